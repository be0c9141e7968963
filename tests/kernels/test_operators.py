"""The operators of a CPU: a table of them, and the properties that all of them have.

Each is compared with a formula in plain torch and double precision, which shares no code with it.
``torch.library.opcheck`` compares schemas, fake forms and autograd with what an operator does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, get_args

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from torch.nn.functional import softplus

from kge_torchrec.kernels import (
    dropout,
    ids,
    library,
    operators,
    pair_scores,
    parallel,
    scores,
    triple_products,
)
from kge_torchrec.models.scorers.layers import Dropout

COMPARISONS, MAPPED = get_args(library.Compared), get_args(library.Mapped)
every_kind = pytest.mark.parametrize("kind", COMPARISONS + MAPPED)


class Call(NamedTuple):
    """An operator with inputs. Its outputs are compared, and gradients of those with a graph."""

    run: Callable[..., tuple[Tensor, ...]]
    formula: Callable[..., tuple[Tensor, ...]]  # of the same inputs in double precision
    inputs: list[Tensor]
    close: list[tuple[float, float]]  # rtol and atol of each result; the last of the others


class Operator(NamedTuple):
    """How to make a call: sizes for any, and sizes for several blocks of a thread."""

    call: Callable[..., Call]
    sizes: dict[str, st.SearchStrategy]
    large: dict[str, Any]


def stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Dropout


def dropout_call(rows: int, dim: int, key: int, share: float, by_column: bool, seed: int) -> Call:
    values = torch.randn(rows, dim, generator=stream(seed))
    if by_column:
        values = values.t().contiguous().t()

    def formula(values):
        low, high = key & 0xFFFFFFFF, key >> 32
        drawn = mixed(mixed((torch.arange(rows * dim) + low) & 0xFFFFFFFF) ^ high)
        stays = (drawn >= min(round(share * 2**32), 2**32 - 1)).view(rows, dim)
        return (values * stays / (1 - share),)

    run = lambda values: (dropout.dropped(values, share, key),)  # noqa: E731
    return Call(run, formula, [values], [(2e-6, 0)])


def mixed(bits: Tensor) -> Tensor:
    """The hash of ``dropout.mixed``, of 32 bits in int64."""
    low = 0xFFFFFFFF
    bits = bits ^ (bits >> 16)
    bits = _product(bits, 0x7FEB352D) & low
    bits = bits ^ (bits >> 15)
    bits = _product(bits, 0x846CA68B) & low
    return bits ^ (bits >> 16)


def _product(bits: Tensor, factor: int) -> Tensor:
    """The low 32 bits of a product, without overflow of int64."""
    high, low = factor >> 16, factor & 0xFFFF
    return ((bits * high & 0xFFFF) << 16) + bits * low


# Sums over scores, and their gradients


SCALES, SHIFTS = st.sampled_from([1e-3, 1.0, 20.0, 300.0]), st.sampled_from([0.0, -50.0, 90.0])
LEAST = -1e38  # the sum of exponents where no candidate counts


def sums_call(softmax: bool, size: tuple[int, ...], scale, shift, share, seed) -> Call:
    """Sums over the candidates that count."""
    values = torch.randn(size, generator=stream(seed)) * scale + shift
    mask = torch.rand(size, generator=stream(seed + 1)) >= share

    def formula(values):
        if softmax:
            return (values.masked_fill(~mask, LEAST).logsumexp(-1),)
        return (torch.where(mask, softplus(values), 0).sum(-1),)

    run = lambda values: (scores.LogSums.apply(values, mask, softmax),)  # noqa: E731
    return Call(run, formula, [values], [(2e-6, 1e-6), (2e-5, 4e-38)])


def full_call(softmax: bool, size, scale, shift, dtype, gap, rest, seed) -> Call:
    """Normalizers of all scores of a query, which other numbers may follow, and the gradients."""
    values = (torch.randn(size, generator=stream(seed)) * scale + shift).to(dtype)
    weight = torch.linspace(0.5, 2, size[0])
    rests = rest * torch.linspace(1, 0.5, size[0], dtype=torch.float64)

    def run(values):
        block, statistics = among(values.detach(), gap), torch.empty(size[0], dtype=torch.float64)
        assert takes(block)
        scores.normalizers(block, statistics, softmax)
        scores.gradients(block, statistics, weight, rests, softmax)
        return statistics, block

    def formula(values):
        statistics = values.logsumexp(1) if softmax else softplus(values).sum(1)
        gradients = (values - statistics[:, None]).exp() if softmax else values.sigmoid()
        return statistics, (gradients - rests[:, None]) * weight.double()[:, None]

    # A difference of some 100 has few digits; a bfloat16 is one of two that are neighbours.
    rtol = 2e-5 if dtype == torch.float32 else 2**-7
    of_sums = (0, 2e-6) if softmax else (2e-6, 2e-36)  # however far from 0 they are
    return Call(run, formula, [values], [of_sums, (rtol, 2e-7 if rest else 4e-38)])


def among(values: Tensor, gap: int) -> Tensor:
    """The same numbers, each query's followed by others that are none of them."""
    memory = torch.full((len(values), values.shape[1] + gap), torch.nan, dtype=values.dtype)
    return memory[:, : values.shape[1]].copy_(values)


