"""Errors: all of one class, and settings named as the one who reads them types them."""

from __future__ import annotations

import ast
import importlib
import pickle
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


def test_settings_are_spelled_by_the_first_interface():
    error = pickle.loads(pickle.dumps(KGEError("Keep them with", unseen=True, top=3)))
    assert str(error) == "Keep them with unseen=True top=3"
    error.spell(lambda name, value: f"--data.{name} {value}")
    error.spell(lambda name, value: "something else")
    assert str(error) == "Keep them with --data.unseen True --data.top 3"
    assert str(KGEError("{braces} stay")) == "{braces} stay"


@pytest.fixture
def data(tmp_path) -> Path:
    """Files with a relation that is in test only."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.tsv").write_text("a\tr\tb\nb\tr\tc\n")
    (folder / "test.tsv").write_text("a\tnew\tc\nb\tnew\ta\n")
    return folder


def advice(message: str, words: str = "with ") -> str:
    """The setting that the message names works."""
    return message.strip().rpartition(words)[2]


def keywords(text: str) -> dict:
    """name=value, ... as Python reads it."""
    call = ast.parse(f"f({text})", mode="eval").body
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}


def test_suggested_python_argument_works(data, tmp_path):
    with pytest.raises(KGEError, match="relations without a training triple: 'new'") as caught:
        prepare(data, tmp_path / "store")
    prepare(data, tmp_path / "store", **keywords(advice(str(caught.value))))
    unseen = keywords(advice(str(caught.value)))
    with pytest.raises(KGEError, match="a store exists here") as caught:
        prepare(data, tmp_path / "store", **unseen)
    prepare(data, tmp_path / "store", **unseen, **keywords(advice(str(caught.value))))


def test_suggested_option_works(data, tmp_path, capsys):
    def refused(arguments: list[str]) -> list[str]:
        assert main(arguments) == 1
        return [*arguments, *advice(capsys.readouterr().err).split()]

    arguments = ["prepare", str(data), "-o", str(tmp_path / "store"), "--no-progress"]
    arguments = refused(arguments)
    assert arguments[-1] == "--allow-unseen-relations" and main(arguments) == 0
    arguments = refused(arguments)
    assert arguments[-1] == "--overwrite" and main(arguments) == 0

    keys = {**QUIET, "data.path": data, "run.dir": tmp_path / "run", "train.epochs": 1}
    keys |= {"evaluation.every": 1}
    arguments = refused(["train", *(f"--{key}={str(v).lower()}" for key, v in keys.items())])
    assert arguments[-2:] == ["--data.allow_unseen_relations", "true"] and main(arguments) == 0
    capsys.readouterr()

    export = ["export", str(tmp_path / "run"), "-o", str(tmp_path / "plain")]
    assert main(export) == 0
    assert main(refused(export)) == 0


def test_error_of_a_python_run_names_the_key(data, tmp_path):
    config = {**QUIET, "data.path": str(data), "run.dir": str(tmp_path / "run"), "train.epochs": 1}
    with pytest.raises(KGEError) as caught:
        api.train(config)
    key, value = advice(str(caught.value)).removeprefix("--").split()
    assert api.train({**config, key: {"true": True}[value]}).results["test"] is not None


def test_message_about_literals_names_the_option(tmp_path, capsys):
    """A graph of names and dates: what is left out by default is all there is."""
    (tmp_path / "train.nt").write_text('<a> <name> "Ann" .\n<b> <name> "Bob" .\n')
    with pytest.raises(KGEError, match="2 have a literal as object") as caught:
        prepare(tmp_path / "train.nt", tmp_path / "store")
    prepare(tmp_path / "train.nt", tmp_path / "store", **keywords(advice(str(caught.value))))
    prepared = ["prepare", str(tmp_path / "train.nt"), "-o", str(tmp_path / "other")]
    assert main(prepared) == 1
    assert main([*prepared, *advice(capsys.readouterr().err).split()]) == 0
