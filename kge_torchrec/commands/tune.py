"""``tune``: search for good settings by many runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

from kge_torchrec.commands import ConfigName, File, Log, Settings, follow_log
from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import at_least
from kge_torchrec.config.parser import config_from_dict, load_config
from kge_torchrec.config.registry import check_imports
from kge_torchrec.environment import loading_torch

if TYPE_CHECKING:
    from kge_torchrec.tuning.study import Study


def tune(
    config: ConfigName | None = None,
    *,
    settings: Settings = (),
    trials: int | None = None,
    study: Annotated[str | None, "DIR"] = None,
    space: File | None = None,
    storage: Annotated[str | None, "URL"] = None,
    resume: Annotated[str | None, "STUDY"] = None,
    log_format: Log = "text",
) -> int:
    """Train with many settings, drop poor ones early, and write the best config.

    Trials are compared on valid; test is never used. --resume resumes a study, also after a kill
    or next to a running process.

    Examples:
      kge-torchrec tune demo --trials 20 --study studies/demo
      kge-torchrec tune kinship --data.path DIRECTORY --space space.yaml
      kge-torchrec tune --resume studies/demo --trials 40 --threads 2
      kge-torchrec train studies/demo/best.yaml

    Args:
        trials: trials of the whole study (default: 30)
        study: folder of a new study (default: studies/SCORER-TIME)
        space: YAML file of keys with ranges or lists (default: chosen from scorer and graph, and
            written to STUDY/space.yaml)
        storage: Optuna's storage, for processes on several hosts, such as
            postgresql+psycopg://HOST/DATABASE (default: STUDY/optuna.db)
        resume: resume the study in this folder; --threads and --device may change
    """
    if "RANK" in os.environ:
        raise ConfigError("tune runs trials of one process each; call it without torchrun")
    settings = [*settings, *follow_log(log_format)]
    if trials is not None:
        at_least("trials", trials, 1)
    if resume is None:
        with loading_torch():
            loaded = load_config(config, settings)
            from kge_torchrec.tuning.study import make_study

            opened = make_study(loaded, trials or 30, study, space, storage)
        return _print_best(opened, opened.run())
    if any(value is not None for value in (config, study, space, storage)):
        raise ConfigError(
            "tune --resume reads the settings of the study; leave out CONFIG, --study, --space "
            "and --storage"
        )
    here = config_from_dict({}, settings)
    keys = {word.partition("=")[0].removeprefix("--") for word in settings} - {"run.progress"}
    if keys - {"threads", "device"}:
        raise ConfigError(
            f"{min(keys - {'threads', 'device'})}: the trials of a study share all keys but those "
            "that it tries; start another study"
        )
    with loading_torch():
        from kge_torchrec.tuning.study import Study

        opened = Study(resume)
    for tried in opened.space:
        names = map(str, tried.options.get("choices", ()))
        check_imports({tried.key: dict.fromkeys(names)}, opened.path)
    own = {key: getattr(here, key) for key in keys if key in ("threads", "device")}
    return _print_best(opened, opened.run(trials, **own))


def _print_best(study: Study, best: dict) -> int:
    print(f"best of {best['trials']} trials: trial {best['number']}, "
          f"valid {best['metric']} {best['value']:.4f}")  # fmt: skip
    if not best["values"]:
        print("  the config itself")
    for key, value in best["values"].items():
        print(f"  {key}: {value:.4g}" if isinstance(value, float) else f"  {key}: {value}")
    print(f"train it, and rank test: kge-torchrec train {study.path / 'best.yaml'}")
    print(f"look at all trials (pip install optuna-dashboard): optuna-dashboard {study.storage}")
    return 0
