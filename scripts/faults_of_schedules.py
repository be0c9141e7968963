"""Faults of learning-rate schedules, of the end of training, and of averaged weights."""

from __future__ import annotations

from faults import Fault

SCHEDULES, STATE = "training/schedules.py", "training/state.py"

FAULTS = [
    Fault("cosine restarts never come", SCHEDULES,
          "min(1.0, done) * self.options.cycles", "min(1.0, done)",
          "tests/training/test_schedule.py -k cosine_restarts"),
    Fault("a rounding error moves a restart", SCHEDULES,
          "math.floor(fallen + 1e-9)", "math.floor(fallen)",
          "tests/training/test_schedule.py -k cosine_restarts"),
    Fault("a share of the training has any number of validations", STATE,
          "max(recent, LEAST_VALIDATIONS)", "recent",
          "tests/training/test_schedule.py -k share_of_the_training_so_far"),
    Fault("any gain is progress in a share of the training", STATE,
          "beats(metric, since, before, LEAST_GAIN)", "beats(metric, since, before)",
          "tests/training/test_schedule.py -k share_of_the_training_so_far"),
    Fault("a high mean rank is the best of a share of the training", STATE,
          'best = min if metric == "mr" else max', "best = max",
          "tests/training/test_schedule.py -k share_of_the_training_so_far"),
    Fault("a run remembers no validations", "training/trainer.py",
          "progress.validations.append([progress.epoch, value])",
          "progress.validations[:] = [[progress.epoch, value]]",
          "tests/training/test_schedule.py -k stops_a_run"),
    Fault("validations of another metric stop a run", STATE,
          "self.best_metric, self.bad_validations, self.validations = None, 0, []",
          "self.best_metric, self.bad_validations = None, 0",
          "tests/training/test_schedule.py -k forgets_the_validations"),
]  # fmt: skip
