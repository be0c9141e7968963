"""What a run says: why it ended early, where it goes on, and what a change does to the rate."""

from __future__ import annotations

import json
import logging
import re

from training_runs import config_of

from kge_torchrec import api, lines
from kge_torchrec.cli import main
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.trackers import MetricsLog

STILL = {"train__lr": 1e-12, "evaluation__every": 1, "evaluation__patience": 2}


def test_early_stop_is_said_everywhere(store, tmp_path, capsys):
    run = tmp_path / "run"
    config = config_of(store, run, train__epochs=9, **STILL)
    api.train(config).close()
    said = capsys.readouterr().err
    assert "epoch 3: training ends here, before epoch 9: 2 validations without a better" in said
    assert f"`train --resume {run} --evaluation.patience 0`" in said
    stopped = json.loads((run / "results.json").read_text())["train"]["stopped_early"]
    assert stopped["epoch"] == 3 and stopped["of"] == 9
    assert re.fullmatch(
        r"2 validations without a better valid mrr than the best, 0\.\d{4} at epoch 1 "
        r"\(evaluation\.patience 2\)",
        stopped["reason"],
    )
    assert main(["train", "--resume", str(run)]) == 0  # nothing is asked for
    assert f"stopped after epoch 3 of 9: {stopped['reason']}" in capsys.readouterr().out
    assert main(["train", "--resume", str(run), "--train.epochs", "12"]) == 1
    said = capsys.readouterr().err
    assert "train.epochs 12: training ended after epoch 3, and would end there again: 2 val" in said
    assert "Set evaluation.patience to 0" in said
    assert RunFolder(run).load_config().train.epochs == 9
    longer = ["--train.epochs", "12", "--evaluation.patience", "0"]
    assert main(["train", "--resume", str(run), *longer]) == 0
    results = json.loads((run / "results.json").read_text())
    assert results["train"]["epochs"] == 12 and "stopped_early" not in results["train"]


def test_resumed_run_says_where_it_goes_on(store, tmp_path, capsys):
    run = tmp_path / "run"
    api.train(config_of(store, run)).close()
    capsys.readouterr()
    api.resume(run, {"train.epochs": 4}).close()
    said = capsys.readouterr().err
    name = RunFolder(run).load_metrics()[0]["step"]
    assert name == 5 and "training goes on from checkpoint step-" in said
    assert "after 2 of 4 epochs" in said


def test_lines_stay_without_bars(store, tmp_path, capsys):
    words = ["train", "countries", "--data.path", str(store), "--run.dir", str(tmp_path / "run")]
    config_of(store, tmp_path / "run", evaluation__every=1).save(tmp_path / "my.yaml")
    words[1:4] = [str(tmp_path / "my.yaml")]
    assert main([*words, "--run.progress", "false"]) == 0
    said = capsys.readouterr().err
    for what in (r"epoch 1: loss [\d.]+, [\d,]+ triples/s", r"epoch 2: valid mrr [\d.]+"):
        assert re.search(rf"^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {what}", said, re.MULTILINE)


def test_one_object_a_line(store, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lines.HANDLER, "as_json", False)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    config_of(store, tmp_path / "run", evaluation__every=1).save(tmp_path / "my.yaml")
    assert main(["train", str(tmp_path / "my.yaml"), "--log-format", "json"]) == 0
    objects = list(map(json.loads, capsys.readouterr().err.splitlines()))
    kinds = [one["kind"] for one in objects]
    assert kinds.count("epoch") == kinds.count("valid") == 2 and "note" in kinds
    assert all(one["time"] and one["text"] for one in objects)
    losses = [one["loss"] for one in objects if one["kind"] == "epoch"]
    assert losses == [
        x["loss"] for x in RunFolder(tmp_path / "run").load_metrics() if x["kind"] == "epoch"
    ]


def test_numbers_that_json_lacks_become_null(store, tmp_path):
    folder = RunFolder(tmp_path)
    log = MetricsLog(folder)
    log.write("epoch", 1, {"losses": [1.0, float("nan")], "inner": [{"x": float("inf")}]})
    log.close()
    assert folder.load_metrics()[0]["losses"] == [1.0, None]
    assert "NaN" not in folder.metrics.read_text() and "Inf" not in folder.metrics.read_text()
