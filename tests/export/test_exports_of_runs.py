"""Every format holds a run's model, however the run came about: resumed, extended."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow.parquet as pq
import torch
from grown_runs import base_config, new_triples
from training_runs import parameters, tiny_store
from worlds import run_world

from kge_torchrec import api, extend, load_model
from kge_torchrec.export import FORMATS

TABLE = "entities.parquet"


def contents(path):
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


def check_every_format(path, folder):
    """Exports in all formats have the run's labels and rows, and score its triples as it does."""
    before = contents(path)
    with api.open_run(path) as run:
        reciprocal = run.config.model.reciprocal
        made = {name: run.export(folder / name, name) for name in FORMATS}
        store = run.model.store
        rows = parameters(run.model)["entities"].numpy()
        triples = torch.from_numpy(np.concatenate([store.train, store.test]).astype(np.int64))
        labels = [of.array.to_pylist() for of in (store.entities, store.relations)]
    model, table = load_model(made["safetensors"]), pq.read_table(made["parquet"] / TABLE)
    assert np.array_equal(model.entities, rows)
    assert np.array_equal(np.array(table["vector"].to_pylist(), np.float32), rows)
    assert table["label"].to_pylist() == labels[0]
    assert [of.array.to_pylist() for of in (model.entity_labels, model.relation_labels)] == labels
    head, relation, tail = triples.T
    for side in ("tail", "head"):
        ours = model.scores(triples, side).double()
        scores = torch.export.load(made["torch"] / "scores.pt2").module()
        one, number, other = head, relation, tail
        if reciprocal and side == "head":
            one, number, other = tail, relation + len(labels[1]), head
        torch.testing.assert_close(scores(one, number, other).double(), ours, rtol=1e-5, atol=1e-5)
    assert contents(path) == before


def awkwardly_named():
    """New triples whose nine new entities have labels that text formats must take care of."""
    awkward = ['"quoted"@en', 'say "hi"', "a\tb", "new\nline", "a, b; c", "back\\slash\\n",
               "Österreich", "日本", "e\u0301\u2028x"]  # fmt: skip
    names = {f"n{i}": label for i, label in enumerate(awkward)}
    return {
        split: [tuple(names.get(word, word) for word in triple) for triple in triples]
        for split, triples in new_triples().items()
    }


def resume_and_extend(path, output):
    api.resume(path, {"train.epochs": 3}).close()
    extend(path, awkwardly_named(), f"{output}/extended", epochs=1).close()


def export_all(path, output, formats):
    with api.open_run(path) as run:
        for name in formats:
            run.export(f"{output}/{name}", name)


def test_run_of_many_verbs_exports_in_every_format(tmp_path):
    """One rank trains and keeps one checkpoint, two resume and extend, one extends once more."""
    config = base_config(
        tiny_store(tmp_path / "store").path, tmp_path / "run",
        model__reciprocal=True, checkpoint__keep=1, evaluation__every=1,
    )  # fmt: skip
    api.train(config).close()
    run_world(2, resume_and_extend, tmp_path / "run", tmp_path)
    more = {"train": [("later", "r0", "new\nline"), ("e1", "new0", "later")]}
    extend(tmp_path / "extended", more, tmp_path / "again", epochs=1).close()
    for name in ("run", "extended", "again"):
        check_every_format(tmp_path / name, tmp_path / f"exports of {name}")
    here = tmp_path / "exports of again"
    formats = sorted(path.name for path in here.iterdir() if path.name in FORMATS)
    run_world(2, export_all, tmp_path / "again", tmp_path / "two", formats)
    for name in formats:
        assert contents(tmp_path / "two" / name) == contents(here / name)
