"""Candidates of the right types: ranges of an extended store, and what refuses them."""

from __future__ import annotations

import functools
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle_full_candidates import train_dense
from training_runs import config_of, fit, largest_difference, parameters, shared_folder, tiny_store

from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.data.batches.queries import SideQueries
from kge_torchrec.data.prepare import extend_store, prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import Answers, Ranges
from kge_torchrec.data.types import Ends
from kge_torchrec.distributed.processes import processes
from kge_torchrec.errors import DataError
from kge_torchrec.kernels.operators import normalizers
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session

OWN = "foreign_parts:CrossEntropy"  # with a closed form
TYPES = {"author": 3, "place": 11, "user": 9}
ENDS = {"follows": ("user", "user"), "visits": ("user", "place"), "made": ("author", "place"),
        "likes": ("user", "place"), "was_at": ("author", "place")}  # fmt: skip


def typed_triples(count: int, extra: str = "") -> list[tuple[str, str, str]]:
    """Random triples of relations between types; some relations like users, too."""
    random, triples = np.random.default_rng(len(extra)), set()
    while len(triples) < count:
        relation = random.choice(list(ENDS))
        head, tail = ENDS[relation]
        if relation == "likes" and random.random() < 0.5:
            tail = "user"
        head, tail = (f"{kind}:{extra}{random.integers(TYPES[kind])}" for kind in (head, tail))
        triples.add((head, str(relation), tail))
    return sorted(triples)


@functools.cache
def the_store() -> Path:
    path = shared_folder() / "typed"
    rows = typed_triples(90)
    splits = {"train": rows[2:], "valid": rows[:1], "test": rows[1:2]}
    prepare(splits, path, {"types": "prefix"}, progress=False)
    return path


def test_ranges_of_a_batch_take_no_memory_per_entity(tmp_path):
    triples = [(f"user:{i}", "likes", f"item:{i % 99}") for i in range(20_000)]
    store = prepare({"train": triples}, tmp_path / "s", {"types": "prefix"}, progress=False)
    ends = Ends(store)
    (types,), _ = ends.kinds("tail", np.zeros(4, np.int64))
    tracemalloc.start()
    ranges = ends.ranges(types)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(stop - start for start, stop in ranges) == 99 and peak < 4096


def test_candidates_of_an_extended_store_follow_its_types(tmp_path):
    """New entities of a type come after all old ones, so a type has several ranges of ids."""
    store = extend_store(TripleStore.open(the_store()), {"train": typed_triples(30, "n")},
                         tmp_path / "more", progress=False)  # fmt: skip
    ends, labels = Ends(store), store.entities.labels(range(store.num_entities))
    kinds = np.array([label.partition(":")[0] for label in labels])
    relations = np.array([store.relations.labels([0, 1, 2, 3, 4]).index(name) for name in ENDS])
    sets, place = ends.kinds("tail", np.repeat(relations, 2))
    assert len(sets) == 3  # likes has two types
    for number, relation in enumerate(ENDS):
        allowed = {"likes": ["place", "user"]}.get(relation, [ENDS[relation][1]])
        ranges = ends.ranges(sets[place[2 * number]])
        inside = np.concatenate([np.arange(*pair) for pair in ranges])
        assert inside.tolist() == np.flatnonzero(np.isin(kinds, allowed)).tolist()
        assert len(ranges) > 1
    config = config_of(
        tmp_path / "more", tmp_path / "run", model__scorer="distmult", model__reciprocal=False,
        negatives__regime="kvsall", negatives__among="types", negatives__sides="tail",
        loss__options={"answers": "sum"}, loss__regularizers__l2=0.01, train__epochs=1,
        train__batch_size=24,
    )  # fmt: skip
    with processes("cpu") as ranks:
        start = parameters(Session(config, RunFolder(tmp_path / "run"), ranks))
    assert largest_difference(train_dense(config, store, start), fit(config).parameters) < 1e-5


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=6))
def test_queries_in_groups_keep_their_answers(of_queries):
    counts, kind = np.array(of_queries).T
    stops, rows = np.cumsum(counts), np.arange(len(counts))
    answers = Answers(len(rows), [Ranges(np.arange(stops[-1]), stops - counts, stops)])
    ends = SimpleNamespace(
        kinds=lambda side, relations: (range(3), kind), ranges=lambda types: types
    )
    queries = SideQueries("tail", rows, rows + 50, answers, rows / 2)
    results = {}
    for number, part in enumerate(queries.among_types(ends)):
        assert (part.side, part.candidates) == ("tail", number)
        query, answer = part.answers.all()
        for i, values in enumerate(zip(part.anchor, part.relation, part.weight, strict=True)):
            results[tuple(values)] = number, answer[query == i].tolist()
    expected = {(i, i + 50, i / 2): (kind[i], list(range(stops[i] - counts[i], stops[i])))
                for i in rows}  # fmt: skip
    assert results == expected


def test_a_block_without_candidates_has_no_normalizer():
    out = torch.zeros(2, dtype=torch.float64)
    normalizers(torch.empty(2, 0), out, True)
    assert out.tolist() == [-torch.inf] * 2
    normalizers(torch.empty(2, 0), out, False)
    assert out.tolist() == [0, 0]


def test_graphs_without_types_are_refused(tmp_path):
    config = config_of(tiny_store(tmp_path / "s").path, tmp_path / "run",
                       negatives__regime="kvsall", negatives__among="types")  # fmt: skip
    with pytest.raises(DataError, match=r"every entity of .* needs one type; set data\.types"):
        fit(config)


@pytest.mark.parametrize("keys, expected", [
    ({}, "types"), ({"loss.options.label_smoothing": 0.1}, "all"), ({"loss.name": OWN}, "all"),
])  # fmt: skip
def test_typed_graphs_have_typed_candidates_where_the_loss_allows_it(keys, expected):
    config = config_from_dict({"negatives.regime": "kvsall", **keys})
    assert config.settled(TripleStore.open(the_store()).size).negatives.among == expected
