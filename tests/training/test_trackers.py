"""Metrics that go elsewhere as well: the same values, the same run after a resume, no harm done."""

from __future__ import annotations

import json
import logging
import sys
from types import ModuleType

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import config_of

from kge_torchrec import api
from kge_torchrec.config import ConfigError
from kge_torchrec.training import trackers
from kge_torchrec.training.run_folder import RunFolder


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


def scalars_of(folder) -> list[dict[str, float]]:
    """Return the flat numbers of every line of metrics.jsonl, by kind/name."""

    def flat(values, prefix):
        for key, value in values.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}/")
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield prefix + key, value

    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    prefix = lambda kind: "" if kind == "test" else f"{kind}/"  # noqa: E731
    return [
        {"step": line.pop("step"), **dict(flat(line, prefix(line.pop("kind"))))} for line in lines
    ]


def test_weights_and_biases_gets_the_values_of_the_log(store, tmp_path, runs):
    folder = tmp_path / "run"
    api.train(config_of(store, folder, train__epochs=2, run__trackers__wandb="graphs")).close()
    (run,) = runs
    settled = RunFolder(folder).load_config()
    assert run.given["project"] == "graphs" and run.given["config"] == settled.to_dict()
    assert run.logged == scalars_of(folder) and run.finished == 1
    assert run.metric == (("*",), {"step_metric": "step"})
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
    assert len(scalars_of(tmp_path / "run")) > 2


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
