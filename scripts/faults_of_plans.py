"""Deliberate faults in plans."""

from __future__ import annotations

from faults import Fault

FAULTS = [
    Fault("clipping by value takes no memory in a plan", "planning/memory.py",
          "if train.clips:", "if train.clipping.norm:",
          "tests/planning/test_dry_run.py -k clipping"),
    Fault("gradients that wait take no memory in a plan", "planning/memory.py",
          "if workload.is_full and (workload.config.train.needs_whole_gradient or of_features):",
          "if False:",
          "tests/planning/test_full_step.py -k deferred_step"),
    Fault("a plan reuses the cost of another number of candidates", "planning/cost.py",
          "key = (chunks, triples, *candidates.items(), is_cuda)",
          "key = (chunks, triples, is_cuda)",
          "tests/planning/test_advice.py -k each_other"),
    Fault("a plan fails where the config refuses another wrapper", "planning/advice.py",
          "        except ConfigError:\n            return None\n",
          "        except KeyError:\n            return None\n",
          "tests/planning/test_faster.py -k not_advised"),
    Fault("a plan has replicated tables look rows up on each other", "planning/layout.py",
          "len(ranks) if self.layout.is_replicated else self.layout.replicas",
          "self.layout.replicas",
          "tests/planning/test_traffic.py -k data_parallel"),
    Fault("a plan adds up what a GPU and its host do at once", "planning/plan.py",
          "if not self.is_cuda:\n            return sum", "if True:\n            return sum",
          "tests/planning/test_dry_run.py -k decides_its_speed"),
    Fault("a plan names the largest resource, though two follow each other", "planning/plan.py",
          'max(busy["host"], busy["loader"]) < working', "False",
          "tests/planning/test_dry_run.py -k decides_its_speed"),
    Fault("a plan makes batches of a GPU on the CPU too", "planning/step.py",
          "elif step.ids:", "if step.ids:",
          "tests/planning/test_dry_run.py -k decides_its_speed"),
    Fault("a plan makes batches of features on a GPU", "planning/memory.py",
          ' or setup.workload.num_features  #', "  #",
          "tests/planning/test_traffic.py -k features_are_looked_up"),
    Fault("a plan holds triples on a GPU without regard to the rest", "planning/memory.py",
          "fits_device(size, memory, free)", "fits_device(size, memory, memory)",
          "tests/planning/test_dry_run.py -k leave_memory"),
]  # fmt: skip