def takes(values: Tensor) -> bool:
    return operators.IMPLEMENTATION["full_scores"](values) == "numba"


# Scores of pairs


def pairs_call(kind: str, chunks, queries, candidates, rows, half, seed) -> Call:
    """One query is equal to a row after its map; some rows repeat, some are unused."""
    draw = stream(seed)
    query = torch.randn(chunks, queries, 2 * half, generator=draw)
    maps = torch.randn(query.shape, generator=draw)
    table = torch.randn(rows, 2 * half, generator=draw)
    index = torch.randint(max(1, rows - 1), (chunks, candidates), generator=draw)
    if kind == "scaled_manhattan":  # no roundings decide the sign of a difference
        query, maps, table = ((64 * x).round() / 64 for x in (query, maps, table))
    if query.numel() and index.numel():
        table[index[0, 0]] = query[0, 0]
        maps[0, 0] = 1
    run = lambda *inputs: (pairs(kind, *inputs, index),)  # noqa: E731
    formula = lambda *inputs: (pairs_formula(kind, *inputs, index),)  # noqa: E731
    return Call(run, formula, [query, maps, table], [(1e-4, 5e-4)])


def pairs(kind: str, query, maps, rows, index=None) -> Tensor:
    if kind not in MAPPED:
        return pair_scores.pair_scores(kind, query, rows, index)
    return pair_scores.pair_scores(kind, query, rows, index, maps)


def pairs_formula(kind: str, query, maps, rows, index) -> Tensor:
    """Compute scores from copies of the rows per chunk and (C, b, K, D) differences."""
    chosen_rows = rows[index]
    if kind == "dot":
        return query @ chosen_rows.transpose(-1, -2)
    scale = maps[:, :, None] if kind.startswith("scaled") else 1
    difference = query[:, :, None] - scale * chosen_rows[:, None]
    if kind == "scaled_squares":
        return difference.square().sum(-1)
    if kind.endswith("manhattan"):
        return difference.abs().sum(-1)
    if kind == "moduli":
        squares = difference.square().unflatten(-1, (-1, 2)).sum(-1)
        return (squares + library.EPSILON).sqrt().sum(-1)
    squares = difference.square().sum(-1)  # torch has no gradient of its root at 0
    return torch.where(squares == 0, 1, squares).sqrt() * (squares != 0)


# Queries and scores of triples


def triples_call(action: int, queries, candidates, rows, relations, half, sides, seed) -> Call:
    """Rows that no triple has get the gradient 0; some are returned as they are."""
    draw, dim = stream(seed), 2 * half - (action == triple_products.REAL)
    inputs = [torch.randn(n, dim, generator=draw) for n in (rows, relations)]
    # Of anchors, relations, targets and candidates, for each side.
    counts = (queries, rows), (queries, relations), (queries, rows), (candidates, rows)
    index = [torch.randint(n, (size,), generator=draw) for _ in range(sides) for size, n in counts]
    copied = torch.randperm(rows, generator=draw)[: rows // 3]

    def formula(rows, relations):
        results = []
        for anchor, relation, target, others in zip(*[iter(index)] * 4, strict=True):
            query, by = rows[anchor], relations[relation]
            if action == triple_products.REAL:
                query = query * by
            else:
                one, other = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (query, by))
                other = other.conj() if action == triple_products.CONJUGATE else other
                query = torch.view_as_real(one * other).flatten(-2)
            results += [query, (query * rows[target]).sum(-1), rows[others]]
        return (*results, rows[copied])

    def run(*tables):
        return triple_products.EncodeTriples.apply(*tables, [action] * sides, copied, *index)

    return Call(run, formula, inputs, [(1e-5, 1e-4)])


