"""Fixed candidates of each triple: their ranks against loops, and their use by runs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from oracle_ranking import dense_scores
from ranking_cases import (
    ColumnScorer,
    make_scorer,
    my_shard,
    on_every_rank,
    random_triples,
    whole,
)
from training_runs import config_of, evaluate, tiny_store

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError
from kge_torchrec.models.scorers import SIDES
from kge_torchrec.ranking.blocks import ModelScores
from kge_torchrec.ranking.fixed import MISSING, FixedLists, rank_among_lists, read_lists
from kge_torchrec.ranking.ranks import Ranks

ENTITIES, RELATIONS, DIM = 60, 4, 8
KINDS = ("optimistic", "pessimistic")


def model(ties: bool = True) -> tuple:
    scorer, generator = make_scorer("distmult", RELATIONS, DIM), torch.Generator().manual_seed(1)
    table = torch.randn(ENTITIES, DIM, generator=generator)
    return scorer, (table[:20].repeat(3, 1) if ties else table)


def distinct_triples(count: int) -> np.ndarray:
    return np.unique(random_triples(count, ENTITIES, RELATIONS, 3).numpy(), axis=0)


def fixed_lists(triples: np.ndarray) -> dict:
    """Repeated candidates, the true answer among them, and rows that end early."""
    random = np.random.default_rng(0)
    lists = {side: random.integers(ENTITIES, size=(len(triples), 9)) for side in SIDES}
    lists["head"][::3, 4] = triples[::3, 0]
    lists["tail"][:, 8] = lists["tail"][:, 7]
    lists["tail"][::4, 5:] = MISSING
    return lists


def as_lists(ranks: Ranks) -> dict:
    return {kind: {side: getattr(ranks, kind)[side].tolist() for side in SIDES} for kind in KINDS}


def rank_here(scorer, table, triples, lists):
    return as_lists(rank_among_lists(ModelScores(scorer, my_shard(table)), triples, lists))


def test_fixed_lists_rank_as_the_definition_says():
    (scorer, table), triples = model(), distinct_triples(150)
    ids = fixed_lists(triples)
    expected = {kind: {} for kind in KINDS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for side, column in (("head", 0), ("tail", 2)):
        scores = dense_scores(scorer, table, torch.from_numpy(triples), side).tolist()
        rows = zip(scores, triples[:, column].tolist(), ids[side].tolist(), strict=True)
        pairs = [([row[e] for e in listed if e >= 0], row[true]) for row, true, listed in rows]
        for kind, beats in (("optimistic", float.__gt__), ("pessimistic", float.__ge__)):
            expected[kind][side] = [1 + sum(beats(s, true) for s in of) for of, true in pairs]
    torch.set_num_threads(threads)
    assert expected["optimistic"] != expected["pessimistic"]
    lists = FixedLists(triples, ids, "a file")
    for results in on_every_rank(rank_here, scorer, table, triples, lists):
        assert results == expected


def test_blocks_of_candidates_do_not_change_counts(monkeypatch):
    (scorer, table), triples = model(), distinct_triples(150)
    lists = FixedLists(triples, fixed_lists(triples), "a file")
    scores = ModelScores(scorer, whole(table))
    expected = as_lists(rank_among_lists(scores, triples, lists))
    monkeypatch.setattr("kge_torchrec.ranking.blocks.block_height", lambda *_: 7)
    monkeypatch.setattr("kge_torchrec.ranking.fixed.LISTS", 31)
    assert as_lists(rank_among_lists(scores, triples, lists)) == expected


def test_nan_counts_against_the_model_in_lists():
    triples = np.array([[0, 0, 1], [2, 0, 3]])
    lists = FixedLists(triples, {side: np.array([[4, 5], [4, 5]]) for side in SIDES}, "it")
    table = torch.tensor([[1.0], [1.0], [1.0], [torch.nan], [torch.nan], [0.0]])
    ranks = rank_among_lists(ModelScores(ColumnScorer(), whole(table)), triples, lists)
    assert ranks.optimistic["tail"].tolist() == [2, 3]  # behind a NaN; last as a NaN
    assert ranks.pessimistic["tail"].tolist() == [2, 3]


def test_triples_without_a_list_are_refused():
    triples = random_triples(5, ENTITIES, RELATIONS, 0).numpy()
    lists = FixedLists(triples[:4], {s: np.zeros((4, 2), int) for s in SIDES}, "some file")
    with pytest.raises(DataError, match="some file gives no candidates for the triple"):
        lists.of("head", triples)
    with pytest.raises(DataError, match="some file gives candidates twice"):
        FixedLists(triples[[0, 1, 0]], {s: np.zeros((3, 2), int) for s in SIDES}, "some file")


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TripleStore:
    return tiny_store(tmp_path_factory.mktemp("graph") / "store")


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    api.train(config_of(store.path, folder, train__epochs=1))
    return folder


@pytest.fixture(scope="module")
def file(store, tmp_path_factory):
    """Lists for valid and test, by labels, with rows that end early."""
    triples = np.concatenate([store.valid, store.test])
    entities = np.array(store.entities.array.to_pylist())
    relations = np.array(store.relations.array.to_pylist())
    lists = entities[np.random.default_rng(1).integers(37, size=(2, len(triples), 4))]
    lists[:, ::2, 3] = ""
    path = tmp_path_factory.mktemp("lists") / "lists.npz"
    columns = entities[triples[:, 0]], relations[triples[:, 1]], entities[triples[:, 2]]
    named = dict(zip(("head", "relation", "tail"), columns, strict=True))
    np.savez(path, head_neg=lists[0], tail_neg=lists[1], **named)
    return path


def test_lists_are_ranked_and_labeled(run, file, capsys):
    command = ["evaluate", str(run), "--candidate-file", str(file), "--by", "category"]
    assert main(command) == 0
    text = capsys.readouterr().out
    label = "FIXED candidates, not comparable with ranks among all entities: unfiltered ranks among"
    assert text.startswith(label) and f"given by {file}" in text and text.count("FIXED") == 2
    results = evaluate(run, by=["category"], candidate_file=file)
    assert results["by"]["category"]["total"]["candidates"]["kind"] == "fixed"
    assert results["candidates"]["per_query"] == [3, 4]
    assert results["both"]["realistic"]["mr"] < evaluate(run)["both"]["realistic"]["mr"]
    with pytest.raises(ConfigError, match=r"evaluation.candidates fixed needs .*candidate-file"):
        evaluate(run, candidates="fixed")
    with pytest.raises(ConfigError, match="candidate_file has no effect with candidates seen"):
        evaluate(run, candidates="seen", candidate_file="x.npz")


def test_file_of_lists_ranks_every_triple_that_it_names(run, store, file, capsys):
    for split in ("valid", "test"):
        assert main(["evaluate", str(run), "--split", split, "--candidate-file", str(file)]) == 0
        assert f"given by {file}; 3 to 4 per query" in capsys.readouterr().out
    one = [store.entities[store.test[0, 0]], store.relations[store.test[0, 1]],
           store.entities[store.test[0, 2]]]  # fmt: skip
    options = {"candidate_file": file}
    assert evaluate(run, triples=[tuple(one)], **options)["triples"]["count"] == 1
    with pytest.raises(DataError, match="gives no candidates for the triple"):
        evaluate(run, "train", **options)


def test_file_in_order_of_a_split(store, tmp_path):
    head, tail = np.random.default_rng(0).integers(37, size=(2, len(store.test), 6))
    np.savez(tmp_path / "ids.npz", head_neg=head, tail_neg=tail)
    lists = read_lists(tmp_path / "ids.npz", store, "test")
    triples = np.asarray(store.test, np.int64)[::-1]
    for side, ids in (("head", head), ("tail", tail)):
        assert (lists.of(side, triples) == ids[::-1]).all()


IDS = np.zeros((10, 2), int)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (None, "no such file of candidates"),
        (b"text", "is no NumPy file of candidates"),
        ({"head_neg": np.full((10, 2), None), "tail_neg": IDS}, "is no NumPy file of candidates"),
        ({"head_neg": IDS}, "has no array tail_neg"),
        ({"head_neg": IDS, "tail_neg": IDS[:9]}, "tail_neg must have one row for each of the 10"),
        ({"head_neg": IDS[0], "tail_neg": IDS}, r"head_neg .* has shape \(2,\)"),
        ({"head_neg": IDS + 37, "tail_neg": IDS}, r"head_neg: ids must lie in \[-1, 37\)"),
        ({"head_neg": IDS - 2, "tail_neg": IDS}, r"head_neg: ids must lie in \[-1, 37\)"),
        ({"head_neg": IDS + 0.5, "tail_neg": IDS}, "must be text or integers, not float64"),
        ({"head_neg": IDS, "tail_neg": IDS.astype(str)}, "tail_neg: '0' is not in the graph"),
        (
            {"head_neg": IDS, "tail_neg": IDS, "head": IDS[:, 0], "relation": IDS[:, 0],
             "tail": IDS[:, 0] - 1},
            r"tail: ids must lie in \[0, 37\)",
        ),
    ],
)  # fmt: skip
def test_unusable_files_are_rejected(store, tmp_path, arrays, words):
    path = tmp_path / "lists.npz"
    if isinstance(arrays, bytes):
        path.write_bytes(arrays)
    elif arrays is not None:
        np.savez(path, **arrays)
    with pytest.raises(DataError, match=words) as error:
        read_lists(path, store, "test")
    assert str(path) in str(error.value)


def test_rows_without_triples_are_of_a_split_only(store, tmp_path):
    np.savez(tmp_path / "lists.npz", head_neg=IDS, tail_neg=IDS)
    with pytest.raises(DataError, match="has no arrays head, relation and tail"):
        read_lists(tmp_path / "lists.npz", store, None)


def test_training_validates_among_lists_and_labels_them(store, file, tmp_path, capsys):
    config = config_of(store.path, tmp_path / "run", train__epochs=1, evaluation__every=1,
                       evaluation__candidates="fixed", run__progress=True,
                       evaluation__candidate_file=str(file))  # fmt: skip
    results = api.train(config).results
    assert results["test"]["candidates"]["kind"] == "fixed"
    assert results["valid"]["restricted_candidates"] == "fixed"
    shown = [line for line in capsys.readouterr().err.splitlines() if "valid" in line]
    assert len([line for line in shown if "valid mrr" in line]) == 1
    (named,) = [line for line in shown if "validations rank among" in line]
    assert str(file) in named
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [x["candidates"]["kind"] for x in lines if x["kind"] == "valid"] == ["fixed"]


def test_training_without_lists_is_refused_at_its_start(store, tmp_path):
    with pytest.raises(ConfigError, match=r"evaluation.candidates fixed needs .*, the candidates"):
        config_of(store.path, evaluation__candidates="fixed")
    np.savez(tmp_path / "lists.npz", head_neg=IDS, tail_neg=IDS,
             **dict.fromkeys(("head", "relation", "tail"), IDS[:, 0]))  # fmt: skip
    config = config_of(store.path, tmp_path / "run", evaluation__candidates="fixed",
                       evaluation__candidate_file=str(tmp_path / "lists.npz"))  # fmt: skip
    with pytest.raises(DataError, match="gives candidates twice for the same triple"):
        api.train(config)
    assert not (tmp_path / "run").exists()
