"""What a run says and logs: lines, metrics.jsonl, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import logging
import re
import sys
from types import ModuleType

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import config_of

from kge_torchrec import api, lines
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.training import trackers
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
    api.resume(run, {"train.epochs": 1}).close()
    assert "nothing to train: " in (said := capsys.readouterr().err)
    assert "has 4 epochs, train.epochs is 1" in said and "goes on" not in said


def test_lines_stay_without_bars(store, tmp_path, capsys):
    config_of(store, tmp_path / "run", evaluation__every=1).save(tmp_path / "my.yaml")
    assert main(["train", str(tmp_path / "my.yaml"), "--run.progress", "false"]) == 0
    said = capsys.readouterr().err
    for what in (r"epoch 1: loss [\d.]+, [\d,]+ triples/s", r"epoch 2: valid mrr [\d.]+"):
        assert re.search(rf"^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {what}", said, re.MULTILINE)


def test_loss_of_an_epoch_is_the_mean_of_its_steps(store, tmp_path):
    api.train(config_of(store, tmp_path / "run", train__log_every=2)).close()
    metrics = RunFolder(tmp_path / "run").load_metrics()
    loss = next(x["loss"] for x in metrics if x["kind"] == "epoch")
    first, second, last, *_ = (x["loss"] for x in metrics if x["kind"] == "step")
    assert loss == pytest.approx((2 * first + 2 * second + last) / 5)  # of five steps


def test_one_object_a_line(store, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lines.HANDLER, "as_json", False)
    root, run = logging.getLogger(), tmp_path / "run"
    monkeypatch.setattr(root, "handlers", list(root.handlers))

    def objects(code: int, *words: object) -> list[dict]:
        assert main([*map(str, words), "--log-format", "json"]) == code
        return list(map(json.loads, capsys.readouterr().err.splitlines()))

    keys = {"evaluation__every": 1, "train__log_every": 2}
    config_of(store, run, **keys).save(tmp_path / "my.yaml")
    said = objects(0, "train", tmp_path / "my.yaml")
    kinds = [one["kind"] for one in said]
    assert kinds.count("epoch") == kinds.count("valid") == 2 and "note" in kinds
    losses = [one["loss"] for one in said if one["kind"] == "epoch"]
    metrics = RunFolder(run).load_metrics()
    assert losses == [x["loss"] for x in metrics if x["kind"] == "epoch"]
    (tmp_path / "new.tsv").write_text("new\tr0\te1\n")
    words = ["extend", run, tmp_path / "new.tsv", "-o", tmp_path / "more", "--epochs", "1"]
    said += objects(0, *words)
    assert all(one["time"] and one["text"] for one in said)
    missing = tmp_path / "missing"
    (error,) = objects(1, "train", "--resume", missing)
    assert error["kind"] == "error" and str(missing) in error["text"]


def test_numbers_that_json_lacks_become_null(store, tmp_path):
    folder = RunFolder(tmp_path)
    log = MetricsLog(folder)
    log.write("epoch", 1, {"losses": [1.0, float("nan")], "inner": [{"x": float("inf")}]})
    log.close()
    assert folder.load_metrics()[0]["losses"] == [1.0, None]
    assert "NaN" not in folder.metrics.read_text() and "Inf" not in folder.metrics.read_text()


# Trackers


class FakeRun:
    """A fake run of W&B."""

    def __init__(self, **kwargs):
        self.given, self.id, self.logged, self.finished = kwargs, kwargs["id"] or "new", [], 0

    def define_metric(self, *names, **settings):
        self.metric = names, settings

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished += 1


@pytest.fixture
def runs(monkeypatch):
    """Runs that were started in a fake W&B."""
    made, module = [], ModuleType("wandb")

    def init(**kwargs):
        made.append(FakeRun(**kwargs))
        return made[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    return made


def test_weights_and_biases_gets_the_values_of_the_log(store, tmp_path, runs):
    folder = tmp_path / "run"
    api.train(config_of(store, folder, train__epochs=2, run__trackers__wandb="graphs")).close()
    (run,) = runs
    assert run.given["project"] == "graphs" and run.finished == 1
    assert run.given["config"] == RunFolder(folder).load_config().to_dict()
    assert run.metric == (("*",), {"step_metric": "step"})
    for line, logged in zip(RunFolder(folder).load_metrics(), run.logged, strict=True):
        if (kind := line.pop("kind")) == "test":  # results have names of their own
            expected = line["test"]["both"]["realistic"]["mrr"]
            assert logged["test/both/realistic/mrr"] == expected and logged["train/epochs"] == 2
        else:
            named = {f"{kind}/{key}": value for key, value in line.items() if key != "step"}
            assert {key: x for key, x in logged.items() if key != "step"} == {
                key: x for key, x in named.items() if not isinstance(x, str)
            }
        assert logged["step"] == line["step"]
    api.resume(folder, {"train.epochs": 3}).close()
    assert runs[1].given["id"] == "new" and runs[1].given["resume"] == "allow"
    assert [line["epoch/epoch"] for line in runs[1].logged if "epoch/epoch" in line] == [3]


@pytest.mark.parametrize(
    "owner, name, said, count",
    [
        (FakeRun, "log", "wandb takes no more metrics of this run: no route", 1),
        (None, "init", "wandb gets no metrics of this run: no route", 0),
    ],
)
def test_failing_tracker_does_not_end_training(
    store, tmp_path, runs, monkeypatch, caplog, owner, name, said, count
):
    def broken(*args, **kwargs):
        calls.append(args)
        raise ConnectionError("no route")

    calls = []
    monkeypatch.setattr(owner or sys.modules["wandb"], name, broken)
    with caplog.at_level(logging.WARNING):
        config = config_of(store, tmp_path / "run", train__epochs=2, run__trackers__wandb="graphs")
        api.train(config).close()
    assert len(calls) == 1 and sum(run.finished for run in runs) == count
    assert [r.message for r in caplog.records if "wandb" in r.message] == [said]
    assert len(RunFolder(tmp_path / "run").load_metrics()) > 2


def test_tensorboard_keeps_the_values_at_the_step_of_a_resume(store, tmp_path):
    folder, options = tmp_path / "run", {"run__trackers__tensorboard": True, "evaluation__every": 1}
    api.train(config_of(store, folder, train__epochs=2, **options)).close()
    api.resume(folder, {"train.epochs": 3}).close()
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    for name in ("epoch/loss", "valid/both/realistic/mrr"):
        assert [event.step for event in events.Scalars(name)] == [5, 10, 15]
    assert "test/both/realistic/mrr" in events.Tags()["scalars"]
    assert not [tag for tag in events.Tags()["scalars"] if tag.startswith("test/test")]


def test_missing_package_is_reported_before_writing(store, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for name, value in (("wandb", "any"), ("tensorboard", True)):
        with pytest.raises(ConfigError, match=rf"{name} needs .* pip install -e '.\[{name}\]'"):
            api.train(config_of(store, tmp_path / "run", **{f"run__trackers__{name}": value}))
    assert not (tmp_path / "run" / "config.yaml").exists()
