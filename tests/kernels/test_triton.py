"""The kernels written in Triton against their formulas in plain torch.

Without a GPU they run in Triton's interpreter (``conftest.py``), which does not check whether they
compile; ``test_kernels_compile_for_every_gpu`` does, which needs no GPU either.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from kge_torchrec.kernels import comparisons, operators
from kge_torchrec.kernels.library import Distance, Mapped

pytest.importorskip("triton", reason="not on this system")
import triton
import triton.runtime.interpreter

from kge_torchrec.kernels import triton_pairs, triton_scores

DISTANCES, MAPPED = get_args(Distance) + get_args(Mapped), get_args(Mapped)
KINDS = ("dot", *DISTANCES)
QUERIES, ROWS = triton_pairs.DISTANCE_TILE
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
    pytest.skip("Triton has neither a GPU nor its interpreter", allow_module_level=True)
# On a GPU these tests belong to make gpu.
pytestmark = (
    pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.filterwarnings("ignore::RuntimeWarning")
)
is_softmax = pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "logistic"])


def case(kind, chunks=2, queries=7, candidates=5, dim=6, dtype=torch.float32, seed=0):
    """Queries, rows and maps of length 1, or None."""
    stream = torch.Generator().manual_seed(seed)
    sizes = queries, candidates, queries
    inputs = [torch.randn(chunks, n, dim, generator=stream) for n in sizes]
    inputs[2] = torch.nn.functional.normalize(inputs[2], dim=-1) if kind in MAPPED else None
    return [x if x is None else x.to(DEVICE, dtype) for x in inputs]


def formula(kind, query, rows, maps):
    """The plain formula of all pairs, in double precision."""
    if kind == "dot":
        return query.double() @ rows.double().mT
    parts = [query] if maps is None else [query, maps]
    parts = [x.double()[:, :, None] for x in parts]
    return comparisons.FORMULAS[kind](*parts, rows.double()[:, None])


def computed(kind, query, rows, maps, run=""):
    """The kernel of distances or products; ``run`` "_": its function, not the operator."""
    if kind == "dot":
        return getattr(triton_pairs, f"{run}products")(query, rows)
    return getattr(triton_pairs, f"{run}distances")(query, rows, maps, kind)


def tile_of(kind):
    """Queries, rows and elements that a program takes."""
    return triton_pairs.PRODUCT_TILE if kind == "dot" else (QUERIES, ROWS, 1)


@pytest.mark.parametrize("kind", ["dot", "manhattan", "scaled_squares", "euclidean"])
@given(data=st.data(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_pairs_equal_the_formula(kind, data, dtype, seed):
    queries, rows, elements = tile_of(kind)
    sizes = (
        data.draw(st.integers(0, 3)),
        data.draw(st.sampled_from([0, 1, queries - 1, queries + 1])),
        data.draw(st.sampled_from([0, 1, 3, rows - 1, rows, rows + 1])),
        data.draw(st.sampled_from([0, 1, 5, elements - 1, elements, elements + 3])),
    )
    inputs = case(kind, *sizes, dtype, seed)
    actual = computed(kind, *inputs)
    exact = dtype == torch.float64 and kind != "dot"  # products are always float32
    assert actual.dtype == (torch.float64 if exact else torch.float32)
    close = 1e-12 if exact else 2e-5
    torch.testing.assert_close(actual.double(), formula(kind, *inputs), rtol=close, atol=close)


@pytest.mark.parametrize("kind", ["dot", "scaled_squares", "euclidean"])
def test_equal_rows_tie_wherever_they_lie(kind):
    """A pair has the same bits in every tile, at its edges, and in a shorter block.

    Products have them on a GPU; in the interpreter numpy multiplies, whose sums depend on places.
    """
    close = 1e-5 if kind == "dot" and DEVICE == "cpu" else 0

    def same(one, other):
        return torch.allclose(one, other, rtol=0, atol=close)

    queries, count, elements = tile_of(kind)
    query, rows, maps = case(kind, 1, queries + 3, 2 * count + 5, elements + 7)
    places = torch.tensor([0, 1, count - 1, count, 2 * count - 1, 2 * count + 4])
    rows[:, places] = rows[:, :1].clone()
    for x in (query, maps):
        if x is not None:
            x[:, -1] = x[:, 0]
    whole = computed(kind, query, rows, maps)
    assert same(whole[..., places], whole[..., :1].expand(-1, -1, len(places)))
    assert same(whole[:, -1], whole[:, 0])
    for block in (slice(1, 4), slice(count - 1, 2 * count + 5)):
        assert same(computed(kind, query, rows[:, block], maps), whole[..., block])
    some, maps = [x if x is None else x[:, 2:5] for x in (query, maps)]
    assert same(computed(kind, some, rows, maps), whole[:, 2:5])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_not_written_and_infinities_stay_in_their_pairs(kind, monkeypatch):
    queries, margin, elements = tile_of(kind)
    query, rows, maps = case(kind, 2, queries + 1, 9, 2 * (elements // 2) + 6)
    rows[0, 2, 1], rows[0, 3, 2], rows[1, 8, 0] = torch.inf, -torch.inf, torch.nan
    count = 2 * (queries + 1) * 9
    memory = torch.full((count + 2 * margin,), 7.0, device=DEVICE)
    out = memory[margin : margin + count].view(2, -1, 9)
    for name in ("products", "distances"):
        monkeypatch.setattr(triton_pairs, f"_empty_{name}", lambda *_: out)
    computed(kind, query, rows, maps, run="_")
    assert (memory[:margin] == 7).all() and (memory[margin + count :] == 7).all()
    if kind != "dot":
        expected = formula(kind, query, rows, maps)
        torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert out.isfinite().sum() == count - 3 * (queries + 1)


@settings(max_examples=10)
@given(
    size=st.tuples(st.integers(1, 3), st.sampled_from([0, 1, 1023, 16385])),
    picks=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_counts_equal_the_definition(size, picks, seed):
    stream = torch.Generator().manual_seed(seed)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 0.5])
    scores = special[torch.randint(8, size, generator=stream)].to(DEVICE)
    query = torch.randint(size[0], (7,), generator=stream).to(DEVICE) if picks else None
    many = 7 if picks else size[0]
    values = special[torch.randint(8, (many,), generator=stream)].to(DEVICE)
    less, equal = torch.full((2, many), 5, device=DEVICE)
    triton_scores.counts(scores, values, query, less, equal)
    compared = scores if query is None else scores[query]
    assert torch.equal(less, 5 + (compared < values[:, None]).sum(1))
    assert torch.equal(equal, 5 + (compared == values[:, None]).sum(1))


@settings(max_examples=15)
@given(
    size=st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 90, 1023, 1024, 1025, 2500])),
    scale=st.sampled_from([1e-3, 3.0, 60.0]), shift=st.sampled_from([0.0, -50.0, 90.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), gap=st.integers(0, 3),
    has_rest=st.booleans(), softmax=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_losses_equal_the_formula(size, scale, shift, dtype, gap, has_rest, softmax, seed):
    """Scores of a query may be followed by numbers that are none of them, and stay."""
    stream = torch.Generator().manual_seed(seed)
    memory = torch.full((size[0], size[1] + gap), 7.0, dtype=dtype, device=DEVICE)
    scores = memory[:, : size[1]]
    scores.copy_(torch.randn(size, generator=stream) * scale + shift)
    weight = torch.linspace(0.5, 2, size[0], device=DEVICE)
    rest = 0.2 * has_rest * weight.double()
    exact, expected, actual = scores.double(), *weight.new_empty(2, size[0], dtype=torch.float64)
    operators.normalizers(exact, expected, softmax)
    triton_scores.normalizers(scores, actual, softmax)
    torch.testing.assert_close(actual, expected, rtol=3e-6, atol=3e-6 if softmax else 1e-36)
    operators.gradients(exact, expected, weight.double(), rest, softmax)
    triton_scores.gradients(scores, expected, weight, rest, softmax)
    close = 2e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(scores.double(), exact, rtol=close, atol=3e-7 if has_rest else 1e-37)
    assert (memory[:, size[1] :] == 7).all()


def test_small_exponentials_keep_their_digits():
    """Also where a GPU's logarithm has few: next to one."""
    scores = torch.tensor([0.0, -0.1, -1.0, -4.6, -7.0, -10.0, -50.0, -80.0], device=DEVICE)[
        :, None
    ]
    actual = torch.empty(len(scores), dtype=torch.float64, device=DEVICE)
    triton_scores.normalizers(scores, actual, False)
    expected = scores[:, 0].double().exp().log1p()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)


