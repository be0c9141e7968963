import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from kge_torchrec.kernels.operators import count_block

SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40])
BLOCKS = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=SPECIAL)


@settings(max_examples=30)
@given(BLOCKS, st.data())
def test_counts_match_the_definition_and_add_up(block, data):
    true = data.draw(arrays(np.float32, len(block), elements=SPECIAL))
    less, equal = torch.full((len(block),), 5), torch.full((len(block),), 7)
    for _ in range(2):
        count_block(torch.from_numpy(block), torch.from_numpy(true), less, equal)
    for i, row in enumerate(block):
        assert less[i] == 5 + 2 * sum(bool(s < true[i]) for s in row)
        assert equal[i] == 7 + 2 * sum(bool(s == true[i]) for s in row)


def test_empty_block_counts_nothing():
    less = torch.zeros(3, dtype=torch.int64)
    count_block(torch.empty(3, 0), torch.zeros(3), less, less)
    assert not less.any()


@pytest.mark.parametrize("wrong", [-1, 3])
def test_rows_outside_the_block_are_rejected(wrong):
    less = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(IndexError, match=r"not all in \[0, 3\)"):
        count_block(torch.zeros(3, 4), torch.zeros(2), less, less, torch.tensor([0, wrong]))


@pytest.mark.gpu
def test_cuda_counts_match_cpu():
    scores = torch.randn(65, 1003).round(decimals=1)
    scores[3] = torch.nan
    true = scores[:, 5].clone()
    counts = {}
    for device in ("cpu", "cuda"):
        less, equal = torch.zeros(2, 65, dtype=torch.int64, device=device)
        count_block(scores.to(device), true.to(device), less, equal)
        counts[device] = less.tolist(), equal.tolist()
    assert counts["cpu"] == counts["cuda"]
