import pytest
import torch

from kge_torchrec.embeddings.init import zeros_on_huge_pages


@pytest.mark.parametrize("shape", [(0,), (0, 4), (5, 0), (3,), (7, 5), (1 << 20, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_zeros_are_writable_in_any_shape(shape, dtype):
    results = zeros_on_huge_pages(*shape, dtype=dtype)
    assert results.equal(torch.zeros(shape, dtype=dtype))
    results.fill_(3)
    assert results.equal(torch.full(shape, 3, dtype=dtype))


def test_memory_lives_as_long_as_a_view():
    rows = zeros_on_huge_pages(1000, 8)[10:20]
    rows += 1
    zeros_on_huge_pages(1000, 8).fill_(5)
    assert rows.sum() == 80
