"""Dropout as it is drawn on a CPU: its share, what it depends on, and its backward."""

from __future__ import annotations

import numba
import pytest
import torch

from kge_torchrec.kernels.dropout import dropped
from kge_torchrec.models.scorers.layers import Dropout

KEYS = torch.randint(2**62, (6,), generator=torch.Generator().manual_seed(0)).tolist()
KEYS += [KEYS[0] ^ 1, KEYS[0] ^ 1 << 40]  # near it


@pytest.mark.parametrize("share", [0.01, 0.159, 0.5, 0.9])
def test_elements_are_dropped_with_the_given_probability(share):
    values = torch.full((500, 300), 3.0)
    gone = [dropped(values, share, key) == 0 for key in KEYS]
    assert torch.allclose(dropped(values, share, KEYS[0])[~gone[0]], torch.tensor(3 / (1 - share)))
    deviation = (share * (1 - share) / values.numel()) ** 0.5
    for mask in gone:
        assert abs(float(mask.float().mean()) - share) < 5 * deviation
    both = [(gone[0] & other).float().mean() for other in gone[1:]]  # of two keys
    chance, allowed = share**2, 5 * (share**2 / values.numel()) ** 0.5
    assert all(abs(float(result) - chance) < allowed for result in both)
    for step in (1, 2, 8, 300, 4096):  # of two places
        first, second = gone[0].flatten()[:-step], gone[0].flatten()[step:]
        assert abs(float((first & second).float().mean()) - chance) < allowed


def test_nan_is_not_hidden():
    values = torch.full((4, 50), torch.nan)
    assert dropped(values, 0.5, KEYS[0]).isnan().all()


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
def test_number_of_threads_changes_no_bit():
    values, threads = torch.randn(3, 70_001), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(dropped(values, 0.3, KEYS[0]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_only_kept_elements_have_gradients():
    values = torch.randn(40, 30).t().requires_grad_()  # not contiguous
    layer = Dropout(0.4)
    torch.manual_seed(5)
    out = layer(values)
    out.backward(torch.full_like(out, 2.0))
    assert torch.allclose(out, torch.where(out == 0, 0.0, values.detach() / 0.6))
    assert torch.allclose(values.grad, torch.where(out == 0, 0.0, 2 / 0.6))
    torch.manual_seed(5)
    assert torch.equal(layer(values), out) and not torch.equal(layer(values), out)


def test_dropout_accepts_bfloat16_and_edge_probabilities():
    half = torch.ones(1000, dtype=torch.bfloat16)
    assert 300 < int((Dropout(0.5)(half) == 0).sum()) < 700
    ones = torch.ones(1000)
    assert Dropout(1.0)(ones).eq(0).all()
    assert Dropout(1 - 1e-12)(ones).eq(0).all()  # rounded, the share is 1
    assert torch.equal(Dropout(0.0)(ones), ones)
    assert torch.equal(Dropout(0.5).eval()(ones), ones)
