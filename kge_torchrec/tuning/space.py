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

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import Trial

from kge_torchrec.config import Config, ConfigError, all_keys
from kge_torchrec.config.keys import all_values, declared
from kge_torchrec.config.parser import values_of
from kge_torchrec.config.registry import resolve
from kge_torchrec.config.sizing import KEYS, filled
from kge_torchrec.data.store import TripleStore
from kge_torchrec.tuning.race import PORTFOLIO, with_values

_OPTIONS = {"low", "high", "log", "step", "choices", "when"}
# Keys that determine the data, metric and training time by which trials are compared.
FIXED = ("data.", "run.", "evaluation.", "checkpoint.", "train.epochs", "device", "threads")


@dataclass(frozen=True)
class Parameter:
    """A range or a list of values for one key, with conditions."""

    key: str
    name: str  # Optuna's name: the key, with the conditions if the key has several ranges
    distribution: BaseDistribution
    when: dict[str, tuple]

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Return whether the conditions hold for the given values of all keys."""
        return all(values.get(key) in allowed for key, allowed in self.when.items())

    def suggested(self, trial: Trial) -> Any:
        """Return the value that Optuna suggests for a trial."""
        name, of = self.name, self.distribution
        if isinstance(of, CategoricalDistribution):
            return trial.suggest_categorical(name, of.choices)
        if isinstance(of, IntDistribution):
            return trial.suggest_int(name, of.low, of.high, step=of.step, log=of.log)
        assert isinstance(of, FloatDistribution)
        return trial.suggest_float(name, of.low, of.high, step=of.step, log=of.log)

    def contains(self, value: Any) -> bool:
        """Return whether a value lies in the range."""
        of = self.distribution
        if isinstance(of, CategoricalDistribution):
            return value in of.choices
        assert isinstance(of, IntDistribution | FloatDistribution)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and of.low <= value <= of.high


def parameters_of(values: Any, where: str = "search space") -> list[Parameter]:
    """Return the parameters of a space, in its order.

    Args:
        values: A mapping in the form that this module describes.
        where: The source of the mapping, for error messages.

    Raises:
        ConfigError: A key is unknown, a range is malformed, or a condition names a later key.
    """
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{where} must map each key to a range or a list of values")
    parameters: list[Parameter] = []
    left = [str(key) for key in values]
    for key, ranges in values.items():
        _check_key(str(key), where)
        several = isinstance(ranges, list) and any(isinstance(item, dict) for item in ranges)
        parts = ranges if several else [ranges]
        made = [_parameter(str(key), part, len(parts) > 1, where) for part in parts]
        for other in (other for parameter in made for other in parameter.when):
            if other in left:
                raise ConfigError(
                    f"{key} in {where}: its condition names {other}, which must come before it"
                )
        left.remove(str(key))
        parameters += made
    return parameters


def suggested(space: Sequence[Parameter], config: Config, trial: Trial) -> dict[str, Any]:
    """Return the values that Optuna suggests for the keys whose conditions hold.

    The config provides the values of all other keys.
    """
    known, chosen = all_values(config), dict[str, Any]()
    for parameter in space:
        if parameter.key not in chosen and parameter.holds(known):
            known[parameter.key] = chosen[parameter.key] = parameter.suggested(trial)
    return chosen


def own_values(space: Sequence[Parameter], config: Config) -> dict[str, Any]:
    """Return the config's own values that lie in the space, by Optuna's names."""
    known = all_values(config)
    return {
        parameter.name: known[parameter.key]
        for parameter in space
        if parameter.holds(known)
        and known.get(parameter.key) is not None
        and parameter.contains(known[parameter.key])
    }


def _check_key(key: str, where: str) -> None:
    keys = all_keys()
    if not _is_key(key):
        close = difflib.get_close_matches(str(key), keys, n=1, cutoff=0.6)
        raise ConfigError(
            f"unknown key {key} in {where}{f'; did you mean {close[0]}?' if close else ''}"
        )
    if key.startswith(FIXED):
        raise ConfigError(
            f"{key} in {where}: all trials of a study share this key; set it in the config"
        )


def _is_key(name: str) -> bool:
    """Return whether a name is that of a key, or may be that of an option in a key."""
    keys = declared(Config)
    parent = name.rpartition(".")[0]
    return name in keys or (parent in keys and keys[parent].default_factory is dict)


def _parameter(key: str, entry: Any, conditional: bool, where: str) -> Parameter:
    if not isinstance(entry, dict):
        entry = {"choices": entry}
    unknown = set(entry) - _OPTIONS
    if unknown:
        raise ConfigError(
            f"{key} in {where}: {sorted(unknown)[0]} is not one of {', '.join(sorted(_OPTIONS))}"
        )
    when = {
        str(other): tuple(values) if isinstance(values, list) else (values,)
        for other, values in (entry.get("when") or {}).items()
    }
    for other in when:
        if not _is_key(other):
            raise ConfigError(f"{key} in {where}: its condition names {other}, which is no key")
    if conditional and not when:
        raise ConfigError(f"{key} in {where}: each of several ranges needs a `when`")
    condition = ", ".join(f"{k}={'|'.join(map(str, v))}" for k, v in when.items())
    name = f"{key} ({condition})" if conditional else key
    try:
        return Parameter(key, name, _distribution(entry), when)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key} in {where}: {error}") from None


def _distribution(entry: dict[str, Any]) -> BaseDistribution:
    if "choices" in entry:
        choices = entry["choices"]
        if not isinstance(choices, list) or not choices or {"low", "high"} & set(entry):
            raise ValueError("give a list of choices, or low and high")
        return CategoricalDistribution(choices)
    low: Any = entry.get("low")
    high: Any = entry.get("high")
    step = entry.get("step")
    for value in (low, high):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"low and high must be numbers, got {value!r} (YAML: 1.0e-4, not 1e-4)"
            )
    log = entry.get("log", False)
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log, step=1 if step is None else step)
    return FloatDistribution(float(low), float(high), log=log, step=step)


# The most entities for which a study can afford to score all of them per query: an epoch of kvsall
# cost 8 times one of 1,024 candidates with 20,000 entities, and 33 times with 78,000.
SMALL = 30_000


def default_search(config: Config, store: TripleStore) -> tuple[dict[str, Any], Config, list[str]]:
    """Return the default space, the config that it varies, and the settings that are tried first.

    If the config leaves training open, these are the settings of the race, without those that a
    study cannot afford on a graph of this size.
    """
    space, resolved = default_space(config, store.num_entities), config.settled(store.size)
    if config.decided_by is not None:
        return space, resolved, []
    first = [
        name
        for name in PORTFOLIO
        if store.num_entities <= SMALL or not with_values(config, values_of(name)).negatives.is_full
    ]
    # The other keys of the first trials follow from their settings.
    kept = {key: attrgetter(key)(resolved) for key in KEYS if key.startswith(FIXED)}
    return space, filled(config, kept), first


def default_space(config: Config, num_entities: int) -> dict[str, Any]:
    """Return the default search space for a scorer and a graph size.

    Learning rates and initial scales follow the searches of Ruffinelli et al. 2020 ("You can teach
    an old dog new tricks") with LibKGE, with narrower ranges. ``model.dim`` is not varied: a larger
    dim is better and slower.
    """
    scorer = resolve("scorer", config.model.scorer)
    is_distance = scorer.measures_distance(scorer.Options(**config.model.scorer_options()))
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
