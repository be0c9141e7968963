"""Distances as training on CUDA has them computed: the formulas here, what they compile to."""

from __future__ import annotations

import math
import re
from typing import get_args

import pytest
import torch
from scorer_cases import SCORERS, candidate_scores, normal
from torch._inductor.utils import run_and_get_code

from kge_torchrec.kernels import comparisons, fused_distances, operators
from kge_torchrec.kernels.library import Distance, Mapped

PLAIN = {
    kind: lambda query, rows, kind=kind: comparisons.distance(kind, query, rows)
    for kind in get_args(Distance)
}
MAPPED = {
    kind: lambda query, rows, maps, kind=kind: comparisons.distance(kind, query, rows, maps=maps)
    for kind in get_args(Mapped)
}
ALL = PLAIN | MAPPED


def value_and_gradients(function, weight, *leaves):
    value = function(*leaves)
    return value, *torch.autograd.grad((value * weight).sum(), leaves)


def case(kind, dtype=torch.float64, chunks=2, queries=7, rows=5, dim=6, device="cpu"):
    """Weights of distances, then queries and rows, a few of which are equal, and maps if any."""
    query, other, maps = (normal(chunks, n, dim, dtype=dtype) for n in (queries, rows, queries))
    other[:, 1] = query[:, 3]
    if dtype == torch.float32:  # of which kernels of a CPU take it that normals have length 1
        maps = torch.nn.functional.normalize(maps, dim=-1)
    weight = normal(chunks, queries, rows, dtype=dtype)
    leaves = (query, other, maps) if kind in MAPPED else (query, other)
    return weight.to(device), *(x.to(device).requires_grad_() for x in leaves)


@pytest.fixture
def not_compiled(monkeypatch):
    """The formulas by torch itself, with (b, K, D) in memory."""
    plainly = lambda formula, choices, *tensors: formula(*choices, *tensors)  # noqa: E731
    monkeypatch.setattr(fused_distances, "_computed", plainly)


@pytest.mark.parametrize("kind", ALL)
def test_fused_formulas_equal_the_distances(not_compiled, kind):
    inputs = case(kind)
    expected = value_and_gradients(ALL[kind], *inputs)
    actual = value_and_gradients(lambda *x: fused_distances.fused(kind, *x), *inputs)
    for one, other in zip(actual, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "name", ["transe_l1", "transe_l2", "rotate", "rote", "mure", "pyke", "pairre"]
)
def test_scorers_call_fused_formulas_where_these_are_used(not_compiled, monkeypatch, name):
    scorer = SCORERS[name](3, 8 - 2 * SCORERS[name].has_biases)
    torch.nn.init.normal_(scorer.relations)
    _, anchor, rows = case("manhattan", torch.float32, dim=8)
    inputs = anchor, torch.zeros(2, 7, dtype=torch.int64), rows, "tail"
    expected, taken, fused = candidate_scores(scorer, *inputs), [], comparisons.fused
    monkeypatch.setitem(operators.IMPLEMENTATION, "distances", lambda query: "inductor")
    monkeypatch.setattr(
        comparisons, "fused", lambda kind, *x: taken.append(kind) or fused(kind, *x)
    )
    torch.testing.assert_close(candidate_scores(scorer, *inputs), expected)
    assert len(taken) == 1


@pytest.mark.parametrize("name", ["transe_l2", "rotate_l2", "rote", "mure", "pyke", "biased rote"])
@pytest.mark.parametrize("half", [False, True])
def test_products_replace_distances_in_training(name, half):
    """Products are as exact as float32 lengths, or as bfloat16 with autocast; ranking has none."""
    scorer = SCORERS[name.split()[-1]](3, 32, biases=name == "biased rote")
    torch.nn.init.normal_(scorer.relations, std=0.3)
    anchor, rows = (normal(2, n, scorer.row_dim, dtype=torch.float32) for n in (50, 40))
    rows[0, 7] = anchor[0, 3]
    rows.requires_grad_()
    query = scorer.encode(anchor, torch.arange(100).view(2, 50) % 3, "tail")
    weight = normal(2, 50, 40, dtype=torch.float32)
    expected = scorer.matrix(query, rows)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        actual = scorer.matrix(query, rows, exact=False)
    near = {"rtol": 2e-2, "atol": 0.2} if half else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(actual.float(), expected, **near)
    assert not torch.equal(actual.float(), expected)
    actual_gradients, expected_gradients = (torch.autograd.grad((x.float() * weight).sum(), rows)[0]
                             for x in (actual, expected))  # fmt: skip
    error = (actual_gradients - expected_gradients).norm() / expected_gradients.norm()
    assert error < (0.02 if half else 1e-5)


def test_half_precision_products_round_the_distance_not_its_terms():
    """Lengths are added in float32: near rows far from 0 are as near as they were."""
    query = (5 * normal(1, 40, 64, dtype=torch.float32)).bfloat16().float()
    rows = (query + 0.3 * normal(1, 40, 64, dtype=torch.float32)).bfloat16().float()
    exact = -torch.cdist(query.double(), rows.double()).square()
    with torch.autocast("cpu", torch.bfloat16):
        result = comparisons.squares_by_products(query, rows)
    assert exact.abs().min() < 10 < 1000 < query.square().sum(-1).mean()
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=1e-3)


