"""The search space of a study: the config keys to vary, with their ranges.

A space file maps dotted keys to ranges or lists:

    train.lr: {low: 0.01, high: 1.0, log: true}      # integers if both bounds are integers
    train.batch_size: [128, 256, 512]                # choices
    seed: [0, 1, 2]
    loss.name: [softmax, margin, self_adversarial]
    loss.options.margin: {low: 1.0, high: 20.0, when: {loss.name: [margin, self_adversarial]}}
    train.optimizer_options.eps:                     # several ranges with different conditions
      - {low: 1.0e-10, high: 1.0e-6, log: true, when: {train.optimizer: adam}}
      - {choices: [1.0e-8], when: {train.optimizer: adagrad}}

A condition (``when``) names a key of the config or an earlier one of the space, and its allowed
values. A key whose conditions do not hold keeps the config's value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import Trial

from kge_torchrec.config import RESOLVED_KEYS, Config, ConfigError
from kge_torchrec.config.keys import all_values
from kge_torchrec.config.parser import config_from_dict, key_with, values_of
from kge_torchrec.config.registry import resolve
from kge_torchrec.config.sizing import filled
from kge_torchrec.data.store import TripleStore
from kge_torchrec.tuning.trials import PORTFOLIO

# Keys that determine the data, metric and training time by which trials are compared.
FIXED = ("data.", "run.", "evaluation.", "checkpoint.", "train.epochs", "device", "threads")
_OPTIONS = {"low", "high", "log", "step", "choices", "when"}
_KINDS: dict[str, type[BaseDistribution]] = {
    "categorical": CategoricalDistribution,
    "int": IntDistribution,
    "float": FloatDistribution,
}


@dataclass(frozen=True)
class Parameter:
    """A range or a list of values for one key, with conditions."""

    key: str
    name: str  # in Optuna: the key, with the conditions if the key has several ranges
    kind: str  # "categorical", "int" or "float"
    options: dict[str, Any]  # {"choices": ...} or {"low": ..., "high": ..., ...}, for Optuna
    when: dict[str, list[Any]]  # the allowed values of other keys

    def holds(self, values: Mapping[str, Any]) -> bool:
        return all(values.get(key) in allowed for key, allowed in self.when.items())


def parameters_of(
    values: Any, where: str = "search space", lines: Mapping[str, int] = MappingProxyType({})
) -> list[Parameter]:
    """Return the parameters of a space in the form that this module describes, in its order.

    Args:
        values: The mapping.
        where: The source of the mapping, for error messages.
        lines: The line of each key there.

    Raises:
        ConfigError: A key is unknown, a range is malformed, or a condition names a later key.
    """
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{where} must map each key to a range or a list of values")
    parameters: list[Parameter] = []
    left = [str(key) for key in values]
    for key, ranges in zip(tuple(left), values.values(), strict=True):
        several = isinstance(ranges, list) and any(isinstance(item, dict) for item in ranges)
        try:
            key_with(key)
            if key.startswith(FIXED):
                raise ValueError("all trials of a study share this key; set it in the config")
            for entry in ranges if several else [ranges]:
                parameters.append(_parameter(key, entry, several and len(ranges) > 1, left))
        except (ConfigError, ValueError, TypeError) as error:
            about = "" if isinstance(error, ConfigError) else f"{key}: "
            place = f"{where}:{lines[key]}" if key in lines else where
            raise ConfigError(f"{place}: {about}{error}") from None
        left.remove(key)
    return parameters


def _parameter(key: str, entry: Any, is_one_of_several: bool, later: Sequence[str]) -> Parameter:
    """Return the parameter of an entry; ``later`` are the keys that no condition may name."""
    entry = dict(entry) if isinstance(entry, dict) else {"choices": entry}
    for unknown in sorted(entry.keys() - _OPTIONS):
        raise ValueError(f"{unknown} is not one of {', '.join(sorted(_OPTIONS))}")
    name, conditions = key, entry.pop("when", None) or {}
    when = {other: x if isinstance(x, list) else [x] for other, x in conditions.items()}
    for other in when:
        key_with(other)
        if other in later:
            raise ValueError(f"its condition names {other}, which must come before it")
    if is_one_of_several:
        if not when:
            raise ValueError("each of several ranges needs a `when`")
        words = (f"{other}={'|'.join(map(str, x))}" for other, x in when.items())
        name = f"{key} ({', '.join(words)})"
    kind, bounds = "categorical", [entry.get("low"), entry.get("high")]
    if "choices" not in entry:
        for value in bounds:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(
                    f"low and high must be numbers, got {value!r} (YAML: 1.0e-4, not 1e-4)"
                )
        kind = "int" if all(isinstance(value, int) for value in bounds) else "float"
    elif not isinstance(entry["choices"], list) or not entry["choices"] or len(entry) > 1:
        raise ValueError("give a list of choices, or low and high")
    _KINDS[kind](**entry)  # refuses what Optuna cannot draw
    return Parameter(key, name, kind, entry, when)


def suggested(space: Sequence[Parameter], config: Config, trial: Trial) -> dict[str, Any]:
    """Return the values that Optuna suggests for the keys whose conditions hold."""
    known, chosen = all_values(config), dict[str, Any]()
    for parameter in space:
        if parameter.key not in chosen and parameter.holds(known):
            suggest = getattr(trial, f"suggest_{parameter.kind}")
            value = suggest(parameter.name, **parameter.options)
            known[parameter.key] = chosen[parameter.key] = value
    return chosen


# The most entities for which a study can afford to score all of them per query: an epoch of kvsall
# cost 8 times one of 1,024 candidates with 20,000 entities, and 33 times with 78,000.
SMALL = 30_000


def default_search(config: Config, store: TripleStore) -> tuple[dict[str, Any], Config, list[str]]:
    """Return the default space, the config that it varies, and the settings that are tried first.

    These are the settings of the race, if it would decide, that a graph of this size can afford.
    """
    space, resolved = default_space(config, store.num_entities), config.settled(store.size)
    if config.decided_by is not None:
        return space, resolved, []
    first = [
        name
        for name in PORTFOLIO
        if store.num_entities <= SMALL or not config_from_dict(values_of(name)).negatives.is_full
    ]
    # The other keys of the first trials follow from their settings.
    kept = {key: attrgetter(key)(resolved) for key in RESOLVED_KEYS if key.startswith(FIXED)}
    return space, filled(config, kept), first


def default_space(config: Config, num_entities: int) -> dict[str, Any]:
    """Return the default search space for a scorer and a graph size.

    Learning rates and initial scales follow the searches of Ruffinelli et al. 2020 ("You can teach
    an old dog new tricks") with LibKGE, with narrower ranges. ``model.dim`` is not varied: a larger
    dim is better and slower.
    """
    scorer = resolve("scorer", config.model.scorer)
    is_distance = scorer.measures_distance(config.model.options_in("options"))
    family = getattr(scorer, "__module__", "").rpartition(".")[2]
    is_network = family in ("transformer", "convolution")
    space: dict[str, Any] = {
        "train.optimizer": ["adam"] if is_network else ["adagrad", "adam"],
        "train.lr": [
            {"low": 0.02, "high": 1.0, "log": True, "when": {"train.optimizer": "adagrad"}},
            {"low": 2e-4, "high": 0.05, "log": True, "when": {"train.optimizer": "adam"}},
        ],
        "train.batch_size": [128, 256, 512, 1024],
        "model.init_scale": {"low": 1e-3, "high": 0.5, "log": True},
        "model.dropout.input": {"low": 0.0, "high": 0.5},
    }
    full = ["1vsall", "kvsall"] if num_entities <= SMALL else []
    sampled = {"negatives.regime": "sampled"}
    if is_distance:
        space["loss.name"] = ["softmax", "self_adversarial"]
        when = {"loss.name": "self_adversarial"}
        space["loss.options.margin"] = {"low": 2.0, "high": 24.0, "when": when}
        space["negatives.count"] = {"low": 32, "high": 1024, "log": True}
        return space
    space["negatives.regime"] = [*(() if is_network and full else ("sampled",)), *full]
    space["negatives.count"] = {"low": 64, "high": 2048, "log": True, "when": sampled}
    space["model.dropout.hidden"] = {"low": 0.0, "high": 0.5}
    if is_network:
        space["loss.options.label_smoothing"] = {"low": 0.0, "high": 0.3}
    else:
        space["loss.n3"] = {"low": 1e-4, "high": 0.3, "log": True}
    # null would be resolved by the regime of the config instead of the trial
    if scorer.relation_query is not None:
        one_by_one = {"negatives.regime": ["sampled", "1vsall"]}
        space["loss.relation_weight"] = [
            {"low": 0.01, "high": 4.0, "log": True, "when": one_by_one},
            {"choices": [0.0], "when": {"negatives.regime": "kvsall"}},
        ]
    return space