BOTH = {"softmax": True, "logistic": False}
SUMS = Operator(
    sums_call,
    {"size": st.tuples(st.integers(1, 4), st.integers(1, 140)), "scale": SCALES, "shift": SHIFTS,
     "share": st.sampled_from([0.0, 0.3, 1.0])},
    {"size": (3, 70, 90), "scale": 3.0, "shift": 0.0, "share": 0.1},
)  # fmt: skip
FULL = Operator(
    full_call,
    {"size": st.tuples(st.integers(1, 4), st.integers(1, 140)), "scale": SCALES, "shift": SHIFTS,
     "dtype": st.sampled_from([torch.float32, torch.bfloat16]), "gap": st.integers(0, 3),
     "rest": st.sampled_from([0.0, 0.1])},
    {"size": (40, 300), "scale": 1.0, "shift": 0.0, "dtype": torch.float32, "gap": 0, "rest": 0.1},
)  # fmt: skip
PAIRS = Operator(
    pairs_call,
    {"chunks": st.integers(0, 4), "queries": st.integers(0, 35), "candidates": st.integers(0, 9),
     "rows": st.integers(1, 40), "half": st.integers(1, 20)},
    {"chunks": 9, "queries": 21, "candidates": 13, "rows": 90, "half": 12},
)  # fmt: skip
TRIPLES = Operator(
    triples_call,
    {"queries": st.integers(0, 70), "candidates": st.integers(0, 5), "rows": st.just(9),
     "relations": st.just(4), "half": st.integers(1, 20), "sides": st.integers(1, 2)},
    {"queries": 150, "candidates": 30, "rows": 70, "relations": 40, "half": 12, "sides": 2},
)  # fmt: skip
DROPOUT = Operator(
    dropout_call,
    {"rows": st.integers(0, 9), "dim": st.integers(1, 9), "key": st.integers(0, 2**62 - 1),
     "share": st.floats(0.01, 0.99), "by_column": st.booleans()},
    {"rows": 3, "dim": 17_001, "key": 12345678901, "share": 0.3, "by_column": False},
)  # fmt: skip


def of_kind(operator: Operator, kind: Any) -> Operator:
    """The operator of a kind, which is the first argument of its calls."""
    return operator._replace(call=partial(operator.call, kind))


OPERATORS = {
    "dropout": DROPOUT,
    **{f"sums, {name}": of_kind(SUMS, softmax) for name, softmax in BOTH.items()},
    **{f"full, {name}": of_kind(FULL, softmax) for name, softmax in BOTH.items()},
    **{kind: of_kind(PAIRS, kind) for kind in COMPARISONS + MAPPED},
    **{f"triples {action}": of_kind(TRIPLES, action) for action in range(3)},
}
every_operator = pytest.mark.parametrize("name", OPERATORS)


