"""``kge-torchrec tune``, and the function ``tune``: search for good settings by many runs."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kge_torchrec.commands import add_log, take_log
from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import at_least
from kge_torchrec.config.parser import AnyConfig, as_config, load_config, read_config
from kge_torchrec.config.registry import check_imports
from kge_torchrec.environment import loading_torch

if TYPE_CHECKING:
    from kge_torchrec.tuning.study import Study

_USAGE = """\
kge-torchrec tune CONFIG [--key.sub value ...] [--trials N] [options below]
       kge-torchrec tune --resume STUDY [--trials N]"""
_DESCRIPTION = """\
Trains with many settings, drops poor ones early, and writes the best config.  Trials are compared
on valid; test is never used.  --resume, or the same command with the same --study, resumes the
study, also after a kill or next to a running process.

examples:
  kge-torchrec tune demo --trials 20 --study studies/demo
  kge-torchrec tune kinship --data.path DIRECTORY --space space.yaml
  kge-torchrec tune --resume studies/demo --trials 40
  kge-torchrec train studies/demo/best.yaml
"""


def add(verb: argparse.ArgumentParser) -> None:
    verb.usage, verb.description = _USAGE, _DESCRIPTION
    verb.add_argument(
        "--trials", type=int, metavar="N", help="trials of the whole study (default: 30)"
    )
    verb.add_argument(
        "--study", metavar="DIR", help="folder of the study (default: studies/SCORER-TIME)"
    )
    verb.add_argument(
        "--space",
        metavar="FILE",
        help="YAML file of keys with ranges or lists (default: chosen from scorer and graph, and "
        "written to STUDY/space.yaml)",
    )
    verb.add_argument(
        "--halving",
        default="epochs",
        metavar="epochs|none",
        help="how poor trials are dropped: after few epochs (default), or not at all",
    )
    verb.add_argument("--resume", metavar="STUDY", help="resume the study in this folder")
    add_log(verb)


def run(parsed: argparse.Namespace) -> int:
    """Run a study, print its best trial and return the exit code: 1 if no trial was completed."""
    if "RANK" in os.environ:
        raise ConfigError("tune runs trials of one process each; call it without torchrun")
    check_optuna()
    take_log(parsed)
    if parsed.resume is not None:
        if parsed.halving != "epochs":
            raise ConfigError("--halving was chosen when the study began; leave it out")
        return _resume(parsed)
    with loading_torch():
        config = load_config(parsed.config, parsed.overrides)
        trials = 30 if parsed.trials is None else parsed.trials
        study = _open(config, trials, parsed.study, parsed.space, parsed.halving)
    results = _run(study, trials)
    return _print_best(study, results)


def tune(
    config: AnyConfig = None,
    trials: int = 30,
    study: str | Path | None = None,
    space: str | Path | dict[str, Any] | None = None,
    halving: str = "epochs",
) -> dict[str, Any]:
    """Search for good settings by their results on valid.

    If ``config`` leaves training open and ``space`` is None, the first trials use the settings of
    the race of defaults; otherwise the first one uses ``config``.

    Args:
        config: The config whose keys the trials change, in a form that ``train`` takes.
        trials: The trials of the whole study, including those of earlier calls and of other
            processes.
        study: The folder of the study, which is created or resumed. None: studies/SCORER-TIME.
        space: A YAML file or its content: keys with ranges or lists. None: a default for the scorer
            and the size of the graph.
        halving: How poor trials are dropped: after few "epochs", or "none".

    Returns:
        The content of trials.json: "best", "trials" and others.

    Raises:
        ConfigError: A setting is invalid, or all trials fail.
        DataError: The data cannot be used.
        TrainingStopped: A signal stopped a training.
    """
    opened = _open(as_config(config), trials, study, space, halving)
    return _run(opened, trials)


def _resume(parsed: argparse.Namespace) -> int:
    """Resume a study from its folder; return the exit code."""
    if any(value is not None for value in (parsed.config, parsed.space, parsed.study)):
        raise ConfigError(
            "tune --resume reads the settings of the study; leave out CONFIG, --space and --study"
        )
    here = read_config(None, parsed.overrides)
    keys = {word.split("=")[0] for word in parsed.overrides if word.startswith("--")}
    if keys - {"--threads", "--device"}:
        raise ConfigError(
            f"{sorted(keys - {'--threads', '--device'})[0].removeprefix('--')}: the trials of a "
            "study share all keys but those that it tries; start another study"
        )
    with loading_torch():
        from kge_torchrec.tuning.study import Study

        study = Study(Path(parsed.resume))
    for tried in study.space.parameters:
        names = map(str, getattr(tried.distribution, "choices", ()))
        check_imports({tried.key: dict.fromkeys(names)}, study.path)
    trials = study.settings.trials if parsed.trials is None else parsed.trials
    results = _run(
        study,
        trials,
        threads=here.threads if "--threads" in keys else None,
        device=here.device if "--device" in keys else None,
    )
    return _print_best(study, results)


def check_optuna() -> None:
    """Raise ConfigError unless Optuna is installed."""
    if find_spec("optuna") is None:
        raise ConfigError("tune needs Optuna: pip install 'kge-torchrec[tune]'")


def _open(
    config: Any,
    trials: int,
    path: str | Path | None,
    space: str | Path | dict[str, Any] | None,
    halving: str,
) -> Study:
    check_optuna()
    from kge_torchrec.training.run_data import check_start, facts_of
    from kge_torchrec.tuning.space import SearchSpace
    from kge_torchrec.tuning.study import Settings, Study, now

    check_start(config, facts_of(config))
    ranges = None
    if space is not None:
        ranges = SearchSpace(space) if isinstance(space, dict) else SearchSpace.read(space)
    settings = Settings(trials, halving, config.evaluation.metric, config.seed)
    named = config.model.scorer if config.decided_by else "default"
    folder = Path(path or f"studies/{named}-{now()}")
    return Study.open_or_make(folder, config, ranges, settings)


def _run(
    study: Study,
    trials: int,
    threads: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    at_least("trials", trials, 1)
    from kge_torchrec.tuning.trials import Worker

    try:
        Worker(study, threads, device).work(trials)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(
            f"interrupted; resume with `tune --resume {study.path}`."
        ) from error
    finally:
        results = study.write_results()
    return results


def _print_best(study: Study, results: dict[str, Any]) -> int:
    """Print the best trial; return the exit code."""
    best = results["best"]
    if best is None:
        print(f"no trial was completed; {study.path / 'trials.json'} says why", file=sys.stderr)
        return 1
    print(f"best of {len(results['trials'])} trials: trial {best['number']}, "
          f"valid {results['metric']} {best['value']:.4f}")  # fmt: skip
    for key, value in best["values"].items():
        print(f"  {key}: {value:.4g}" if isinstance(value, float) else f"  {key}: {value}")
    print(f"train it, and rank test: kge-torchrec train {study.path / 'best.yaml'}")
    return 0
