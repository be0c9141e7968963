"""Training against all entities of the right types on 1, 2 and 4 ranks against the oracle."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle_full_candidates import train_dense
from training_runs import config_of, fit, largest_difference, parameters, shared_folder, tiny_store
from worlds import run_world

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.data.batches.queries import SideQueries
from kge_torchrec.data.node_types import Ends
from kge_torchrec.data.prepare import extend_store, prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import Answers, Ranges
from kge_torchrec.distributed.processes import processes
from kge_torchrec.errors import DataError
from kge_torchrec.kernels.operators import normalizers
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session

CASES = {
    "recommender": {"negatives__sides": "tail", "model__reciprocal": False,
                    "loss__options": {"answers": "sum"}, "loss__regularizers__l2": 0.01},
    "both sides": {"model__reciprocal": True, "loss__n3": 0.01},
    "bce": {"model__reciprocal": False, "loss__name": "bce"},
    "triples": {"model__reciprocal": True, "negatives__regime": "1vsall",
                "loss__relation_weight": 0.5},
    "distances": {"model__scorer": "transe_l2", "negatives__regime": "allvsall",
                  "loss__name": "bce"},
}  # fmt: skip
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
    prepare(splits, path, types="prefix", progress=False)
    return path


def variant(name: str, store: Path | None = None) -> Config:
    keys = {"model__scorer": "distmult", "loss__n3": 0.0, "loss__relation_weight": 0.0,
            "negatives__regime": "kvsall", "negatives__among": "types", "train__epochs": 1,
            "train__batch_size": 24}  # fmt: skip
    return config_of(store or the_store(), **{**keys, **CASES[name]})


def rank_trains(folder: Path, small: bool, at_start: bool) -> dict[str, dict]:
    """The parameters of every case, at the start or at the end."""

    def prepare_fit(loop) -> None:
        loop._save = lambda: None
        if small:
            loop.pipeline.full.kept_bytes, loop.pipeline.full.block_bytes = 0, 200

    out = {}
    for name in CASES:
        config = variant(name)
        run = replace(config.run, dir=str(folder / name))
        config = replace(config, run=run)
        if not at_start:
            out[name] = fit(config, prepare_fit).parameters
            continue
        with processes("cpu") as ranks:
            out[name] = parameters(Session(config, RunFolder(run.dir), ranks))
    return out


@functools.cache
def trained(world_size: int, small: bool = False, at_start: bool = False) -> dict[str, dict]:
    with tempfile.TemporaryDirectory() as folder:
        return run_world(world_size, rank_trains, Path(folder), small, at_start)[0]


@functools.cache
def dense(name: str) -> dict:
    start = trained(1, at_start=True)[name]
    return train_dense(variant(name), TripleStore.open(the_store()), start)


@pytest.mark.parametrize(
    "world_size, small", [(1, False), (2, True), pytest.param(4, True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", CASES)
def test_an_epoch_equals_the_dense_oracle(name, world_size, small):
    start, end = trained(1, at_start=True)[name], trained(world_size, small)[name]
    assert largest_difference(start, end) > 1e-2
    assert largest_difference(dense(name), end) < 1e-5


def test_candidates_of_an_extended_store_follow_its_types(tmp_path):
    """New entities of a type come after all old ones, so a type has several ranges of ids."""
    store = extend_store(TripleStore.open(the_store()), {"train": typed_triples(30, "n")},
                         tmp_path / "more", progress=False)  # fmt: skip
    ends, labels = Ends.of(store), store.entities.labels(range(store.num_entities))
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
    config = variant("recommender", tmp_path / "more")
    config = replace(config, run=replace(config.run, dir=str(tmp_path / "run")))
    with processes("cpu") as ranks:
        start = parameters(Session(config, RunFolder(tmp_path / "run"), ranks))
    assert largest_difference(train_dense(config, store, start), fit(config).parameters) < 1e-5


@given(st.data())
def test_chosen_queries_keep_their_answers(data):
    counts = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    stops = np.cumsum(counts)
    ranges = Ranges(np.arange(100, 100 + stops[-1]), np.arange(len(counts)), stops - counts, stops)
    weight = np.arange(len(counts), dtype=np.float32)
    rows = np.arange(len(counts))
    queries = SideQueries("tail", rows, rows + 50, Answers(len(counts), [ranges]), weight)
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(counts),
                                         max_size=len(counts))))  # fmt: skip
    part = queries.only(chosen)
    expected = [list(range(100 + stops[i] - counts[i], 100 + stops[i])) for i in rows[chosen]]
    query, answer = part.answers.all()
    assert [answer[query == i].tolist() for i in range(len(part.anchor))] == expected
    for values in (part.anchor, part.relation - 50, part.weight):
        assert values.tolist() == rows[chosen].tolist()


def test_a_block_without_candidates_has_no_normalizer():
    out = torch.zeros(2, dtype=torch.float64)
    normalizers(torch.empty(2, 0), out, True)
    assert out.tolist() == [-torch.inf] * 2
    normalizers(torch.empty(2, 0), out, False)
    assert out.tolist() == [0, 0]


@pytest.mark.parametrize("keys, said", [
    ({"loss__name": "margin"}, "only loss.name softmax and bce can leave entities out"),
    ({"loss__options": {"label_smoothing": 0.1}}, "without label_smoothing"),
    ({"loss__name": "bce", "loss__options": {"reduction": "mean"}}, "with reduction sum"),
    ({"negatives__among_options": {"share": 0.5}}, "negatives.among_options: negatives.regime"),
    ({"negatives__among_options": {"types": "x.tsv"}}, "leave types and share at their defaults"),
    ({"negatives__among": "seen"}, "or with types every entity of a type, as a candidate"),
    ({"negatives__regime": "kvssample"}, "draws for all queries of a batch together"),
    ({"negatives__regime": "kvssample", "negatives__among": "all",
      "loss__options": {"answers": "sum"}},
     "loss.options.answers sum: negatives.regime kvssample does not sum answers; use kvsall"),
    ({"loss__options": {"answers": "max"}}, "loss.options.answers must be one of mean, sum"),
])  # fmt: skip
def test_settings_that_contradict_typed_candidates_are_refused(keys, said):
    with pytest.raises(ConfigError, match=said):
        config_of("s", **{"negatives__regime": "kvsall", "negatives__among": "types", **keys})


def test_graphs_without_types_are_refused(tmp_path):
    config = config_of(tiny_store(tmp_path / "s").path, tmp_path / "run",
                       negatives__regime="kvsall", negatives__among="types")  # fmt: skip
    with pytest.raises(DataError, match=r"every entity of .* needs one type; set data\.types"):
        fit(config)


@pytest.mark.parametrize("keys, expected", [
    ({}, "types"), ({"loss.options.label_smoothing": 0.1}, "all"), ({"loss.name": "margin"}, "all"),
])  # fmt: skip
def test_typed_graphs_have_typed_candidates_where_the_loss_allows_it(keys, expected):
    config = config_from_dict({"negatives.regime": "kvsall", **keys})
    assert config.settled(TripleStore.open(the_store()).size).negatives.among == expected