def test_aligned_products_equal_unaligned_ones(monkeypatch):
    """Values and both gradients; each query's products begin where a line of memory does."""
    monkeypatch.setattr(comparisons, "_FEW_PAIRS", 100)
    inputs = [normal(1, n, 24, dtype=torch.float32).requires_grad_() for n in (9, 37)]
    weight = normal(1, 9, 37, dtype=torch.float32)
    actual, expected = comparisons.products(*inputs, aligned=True), comparisons.products(*inputs)
    assert actual.stride() == (9 * 48, 48, 1) and expected.stride() == (9 * 37, 37, 1)
    torch.testing.assert_close(actual, expected)
    actual_gradients, expected_gradients = (torch.autograd.grad((x * weight).sum(), inputs)
                             for x in (actual, expected))  # fmt: skip
    torch.testing.assert_close(actual_gradients, expected_gradients)
    few = [x[:, :2].detach() for x in inputs]
    for other in (few, [few[0], inputs[1][:, :32]], [x.double() for x in inputs]):
        assert comparisons.products(*other, aligned=True).is_contiguous()
    with torch.autocast("cpu", torch.bfloat16):
        assert comparisons.products(*inputs, aligned=True).dtype == torch.bfloat16


def test_squares_beyond_float16_range_keep_float32_precision():
    query, rows = (100 * normal(1, n, 64, dtype=torch.float32) for n in (9, 7))
    exact = -torch.cdist(query.double(), rows.double()).square()
    with torch.autocast("cpu", torch.float16):
        result = comparisons.squares_by_products(query, rows)
    assert exact.min() < -65_504
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=0)


def test_fused_formulas_are_used_only_when_training_on_cuda(monkeypatch):
    """Ranking there uses tiles, and so does a first pass over scores that are not kept."""
    there = {"device": torch.device("cuda"), "dtype": torch.float32, "is_meta": False}
    cuda = type("query", (), there)
    cpu, chosen = torch.zeros(1).double(), operators.IMPLEMENTATION["distances"]
    for there_is in (True, False):
        monkeypatch.setattr(operators, "has_triton", lambda there_is=there_is: there_is)
        assert chosen(cuda) == ("inductor" if there_is else "torch") and chosen(cpu) == "torch"
        with torch.no_grad():
            assert chosen(cuda) == ("triton" if there_is else "torch") and chosen(cpu) == "torch"
    assert chosen(torch.zeros(1)) == "numba"


def test_no_two_kinds_or_dtypes_share_a_limit_of_recompilations(monkeypatch):
    """torch runs a code object eagerly after eight recompilations, with all pairs in memory."""
    codes = []
    monkeypatch.setattr(torch, "compile", lambda f: codes.append(f.__code__) or f)
    for kind in ALL:
        for dtype in (torch.float32, torch.float64):
            for dim in (2, 4):  # a second size is no other function
                weight, *leaves = case(kind, dtype, dim=dim)
                (fused_distances.fused(kind, *leaves) * weight).sum().backward()
    formulas = 2 * sum(4 if kind in MAPPED else 3 for kind in ALL)
    assert len(codes) == len({id(code) for code in codes}) == formulas


def test_half_precision_is_summed_in_float32(not_compiled):
    _, query, rows = case("manhattan", torch.bfloat16)
    value = comparisons.fused("manhattan", query, rows)
    assert value.dtype == torch.float32
    assert torch.autograd.grad(value.sum(), query)[0].dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "inside"), [("manhattan", False), ("moduli", True), ("scaled_squares", True)]
)
def test_no_tensor_of_pairwise_differences_is_allocated(kind, inside):
    """Checks the code of Inductor, for the function itself and as a part of a compiled one."""
    torch.manual_seed(1)  # gradients add up 64 pairs in another order, with errors near the bound
    inputs = case(kind, torch.float32, 1, 64, 48, 20)
    expected = value_and_gradients(ALL[kind], *inputs)

    def function(*leaves):
        return fused_distances.fused(kind, *leaves)

    compiled = torch.compile(function, fullgraph=True) if inside else function
    actual, codes = run_and_get_code(value_and_gradients, compiled, *inputs)
    # Queries may be formulas themselves there, whose numbers count as read.
    assert ("kge_torchrec.in_memory" in "".join(codes)) == inside
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    shapes = re.findall(r"empty_strided_cpu\(\(([^)]*)\)", "".join(codes))
    sizes = [math.prod(map(int, filter(None, shape.split(", ")))) for shape in shapes]
    assert len(sizes) >= 2 and max(sizes) == 64 * 48


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("inside", [False, True])
def test_fused_formulas_equal_the_distances_on_cuda(kind, inside):
    inputs = case(kind, torch.float32, 1, 1024, 512, 128, device="cuda")
    if kind == "scaled_manhattan":  # no difference is so small that roundings decide its sign
        with torch.no_grad():
            for x, shift in zip(inputs[1:], (2**-13, 0, 0), strict=True):
                x.mul_(64).round_().div_(64).add_(shift)
    function = torch.compile(ALL[kind]) if inside else ALL[kind]
    value_and_gradients(function, *inputs)  # compiles, which takes memory of its own
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    actual = value_and_gradients(function, *inputs)
    assert torch.cuda.max_memory_allocated() - before < 1024 * 512 * 32
    weight, *leaves = (x.detach().cpu() for x in inputs)
    expected = value_and_gradients(ALL[kind], weight, *(x.requires_grad_() for x in leaves))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-3)


@pytest.fixture(autouse=True)
def compiled_anew():
    yield
    if fused_distances._compiled.cache_info().currsize:
        torch._dynamo.reset()
        fused_distances._compiled.cache_clear()