def computed(function, inputs) -> list[Tensor]:
    """The outputs, and the gradients of a weighted sum of those that have some."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    total = 0.0
    for out in outputs:
        weight = torch.linspace(-1, 2, out.numel()).to(out.dtype).view(out.shape)
        total = total + (out * weight).sum()
    gradients = []
    if outputs[0].requires_grad:
        gradients = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    return [*(x.detach() for x in outputs), *gradients]


@every_operator
@settings(max_examples=20)
@given(data=st.data())
def test_values_and_gradients_equal_the_formula(name, data):
    operator = OPERATORS[name]
    sizes = {key: data.draw(values, key) for key, values in operator.sizes.items()}
    call = operator.call(**sizes, seed=data.draw(st.integers(0, 999), "seed"))
    actual = computed(call.run, call.inputs)
    expected = computed(call.formula, [x.double() for x in call.inputs])
    expected = expected[: len(actual)]  # full scores have their own gradients, not autograd's
    close = call.close + call.close[-1:] * len(actual)
    for one, other, (rtol, atol) in zip(actual, expected, close, strict=False):
        other = other.to(one.dtype).double()
        torch.testing.assert_close(one.double(), other, rtol=rtol, atol=atol)


@every_operator
def test_number_of_threads_changes_no_bit(name, monkeypatch):
    monkeypatch.setattr(parallel, "SERIAL_ELEMENTS", 0)
    used, tell = [], numba.set_num_threads
    monkeypatch.setattr(numba, "set_num_threads", lambda n: used.append(n) or tell(n))
    call = OPERATORS[name].call(**OPERATORS[name].large, seed=0)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(computed(call.run, call.inputs))
    finally:
        torch.set_num_threads(before)
    assert set(used) == {2} or numba.config.NUMBA_NUM_THREADS == 1
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@every_operator
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_no_number_hides_that_an_input_is_not_finite(name, number):
    call = OPERATORS[name].call(**OPERATORS[name].large, seed=0)
    call.inputs[0].flatten()[7] = number  # of a single query, row or place
    actual, expected = call.run(*call.inputs), call.formula(*(x.double() for x in call.inputs))
    if name.startswith("full") and number == torch.inf:
        actual, expected = actual[:1], expected[:1]  # its gradients may be 0 or nan
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
    assert not all(x.isfinite().all() for x in actual)


@pytest.mark.parametrize("wrong", [-1, 5])
def test_ids_outside_a_table_are_rejected(wrong):
    low, high = min(0, wrong), max(4, wrong)
    words = rf": {low} to {high} are not all in \[0, 5\)"
    index = torch.tensor([[0, 4, wrong, 3]])
    ids.check_within("rows", index.clamp(0, 4), 5)
    with pytest.raises(IndexError, match=f"rows{words}"):
        ids.check_within("rows", index, 5)
    with pytest.raises(IndexError, match=f"candidates{words}"):
        pair_scores.pair_scores("dot", torch.zeros(1, 3, 4), torch.zeros(5, 4), index)


# torch's own checks


def made(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=stream(seed)).requires_grad_()


def calls() -> dict[str, tuple]:
    """Operators and arguments of each."""
    full, sums = made(5, 9).detach(), torch.zeros(5, dtype=torch.float64)
    weight, rest = torch.ones(5), made(5).detach().double()
    query, rows, index = made(2, 3, 6), made(4, 6, seed=1), torch.tensor([[0, 3, 3], [1, 0, 2]])
    none, maps = made(2, 3, 0), made(2, 3, 6)
    parts = [x.detach() for x in (query, maps, rows, index, made(2, 3, 3))]
    without = [parts[0], none.detach(), *parts[2:]]
    pairs, none_left = pair_scores, 0 * rest
    return {
        "normalizers": (scores.normalizers, full, sums, True),
        "normalizers of bfloat16": (scores.normalizers, full.bfloat16(), sums, False),
        "gradients": (scores.gradients, full, sums, weight, none_left, True),
        "gradients of bfloat16": (scores.gradients, full.bfloat16(), sums, weight, rest, False),
        "dropout": (dropout.dropped, made(5, 7), 0.3, 12345678901),
        "dropout of columns": (
            dropout.dropped, made(5, 7).detach().t().requires_grad_(), 0.3, 12345678901),
        "dot": (pairs.score, query, none, rows, index, "dot"),
        "gradients of queries, dot": (pairs.query_gradients, *without, "dot"),
        "gradients of rows, dot": (pairs.row_gradients, *without, "dot"),
        "squares": (pairs.score, query, maps, rows, index, "scaled_squares"),
        "gradients of queries": (pairs.query_gradients, *parts, "scaled_squares"),
        "gradients of rows": (pairs.row_gradients, *parts, "scaled_squares"),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_torch_checks_the_operator(name):
    operator, *arguments = calls()[name]
    opcheck(operator, tuple(arguments))


# What is a property of one only


def test_elements_are_dropped_independently_with_the_given_probability():
    """Also with keys that lie near each other, and at places near each other."""
    keys = torch.randint(2**62, (6,), generator=stream(0)).tolist()
    keys += [keys[0] ^ 1, keys[0] ^ 1 << 40]
    for share in (0.01, 0.159, 0.5, 0.9):
        gone = [dropout.dropped(torch.ones(500, 300), share, key) == 0 for key in keys]
        count, chance = gone[0].numel(), share**2
        deviation, allowed = (share * (1 - share) / count) ** 0.5, 5 * (chance / count) ** 0.5
        assert all(abs(float(mask.float().mean()) - share) < 5 * deviation for mask in gone)
        both = [gone[0] & other for other in gone[1:]]
        for step in (1, 2, 8, 300, 4096):
            both.append(gone[0].flatten()[:-step] & gone[0].flatten()[step:])
        assert all(abs(float(mask.float().mean()) - chance) < allowed for mask in both)


def test_dropout_is_drawn_by_the_generator_of_torch():
    values, layer = torch.randn(40, 30), Dropout(0.4)
    first, again, other = (torch.manual_seed(seed) and layer(values) for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(layer(values), other)


def test_dropout_accepts_bfloat16_and_edge_probabilities():
    half = torch.ones(1000, dtype=torch.bfloat16)
    assert 300 < int((Dropout(0.5)(half) == 0).sum()) < 700
    ones = torch.ones(1000)
    assert Dropout(1.0)(ones).eq(0).all()
    assert Dropout(1 - 1e-12)(ones).eq(0).all()  # rounded, the share is 1
    assert torch.equal(Dropout(0.0)(ones), ones)
    assert torch.equal(Dropout(0.5).eval()(ones), ones)


def test_bfloat16_is_rounded_to_the_nearest_and_halves_to_even():
    """Gradients are the weight itself where sigmoids are 1."""
    weight = torch.randn(5000) * 10 ** torch.linspace(-20, 20, 5000)
    weight[::10] = ((weight[::10].view(torch.int32) & -65536) | 0x8000).view(torch.float32)
    results = torch.full((5000, 1), 100, dtype=torch.bfloat16)
    none = torch.zeros(5000, dtype=torch.float64)
    scores.gradients(results, none, weight, none, False)
    assert torch.equal(results[:, 0], weight.bfloat16())


def test_gradients_of_large_scores_keep_their_digits():
    """A normalizer of 150 in float32 would be off by 8e-6."""
    values = 150 + torch.rand(1, 90, generator=stream(0))
    normalizer = values.double().logsumexp(1)
    expected = (values.double() - normalizer[:, None]).exp()
    scores.gradients(values, normalizer, torch.ones(1), 0 * normalizer, True)
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "threads, work, blocks, started",
    [(2, 1, 9, []), (2, 1 << 20, 1, []), (2, 1 << 20, 9, [2]), (1, 1 << 30, 9, [])],
)
def test_only_large_blocks_start_threads(monkeypatch, threads, work, blocks, started):
    kernel = parallel.BlockKernel.__new__(parallel.BlockKernel)
    results, before = [], torch.get_num_threads()
    kernel._block, kernel._run = 1, lambda share, *_: results.append(share)
    monkeypatch.setattr(parallel, "_address_of_share", lambda: 7)
    monkeypatch.setattr(parallel.numba, "set_num_threads", results.append)
    try:
        torch.set_num_threads(threads)
        kernel(blocks, work)
    finally:
        torch.set_num_threads(before)
    assert results == [*started, 7 if started else 0]


@every_kind
def test_score_of_a_pair_does_not_depend_on_its_position(kind):
    """Nor on whether its row is copied."""
    query, maps, table = pairs_call(kind, 1, 40, 0, 30, 25, 0).inputs
    index = torch.randint(29, (1, 11), generator=stream(1))
    together = pairs(kind, query, maps, table, index)
    assert torch.equal(pairs(kind, query, maps, table[index]), together)
    for i in (0, 17, 39):
        for k in range(11):
            one = slice(i, i + 1)
            single = pairs(kind, query[:, one], maps[:, one], table, index[:, k : k + 1])
            assert torch.equal(single[0, 0, 0], together[0, i, k])


def test_half_precision_is_computed_in_float32():
    for kind in ("manhattan", "scaled_manhattan"):
        call = pairs_call(kind, 3, 5, 7, 6, 5, 0)
        result, *gradients = computed(call.run, [x.bfloat16() for x in call.inputs])
        assert result.dtype == torch.float32
        assert {grad.dtype for grad in gradients} == {torch.bfloat16}


def test_unneeded_gradients_are_not_computed(monkeypatch):
    query, maps, table = pairs_call("dot", 3, 5, 7, 6, 5, 0).inputs
    monkeypatch.setattr(pair_scores, "by_row", None)
    index = torch.zeros(3, 7, dtype=torch.int64)
    pairs("dot", query.requires_grad_(), maps, table, index).sum().backward()
    assert query.grad is not None


# Which implementation runs


def test_unsupported_scores_are_left_to_torch():
    assert not takes(torch.zeros(3, 4, dtype=torch.float64))
    assert not takes(torch.zeros(4, 3).T)
    assert not takes(torch.zeros(1, 4).expand(3, 4))
    assert not takes(torch.zeros(20)[4:].as_strided((2, 3), (9, 1)))  # the last row ends there


def test_double_precision_uses_the_formula(monkeypatch):
    monkeypatch.setattr(scores, "LogSums", None)
    monkeypatch.setattr(dropout, "dropped", None)
    values = made(2, 3).double()
    every = torch.ones(2, 3, dtype=torch.bool)
    torch.testing.assert_close(operators.log_sums(values, every, True), values.logsumexp(-1))
    assert operators.dropped(values, 0.5).dtype == torch.float64


def test_a_compiler_that_does_not_exist_is_none(monkeypatch, tmp_path):
    """``CC`` decides alone: Triton takes no other compiler then."""
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: name)
    has_triton = library.has_triton.__wrapped__
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    assert not has_triton()
    (tmp_path / "no-compiler").touch(0o755)
    assert has_triton()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert not has_triton()
