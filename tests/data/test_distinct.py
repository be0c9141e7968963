from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.data.batches.lookup import distinct


@given(
    ids=st.integers(0, 63).flatmap(lambda bits: st.lists(st.integers(0, 2**bits - 1), max_size=60))
)
@settings(max_examples=80, deadline=None)
def test_it_is_numpys(ids):
    ids = np.array(ids, np.int64)
    before = ids.copy()
    unique, inverse = distinct(ids)
    expected = np.unique(ids, return_inverse=True)
    assert np.array_equal(unique, expected[0]) and np.array_equal(inverse, expected[1])
    assert unique.dtype == inverse.dtype == np.int64 and np.array_equal(ids, before)


@pytest.mark.parametrize("largest", [255, 256, 65_535, 65_536, 86_000_000, 2**62])
def test_many_of_any_size(largest):
    ids = np.random.default_rng(0).integers(0, largest, 5000, endpoint=True)
    ids[:3] = largest
    unique, inverse = distinct(ids)
    assert np.array_equal(unique, np.unique(ids)) and np.array_equal(unique[inverse], ids)
