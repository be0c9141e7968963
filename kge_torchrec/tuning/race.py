"""The race of defaults: short trainings of several settings on one graph; the best one continues.

A config that says nothing of training is completed by a race of the configs in
``configs/portfolio`` (successive halving, Jamieson and Talwalkar 2016). After each comparison the
worst setting stops, and the others train for twice the time (``standings`` has the rules). The
better one of the last two continues from its checkpoint, so only the time of the others is lost.

The time of a setting is computed from counts (``work_of``) and never measured, so a second start
chooses the same. Each setting trains in ``race/NAME`` of the run's folder, and ``race.json`` has
the results so far, so a killed race resumes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from kge_torchrec import files
from kge_torchrec.config import Config
from kge_torchrec.config.parser import values_of
from kge_torchrec.config.sizing import filled
from kge_torchrec.config.training import cutoff_of
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.lines import say
from kge_torchrec.ranking.recommendation import users_of
from kge_torchrec.training.assembly import build_batches, sides_of
from kge_torchrec.training.run_data import open_store
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.runs import Extras, train_run
from kge_torchrec.training.session import validation_triples
from kge_torchrec.training.stop_signal import TrainingInterrupted, TrainingStopped
from kge_torchrec.training.trainer import NonFiniteLoss, NonFiniteParameters
from kge_torchrec.tuning.space import with_values
from kge_torchrec.tuning.standings import MOST_EPOCHS, Standings

# Most racers by size, and the largest work of those that lose, in trainings by the rules. The first
# ones of the portfolio race where the time does not suffice for all.
PORTFOLIO = ("softmax_n3", "rote", "softmax_weak_n3", "kvsall_adam")
FIELDS = {"small": (2, 0.2), "base": (4, 0.6), "large": (4, 0.6)}
ONCE = "small"  # this size does not compare the last two again
# The winner trains until it gains less in this last share of its training than
# ``state.LEAST_GAIN``, for ``MOST_EPOCHS`` trainings by the rules at most.
PATIENCE = 0.3
_NEVER = 10**9  # epochs between validations: only the last epoch is validated


@dataclass(frozen=True)
class Racer:
    """A setting in the race.

    Attributes:
        name: Its name in ``configs/portfolio``.
        config: The config with which the run continues if it wins.
        work: Of an epoch, see ``work_of``.
        epochs: After each rung.
    """

    name: str
    config: Config
    work: float
    epochs: tuple[int, ...] = ()

    def on_rungs(self, works: Sequence[float]) -> Racer:
        """Return the racer with its epochs after rungs of these works."""
        most = self.config.train.epochs
        epochs = tuple(min(most, max(1, int(work / self.work))) for work in works)
        return replace(self, epochs=epochs)


def race(config: Config, folder: RunFolder, ranks: Processes) -> Config:
    """Race the settings of the portfolio on the graph of a run, or resume the race.  Collective.

    The winner's checkpoint and metrics become those of the run.

    Args:
        config: The run's config, which says nothing of training.
        folder: The run's folder.
        ranks: The ranks of the run.

    Returns:
        The config of the winner, or ``config`` if there is nothing to compare.

    Raises:
        NonFiniteLoss, NonFiniteParameters: The training of every setting diverged.
        TrainingStopped, TrainingInterrupted: A signal; the race resumes with the run.
    """
    standings = on_first_rank(ranks, lambda: Standings.read(folder))
    if config.decided_by is not None:
        on_first_rank(ranks, lambda: _end(folder, standings))
        return config
    store = open_store(config, folder.path, ranks, config.run.progress and ranks.is_first)
    place = ranks.device.type == "cuda", ranks.world_size
    if standings is not None:
        place = standings.on_cuda, standings.world_size
    racers, rungs, share = entered(config, store, ranks, place)
    if not len(store.valid) or len(racers) < 2:
        why = "a race takes too long" if len(store.valid) else "valid has no triples"
        say(f"default: rules, because {why}")
        return config
    if standings is None:
        epochs = {racer.name: racer.epochs for racer in racers}
        standings = Standings(config.evaluation.metric, epochs, rungs, share, *place)
        standings.queries = _queries(racers[0].config, store)
    track = _Track(config, folder, store, ranks)
    say(_announced(standings, config.size != ONCE))
    winner = _winner(racers, standings, track)
    standings.winner = winner.name

    def install() -> None:
        _save(folder, standings)
        folder.save_config(winner.config)
        _move_in(folder, winner.name)

    on_first_rank(ranks, install)
    return winner.config


def entered(
    config: Config, store: TripleStore, ranks: Processes, place: tuple[bool, int]
) -> tuple[list[Racer], list[float], float]:
    """Return the settings for whose race the time suffices, and what the race takes.

    Args:
        config: The run's config, which says nothing of training.
        store: The triples.
        ranks: The ranks of the run.
        place: Whether the race started on CUDA, and on how many ranks.

    Returns:
        The racers, at least one; the work of each rung; and the most work of all losers. Work is
        in trainings by the rules.
    """
    epochs = config.settled(store.size, *place).train.epochs
    to_its_end = {
        "train.epochs": MOST_EPOCHS * epochs,
        "evaluation.every": max(1, epochs // 10),
        "evaluation.patience": PATIENCE,
    }
    racers = []
    for name in PORTFOLIO:
        chosen = filled(with_values(config, values_of(name)), to_its_end)
        chosen = chosen.settled(store.size, *place)
        racers.append(Racer(name, chosen, work_of(chosen, store, ranks)))
    whole = racers[0].work * epochs
    most, limit = FIELDS[config.size]
    for count in range(most, 1, -1):
        rungs = _rungs(count, limit)
        entering = [racer.on_rungs([whole * rung for rung in rungs]) for racer in racers[:count]]
        share = _most_lost(entering) / whole
        if share <= limit and config.size != ONCE:
            rungs.append(2 * rungs[-1])
            entering = [racer.on_rungs([whole * rung for rung in rungs]) for racer in entering]
        if share <= limit:
            return entering, rungs, share
    return racers[:1], [], 0.0


def _rungs(count: int, limit: float) -> list[float]:
    """Return the work of each rung, if all losers may take ``limit`` together.

    One racer loses after each rung. A race of two has a first rung too, for the projection.
    """
    last = limit / (2 - 2 ** (2 - count))
    return [last / 2**later for later in reversed(range(max(2, count - 1)))]


def _queries(config: Config, store: TripleStore) -> int:
    """Return the queries that a validation ranks; 0 if its metric is no mean of shares."""
    metric, triples = config.evaluation.metric, validation_triples(config, store)
    if metric == "mr" or metric.startswith("coverage"):
        return 0
    return 2 * len(triples) if cutoff_of(metric) is None else len(users_of(triples)[1])


def _most_lost(racers: Sequence[Racer]) -> float:
    """Return the most work that losers can take: one of them after each rung."""
    rungs = range(len(racers[0].epochs))[1 - len(racers) :]
    return sum(max(racer.work * racer.epochs[rung] for racer in racers) for rung in rungs)


# Work of a step besides its scores: starting operations, looking rows up and updating them.
# On a CPU a step took about 9 ms besides 0.25 ns per element of a score.
_STEP = 3.6e7


def work_of(config: Config, store: TripleStore, ranks: Processes) -> float:
    """Return the work of an epoch in elements of scores.

    Args:
        config: A config without nulls.
        store: The triples.
        ranks: The ranks of the run.
    """
    negatives, batches = config.negatives, build_batches(config, store, ranks)
    sides = 1 if negatives.examples == "queries" else len(sides_of(negatives.sides))
    count = store.num_entities if negatives.is_full else negatives.drawn("tail")
    scores = float(batches.examples) * sides * count
    return scores * config.model.dim + batches.steps_per_epoch * _STEP


@dataclass(frozen=True)
class _Track:
    """Where racers train."""

    config: Config
    folder: RunFolder
    store: TripleStore
    ranks: Processes

    def run(self, racer: Racer, rung: int) -> float | None:
        """Train a racer until the end of a rung; return its result, or None if it diverged."""
        folder = RunFolder(self.folder.racers / racer.name)
        epochs = racer.epochs[rung]
        every = {**racer.config.checkpoint.every, "epochs": 0}
        options = {**racer.config.checkpoint.options, "copy_to": None}
        config = replace(
            racer.config,
            data=replace(racer.config.data, path=str(self.store.path)),
            train=replace(racer.config.train, epochs=epochs),
            evaluation=replace(racer.config.evaluation, every=_NEVER, patience=0),
            checkpoint=replace(racer.config.checkpoint, keep=1, every=every, options=options),
            run=replace(
                racer.config.run,
                dir=str(folder.path),
                resume="never",
                progress=False,
                trackers={"tensorboard": False},
            ),
        )

        try:
            resumed = folder if on_first_rank(self.ranks, lambda: folder.holds_run) else None
            train_run(config, Extras(rank_test=False, is_trial=True), resumes=resumed)
        except (NonFiniteLoss, NonFiniteParameters) as error:
            say(f"race of defaults: {racer.name} diverged: {error}")
            return None
        except (TrainingStopped, TrainingInterrupted) as error:
            raise type(error)(
                f"stopped in the race of defaults; resume with `train --resume {self.folder.path}`."
            ) from error
        return on_first_rank(self.ranks, lambda: folder.load_results()["valid"]["best"])


def _winner(racers: Sequence[Racer], standings: Standings, track: _Track) -> Racer:
    """Run the rungs that are left; return the racer that is left at the end.

    The last rung of a race that may compare again runs only if the results before it are too close.
    """
    compared = len(standings.rungs) - (1 if track.config.size == ONCE else 2)
    left = {racer.name: racer for racer in racers}
    for rung in range(len(standings.rungs)):
        for racer in left.values():
            values = standings.values.setdefault(racer.name, [])
            if len(values) <= rung:
                values.append(None if None in values else track.run(racer, rung))
                on_first_rank(track.ranks, lambda: _save(track.folder, standings))
                _report(track, racer, standings)
        if len(left) > 2:
            left = {name: left[name] for name in standings.staying(list(left), rung)}
        elif rung == compared and standings.tells_apart(list(left), rung):
            break
    first, second = standings.finalists(list(left))
    if standings.values[first][-1] is None:
        raise NonFiniteLoss(
            "the training of every setting in the race of defaults diverged; set model.scorer, "
            "loss.name and train.lr yourself"
        )
    _report_winner(track, first, second, standings)
    return left[first]


def _save(folder: RunFolder, standings: Standings) -> None:
    files.write_json(folder.race, asdict(standings))


def _end(folder: RunFolder, standings: Standings | None) -> None:
    """End a race that was killed while the winner moved in, or whose config now says more."""
    if standings is not None and standings.winner is not None:
        return _move_in(folder, standings.winner)
    folder.remove(["race", "race.json"])


def _move_in(folder: RunFolder, winner: str) -> None:
    """Move the winner's checkpoint and metrics into the run's folder; a second call finishes it."""
    racer = folder.racers / winner
    for name in ("metrics.jsonl", "checkpoints"):
        if (racer / name).exists():
            (racer / name).replace(folder.path / name)
    shutil.rmtree(folder.racers)


def _announced(standings: Standings, again: bool) -> str:
    rungs = [f"{name} {', '.join(map(str, n))}" for name, n in standings.epochs.items()]
    more = ", and as much again if the last two are too close then" if again else ""
    return (
        f"race of defaults (default: rules skips it): epochs until each comparison: "
        f"{'; '.join(rungs)}. It adds at most {standings.share:.0%} of a training's time{more}"
    )


def _report(track: _Track, racer: Racer, standings: Standings) -> None:
    values = standings.values[racer.name]
    if values[-1] is not None:
        epochs = racer.epochs[len(values) - 1]
        say(
            f"race of defaults: {racer.name} valid {standings.metric} {values[-1]:.4f} after "
            f"{epochs} epoch{'s' * (epochs != 1)}",
        )


def _report_winner(track: _Track, first: str, second: str, standings: Standings) -> None:
    mine, others = standings.values[first][-1], standings.values[second][-1]
    ahead = "" if others is None else f", {others:.4f} with {second}"
    if standings.order((first, second))[0] != first:
        ahead += ", which is too close to tell them apart"
    say(
        f"race of defaults: {first} continues (valid {standings.metric} {mine:.4f}{ahead})",
    )
