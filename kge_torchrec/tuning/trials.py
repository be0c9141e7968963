"""A trial: a short run of a config with other values, which is compared by its result on valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kge_torchrec.config import Config
from kge_torchrec.config.keys import declared, replace_keys
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.config.registry import resolve
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import ALONE, Processes, on_first_rank
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.runs import Extras, train_run

if TYPE_CHECKING:
    from kge_torchrec.training.trainer import Callback

# The settings of a race, and of the first trials of a study. Where the time does not suffice for
# all, the first ones race.
PORTFOLIO = ("softmax_n3", "rote", "softmax_weak_n3", "kvsall_adam")


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the config with other values for dotted keys; keys of options are allowed.

    Where a value chooses another part, options of the config that this part has not are left out.
    """
    kept = config.to_dict()
    for key, item in declared(Config).items():
        section, _, name = key.rpartition(".")
        if (part := item.part) is not None and f"{section}.{part.field}" in values:
            owner = resolve(part.kind, values[f"{section}.{part.field}"])
            known = declared(owner.Options)
            options = attrgetter(key)(config)
            kept[section][name] = {x: options[x] for x in options if x in known}
    return config_from_dict(kept, dict(values))


def train_trial(
    config: Config,
    folder: RunFolder,
    store: TripleStore,
    values: Mapping[str, Any],
    callbacks: Sequence[Callback] = (),
    ranks: Processes = ALONE,
) -> float:
    """Train a trial in its folder, or resume it; return its best result on valid.  Collective.

    It does not rank test, and it accepts keys without effect, since a key of a search space may act
    in some trials only. ``values`` are other values of keys for this trial.
    """
    config = replace_keys(
        config,
        {
            "data.path": str(store.path),
            "checkpoint.keep": 1,
            "checkpoint.every.epochs": 0,
            "checkpoint.options.copy_to": None,
            "run.dir": str(folder.path),
            "run.resume": "never",
            "run.progress": False,
            "run.trackers.tensorboard": False,
            **values,
        },
    )
    resumes = folder if on_first_rank(ranks, lambda: folder.holds_run) else None
    train_run(config, Extras(callbacks, rank_test=False, is_trial=True), resumes=resumes)
    return on_first_rank(ranks, lambda: float(folder.load_results()["valid"]["best"]))
