"""Runs of one config with several seeds: training, mean and deviation, and a paired test.

FOLDER/seeds.json   the seeds and the config
FOLDER/seed-0       a run; and so on
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from kge_torchrec import files
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.keys import changed_keys
from kge_torchrec.config.parser import AnyConfig, as_config, config_from_dict, load_config
from kge_torchrec.lines import say
from kge_torchrec.training.run_folder import RunFolder

if TYPE_CHECKING:
    from kge_torchrec.training.trainer import Callback

FILE = "seeds.json"
Results = Mapping[str, Any]  # what ``metrics`` returns


class SeedRuns:
    """The runs of one config with several seeds, in a folder that ``train_seeds`` wrote.

    Raises ConfigError for another folder.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            content = json.loads((self.path / FILE).read_text(encoding="utf-8"))
            self.seeds: list[int] = list(content["seeds"])
            self._values: dict[str, Any] = dict(content["config"])
        except FileNotFoundError:
            raise ConfigError(f"{path} has no {FILE}: it is no folder of train --seeds") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.path / FILE} is damaged ({error})") from error

    @cached_property
    def config(self) -> Config:
        """The config of the runs.  To check it loads torch."""
        return config_from_dict(self._values)

    def folder(self, seed: int) -> RunFolder:
        """Return the folder of a run."""
        return RunFolder(self.path / f"seed-{seed}")

    @property
    def missing(self) -> list[int]:
        """The seeds whose runs have no results yet."""
        return [seed for seed in self.seeds if not self.folder(seed).results.exists()]

    def results(self, seeds: Sequence[int] = ()) -> dict[int, dict[str, Any]]:
        """Return results.json of some seeds (default: all).

        Raises:
            ConfigError: A run is missing or not finished.
        """
        for seed in seeds or self.seeds:
            if seed not in self.seeds or seed in self.missing:
                raise ConfigError(
                    f"seed {seed} has no results in {self.path}, which has the seeds "
                    f"{', '.join(map(str, self.seeds))}; train --resume {self.path} trains what "
                    "is missing, and --seeds names others"
                )
        return {seed: self.folder(seed).load_results() for seed in seeds or self.seeds}


def is_seeds(path: str | Path) -> bool:
    """Return whether a folder holds runs of several seeds."""
    return (Path(path) / FILE).is_file()


def parse_seeds(seeds: str | int | Sequence[int]) -> list[int]:
    """Return the seeds that 5 (0 to 4), "5", "0,1,2" or [0, 1, 2] mean."""
    try:
        if isinstance(seeds, str):
            found = [int(word) for word in seeds.rstrip(",").split(",")]
            found = found if "," in seeds else list(range(found[0]))
        else:
            found = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    except ValueError:
        found = []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise ConfigError(
            f"--seeds must be a number of seeds, such as 5, or different seeds, such as 0,1,2, got "
            f"{seeds!r}"
        )
    return found


def train_seeds(
    config: AnyConfig = None,
    seeds: str | int | Sequence[int] = 5,
    callbacks: Sequence[Callback] = (),
) -> SeedRuns:
    """Train a config with several seeds, one run after the other; train only what is missing.

    A second call with the same run.dir resumes a run that was killed and keeps finished ones; it
    may name more seeds. If a race of defaults decides what is trained, that of the first seed
    decides for all.  Collective.

    Args:
        config: As for ``train``; run.dir is the folder of the runs.
        seeds: A number of seeds, from 0 on, or the seeds.
        callbacks: As for ``train``.

    Raises:
        ConfigError: As ``train``, or run.dir holds runs of another config, or another process
            trains there.
    """
    from kge_torchrec import api
    from kge_torchrec.distributed.processes import on_first_rank, processes
    from kge_torchrec.training.stop_signal import TrainingInterrupted, TrainingStopped

    config, chosen = as_config(config), parse_seeds(seeds)
    if config.checkpoint.options.copy_to is not None:
        raise ConfigError("checkpoint.options.copy_to: the runs of --seeds would share one copy")
    if config.run.dir is None and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("run.dir: name the folder of the seeds, which all ranks share")
    with processes(config.device, config.timeout) as ranks, ExitStack() as held:
        path, numbers, missing = on_first_rank(ranks, lambda: _claim(config, chosen, held))
        for place, seed in enumerate(missing, 1):
            say(f"seed {seed}, run {place} of {len(missing)}")
            own = config
            if config.decided_by is None and seed != numbers[0]:
                own = load_config(path / f"seed-{numbers[0]}")
            run = replace(config.run, dir=str(path / f"seed-{seed}"), resume="auto")
            try:
                api.train(replace(own, seed=seed, run=run), callbacks)
            except (TrainingStopped, TrainingInterrupted) as error:
                raise type(error)(
                    f"stopped in the run of seed {seed}; resume with `train --resume {path}`."
                ) from error
    return SeedRuns(path)


