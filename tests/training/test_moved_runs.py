"""A run opens from any folder, and its store is found beside it or by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from training_runs import config_of

import kge_torchrec
from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.errors import StoreError

VERBS = ("evaluate RUN", "predict RUN --head e1 --relation r1", "export RUN -o OUT",
         "extend RUN new.tsv -o OUT --epochs 0", "train --resume RUN --train.epochs 2")  # fmt: skip


@pytest.fixture
def trained(store, tmp_path, monkeypatch) -> Path:
    """A folder with a run and its store; the run was trained with relative paths."""
    home = tmp_path / "home"
    shutil.copytree(store, home / "triples")
    monkeypatch.chdir(home)
    api.train(config_of("triples", "run", train__epochs=1)).close()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.tsv").write_text("e1\tr1\tnew\n")
    return home


def test_relative_paths_and_a_store_that_is_named(trained, tmp_path, capsys):
    for number, verb in enumerate(VERBS):
        words = verb.replace("RUN", "home/run").replace("OUT", f"out{number}").split()
        assert main(words) == 0, verb
        shutil.rmtree(f"out{number}", ignore_errors=True)
        (trained / "triples").rename(tmp_path / "stored")
        assert main(words) == 1, verb
        said = capsys.readouterr().err
        assert f"its data.path, {trained}/triples, is no store" in said
        assert "--data.path PATH" in said
        assert main([*words, "--data.path", "stored"]) == 0, verb
        (tmp_path / "stored").rename(trained / "triples")


def test_moved_with_its_store(trained, tmp_path):
    trained.rename(tmp_path / "elsewhere")
    with kge_torchrec.open_run(tmp_path / "elsewhere" / "run") as run:
        assert run.model.store.path == tmp_path / "elsewhere" / "triples"


def test_store_that_is_named_in_python(trained, tmp_path):
    (trained / "triples").rename(tmp_path / "stored")
    with pytest.raises(StoreError, match="the triples of the run are missing"):
        kge_torchrec.open_run(trained / "run").entity_labels  # noqa: B018
    with kge_torchrec.open_run(trained / "run", data=tmp_path / "stored") as run:
        assert len(run.predict(head="e1", relation="r1", k=2)) == 2
