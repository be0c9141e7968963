"""The start of a study: the settings of its first trials.

A study of a config that leaves training open starts from the configs in ``configs/portfolio``. The
first trials use them as they are. The later ones choose one of them by the key ``start`` of the
space, and vary values around it. A race of defaults on the same graph (``race.json`` of a run)
orders them and leaves out those that lost clearly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from kge_torchrec.config import Config, ConfigError, GraphSize
from kge_torchrec.config.keys import all_values
from kge_torchrec.training.remote_runs import folder_of
from kge_torchrec.tuning.race import PORTFOLIO
from kge_torchrec.tuning.space import SMALL, START, SearchSpace, with_values
from kge_torchrec.tuning.standings import Standings

# A racer lost clearly if it reached less than this share of the best racer's result in equal time.
CLEARLY = 0.75
# Ranges around a setting reach from its value divided by the factor to its value times the factor.
FACTORS = {"train.lr": 5, "loss.n3": 10, "loss.relation_weight": 10, "negatives.count": 2}
_DROPOUT = ("model.dropout.entity", "model.dropout.relation")


@dataclass(frozen=True)
class Start:
    """The settings that a study starts from.

    Attributes:
        kind: config, portfolio, space (its key ``start``), or the folder of a run that raced.
        members: The names of the configs, the first trial's first; empty: the study's own config.
        words: What the members are and why, for people.
    """

    kind: str
    members: tuple[str, ...]
    words: str


def chosen_start(kind: str, config: Config, space: SearchSpace | None, num_entities: int) -> Start:
    """Return the settings that a study starts from.

    Args:
        kind: auto, config, portfolio or the folder of a run with a race.json.
        config: The config of the study.
        space: The search space; None: the default.
        num_entities: Entities of the graph.

    Raises:
        ConfigError: The folder has no race, or the space has settings of its own to start from.
    """
    if space is not None and space.starts:
        if kind != "auto":
            raise ConfigError(
                f"start: the search space already lists {START}; leave the option out, or remove "
                "the key from the space"
            )
        return Start("space", space.starts, f"{', '.join(space.starts)} (the search space)")
    if kind == "auto":
        if space is not None:
            return Start("config", (), "the config, because the search space has no start")
        if config.decided_by is not None:
            return Start("config", (), f"the config, because {config.decided_by}")
    if kind == "config":
        return Start("config", (), "the config")
    few = num_entities <= SMALL
    fitting = [name for name in PORTFOLIO if few or not _config_of(config, name).negatives.is_full]
    if kind not in ("auto", "portfolio"):
        return _raced(kind, fitting)
    words = f"the portfolio: {', '.join(fitting)}"
    if len(fitting) < len(PORTFOLIO):
        words += f" (without those that score more than {SMALL:,} entities per query)"
    return Start("portfolio", tuple(fitting), words)


def _config_of(config: Config, member: str) -> Config:
    """Return the config with a member's values.

    Raises:
        ConfigError: The config has values that do not suit the member.
    """
    try:
        return with_values(config, {START: member})
    except ConfigError as error:
        raise ConfigError(f"start {member}: {error}") from None


def _raced(folder: str, others: Sequence[str]) -> Start:
    """Return the racers of a run, the best one first, and then the members that did not race.

    Raises:
        ConfigError: The folder has no race.
    """
    run = folder_of(folder)
    try:
        standings = Standings.read(run)
    except (TypeError, ValueError):
        raise ConfigError(f"start: {run.race} is not of this program version") from None
    if standings is None:
        raise ConfigError(
            f"start: {folder} has no race.json; name config, portfolio, or a run of a config that "
            "leaves training open"
        )
    racers = [name for name in _order(standings) if name in PORTFOLIO]  # of earlier versions too
    first, lost = racers[0], {}
    for name in racers[1:]:
        rung = len(standings.values[name]) - 1
        mine, best = standings.values[name][rung], standings.values[first][rung]
        if mine is None:
            lost[name] = "diverged"
        elif best is not None and _share(standings.metric, mine, best) < CLEARLY:
            lost[name] = f"{standings.metric} {mine:.4f} where {first} had {best:.4f}"
    members = [name for name in racers if name not in lost]
    members += [name for name in others if name not in racers]
    words = f"the race of {Path(folder)}: {', '.join(members)}"
    if lost:
        left_out = "; ".join(f"{name}, {why}" for name, why in lost.items())
        words += f" (left out, because they lost clearly: {left_out})"
    return Start(folder, tuple(members), words)


def _order(standings: Standings) -> list[str]:
    """Return the racers, the winner or else the best one first.

    Those that were dropped later come before those that were dropped earlier.

    Raises:
        ConfigError: The race has no result.
    """
    values = {name: len(results) for name, results in standings.values.items() if results}
    if not values:
        raise ConfigError("start: the race has no result yet; resume its run first")
    order: list[str] = []
    for rungs in sorted(set(values.values()), reverse=True):
        order += standings.order([name for name, count in values.items() if count == rungs])
    return sorted(order, key=lambda name: name != standings.winner)


def _share(metric: str, mine: float, best: float) -> float:
    """Return how much of the best result another one reaches; 1 or more if it is as good."""
    mine, best = (best, mine) if metric == "mr" else (mine, best)
    return mine / best if best > 0 else 1.0


def space_around(config: Config, members: Sequence[str], graph: GraphSize) -> dict[str, Any]:
    """Return the default search space of a study that starts from several settings.

    Every value of a member lies in its ranges. Ranges are on a log scale except those of dropout,
    and a key has none where the member does not use it.

    Args:
        config: The config of the study.
        members: The names of the configs that trials start from.
        graph: The size of the graph.
    """
    space: dict[str, Any] = {START: list(members)}
    for name in members:
        member = _config_of(config, name).settled(graph)
        ranges: dict[str, dict[str, Any]] = {}
        for key, factor in FACTORS.items():
            value = attrgetter(key)(member)
            if not value or (key == "negatives.count" and member.negatives.is_full):
                continue
            low, high = (type(value)(float(f"{v:.3g}")) for v in (value / factor, value * factor))
            ranges[key] = {"low": low, "high": high, "log": True}
        size = member.train.batch_size
        ranges["train.batch_size"] = {"choices": sorted({max(1, size // 2), size, 2 * size})}
        for key in _DROPOUT:
            if all_values(member)[key]:
                ranges[key] = {"low": 0.0, "high": 0.6}
        for key, entry in ranges.items():
            space.setdefault(key, []).append({**entry, "when": {START: name}})
    return space


def started(space: SearchSpace, members: Sequence[str]) -> SearchSpace:
    """Return the space with the configs that trials start from, if it lists none."""
    if space.starts or not members:
        return space
    return SearchSpace({START: list(members), **space.values})
