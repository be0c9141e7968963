"""Cores of a graph, against peeling by the definition."""

from __future__ import annotations

import numpy as np
import pytest

from kge_torchrec.data.prepare import prepare
from kge_torchrec.tuning import subgraphs
from kge_torchrec.tuning.subgraphs import core_numbers, core_of_share, write_core


def zipf_graph(seed: int, entities: int = 60, count: int = 400) -> dict[str, list]:
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, entities + 1)
    ends = random.choice(entities, size=(count, 2), p=weights / weights.sum())
    rows = {(f"e{h}", f"r{random.integers(4)}", f"e{t}") for h, t in ends.tolist()}
    rows = sorted(rows)
    random.shuffle(rows)
    rows = [tuple(row) for row in rows]
    return {"train": rows[60:], "valid": rows[:40], "test": rows[40:60]}


def peeled(triples: list, k: int) -> set:
    """Entities that are left when those in fewer than k triples are removed, again and again."""
    left = list(triples)
    while True:
        ends = [end for h, _, t in left for end in (h, t)]
        poor = {end for end in ends if ends.count(end) < k}
        if not poor:
            return set(ends)
        left = [row for row in left if row[0] not in poor and row[2] not in poor]


@pytest.fixture(scope="module", params=[0, 1])
def graph(request, tmp_path_factory):
    splits = zipf_graph(request.param)
    path = tmp_path_factory.mktemp("cores") / "store"
    return splits, prepare(splits, path, allow_unseen_relations=True)


@pytest.mark.first_tier("1")
def test_core_numbers_match_peeling(graph):
    splits, store = graph
    cores = dict(zip(store.entities.labels(range(store.num_entities)), core_numbers(store).tolist(),
                     strict=True))  # fmt: skip
    assert len(set(cores.values())) > 4
    for k in range(1, max(cores.values()) + 2):
        assert {label for label, core in cores.items() if core >= k} == peeled(splits["train"], k)


def test_core_is_a_valid_store(graph, tmp_path, monkeypatch):
    splits, store = graph
    monkeypatch.setattr(subgraphs, "FEWEST_VALID", 0)
    cores = core_numbers(store)
    k, share = core_of_share(store, cores, 1 / 3)
    inside = peeled(splits["train"], k)
    expected = {
        split: {row for row in splits[split] if {row[0], row[2]} <= inside}
        for split in ("train", "valid")
    }
    assert 0 < share < 1 and share == len(expected["train"]) / len(splits["train"])
    core = write_core(store, cores, k, tmp_path / "core", seed=0)
    assert core.num_entities == len(inside) and len(core.test) == 0
    for split, rows in expected.items():
        results = core.split(split)
        columns = (core.entities.labels(results[:, 0]), core.relations.labels(results[:, 1]),
                   core.entities.labels(results[:, 2]))  # fmt: skip
        assert set(zip(*columns, strict=True)) == rows and len(results) == len(rows)
        side = core.filter_index((split,)).answers("tail", results[:, 0], results[:, 1])
        assert (side.counts > 0).all()


def test_core_with_few_valid_triples_holds_out_training_triples(graph, tmp_path):
    _, store = graph
    cores = core_numbers(store)
    k, share = core_of_share(store, cores, 1 / 3)
    core = write_core(store, cores, k, tmp_path / "core", seed=0)
    total = share * len(store.train)
    assert len(core.train) < total and len(core.valid) >= 0.05 * total
    degrees = np.asarray(core.degrees())
    assert degrees.min() > 0  # nobody is left without a training triple
    assert set(core.train[:, 1].tolist()) == set(range(core.num_relations))


def test_regular_graph_has_no_smaller_core(tmp_path):
    ring = [(f"e{i}", "r", f"e{(i + 1) % 20}") for i in range(20)]
    store = prepare({"train": ring}, tmp_path / "store")
    cores = core_numbers(store)
    assert set(cores.tolist()) == {2} and core_of_share(store, cores, 0.1) == (0, 1.0)