def test_gradients_of_large_scores_keep_their_digits():
    """A normalizer of 150 in float32 would be off by 8e-6."""
    scores = 150 + torch.rand(1, 90, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    normalizer = scores.double().logsumexp(1)
    expected = (scores.double() - normalizer[:, None]).exp()
    triton_scores.gradients(scores, normalizer, torch.ones(1, device=DEVICE), 0 * normalizer, True)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-6, atol=0)


@is_softmax
def test_infinite_scores_of_losses(softmax):
    """-inf is a candidate that does not count; nan and inf are not hidden."""
    scores = torch.zeros(5, 1030, device=DEVICE)
    scores[0, 5:], scores[1], scores[2, 1029] = -torch.inf, -torch.inf, torch.nan
    scores[3, 7] = torch.inf
    normalizer = torch.empty(5, dtype=torch.float64, device=DEVICE)
    triton_scores.normalizers(scores, normalizer, softmax)
    of_one = [5, 0, np.nan, np.inf, 1030]
    expected = np.log(of_one) if softmax else np.log(2) * np.array(of_one)
    if softmax:
        expected[3] = np.nan  # as in the kernels of a CPU, no finite number
    np.testing.assert_allclose(normalizer.cpu(), expected, rtol=1e-6)
    none = torch.zeros_like(normalizer)
    triton_scores.gradients(scores, normalizer, torch.ones(5, device=DEVICE), none, softmax)
    assert (scores[0, 5:] == 0).all() and scores[2, 1029].isnan()
    assert scores[[0, 4]].isfinite().all()


