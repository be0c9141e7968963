"""Fixed and sampled candidates in training, evaluate and the files of a run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from training_runs import config_of, tiny_store
from worlds import run_world

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError
from kge_torchrec.ranking.candidate_files import find_lists, read_lists
from kge_torchrec.training.session import selection_of

COUNT = 6


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TripleStore:
    """A store with lists of its own for test, as prepared from a data set that has them."""
    plain = tiny_store(tmp_path_factory.mktemp("graph") / "store")
    lists = np.random.default_rng(0).integers(37, size=(2, len(plain.test), COUNT))
    for side, array in zip(("head", "tail"), lists, strict=True):
        np.save(plain.path / f"candidates-test-{side}.npy", array.astype(np.int32))
    meta = json.loads((plain.path / "meta.json").read_text())
    for side in ("head", "tail"):
        file = plain.path / f"candidates-test-{side}.npy"
        meta["files"][file.name] = file.stat().st_size
    meta["report"]["sources"] = {"test": ["ogb:tiny"]}
    (plain.path / "meta.json").write_text(json.dumps(meta))
    return TripleStore.open(plain.path)


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


def test_lists_of_the_data_set_are_ranked_and_labeled(run, store, capsys):
    assert main(["evaluate", str(run), "--candidates", "fixed", "--by", "category"]) == 0
    text = capsys.readouterr().out
    label = "FIXED candidates, not comparable with ranks among all entities: unfiltered ranks among"
    assert text.startswith(label) and "given by ogb:tiny" in text and text.count("FIXED") == 2
    written = json.loads((run / "evaluation-test-by-category-fixed-candidates.json").read_text())
    assert written["total"]["candidates"]["kind"] == "fixed"
    results = api.evaluate(run, candidates="fixed")
    assert results["candidates"]["per_query"] == [COUNT, COUNT]
    assert results["both"]["realistic"]["mr"] < api.evaluate(run)["both"]["realistic"]["mr"]
    with pytest.raises(DataError, match=r"no fixed candidates for the valid triples. Name a file"):
        api.evaluate(run, "valid", candidates="fixed")
    with pytest.raises(DataError, match="no fixed candidates for triples of your own"):
        api.evaluate(run, candidates="fixed", triples=[("e1", "r0", "e2")])


def test_sampled_candidates_are_ranked_and_labeled(run, capsys):
    arguments = ["evaluate", str(run), "--candidate-count", "5", "--candidate-seed", "3"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("SAMPLED") and "5 random" in lines[0] and "seed 3" in lines[0]
    assert "unbiased" in lines[-1]
    results = api.evaluate(run, candidates="sampled", candidates_options={"count": 5, "seed": 3})
    assert main([*arguments, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == results
    every = api.evaluate(run, candidates="sampled")  # of 500, which are all
    assert every["both"] == api.evaluate(run)["both"]
    own = api.evaluate(run, candidates="sampled", triples=[("e1", "r0", "e2")])
    assert own["candidates"]["kind"] == "sampled"


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_results_do_not_depend_on_number_of_ranks(run, file, world_size):
    for kwargs in (
        {"candidates": "fixed"},
        {"split": "valid", "candidates_options": {"file": str(file)}},
        {"candidates_options": {"count": 5}},
    ):
        expected = api.evaluate(run, **kwargs)
        for results in run_world(world_size, evaluate_here, run, kwargs):
            assert results == expected


def evaluate_here(run, kwargs):
    return api.evaluate(run, **kwargs)


def test_file_of_lists_ranks_every_triple_that_it_names(run, store, file, capsys):
    for split in ("valid", "test"):
        assert main(["evaluate", str(run), "--split", split, "--candidate-file", str(file)]) == 0
        assert f"given by {file}; 3 to 4 per query" in capsys.readouterr().out
    one = [store.entities[store.test[0, 0]], store.relations[store.test[0, 1]],
           store.entities[store.test[0, 2]]]  # fmt: skip
    options = {"candidates_options": {"file": file}}
    assert api.evaluate(run, triples=[tuple(one)], **options)["triples"]["count"] == 1
    with pytest.raises(DataError, match="gives no candidates for the triple"):
        api.evaluate(run, "train", **options)


def test_file_in_order_of_a_split_equals_lists_of_the_store(store, tmp_path):
    stored = store.candidates("test")
    np.savez(tmp_path / "ids.npz", head_neg=stored["head"], tail_neg=stored["tail"])
    lists = find_lists(str(tmp_path / "ids.npz"), store, "test")
    triples = np.asarray(store.test, np.int64)[::-1]
    expected = find_lists(None, store, "test")
    for side in ("head", "tail"):
        assert (lists.of(side, triples).ids == stored[side][::-1]).all()
        assert (expected.of(side, triples).ids == stored[side][::-1]).all()


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


@pytest.mark.parametrize("kind", ["fixed", "sampled"])
@pytest.mark.first_tier("sampled")
def test_training_validates_among_lists_and_labels_them(store, file, tmp_path, capsys, kind):
    options = {"file": str(file)} if kind == "fixed" else {"count": 5}
    config = config_of(store.path, tmp_path / "run", train__epochs=1, evaluation__every=1,
                       evaluation__candidates=kind, evaluation__candidates_options=options,
                       run__progress=True)  # fmt: skip
    results = api.train(config).results
    assert results["test"]["candidates"]["kind"] == kind
    assert results["valid"]["restricted_candidates"] == kind
    shown = [line for line in capsys.readouterr().err.splitlines() if "valid mrr" in line]
    assert len(shown) == 1 and kind.upper() in shown[0]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [x["candidates"]["kind"] for x in lines if x["kind"] == "valid"] == [kind]


def test_training_without_lists_is_refused_at_its_start(store, tmp_path):
    config = config_of(store.path, tmp_path / "run", evaluation__every=1,
                       evaluation__candidates="fixed")  # fmt: skip
    with pytest.raises(DataError, match=r"evaluation.candidates fixed: .* for the valid triples"):
        api.train(config)
    assert not (tmp_path / "run").exists()


def test_selection_names_the_lists(store):
    def words(**changes) -> str:
        return selection_of(config_of(store.path, **changes), store)

    assert words() == "mrr"
    kind = {"evaluation__candidates": "sampled"}
    assert words(**kind) == "mrr among candidates sampled 500 by seed 0"
    options = {"evaluation__candidates_options": {"count": 9, "seed": 2}}
    assert words(**kind, **options) == "mrr among candidates sampled 9 by seed 2"
    options = {"evaluation__candidates_options": {"file": "x.npz"}}
    assert words(evaluation__candidates="fixed", **options) == "mrr among candidates fixed x.npz"
    options = {"evaluation__candidates_options": {"types": "x.tsv"}}
    assert words(evaluation__candidates="types", **options) == "mrr among candidates types x.tsv"


def test_options_of_other_candidates_are_refused(run):
    with pytest.raises(ConfigError, match="count has no effect with candidates fixed"):
        api.evaluate(run, candidates="fixed", candidates_options={"count": 5})
    with pytest.raises(ConfigError, match="types has no effect with candidates sampled"):
        api.evaluate(run, types="x.tsv", candidates_options={"count": 5}, candidates="sampled")
    with pytest.raises(ConfigError, match=r"candidates_options.number is no option"):
        api.evaluate(run, candidates="sampled", candidates_options={"number": 5})
    with pytest.raises(ConfigError, match=r"candidates_options.count must be an integer >= 1"):
        api.evaluate(run, candidates="sampled", candidates_options={"count": 0})


def test_earlier_name_of_types_is_read():
    config: Config = config_from_dict(
        {
            "data.path": "x",
            "evaluation.candidates": "types",
            "evaluation.candidates_options.types": "x.tsv",
        }
    )
    assert config.evaluation.candidate_options.types == "x.tsv"
