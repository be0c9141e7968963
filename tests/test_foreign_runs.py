"""A run or an export of somebody else runs no code, unless the caller names the module."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from training_runs import config_of

import kge_torchrec
from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.config.registry import KINDS
from kge_torchrec.errors import ExportError

EVIL = 'raise SystemExit("evil code ran")\n'
SCORER = (
    "from kge_torchrec.models.scorers.bilinear import DistMult\n\nclass Own(DistMult):\n    pass\n"
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    yield tmp_path
    for name in ("evil", "own_parts"):
        sys.modules.pop(name, None)


def foreign_run(folder: Path, **values) -> Path:
    """A run whose config names classes of evil.py beside it; the file ends Python if it runs."""
    folder.mkdir()
    (folder / "evil.py").write_text(EVIL)
    (folder / "checkpoints").mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_that_names_a_class(here, monkeypatch, kind):
    section, key = KINDS[kind].key.split(".")
    named = {"evil:Part": {}} if kind == "regularizer" else "evil:Part"
    run = foreign_run(here / "run", **{section: {key: named}})
    monkeypatch.chdir(run)
    for read in (lambda: kge_torchrec.open_run("."), lambda: kge_torchrec.load_config(".")):
        with pytest.raises(ConfigError, match=r"names the class evil:Part.*--allow-import evil"):
            read()


def test_tables_per_type(here):
    run = foreign_run(here / "run", entities={"tables": {"a": {"optimizer": "evil:Part"}}})
    with pytest.raises(ConfigError, match=r"entities\.tables: .* names the class evil:Part"):
        kge_torchrec.open_run(run)


def test_folder_without_other_files_of_a_run(here, capsys):
    """A folder is a run. A config file that the user names is the user's own, and may import."""
    run = here / "run"
    run.mkdir()
    (run / "evil.py").write_text(EVIL)
    (run / "config.yaml").write_text("model: {scorer: 'evil:Scorer'}")
    for verb in (f"train {run}", f"plan {run} --devices 8xH100-80GB", f"evaluate {run}"):
        assert main(verb.split()) == 1
        assert "names the class evil:Scorer" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="names the class evil:Scorer"):
        kge_torchrec.load_config(run)
    with pytest.raises(SystemExit, match="evil code ran"):
        main(["train", str(run / "config.yaml")])


VERBS = (
    "evaluate .",
    "predict . --head a --relation r",
    "tune . --trials 1",
    "compare .",
    "export . -o y",
    "train .",
    "train config.yaml",
    "train --resume .",
    "extend . x -o y",
    "plan . --devices 8xH100-80GB",
)


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_in_the_folder_of_the_run(here, monkeypatch, capsys, verb):
    monkeypatch.chdir(foreign_run(here / "run", model={"scorer": "evil:Scorer"}))
    assert main(verb.split()) == 1
    assert "reading it runs the code of evil" in capsys.readouterr().err


def test_a_report_leaves_out_a_model_of_foreign_code(here, caplog):
    """It shows what the folder says; the file would end Python if it ran."""
    run = foreign_run(here / "run", model={"scorer": "evil:Scorer"})
    assert main(["report", str(run)]) == 0
    assert "the report leaves out the model" in caplog.text and "--allow-import evil" in caplog.text


def test_named_module_is_imported(here, monkeypatch):
    monkeypatch.chdir(foreign_run(here / "run", model={"scorer": "evil:Scorer"}))
    with pytest.raises(SystemExit, match="evil code ran"):
        main(["evaluate", ".", "--allow-import", "evil"])


def test_own_parts_lie_beside_the_config_or_in_the_working_directory(
    here, store, monkeypatch, capsys
):
    """Only where the user names them; the run that is trained names them to nobody."""
    home = here / "home"
    home.mkdir()
    (home / "own_parts.py").write_text(SCORER)
    config_of(store, here / "run", train__epochs=1).save(home / "config.yaml")
    values = yaml.safe_load((home / "config.yaml").read_text())
    values["model"]["scorer"] = "own_parts:Own"
    (home / "config.yaml").write_text(yaml.safe_dump(values))

    def forget() -> None:
        sys.modules.pop("own_parts", None)
        sys.path[:] = [path for path in sys.path if path != str(home)]

    assert main(["train", "home/config.yaml"]) == 0
    forget()
    assert main(["evaluate", "run"]) == 1
    assert "add --allow-import own_parts" in capsys.readouterr().err
    monkeypatch.chdir(home)
    assert main(["evaluate", "../run"]) == 1
    assert main(["evaluate", "../run", "--allow-import", "own_parts"]) == 0
    forget()
    assert main(["list", "scorer", "own_parts:Own"]) == 0
    assert main(["export", "../run", "-o", "../export"]) == 0
    forget()
    with pytest.raises(ExportError, match="names the class own_parts:Own"):
        kge_torchrec.load_model(here / "export")
    monkeypatch.syspath_prepend(home)
    assert kge_torchrec.load_model(here / "export", allow_imports=["own_parts"]).num_entities == 37


def test_new_run_takes_settings_of_another_but_not_its_folder(store, here):
    """Neither run.dir nor run.resume nor the URL of its copy; and the folder is enough."""
    url = (here / "copy").as_uri()
    first = config_of(
        store,
        here / "first",
        run__resume="auto",
        train__epochs=1,
        checkpoint__options__copy_to=url,
    )
    api.train(first).close()
    before = json.loads((here / "first" / "results.json").read_text())
    copied = sorted(path.name for path in (here / "copy").rglob("*"))
    for number, name in enumerate((here / "first", here / "first" / "config.yaml")):
        again = here / f"again{number}"
        assert main(["train", str(name), "--run.dir", str(again)]) == 0
        config = yaml.safe_load((again / "config.yaml").read_text())
        assert config["run"]["resume"] == "never"
        assert config["checkpoint"]["options"].get("copy_to") is None
        after = json.loads((again / "results.json").read_text())
        assert after["test"] == before["test"]
    assert sorted(path.name for path in (here / "copy").rglob("*")) == copied
    shutil.rmtree(here / "copy")
    config = kge_torchrec.load_config(here / "first")
    assert config.run.dir is None and config.train.epochs == 1


def test_space_of_a_foreign_study(here, store, capsys):
    """``tune --resume`` may train with classes that only the space of the study names."""
    pytest.importorskip("optuna")
    config_of(store, train__epochs=1).save(here / "my.yaml")
    (here / "space.yaml").write_text("train.lr: [0.1, 0.2]\n")
    words = ["tune", "my.yaml", "--trials", "1", "--space", "space.yaml", "--study", "study"]
    assert main(words) == 0
    (here / "study" / "evil.py").write_text(EVIL)
    (here / "study" / "space.yaml").write_text("train.optimizer: [adam, 'evil:Part']\n")
    assert main(["tune", "--resume", "study", "--trials", "2"]) == 1
    assert "train.optimizer: study names the class evil:Part" in capsys.readouterr().err