@is_softmax
def test_no_scores_are_left_alone(softmax):
    for size in ((0, 4), (3, 0)):
        scores = torch.empty(size, device=DEVICE)
        normalizer = torch.zeros(size[0], dtype=torch.float64, device=DEVICE)
        operators.normalizers(scores, normalizer, softmax)
        triton_scores.gradients(scores, normalizer, normalizer.float(), normalizer, softmax)


def test_unsupported_scores_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(operators, "has_triton", lambda: True)

    def chosen(scores):
        there = {"device": torch.device("cuda"), "dtype": scores.dtype, "stride": scores.stride}
        return operators.IMPLEMENTATION["full_scores"](SimpleNamespace(**there))

    assert chosen(torch.zeros(3, 4)) == chosen(torch.zeros(3, 4).bfloat16()) == "triton"
    assert chosen(torch.zeros(3, 4).double()) == chosen(torch.zeros(3, 4).half()) == "torch"
    assert chosen(torch.zeros(4, 3).T) == "torch"


@pytest.fixture
def sparse_file(tmp_path, monkeypatch):
    """Return a function that makes tensors in a file with holes, which takes no memory."""
    executor = triton.runtime.interpreter.GridExecutor
    monkeypatch.setattr(executor, "_restore_args_dev", lambda *_: None)  # it copies all of them

    def make(*sizes: int) -> torch.Tensor:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        return torch.from_numpy(np.memmap(path, np.float32, "w+", shape=sizes))

    return make


no_gpu = pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu does it there")
FAR = 3 << 29  # two rows of it have more than 2^31 elements


@no_gpu
@is_softmax
def test_losses_beyond_two_billion_elements(softmax, sparse_file):
    scores = sparse_file(3, FAR)[:, :5]
    scores.copy_(torch.randn(3, 5))
    near, weight = scores.clone(), torch.ones(3)
    for some in (scores, near):
        normalizer = torch.empty(3, dtype=torch.float64)
        triton_scores.normalizers(some, normalizer, softmax)
        triton_scores.gradients(some, normalizer, weight, 0 * normalizer, softmax)
    assert torch.equal(scores, near) and near[2].count_nonzero() == 5


