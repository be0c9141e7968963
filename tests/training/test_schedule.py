"""Learning rates, early stopping, plateaus and the best model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from training_runs import config_of, fit, scripted

from kge_torchrec.config import ConfigError, TrainConfig
from kge_torchrec.training.schedules import Schedule
from kge_torchrec.training.state import TrainState, beats
from kge_torchrec.training.trainer import Trainer


def factors(steps: int = 20, **changes) -> list[float]:
    schedule = Schedule.of(TrainConfig(epochs=4, **changes), steps_per_epoch=5)
    return [schedule.factor(step) for step in range(steps)]


COSINE = [(1 + math.cos(math.pi * i / 20)) / 2 for i in range(20)]
RATES = [
    ({}, [1.0] * 20),
    ({"schedule": "linear"}, [*(1 - i / 20 for i in range(20)), 0, 0]),
    ({"schedule": "cosine"}, COSINE),
    ({"schedule": "exponential", "schedule_options": {"decay": 0.5}},
     [0.5 ** (i // 5) for i in range(20)]),
    ({"warmup_steps": 4}, [0.25, 0.5, 0.75, *[1.0] * 16]),
    ({"schedule": "linear", "warmup_steps": 4},
     [0.25, 0.5, 0.75, 1.0, *(1 - i / 16 for i in range(16))]),
    ({"schedule": "cosine", "warmup_steps": 40}, [(i + 1) / 40 for i in range(20)]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), RATES, ids=str)
def test_rates_follow_their_formula(changes, expected):
    assert factors(len(expected), **changes) == pytest.approx(expected)


def test_each_plateau_lowers_the_rate():
    options = {"decay": 0.5}
    schedule = Schedule.of(TrainConfig(epochs=4, schedule="plateau", schedule_options=options), 5)
    assert [schedule.factor(9, plateaus) for plateaus in range(3)] == [1.0, 0.5, 0.25]


def test_imported_schedule_and_its_options_are_used():
    path, options = "foreign_parts:Stairs", {"epochs": 1}
    assert factors(schedule=path) == [1.0] * 10 + [0.5] * 10
    assert factors(10, schedule=path, schedule_options=options) == [1.0] * 5 + [0.5] * 5
    with pytest.raises(ConfigError, match="steps is no option of Stairs, which has epochs"):
        factors(schedule=path, schedule_options={"steps": 1})


def lines(run: Path, kind: str) -> list[dict]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in records if line["kind"] == kind]


def test_rate_falls_after_a_plateau_and_after_resuming(store, tmp_path):
    options = {"train__schedule": "plateau", "train__schedule_options__decay": 0.5,
               "train__schedule_options__patience": 1,
               "evaluation__every": 1, "train__lr": 0.08}  # fmt: skip
    config = config_of(store, tmp_path, train__epochs=4, **options)
    fit(config, scripted([0.5, 0.4, 0.4, 0.6]))  # the second without progress is one too many
    longer = config_of(store, tmp_path, train__epochs=8, **options)
    fit(longer, scripted([0.6, 0.6, 0.7, 0.7]))
    rates = [line["lr"] for line in lines(tmp_path, "step")]
    assert rates == pytest.approx([0.08] * 3 + [0.04] * 3 + [0.02] * 2)


@pytest.mark.parametrize("metric, values", [("mrr", (0.5, 0.504, 0.506)), ("mr", (10, 9.95, 9.8))])
def test_progress_is_relative_to_the_best_value(metric, values):
    state = TrainState()
    assert [state.waits_on_plateau(metric, value, 0.01) for value in values] == [0, 1, 0]
    assert [state.waits_on_plateau(metric, value, 0) for value in (values[2], values[0])] == [1, 2]


@pytest.mark.parametrize("metric, best, worse", [("mrr", 0.9, 0.1), ("mr", 1.5, 9.0)])
def test_training_stops_early_when_patience_ends(store, tmp_path, metric, best, worse):
    config = config_of(store, tmp_path, train__epochs=20, evaluation__every=1,
                       evaluation__patience=2, evaluation__metric=metric)  # fmt: skip
    values = [worse, best, worse, best, *[best] * 9]
    session = fit(config, scripted(values, metric))
    assert [line["epoch"] for line in lines(tmp_path, "valid")] == [1, 2, 3, 4]
    newest = session.checkpoints.names()[-1]
    progress = session.checkpoints.open(newest).progress
    assert (progress.epoch, progress.best_metric, progress.bad_validations) == (4, best, 2)
    assert progress.best_checkpoint == "step-000000000010"


def stalls(values: list[float], share: float, metric: str = "mrr", every: int = 1) -> int | None:
    """The validation, from 1, at which training stops."""
    state = TrainState()
    for number, value in enumerate(values, 1):
        state.validations.append([number * every, value])
        if state.has_stalled(metric, share):
            return number


def test_patience_is_a_share_of_the_training_so_far():
    gains = [0.1 * (i + 1) for i in range(10)]
    assert stalls([*gains, *[1.0] * 40], 0.5) == stalls([*gains, *[1.0] * 40], 0.5, every=7) == 20
    assert stalls([*gains, *[1.0] * 40], 0.2) == 14  # at least four validations
    assert stalls([1 + 0.0004 * i for i in range(20)], 0.5) == 5
    assert stalls([0.9 * 1.01**i for i in range(60)], 0.2) is None
    slow = [1.001**i for i in range(100)]  # a fifth of the training gains more than 0.2 percent
    assert stalls(slow, 0.2) is None and stalls(slow, 0.2, "mr") == 5
    assert stalls([1.001**-i for i in range(100)], 0.2, "mr") is None
    assert stalls([0.5, 0.9, 0.1, 0.1, 0.1, 0.1], 0.2) == 6  # the best before counts, not the last
    assert stalls([0.5] * 4, 0.9) is None


def test_share_of_the_training_stops_a_run_also_after_a_resume(store, tmp_path):
    options = {"evaluation__every": 1, "evaluation__patience": 0.4, "train__batch_size": 130}
    values = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, *[0.6] * 30]
    ends = []
    for name, first in (("whole", 20), ("resumed", 8)):
        run = tmp_path / name
        fit(config_of(store, run, train__epochs=first, **options), scripted(values))
        session = fit(config_of(store, run, train__epochs=20, **options), scripted(values[first:]))
        progress = session.checkpoints.open(session.checkpoints.names()[-1]).progress
        ends.append((progress.epoch, progress.validations))
    assert ends[0] == ends[1] and ends[0][0] == 10
    assert ends[0][1] == [[i + 1, value] for i, value in enumerate(values[:10])]


def test_validation_follows_its_interval_and_the_last_epoch(store, tmp_path):
    fit(config_of(store, tmp_path, train__epochs=5, evaluation__every=2), scripted([1, 2, 3]))
    assert [line["epoch"] for line in lines(tmp_path, "valid")] == [2, 4, 5]


def test_sample_of_valid_does_not_change(store, tmp_path):
    config = config_of(store, tmp_path, evaluation__max_triples=4, train__epochs=1)
    samples = []

    def watch(loop: Trainer) -> None:
        model = loop.session._model
        ranked = model.ranks_of
        model.ranks_of = lambda triples, *rest: samples.append(triples) or ranked(triples, *rest)
        loop.session.validate()
        loop.session.validate()

    fit(config, watch)
    assert len(samples[0]) == 4 and (samples[0] == samples[1]).all()


@pytest.mark.parametrize("metric, better, worse", [("mr", 4.9, 5.1), ("mrr", 5.1, 4.9)])
def test_better_values_depend_on_the_metric(metric, better, worse):
    assert beats(metric, better, 5.0) and not beats(metric, worse, 5.0)
    assert not beats(metric, 5.0, 5.0) and beats(metric, worse, None)


def test_progress_round_trips_through_plain_values():
    progress = TrainState(epoch=3, best_metric=0.25, data="abc")
    assert TrainState(**json.loads(json.dumps(progress.to_dict()))) == progress
