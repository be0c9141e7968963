"""Errors: all of one class, and settings named as the one who reads them types them."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
from training_runs import QUIET

import kge_torchrec
from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.data.prepare import prepare
from kge_torchrec.errors import KGEError


def errors_defined(of: type[BaseException]) -> set[type[BaseException]]:
    """Every public exception class of the package."""
    below = {c for child in of.__subclasses__() for c in errors_defined(child)}
    is_ours = of.__module__.startswith("kge_torchrec.") and not of.__name__.startswith("_")
    return below | ({of} if is_ours else set())


def test_every_error_derives_from_kge_error():
    """The command line catches KGEError, so every error must derive from it."""
    for module in pkgutil.walk_packages(kge_torchrec.__path__, "kge_torchrec."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    results = errors_defined(BaseException)
    assert {"ConfigError", "ScaleTooSmall", "PackageSetError"} <= {
        error.__name__ for error in results
    }
    # A collective raises the first, and `processes` makes a RankLost of it; the command line
    # catches every KeyboardInterrupt.
    inside = {"TrainingInterrupted"}
    rest = {error.__name__ for error in results if not issubclass(error, KGEError)}
    assert rest <= inside


@pytest.fixture
def data(tmp_path) -> Path:
    """Files with a relation that is in test only."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.tsv").write_text("a\tr\tb\nb\tr\tc\n")
    (folder / "test.tsv").write_text("a\tnew\tc\nb\tnew\ta\n")
    return folder


def advice(message: str) -> tuple[str, str]:
    """The key that the message names last, and its value."""
    key, value = message.strip().rpartition("with ")[2].split()
    return key, value


def test_suggested_key_works_everywhere(data, tmp_path, capsys):
    with pytest.raises(KGEError, match="relations without a training triple: 'new'") as caught:
        prepare(data, tmp_path / "store")
    key, value = advice(str(caught.value))
    assert (key, value) == ("data.allow_unseen_relations", "true")
    prepare(data, tmp_path / "store", {key: True})
    with pytest.raises(KGEError, match=r"replace it with --overwrite \(overwrite=True\)"):
        prepare(data, tmp_path / "store", {key: True})
    words = ["prepare", str(data), "-o", str(tmp_path / "store"), f"--{key}", value]
    assert main(words) == 1 and "replace it with --overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    config = {**QUIET, "data.path": str(data), "run.dir": str(tmp_path / "run"), "train.epochs": 1}
    with pytest.raises(KGEError, match=f"with {key} {value}"):
        api.train(config)
    assert api.train({**config, key: True}).results["test"] is not None
    export = ["export", str(tmp_path / "run"), "-o", str(tmp_path / "plain")]
    assert main(export) == 0 and main(export) == 1
    assert "replace it with --overwrite" in capsys.readouterr().err
    assert main([*export, "--overwrite"]) == 0


def test_message_about_literals_names_the_key(tmp_path):
    """A graph of names and dates: what is left out by default is all there is."""
    (tmp_path / "train.nt").write_text('<a> <name> "Ann" .\n<b> <name> "Bob" .\n')
    with pytest.raises(KGEError, match="2 have a literal as object") as caught:
        prepare(tmp_path / "train.nt", tmp_path / "store")
    prepare(tmp_path / "train.nt", tmp_path / "store", dict([advice(str(caught.value))]))
