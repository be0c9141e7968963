"""Exports of the rows that an extended run has and the run before it has not."""

from __future__ import annotations

import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from grown_runs import OLD_ENTITIES, TABLE, base_run, new_triples, tensors
from training_runs import parameters
from worlds import run_world

from kge_torchrec import api, extend, load_model
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.errors import ExportError
from kge_torchrec.export import write
from kge_torchrec.export.table_files import FORMATS, open_table


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A run, and one extended from it with old rows frozen: only new rows are others."""
    run = base_run()
    made = extend(run, new_triples(), tmp_path_factory.mktemp("grown") / "run", freeze=True)
    return run, made.path


def labels_of(folder):
    return (folder / "entities.txt").read_text().splitlines()


def export_changes(path, earlier, output):
    write.CHUNK_ROWS = 5
    with api.open_run(path) as run:
        for name in FORMATS:
            run.export(f"{output}/{name}", name, changed_since=earlier)


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)],
)
def test_changed_rows_export_in_every_format(grown, tmp_path, world_size):
    earlier, path = grown
    run_world(world_size, export_changes, path, earlier, str(tmp_path))
    with api.open_run(path) as run:
        rows = parameters(run.model)["entities"].numpy()[OLD_ENTITIES:]
        labels = run.model.store.entities.array[OLD_ENTITIES:].to_pylist()
    for name, table in FORMATS.items():
        out = tmp_path / name
        assert np.array_equal(open_table(out / table.name, name, *rows.shape), rows)
        assert np.load(out / "ids.npy").tolist() == list(
            range(OLD_ENTITIES, OLD_ENTITIES + len(rows))
        )
        assert labels_of(out) == labels
        with pytest.raises(ExportError, match="only the rows that differ from those of"):
            load_model(out)
    assert pq.read_table(tmp_path / "parquet" / "entities.parquet")["label"].to_pylist() == labels


def test_changed_rows_rebuild_the_later_run(tmp_path, capsys):
    earlier = base_run()
    later = extend(earlier, new_triples(), tmp_path / "later", epochs=1).path
    command = ["export", str(later), "-o", str(tmp_path / "changes")]
    assert main([*command, "--changed-since", str(earlier)]) == 0
    assert "ids.npy" in capsys.readouterr().out
    for run, name in ((earlier, "old"), (later, "new")):
        with api.open_run(run) as opened:
            opened.export(tmp_path / name)
    ids, rows = (np.load(tmp_path / "changes" / f"{n}.npy") for n in ("ids", "entities"))
    old, new = (np.load(tmp_path / name / "entities.npy") for name in ("old", "new"))
    untouched = np.setdiff1d(np.arange(len(new)), ids)
    table = np.concatenate([old, np.zeros((len(new) - len(old), old.shape[1]), np.float32)])
    table[ids] = rows
    assert np.array_equal(table, new)
    assert (old[untouched] == new[untouched]).all()
    assert set(range(OLD_ENTITIES, len(new))) < set(ids.tolist())
    assert (rows[ids < OLD_ENTITIES] != old[ids[ids < OLD_ENTITIES]]).any(1).all()


def test_export_of_unchanged_run_is_empty(grown, tmp_path):
    _, path = grown
    with api.open_run(path) as run:
        run.export(tmp_path / "out", changed_since=path)
    assert np.load(tmp_path / "out" / "entities.npy").shape == (0, tensors(path)[TABLE].shape[1])


def test_invalid_exports_are_rejected(grown, tmp_path):
    earlier, path = grown
    with api.open_run(earlier) as run:
        with pytest.raises(ExportError, match="have different ids than in this run"):
            run.export(tmp_path / "out", changed_since=path)
        with pytest.raises(ConfigError, match="is no run folder"):
            run.export(tmp_path / "out", changed_since=tmp_path)
        for name in ("huggingface", "pykeen"):
            with pytest.raises(ConfigError, match="changes can be exported to npy, safetensors"):
                run.export(tmp_path / "out", name, changed_since=earlier)
    with api.open_run(path) as run:
        with pytest.raises(ConfigError, match="describes a whole model"):
            run.export(tmp_path / "out", changed_since=earlier, card=True)
        with pytest.raises(ExportError, match=r"has dim 12, this run"):
            run.export(tmp_path / "out", changed_since=base_run(model__dim=12))
    damaged = shutil.copytree(earlier, tmp_path / "damaged")
    for file in damaged.glob("checkpoints/step-*/*"):
        if file.suffix != ".json":
            file.write_bytes(b"")
    with api.open_run(path) as run, pytest.raises(ExportError, match="cannot be read"):
        run.export(tmp_path / "out", changed_since=damaged)
    assert not (tmp_path / "out").exists()


def test_rows_are_compared_bitwise(tmp_path, monkeypatch):
    """0 and -0 are equal numbers and other bits; a NaN is no equal number and the same bits."""
    before = np.array([[0.0, 1.0], [np.nan, 1.0], [2.0, 3.0]], np.float32)
    rows = np.array([[-0.0, 1.0], [np.nan, 1.0], [2.0, 3.0], [4.0, 5.0]], np.float32)
    monkeypatch.setattr(write, "entity_rows", lambda *_: [torch.from_numpy(before)])
    earlier = write.Earlier(tmp_path, len(before))
    assert earlier._changed(0, rows).tolist() == [True, False, False, True]
