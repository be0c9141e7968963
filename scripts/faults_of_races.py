"""Deliberate faults of the race of defaults."""

from __future__ import annotations

from faults import Fault

RACE, PARSER, SIZING = "tuning/race.py", "config/parser.py", "config/sizing.py"
TESTS = "tests/tuning/test_race.py"

FAULTS = [
    Fault("the best racer is dropped", RACE,
          "del left[others[-1]]", "del left[first]", f"{TESTS} -k best_setting"),
    Fault("the first rung drops a racer", RACE,
          "        if rung == 0:\n            continue\n", "", f"{TESTS} -k best_setting"),
    Fault("a resumed race trains finished rungs again", RACE,
          "if len(values) <= rung:", "if len(values) <= rung or rung == 0:",
          f"{TESTS} -k killed_race"),
    Fault("a racer starts each rung anew", RACE,
          "            if not folder.holds_run:\n", "            if folder.holds_run:\n"
          "                folder.remove(['checkpoints', 'config.yaml'])\n            if True:\n",
          f"{TESTS} -k never_raced"),
    Fault("projections forget the gain", RACE,
          "PROJECTED * doublings *", "0.0 * doublings *", f"{TESTS} -k still_rises"),
    Fault("losers may take any time", RACE,
          "if share <= limit:", "if share <= 1e9:", f"{TESTS} -k share_of_its_size"),
    Fault("a step costs nothing", RACE,
          " + batches.steps_per_epoch * _STEP", "", f"{TESTS} -k work_counts"),
    Fault("the winner is not moved in", RACE,
          "        _move_in(folder, winner.name)\n", "        pass\n", f"{TESTS} -k best_setting"),
    Fault("a diverged racer ends the run", RACE,
          "except (NonFiniteLoss, NonFiniteParameters) as error:",
          "except ZeroDivisionError as error:", f"{TESTS} -k diverges"),
    Fault("a stopped race names the racer's folder", RACE,
          "with `train --resume {self.folder.path}`", "with `train --resume {folder.path}`",
          f"{TESTS} -k signal_stops"),
    Fault("a race goes on though the config says how to train", "training/runs.py",
          "if config.decided_by is not None and not is_racing:",
          "if config.decided_by is not None:", f"{TESTS} -k says_how"),
    Fault("a key at its default leaves the race on", PARSER,
          'return replace(config, default="rules") if named else config', "return config",
          f"{TESTS} -k counts_as_given"),
    Fault("free keys end the race", SIZING,
          "and key not in _FREE", "or key in _FREE", f"{TESTS} -k free_keys"),
    Fault("a command repeated on a raced run finds another config", "config/__init__.py",
          "if raced and self.decided_by is None:", "if False:", f"{TESTS} -k killed_race"),
]  # fmt: skip
