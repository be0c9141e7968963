"""Expected numbers of different entities, against formulas term by term and against draws."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import tiny_store

from kge_torchrec.data import SIDES
from kge_torchrec.data.batches import BatchPlan
from kge_torchrec.data.batches.triples import TripleBatches
from kge_torchrec.data.negatives import DegreeSampler, UniformSampler
from kge_torchrec.planning.sizes import Sizes


def term_by_term(count: int, exponent: float, positives: int, negatives: int) -> float:
    chance = np.arange(1, count + 1.0) ** -exponent
    chance /= chance.sum()
    absent = (1 - chance) ** (2 * positives) * (1 - 1 / count) ** negatives
    return float((1 - absent).sum())


def zipf(entities: int, skew: float) -> Sizes:
    return Sizes.of_counts(entities, 1, 1, skew)


@settings(max_examples=20)
@given(
    count=st.integers(2, 30_000),
    exponent=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.05, 2.0)),
    positives=st.integers(1, 3000),
    negatives=st.integers(0, 3000),
)
def test_zipf_is_the_sum_over_all_entities(count, exponent, positives, negatives):
    sizes = zipf(count, exponent)
    assert sizes.members.sum() == pytest.approx(count)
    assert (sizes.chance * sizes.members).sum() == pytest.approx(1)
    exact = term_by_term(count, exponent, positives, negatives)
    assert sizes.distinct(positives, negatives) == pytest.approx(exact, rel=2e-3)


def graph(entities: int, triples: int, skewed: bool) -> np.ndarray:
    stream = np.random.default_rng(0)
    unit = stream.random((triples, 2))
    ends = entities**unit - 1 if skewed else unit * entities
    ends = np.minimum(ends.astype(np.int64), entities - 1)
    return np.stack([ends[:, 0], np.zeros(triples, dtype=np.int64), ends[:, 1]], 1)


@pytest.mark.parametrize(
    ("batch", "skewed", "power"),
    [(64, True, None), (256, False, 0.75)],
)
def test_degrees_predict_the_ids_of_batches(batch, skewed, power):
    entities, negatives = 2000, 300
    data = graph(entities, 4000, skewed)
    degrees = np.bincount(data[:, [0, 2]].ravel(), minlength=entities)
    sampler = UniformSampler(entities) if power is None else DegreeSampler(degrees, power)
    counts = dict.fromkeys(SIDES, negatives)
    builder = TripleBatches(data, BatchPlan(batch, sampler=sampler, counts=counts))
    found = []
    for epoch in range(12):
        full = [b for b in builder.epoch(epoch) if b.weight.numel() == batch]
        found += [b.ids.numel() for b in full]
    degree, members = np.unique(degrees, return_counts=True)
    sizes = Sizes({"entity": entities}, 1, len(data), degree / degrees.sum(), members)
    expected = sizes.distinct(batch, 2 * negatives, power)
    assert np.mean(found) == pytest.approx(expected, rel=0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the files that are mapped")
def test_a_plan_leaves_no_pages_of_the_index_in_memory(tmp_path):
    store = tiny_store(tmp_path / "store")
    assert Sizes.of_store(store).entities == store.num_entities
    assert f"{store.path}/known" not in Path("/proc/self/maps").read_text()
