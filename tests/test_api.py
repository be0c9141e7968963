"""The Python interface on the embedded graph: train, evaluate, predict."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch.distributed as dist
import yaml
from training_runs import QUIET, config_of, evaluate, random_triples, tiny_store

import kge_torchrec
from kge_torchrec import api, cli
from kge_torchrec.config import ConfigError
from kge_torchrec.data.prepare import prepare
from kge_torchrec.errors import DataError, UnknownLabelError
from kge_torchrec.training import runs
from kge_torchrec.training.checkpoints import CheckpointError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api") / "run"
    config = config_of("countries", folder, model__dim=16, train__batch_size=256,
                       evaluation__every=2, train__epochs=4)  # fmt: skip
    with api.train(config) as run:
        yield run


def test_verbs_work_from_python(run, capsys):
    assert evaluate(run.path, "valid") == run.evaluate("valid")
    sizes = {"entities": 1_000_000, "relations": 10, "triples": 5_000_000}
    plan = kge_torchrec.plan({"model.dim": 32}, devices="2xL4", **sizes)
    flags = [f"--{name}={value}" for name, value in sizes.items()]
    assert cli.main(["plan", "--devices=2xL4", "--model.dim=32", *flags, "--format=json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(plan))
    with pytest.raises(TypeError, match="unexpected keyword argument 'format'"):
        kge_torchrec.plan(devices="2xL4", format="json", **sizes)


@pytest.mark.parametrize("name", kge_torchrec.__all__)
def test_public_names_exist_and_have_docstrings(name):
    value = getattr(kge_torchrec, name)
    assert value.__name__ == name and value.__doc__


def test_dir_lists_the_names_of_the_package():
    listed = set(dir(kge_torchrec))
    assert set(kge_torchrec.__all__) <= listed and not {"Any", "import_module"} & listed


def test_run_has_a_repr_and_its_contents(run, tmp_path):
    mrr = run.results["test"]["both"]["realistic"]["mrr"]
    assert repr(run) == f"<Run {run.path}: complex, dim 16, test MRR {mrr:.4f}>"
    (tmp_path / "config.yaml").write_bytes((run.path / "config.yaml").read_bytes())
    assert repr(api.open_run(tmp_path)).endswith("complex, dim 16, no results yet>")
    assert [line["epoch"] for line in run.history if line["kind"] == "valid"] == [2, 4]
    with api.open_run(run.path) as again:
        labels = again.entity_labels
        assert len(labels) == again.model.store.num_entities
        assert "Austria" in labels and "Atlantis" not in labels and 3 not in labels
        assert labels[int(labels.ids(["Austria"])[0])] == "Austria"
        assert repr(again.relation_labels).startswith(
            f"<Vocabulary of {len(again.relation_labels)}"
        )
        rows = again.entities
        assert rows.shape == (len(labels), 16) and rows.dtype == np.float32
        prediction = again.predict(head="Austria", relation="borders", k=1)[0]
        assert prediction.label in labels


def test_train_accepts_triples_in_memory(tmp_path):
    triples = random_triples(12, 2, 60)
    splits = {"train": triples[:50], "test": triples[50:]}
    config = config_of("countries", tmp_path / "memory")
    with api.train(config, triples=splits) as run:
        assert set(run.entity_labels) >= {label for row in triples[:50] for label in row[::2]}
        store = prepare(splits, tmp_path / "store")
        of_store = api.train(config_of(store.path, tmp_path / "file"))
        assert run.results["test"] == of_store.results["test"]
        assert api.resume(run.path, {"train.epochs": 3}).results["train"]["epochs"] == 3
    with pytest.raises(ConfigError, match="triples in memory cannot be compared"):
        api.train({"run.resume": "auto", "run.dir": str(tmp_path / "auto")}, triples=splits)
    with pytest.raises(DataError, match="no training triples"):
        api.train(config_of("countries", tmp_path / "none"), triples={"train": []})
    assert not (tmp_path / "none").exists()


def test_train_splits_one_table_of_triples(tmp_path):
    triples = random_triples(12, 2, 100)
    columns = dict(zip(("head", "relation", "tail"), zip(*triples, strict=True), strict=True))
    results = []
    for name, table in (("list", triples), ("table", pa.table(columns))):
        with api.train(config_of("countries", tmp_path / name), triples=table) as run:
            sizes = [len(run.model.store.split(split)) for split in ("train", "valid", "test")]
            assert min(sizes) > 3 and sizes[0] > 70
            results.append(run.results["test"])
    assert results[0] == results[1] and results[0] is not None


def some_triple(run: api.Run, split: str) -> tuple[str, str, str]:
    store = run.model.store
    head, relation, tail = store.split(split)[0].tolist()
    (relation,) = store.relations.labels([relation])
    return (*store.entities.labels([head]), relation, *store.entities.labels([tail]))


def test_invalid_queries_are_rejected(run):
    for query in ({"head": "x"}, {"relation": "r"}, {"head": "x", "relation": "r", "tail": "y"}):
        with pytest.raises(ConfigError, match=f"two of head, relation and tail.*{len(query)} of"):
            run.predict(**query)
    head, relation, _ = some_triple(run, "train")
    with pytest.raises(ConfigError, match="k must be an integer >= 1, got 0"):
        run.predict(head=head, relation=relation, k=0)
    with pytest.raises(UnknownLabelError, match=rf"unknown entity.*did you mean.*{head}"):
        run.predict(head=head + "x", relation=relation)
    with pytest.raises(ConfigError, match="split must be one of train, valid, test"):
        run.evaluate("everything")


def test_closed_run_releases_the_process_group_and_reopens(run):
    assert run.evaluate() == run.results["test"]
    run.close()
    assert not dist.is_initialized()
    assert run.evaluate() == run.results["test"]
    run.close()
    with api.open_run(run.path) as again:
        assert again.evaluate() == run.results["test"]


def test_dict_and_yaml_file_are_accepted_as_configs(tmp_path):
    path = tiny_store(tmp_path / "store").path
    of_dict = api.train({**QUIET, "data.path": str(path), "run": {"dir": str(tmp_path / "a")}})
    nested = config_of(path, tmp_path / "b").to_dict()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(nested))
    of_file = api.train(tmp_path / "config.yaml")
    assert of_dict.results["test"] == of_file.results["test"]


def test_run_without_checkpoint_or_results_is_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"no run folder: it has no config.yaml"):
        api.open_run(tmp_path)
    config = config_of("countries", tmp_path)
    config.save(tmp_path / "config.yaml")
    with api.open_run(tmp_path) as run:
        with pytest.raises(CheckpointError, match="no checkpoint yet: train it first"):
            run.evaluate()
        with pytest.raises(ConfigError, match="no results yet"):
            _ = run.results


def test_training_without_test_triples_has_no_test_results(tmp_path, capsys):
    store = prepare({"train": random_triples(9, 2, 40)}, tmp_path / "store")
    config = config_of(store.path, tmp_path / "run", train__epochs=1, run__progress=True)
    with api.train(config) as run:
        assert run.results["test"] is None
        assert "note: valid and test: no triples, so that nothing is" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="has no test triples"):
            run.evaluate()


def test_notes_of_training_take_one_line_each(tmp_path, capsys):
    """Also to a caller who wants no progress; not to a search, which starts many."""
    pairs = [(f"e{i}", "knows", f"e{i + 1}") for i in range(60)]
    splits = {
        "train": [*pairs, *((t, r, h) for h, r, t in pairs[5:]), ("e1", "likes", "e7 ")],
        "valid": [(t, r, h) for h, r, t in pairs[3:5]],
        "test": [(t, r, h) for h, r, t in pairs[:3]] + [pairs[0], ("new", "likes", "e7")],
    }
    data = tmp_path / "data"
    data.mkdir()
    for split, rows in splits.items():
        (data / f"{split}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    config = config_of(data, tmp_path / "run", train__epochs=1)
    with api.train(config) as run:
        said = run.results["notes"]
    lines = capsys.readouterr().err.splitlines()
    assert said == [line.partition(" note: ")[2] for line in lines if " note: " in line]
    expected = [
        "test: 1 entities never occur in train, such as 'new'",
        "train-test: 1 triples occur in both; those of test are ranked all the same",
        "2 of 2 valid triples (100.0%) and 3 of 5 test triples (60.0%) follow from train",
    ]
    assert len(said) == len(expected)
    assert all(words in note for words, note in zip(expected, said, strict=True))
    api.train(replace(config, run=replace(config.run, dir=str(tmp_path / "other"))), (), False)
    assert " note: " not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("resumes", "changes"), [(True, {}), (False, {"entities__engine": "handrolled"})]
)
def test_session_is_freed_after_training(tmp_path, monkeypatch, resumes, changes):
    """Otherwise ``evaluate`` would load a second copy of the table into memory."""
    config, fit, alive = config_of("countries", tmp_path, train__epochs=1, **changes), runs._fit, []
    if resumes:
        api.train(config).close()

    def note(session, *rest, **named):
        model = session.backend.model
        parts = [session, session.backend, *model.modules(), *model.parameters()]
        alive[:] = [weakref.ref(x) for x in parts]
        return fit(session, *rest, **named)

    monkeypatch.setattr(runs, "_fit", note)
    gc.disable()  # does not keep training from asking for it
    try:
        api.resume(tmp_path, {"train.epochs": 2}) if resumes else api.train(config)
        left = [x() for x in alive]
    finally:
        gc.enable()
    assert len(left) > 5 and not [type(x).__name__ for x in left if x is not None]
