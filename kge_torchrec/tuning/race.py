"""The race of defaults: short trainings of several settings on one graph; the best one continues.

Successive halving (Jamieson and Talwalkar 2016) of the configs in ``configs/portfolio``, each in
``race/NAME`` of the run's folder. Work is computed from counts and never measured, so a second
start chooses the same; ``race.json`` has the results so far, so a killed race resumes.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from kge_torchrec import files
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.parser import values_of
from kge_torchrec.config.sizing import filled
from kge_torchrec.config.training import cutoff_of
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.lines import say
from kge_torchrec.ranking.search import by_query
from kge_torchrec.training.assembly import build_batches, sides_of
from kge_torchrec.training.run_data import open_store
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import validation_triples
from kge_torchrec.training.state import beats
from kge_torchrec.training.stop_signal import TrainingInterrupted, TrainingStopped
from kge_torchrec.training.trainer import NonFiniteLoss, NonFiniteParameters
from kge_torchrec.tuning.trials import PORTFOLIO, train_trial, with_values

SLOW = "rote"  # rises slowly, so it stays until the last comparison
# By size: the most racers, and the largest work of those that lose, in trainings by the rules.
FIELDS = {"small": (2, 0.2), "base": (4, 0.6), "large": (4, 0.6)}
ONCE = "small"  # this size does not compare the last two again
PROJECTED = 0.15  # share of the last doubling's gain that each further doubling should add
MOST_EPOCHS = 2  # of the winner, in trainings by the rules
PATIENCE = 0.3  # the winner ends when it gained little in this last share of its training
# Work of a step besides its scores: starting operations, looking rows up and updating them.
# On a CPU a step took about 9 ms besides 0.25 ns per element of a score.
STEP_WORK = 3.6e7


@dataclass
class Race:
    """The rules and the results of a race so far, as race.json has them.

    Attributes:
        metric: The metric of the validations.
        epochs: Epochs of each racer after each rung.
        rungs: Work of each rung, in trainings by the rules.
        queries: Ranked per validation; 0 where their number does not bound the noise of the metric.
        on_cuda, world_size: Where the race started; the settings follow from them.
        values: Results of each racer on valid, per finished rung; None if training diverged.
        winner: The winner, once its checkpoint is the run's.
    """

    metric: str
    epochs: dict[str, list[int]]
    rungs: list[float]
    queries: int = 0
    on_cuda: bool = False
    world_size: int = 1
    values: dict[str, list[float | None]] = field(default_factory=dict)
    winner: str | None = None

    @classmethod
    def read(cls, folder: RunFolder) -> Race | None:
        """Return what race.json of a run holds, or None if there is no such file."""
        if not folder.race.is_file():
            return None
        try:
            return cls(**json.loads(folder.race.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{folder.race} is not of this version of the program ({error}); delete it and "
                f"{folder.racers} to race again"
            ) from None

    def run(
        self, train: Callable[[str, int], float | None], save: Callable[[], object]
    ) -> tuple[str, str]:
        """Run the rungs that are left; return the last two racers, the winner first.

        After each rung the worst racer beside ``SLOW`` stops. The last two may train and be
        compared once more, if they are too close.

        Args:
            train: Trains a racer for these epochs in all; returns its result, None if it diverged.
            save: Called after each training.
        """
        left, compared = list(self.epochs), max(2, len(self.epochs) - 1) - 1
        for rung in range(len(self.rungs)):
            for name in left:
                values = self.values.setdefault(name, [])
                if len(values) <= rung:
                    values.append(None if None in values else train(name, self.epochs[name][rung]))
                    save()
            if len(left) > 2:
                left.remove(self.order([name for name in left if name != SLOW], rung)[-1])
            elif rung == compared and not self.is_close(left, rung):
                break
        return self.finalists(left, rung)

    def projected(self, name: str, rung: int) -> float | None:
        """Return what a racer should reach at the end; None if it diverged.

        Settings that rise slowly may end higher: a share of the gain since half the time is added
        for each doubling of the time that is left. A mean rank is not projected.
        """
        *earlier, last = self.values[name][: rung + 1]
        if last is None or not earlier or self.metric == "mr":
            return last
        doublings = math.log2(MOST_EPOCHS / self.rungs[rung])
        return last + PROJECTED * doublings * max(0.0, last - (earlier[-1] or 0.0))

    def order(self, names: Sequence[str], rung: int) -> list[str]:
        """Return racers by their projections after a rung, the best one first; ties keep order."""
        lower = beats(self.metric, 0.0, 1.0)

        def key(name: str) -> float:
            value = self.projected(name, rung)
            return math.inf if value is None else value if lower else -value

        return sorted(names, key=key)

    def is_close(self, names: Sequence[str], rung: int) -> bool:
        """Return whether results or projections of two racers differ by less than their noise."""
        one, other = (self.values[name][rung] for name in names)
        if one is None or other is None:
            return False
        ahead = (self.projected(names[0], rung) or 0.0) - (self.projected(names[1], rung) or 0.0)
        return min(abs(one - other), abs(ahead)) < self._noise(max(one, other))

    def finalists(self, names: Sequence[str], rung: int) -> tuple[str, str]:
        """Return the last two, the winner first; within the noise ``SLOW`` loses."""
        best, other = self.order(names, rung)
        value, second = self.projected(best, rung), self.projected(other, rung)
        noise = self._noise(self.values[best][rung] or 0.0)
        if value is not None and second is not None and abs(value - second) < noise:
            best, other = sorted(names, key=lambda name: name == SLOW)
        return best, other

    def _noise(self, mean: float) -> float:
        """Return the standard error of a share; no values in [0, 1] with this mean vary more."""
        return math.sqrt(mean * (1 - mean) / self.queries) if self.queries else 0.0


def race(config: Config, folder: RunFolder, ranks: Processes) -> Config:
    """Race, or resume the race; return the winner's config.  Collective.

    The winner's checkpoint and metrics become those of the run. Where there is nothing to compare,
    it returns ``config``.

    Raises:
        ConfigError: race.json is not of this version.
        NonFiniteLoss: The training of every setting diverged.
        TrainingStopped, TrainingInterrupted: A signal; the race resumes with the run.
    """
    state = on_first_rank(ranks, lambda: Race.read(folder))
    if config.decided_by is not None:
        on_first_rank(ranks, lambda: _end(folder, state))
        return config
    store = open_store(config, folder.path, ranks, config.run.progress and ranks.is_first)
    if not len(store.valid):
        say("default: rules, because valid has no triples")
        return config
    place = ranks.device.type == "cuda", ranks.world_size
    if state is not None:
        place = state.on_cuda, state.world_size
    configs = racers(config, store, place)
    if state is None:
        works = {name: work_of(chosen, store, ranks) for name, chosen in configs.items()}
        by_rules = config.settled(store.size, *place).train.epochs
        epochs, rungs, share = entered(works, by_rules, config.size)
        if not epochs:
            say("default: rules, because a race takes too long")
            return config
        state = Race(
            config.evaluation.metric,
            epochs,
            rungs,
            queries_of(configs[PORTFOLIO[0]], store),
            *place,
        )
        more = "" if config.size == ONCE else ", or twice that if the last two are close"
        shown = "; ".join(
            f"{name} ({configs[name].model.scorer}) {', '.join(map(str, n))}"
            for name, n in epochs.items()
        )
        say(
            f"race of defaults: the config names no model, so {len(epochs)} settings train for a "
            f"short time and the best one continues. Epochs until each comparison: {shown}. The "
            f"others cost at most {share:.0%} of a training's time{more}. --default rules skips it"
        )
    winner = _winner(state, configs, folder, store, ranks)

    def install() -> None:
        state.winner = winner
        files.write_json(folder.race, asdict(state))
        folder.save_config(configs[winner])
        _end(folder, state)

    on_first_rank(ranks, install)
    return configs[winner]


def racers(config: Config, store: TripleStore, place: tuple[bool, int]) -> dict[str, Config]:
    """Return the config of each setting, with which the run continues if it wins.

    ``place``: whether the race started on CUDA, and on how many ranks.
    """
    epochs = config.settled(store.size, *place).train.epochs
    to_its_end = {
        "train.epochs": MOST_EPOCHS * epochs,
        "evaluation.every": max(1, epochs // 10),
        "evaluation.patience": PATIENCE,
    }
    return {
        name: filled(with_values(config, values_of(name)), to_its_end).settled(store.size, *place)
        for name in PORTFOLIO
    }


def work_of(config: Config, store: TripleStore, ranks: Processes) -> float:
    """Return the work of an epoch of a config without nulls, in elements of scores."""
    negatives, batches = config.negatives, build_batches(config, store, ranks)
    sides = 1 if negatives.examples == "queries" else len(sides_of(negatives.sides))
    count = store.num_entities if negatives.is_full else negatives.drawn("tail")
    scores = float(batches.examples) * sides * count
    return scores * config.model.dim + batches.steps_per_epoch * STEP_WORK


def entered(
    works: Mapping[str, float], epochs: int, size: str
) -> tuple[dict[str, list[int]], list[float], float]:
    """Return the racers for whose race the time suffices, and what the race takes.

    One racer loses after each rung. A race of two has a first rung too, for the projection.

    Args:
        works: The work of an epoch of each setting.
        epochs: The epochs of a training by the rules.
        size: A key of ``FIELDS``.

    Returns:
        The epochs of each racer after each rung (nothing if fewer than two can race); the work of
        each rung; and the most work of all losers, if the last two are not compared again. Work is
        in trainings by the rules.
    """
    whole = next(iter(works.values())) * epochs
    most, limit = FIELDS[size]
    for count in range(min(most, len(works)), 1, -1):
        last = limit / (2 - 2 ** (2 - count))
        rungs = [last / 2**later for later in reversed(range(max(2, count - 1)))]
        if size != ONCE:
            rungs.append(2 * last)
        field = {
            name: [min(MOST_EPOCHS * epochs, max(1, int(whole * rung / work))) for rung in rungs]
            for name, work in [*works.items()][:count]
        }
        losing = range(max(2, count - 1))[1 - count :]
        lost = sum(max(works[name] * field[name][rung] for name in field) for rung in losing)
        if lost / whole <= limit:
            return field, rungs, lost / whole
    return {}, [], 0.0


def queries_of(config: Config, store: TripleStore) -> int:
    """Return the queries that a validation ranks; 0 if its metric is no mean of shares."""
    metric, triples = config.evaluation.metric, validation_triples(config, store)
    if metric == "mr" or metric.startswith("coverage"):
        return 0
    return 2 * len(triples) if cutoff_of(metric) is None else len(by_query(triples)[1])


def _winner(
    state: Race,
    configs: Mapping[str, Config],
    run: RunFolder,
    store: TripleStore,
    ranks: Processes,
) -> str:
    """Train the racers until one wins, and say why."""
    began = time.perf_counter()

    def train(name: str, epochs: int) -> float | None:
        values = {
            "train.epochs": epochs,
            "evaluation.every": 10**9,  # after the last epoch only
            "evaluation.patience": 0,
            "run.trackers.wandb": None,
        }
        try:
            value = train_trial(
                configs[name], RunFolder(run.racers / name), store, values, ranks=ranks
            )
        except (NonFiniteLoss, NonFiniteParameters) as error:
            say(f"race of defaults: {name} diverged: {error}")
            return None
        except (TrainingStopped, TrainingInterrupted) as error:
            raise type(error)(
                f"stopped in the race of defaults; resume with `train --resume {run.path}`."
            ) from error
        many = "s" * (epochs != 1)
        say(f"race of defaults: {name} valid {state.metric} {value:.4f} after {epochs} epoch{many}")
        return value

    def save() -> None:
        on_first_rank(ranks, lambda: files.write_json(run.race, asdict(state)))

    first, second = state.run(train, save)
    rung = len(state.values[first]) - 1
    mine, others = state.values[first][rung], state.values[second][rung]
    if mine is None:
        raise NonFiniteLoss(
            "the training of every setting in the race of defaults diverged; set model.scorer, "
            "loss.name and train.lr yourself"
        )
    ahead = "" if others is None else f", {others:.4f} with {second}"
    if state.order((first, second), rung)[0] != first:
        ahead += ", which is too close to tell them apart"
    say(
        f"race of defaults: {first} ({configs[first].model.scorer}) wins and continues (valid "
        f"{state.metric} {mine:.4f}{ahead}) after {time.perf_counter() - began:.0f} s"
    )
    return first


def _end(folder: RunFolder, state: Race | None) -> None:
    """Move the winner into the run's folder, also after a kill; remove a race without a winner."""
    if state is None or state.winner is None:
        return folder.remove("race", "race.json")
    racer = folder.racers / state.winner
    for name in ("metrics.jsonl", "checkpoints"):
        if (racer / name).exists():
            (racer / name).replace(folder.path / name)
    shutil.rmtree(folder.racers)