@triton.jit
def _write_places(out, program, queries, candidates):
    chunk, q, r = triton_pairs._place(program, queries, candidates, 16, 512)
    triton.language.store(out, chunk * queries * candidates)
    triton.language.store(out + 1 + triton.language.arange(0, 16), q * candidates)
    triton.language.store(out + 17 + triton.language.arange(0, 512), r)


@pytest.mark.parametrize("queries, candidates", [(1, 1), (20, 2560), (1 << 31, 5)])
def test_tiles_beyond_two_billion(queries, candidates):
    """The number of a program has 32 bits, but not the places that are computed from it."""
    out, program = torch.empty(529, dtype=torch.int64, device=DEVICE), (1 << 30) + 1
    _write_places[(1,)](out, program, queries, candidates)
    rest, across = divmod(program, -(-queries // 16))
    chunk, down = divmod(rest, -(-candidates // 512))
    q, r = (range(size * tile, size * tile + size) for size, tile in ((16, across), (512, down)))
    places = [chunk * queries * candidates, *(candidates * x for x in q), *r]
    assert out.tolist() == places and max(places) >= 1 << 30


def test_torch_checks_the_operators():
    query, rows, _ = case("euclidean")
    opcheck(triton_pairs.distances, (*case("euclidean"), "euclidean"))
    opcheck(triton_pairs.products, (query, rows))
    counts = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    scores, values = torch.ones(3, 4, device=DEVICE), torch.ones(3, device=DEVICE)
    for chosen in (None, torch.tensor([0, 0, 2], device=DEVICE)):
        opcheck(triton_scores.counts, (scores, values, chosen, *counts))
    scores, weight = torch.randn(5, 9, device=DEVICE), torch.ones(5, device=DEVICE)
    opcheck(triton_scores.normalizers, (scores, weight.double(), True))
    opcheck(triton_scores.gradients, (scores, weight.double(), weight, weight.double(), True))


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kge_torchrec.kernels import triton_pairs, triton_scores

def build(kernel, types, values, warps=4):
    types = dict(zip(kernel.arg_names, types)) | dict.fromkeys(values, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in values.items()}
    source = ASTSource(kernel, types, places)
    options = {"enable_fp_fusion": True, "num_warps": warps}
    built = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options)
    assert "st.local" not in built.asm["ptx"]
    assert len(built.asm["cubin"]) > 1000

tiles = {"EPSILON": 1e-12, **dict(zip(("QUERIES", "ROWS"), triton_pairs.DISTANCE_TILE))}
for kind in sys.argv[2:]:
    build(triton_pairs._distance, ["*fp32"] * 4 + ["i32"] * 3, {"KIND": kind, **tiles})
for softmax in (True, False):
    for scores in ("*fp32", "*bf16"):
        values = {"SOFTMAX": softmax, "TILE": 1024}
        build(triton_scores._normalizers, [scores, "*fp64", "i64", "i32"],
              {**values, "LEAST": -1e38})
        types = [scores, "*fp64", "*fp32", "*fp64", "i64", "i32"]
        build(triton_scores._gradients, types, values)
tiles = dict(zip(("QUERIES", "ROWS", "ELEMENTS"), triton_pairs.PRODUCT_TILE))
for unit in (1, 4):
    types = ["*fp32"] * 3 + ["i32"] * 3
    build(triton_pairs._product, types, {"UNIT": unit, **tiles}, triton_pairs.WARPS)
for picks in (True, False):
    values = {"HAS_ROWS": picks, "WIDTH": 1024, "PASSES": 16}
    types = ["*fp32", "*fp32", "*i64" if picks else "*fp32", "*i64", "*i64", "i32"]
    build(triton_scores._counts, types, values)
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "100"])
def test_kernels_compile_for_every_gpu(capability, tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, capability, *DISTANCES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
