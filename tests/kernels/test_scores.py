from __future__ import annotations

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.kernels.operators import IMPLEMENTATION
from kge_torchrec.kernels.scores import LogSums, gradients, normalizers

takes = lambda scores: IMPLEMENTATION["full_scores"](scores) == "numba"  # noqa: E731
is_softmax = pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "logistic"])


@st.composite
def scores_of(draw):
    """(Q, m), near each other or so far apart that exponentials underflow; with a gap, or none."""
    seed = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 140))
    scale = draw(st.sampled_from([1e-3, 1.0, 20.0, 300.0]))
    scores = torch.randn(shape, generator=seed) * scale + draw(st.sampled_from([0.0, -50.0, 90.0]))
    scores = scores.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))
    return among(scores, shape[1] + draw(st.integers(0, 3)))


def among(scores, width):
    """The same numbers, each query's followed by others that are none of them."""
    memory = torch.full((len(scores), width), torch.nan, dtype=scores.dtype)
    return memory[:, : scores.shape[1]].copy_(scores)


def rests_of(scores, rest):
    return rest * torch.linspace(1, 0.5, len(scores), dtype=torch.float64)


def both(scores, weight, rest, softmax):
    """``rest`` is that of the first query; the last has half of it."""
    statistics = torch.empty(len(scores), dtype=torch.float64)
    result = among(scores, scores.stride(0))
    normalizers(scores, statistics, softmax)
    gradients(result, statistics, weight, rests_of(scores, rest), softmax)
    return statistics, result


@is_softmax
@given(scores=scores_of(), rest=st.sampled_from([0.0, 0.1]))
@settings(max_examples=30)
def test_gradients_equal_those_of_double_precision(softmax, scores, rest):
    assert takes(scores)
    weight = torch.linspace(0.5, 2, len(scores))
    statistics, actual = both(scores, weight, rest, softmax)
    exact = scores.double()
    if softmax:
        expected = exact.logsumexp(1)
        assert torch.allclose(statistics, expected, rtol=0, atol=2e-6)  # however far from 0 it is
        derivatives = (exact - expected[:, None]).exp()
    else:
        expected = torch.nn.functional.softplus(exact).sum(1)
        assert torch.allclose(statistics, expected, rtol=2e-6, atol=2e-36)
        derivatives = exact.sigmoid()
    expected = (
        ((derivatives - rests_of(scores, rest)[:, None]) * weight.double()[:, None])
        .float()
        .to(scores.dtype)
    )
    # A difference of some 100 has few digits; a bfloat16 is one of two that are neighbours.
    close = 2e-5 if scores.dtype == torch.float32 else 2**-7
    assert torch.allclose(
        actual.double(), expected.double(), rtol=close, atol=2e-7 if rest else 4e-38
    )


def test_bfloat16_is_rounded_to_the_nearest_and_halves_to_even():
    """Gradients are the weight itself where sigmoids are 1."""
    weight = torch.randn(5000) * 10 ** torch.linspace(-20, 20, 5000)
    weight[::10] = ((weight[::10].view(torch.int32) & -65536) | 0x8000).view(torch.float32)
    results = torch.full((5000, 1), 100, dtype=torch.bfloat16)
    none = torch.zeros(5000, dtype=torch.float64)
    gradients(results, none, weight, none, False)
    assert torch.equal(results[:, 0], weight.bfloat16())


@is_softmax
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_is_not_hidden(dtype, softmax):
    scores = torch.zeros(3, 140, dtype=dtype)
    scores[1, 7], scores[2, 139] = torch.nan, torch.inf
    statistics, results = both(scores, torch.ones(3), 0.0, softmax)
    assert statistics.isfinite().tolist() == [True, False, False]
    assert statistics[1].isnan() and results[1, 7].isnan()
    assert results[0].isfinite().all()


def test_unsupported_inputs_are_left_to_torch():
    assert not takes(torch.zeros(3, 4, dtype=torch.float64))
    assert not takes(torch.zeros(4, 3).T)
    assert not takes(torch.zeros(1, 4).expand(3, 4))
    assert not takes(torch.zeros(20)[4:].as_strided((2, 3), (9, 1)))  # the last row ends there


@is_softmax
@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
def test_number_of_threads_changes_no_bit(softmax):
    scores, threads = torch.randn(40, 5000), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single_thread = both(scores, torch.ones(40), 0.1, softmax)
        torch.set_num_threads(2)
        for one, other in zip(
            both(scores, torch.ones(40), 0.1, softmax), single_thread, strict=True
        ):
            assert torch.equal(one, other)
    finally:
        torch.set_num_threads(threads)


def masked_sums(scores, mask, softmax):
    if softmax:
        return scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    return (torch.nn.functional.softplus(scores) * mask).sum(-1)


@is_softmax
@given(scores=scores_of(), share=st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=30)
def test_sums_of_candidates_equal_those_of_double_precision(softmax, scores, share):
    scores = scores.float().requires_grad_()
    mask = torch.rand(scores.shape) >= share
    actual = LogSums.apply(scores, mask, softmax)
    exact = scores.detach().double().requires_grad_()
    expected = masked_sums(exact, mask, softmax)
    weight = torch.linspace(0.5, 2, len(scores))
    some = mask.any(1)
    assert torch.allclose(actual[some].double(), expected[some], rtol=2e-6, atol=1e-6)
    assert (actual[~some] == (-1e38 if softmax else 0)).all()
    (slopes,) = torch.autograd.grad((actual * weight)[some].sum(), scores)
    (exact_gradient,) = torch.autograd.grad((expected * weight)[some].sum(), exact)
    assert torch.allclose(slopes.double(), exact_gradient, rtol=2e-5, atol=4e-38)
    assert not slopes[~mask].any()


@is_softmax
def test_sums_keep_shapes_and_threads_change_no_bit(softmax):
    scores, mask = torch.randn(3, 200, 250) * 3, torch.rand(3, 200, 250) > 0.1
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            inputs = scores.clone().requires_grad_()
            sums = LogSums.apply(inputs, mask, softmax)
            results.append((sums.detach(), *torch.autograd.grad(sums.sum(), inputs)))
    finally:
        torch.set_num_threads(before)
    assert results[0][0].shape == (3, 200)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@is_softmax
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_sums_hide_no_nan(softmax, number):
    scores = torch.zeros(2, 140)
    scores[1, 139] = number
    assert LogSums.apply(
        scores, torch.ones(2, 140, dtype=torch.bool), softmax
    ).isfinite().tolist() == [True, False]
