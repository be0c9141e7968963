from __future__ import annotations

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.models.slope_kernels import logistic_slopes


@st.composite
def scores_of(draw):
    """(Q, m) float32, near each other or so far apart that exponentials underflow."""
    seed = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 70))
    scale = draw(st.sampled_from([1e-3, 1.0, 20.0, 300.0]))
    return torch.randn(shape, generator=seed) * scale + draw(st.sampled_from([0.0, -50.0, 90.0]))


@given(scores_of())
@settings(max_examples=60, deadline=None)
def test_logistic_is_that_of_double_precision(scores):
    slopes, normalizer = scores.clone(), torch.empty(len(scores))
    logistic_slopes(slopes, normalizer)
    exact = scores.double()
    assert torch.allclose(slopes.double(), exact.sigmoid(), rtol=5e-7, atol=2e-38)
    expected = torch.nn.functional.softplus(exact).sum(1)
    assert torch.allclose(normalizer.double(), expected, rtol=2e-6, atol=2e-36)


def test_nan_is_not_hidden():
    scores, normalizer = torch.zeros(3, 40), torch.empty(3)
    scores[1, 7], scores[2, 9] = torch.nan, torch.inf
    logistic_slopes(scores, normalizer)
    assert normalizer.isnan().tolist() == [False, True, False] and normalizer[2].isinf()
    assert scores[1, 7].isnan() and scores[2, 9] == 1


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
def test_threads_do_not_change_a_bit():
    scores, threads = torch.randn(40, 5000), torch.get_num_threads()

    def slopes():
        found, sums = scores.clone(), torch.empty(40)
        logistic_slopes(found, sums)
        return torch.cat([found.flatten(), sums])

    try:
        torch.set_num_threads(1)
        alone = slopes()
        torch.set_num_threads(2)
        assert torch.equal(slopes(), alone)
    finally:
        torch.set_num_threads(threads)