def _claim(
    config: Config, numbers: list[int], held: ExitStack
) -> tuple[Path, list[int], list[int]]:
    """Lock the folder of the seeds until ``held`` closes, and write seeds.json.

    Returns:
        The folder, its seeds, and those whose runs have no results yet.
    """
    folder = RunFolder.new(config)
    if not is_seeds(folder.path):
        folder.check_free()
    held.enter_context(folder.locked())
    if is_seeds(folder.path):
        before = SeedRuns(folder.path)
        differing = [
            key
            for key in changed_keys(before.config, config)
            if key not in ("seed", "threads", "device", "timeout") and not key.startswith("run.")
        ]
        if differing:
            raise ConfigError(
                f"{folder.path} has seeds of another config: {', '.join(differing)}; name another "
                "run.dir"
            )
        numbers = list(dict.fromkeys([*before.seeds, *numbers]))
    content = {"seeds": numbers, "config": config.to_dict()}
    files.write_json(folder.path / FILE, content)
    return folder.path, numbers, SeedRuns(folder.path).missing


def resume_seeds(path: str | Path, settings: Sequence[str] = ()) -> SeedRuns:
    """Train what is missing in a folder of seeds; settings may change threads or device."""
    runs = SeedRuns(path)
    config = config_from_dict(runs.config.to_dict(), [*settings, f"--run.dir={path}"])
    return train_seeds(config, runs.seeds)


Spread = dict[str, dict[str, tuple[float, float | None]]]  # mean and deviation, by row and metric


def spread(results: Mapping[int, Results]) -> Spread:
    """Return mean and sample standard deviation of the realistic metrics, by side and name.

    Baselines are beside the sides, with the ranks of both. The deviation of one run is None.
    """
    runs = []
    for run in results.values():
        rows = {side: run[side] for side in ("head", "tail", "both") if side in run}
        rows |= {name: x["both"] for name, x in run.get("baselines", {}).items()}
        runs.append({name: row["realistic"] for name, row in rows.items()})
    return _spread(runs)


def list_spread(results: Mapping[int, Results]) -> Spread:
    """Return the same of recall and NDCG, by model and baseline; {} without recommendations."""
    runs = []
    for run in results.values():
        if "recommendation" in run:
            stats = run["recommendation"]
            names = [name for name in stats if name.startswith(("recall@", "ndcg@"))]
            rows = {"model": stats, **run.get("recommendation_baselines", {})}
            runs.append({by: {x: row[x] for x in names} for by, row in rows.items() if row})
    return _spread(runs) if runs else {}


def _spread(runs: Sequence[Mapping[str, Mapping[str, float]]]) -> Spread:
    spreads: Spread = {}
    for row, metrics in runs[0].items():
        spreads[row] = {}
        for name in metrics:
            values = [float(run[row][name]) for run in runs]
            spreads[row][name] = mean(values), stdev(values) if len(values) > 1 else None
    return spreads


def paired_test(
    first: Mapping[int, Results], second: Mapping[int, Results]
) -> dict[str, dict[str, float | None]]:
    """Compare two configs on the seeds that both have, for each realistic metric of both sides.

    Returns:
        By metric: the mean "difference" of second from first, "t" of Student's paired test, and
        the two-sided "p"; t and p are None if all differences are equal.

    Raises:
        ConfigError: They have fewer than two seeds in common.
    """
    common = sorted(first.keys() & second.keys())
    if len(common) < 2:
        raise ConfigError("a paired test needs two seeds or more that both folders have")
    tests = {}
    for name in first[common[0]]["both"]["realistic"]:
        one, other = (
            [results[seed]["both"]["realistic"][name] for seed in common]
            for results in (first, second)
        )
        values = [after - before for before, after in zip(one, other, strict=True)]
        difference, deviation, t, p = mean(values), stdev(values), None, None
        if deviation > 0:
            t = difference / (deviation / math.sqrt(len(common)))
            p = two_sided_p(t, len(common) - 1)
        tests[name] = {"difference": difference, "t": t, "p": p}
    return tests


def two_sided_p(t: float, freedom: int) -> float:
    """Return the probability that Student's t is at least as far from 0.

    The finite series of Abramowitz and Stegun (1964), 26.7.3 and 26.7.4.
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    is_odd, total, term = freedom % 2, 0.0, 1.0
    for k in range(is_odd, freedom - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * math.cos(angle) ** 2
    if is_odd:
        return max(0.0, 1 - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total))
    return max(0.0, 1 - math.sin(angle) * total)
