"""Runs that all tests of reports share."""

from __future__ import annotations

import shutil

import pytest
from training_runs import config_of

from kge_torchrec import api, extend, train_seeds

COMMON = {"train__epochs": 2, "evaluation__every": 1, "train__batch_size": 256}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Runs by folder: done, of another dim, by recall, longer, extended, of seeds, an export."""
    folder = tmp_path_factory.mktemp("reports")
    with api.train(config_of("countries", folder / "one", **COMMON)) as run:
        run.export(folder / "export")
    api.train(config_of("countries", folder / "two", model__dim=32, **COMMON)).close()
    lists = {**COMMON, "evaluation__metric": "recall@20"}
    api.train(config_of("countries", folder / "lists", **lists)).close()
    shutil.copytree(folder / "one", folder / "more")
    api.resume(folder / "more", {"train.epochs": 3}).close()
    (folder / "new.tsv").write_text("Atlantis\tneighbor\titaly\n")
    extend(folder / "one", folder / "new.tsv", folder / "extended").close()
    train_seeds(config_of("countries", folder / "seeds", **COMMON), 2)
    return folder


@pytest.fixture
def unfinished(runs, tmp_path):
    """Makes a copy of a run that lost its results."""

    def copy(name):
        folder = shutil.copytree(runs / "one", tmp_path / name)
        (folder / "results.json").unlink()
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        kept = [line for line in lines if '"kind": "test"' not in line]
        (folder / "metrics.jsonl").write_text("".join(kept))
        return folder

    return copy
