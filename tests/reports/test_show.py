"""``show``: runs in every state side by side, from their folders alone."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys

import pytest
from training_runs import config_of, tiny_store

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.reports.folders import RunFacts
from kge_torchrec.training.run_folder import RunFolder


def rows_of(capsys, *words):
    assert main(["show", *map(str, words), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_state_is_one_word(runs, unfinished, capsys):
    expected = {"one": "done", "more": "done", "extended": "extended", "export": "export",
                "seeds": "2 seeds"}  # fmt: skip
    folders = [runs / name for name in expected]
    folders += [unfinished(name) for name in ("stopped", "failed", "killed", "trains")]
    (folders[-4] / "stopped.json").write_text("{}")
    (folders[-2] / ".lock").write_text('{"process": 1}')
    with RunFolder(folders[-1]).locked():
        states = {x["run"]: x["state"] for x in rows_of(capsys, *folders)}
    expected |= {"stopped": "stopped", "failed": "failed", "killed": "killed", "trains": "training"}
    assert states == expected
    assert (folders[-2] / ".lock").read_text() == '{"process": 1}'


def test_results_are_those_of_the_runs(runs, tmp_path, capsys):
    one, lists, export = rows_of(capsys, runs / "one", runs / "lists", runs / "export")
    results = json.loads((runs / "one" / "results.json").read_text())
    assert one["selected by"] == "mrr" and one["valid"] == results["valid"]["best"]
    assert one["test"] == one["test mrr"] == results["test"]["both"]["realistic"]["mrr"]
    assert (one["epochs"], one["time"]) == (2, results["train"]["seconds"])
    assert one["triples/s"] == results["train"]["triples_per_second"]
    files = (runs / "one" / "checkpoints" / results["checkpoint"]["name"]).iterdir()
    assert one["size"] == sum(file.stat().st_size for file in files)
    copy = shutil.copytree(runs / "one", tmp_path / "other-checkpoints")
    for step in (0, 10**6):  # neither the oldest nor the newest is the ranked one
        other = copy / "checkpoints" / f"step-{step:012d}"
        other.mkdir()
        (other / "manifest.json").write_text("{}")
    assert rows_of(capsys, copy)[0]["size"] == one["size"]
    assert (one["data"], one["model"]) == ("countries", "complex 8")
    by_recall = json.loads((runs / "lists" / "results.json").read_text())
    assert lists["selected by"] == "recall@20" and lists["valid"] == by_recall["valid"]["best"]
    assert lists["test"] == by_recall["test"]["recommendation"]["recall@20"]
    assert lists["test mrr"] == by_recall["test"]["both"]["realistic"]["mrr"]
    assert export["test"] == one["test"] and export["data"] == "-"
    assert one["evaluation.metric"] == "mrr" and export["evaluation.metric"] is None


def test_a_run_that_goes_on_has_no_results_of_an_earlier_checkpoint(runs, unfinished, capsys):
    folder = unfinished("goes-on")
    shutil.copy(runs / "one" / "results.json", folder)
    (row,) = rows_of(capsys, folder)
    assert row["test"] is None and row["epochs"] == 2 and row["state"] == "failed"
    best = max(x["both"]["realistic"]["mrr"] for x in RunFacts.read(folder, "x").of_kind("valid"))
    assert row["valid"] == best


def test_seeds_are_mean_and_deviation(runs, tmp_path, capsys):
    (row,) = rows_of(capsys, runs / "seeds")
    values = [x["test"] for x in rows_of(capsys, *(runs / "seeds" / f"seed-{i}" for i in (0, 1)))]
    assert row["test"] == pytest.approx(sum(values) / 2)
    assert row["test_std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert row["seed"] == [0, 1] and row["epochs_std"] == 0
    folder = shutil.copytree(runs / "seeds", tmp_path / "half-seeds")
    shutil.rmtree(folder / "seed-1")
    (row,) = rows_of(capsys, folder)
    assert row["state"] == "1 of 2 seeds" and row["test"] == values[0] and row["test_std"] is None
    shutil.rmtree(folder / "seed-0")
    assert main(["show", str(folder)]) == 1 and "none of its seeds" in capsys.readouterr().err


def test_table_has_units_and_the_settings_that_differ(runs, tmp_path, capsys):
    assert main(["show", str(runs / "one"), str(runs / "two")]) == 0
    results, settings = capsys.readouterr().out.split("\n\n")
    assert "test mrr" not in results and "KiB" in results and " ms" in results
    assert settings.splitlines() == ["settings that differ", "key        one  two",
                                     "-------------------", "model.dim  8    32"]  # fmt: skip
    assert main(["show", str(runs / "one")]) == 0
    settings = capsys.readouterr().out.split("\n\n")[1]
    assert settings.startswith("settings that differ from the defaults\nkey")
    assert "train.epochs" in settings and "train.lr" in settings
    copy = str(shutil.copytree(runs / "one", tmp_path / "copy"))
    assert main(["show", str(runs / "one"), copy, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["run"] for row in rows] == ["one", "copy"] and "model.dim" not in rows[0]
    assert rows[0]["test"] == rows[1]["test"] and float(rows[0]["size"]) > 0
    assert main(["show", str(runs / "one"), copy]) == 0
    assert capsys.readouterr().out.endswith("settings that differ: none\n")


def test_runs_on_different_triples_are_told_apart(runs, capsys, tmp_path):
    store = tiny_store(tmp_path / "store", held_out=20)
    api.train(config_of(store.path, tmp_path / "other")).close()
    assert main(["show", str(runs / "one"), str(tmp_path / "other"), str(runs / "two")]) == 0
    said = "different triples, so the metrics do not compare: one, two | other\n"
    assert said in capsys.readouterr().out
    assert main(["show", str(runs / "one"), str(runs / "two")]) == 0
    assert "different triples" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "is no run folder"),
        ({"config.yaml": "a: [1"}, "config.yaml is not valid YAML"),
        ({"config.yaml": "3"}, "config.yaml is no config of a run"),
        ({"config.json": "{}"}, "config.json is damaged"),
        ({"seeds.json": "{"}, "seeds.json is damaged"),
    ],
)
def test_folders_without_a_run_are_refused(tmp_path, capsys, content, said):
    for name, text in (content or {}).items():
        (tmp_path / name).write_text(text)
    assert main(["show", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err
    assert main(["show", str(tmp_path), str(tmp_path)]) == 1
    assert "named twice" in capsys.readouterr().err


def test_show_loads_no_torch(runs):
    code = (
        "import sys; from kge_torchrec.cli import main; "
        f"code = main(['show', *{[str(runs / x) for x in ('one', 'lists', 'seeds', 'export')]}]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
