"""The results of a race of defaults so far, and which settings they let continue.

Settings that rise slowly may end higher. So comparisons use a projection: the last result, and a
share of its gain since half the time for each doubling of the time that is left. Where the results
or projections of the last two differ by less than the noise of the valid triples, they are compared
again. If the projections are too close then, ``SLOW`` loses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.state import beats

SLOW = "rote"  # rises slowly, so it stays until the last comparison
PROJECTED = 0.15  # share of the last doubling's gain that each further doubling should add
MOST_EPOCHS = 2  # of the winner, in trainings by the rules


@dataclass
class Standings:
    """The results of a race so far, as race.json has them.

    Attributes:
        metric: The metric of the validations.
        epochs: Epochs of each racer after each rung.
        rungs: Work of each rung, in trainings by the rules.
        share: Largest share that the losers' work is of a training by the rules, unless the last
            two are compared again.
        on_cuda, world_size: Where the race started; the settings follow from them.
        values: Results of each racer on valid, per finished rung; None if training diverged.
        winner: The winner, once its checkpoint is the run's.
        queries: Ranked per validation; 0 where their number does not bound the noise of the metric.
    """

    metric: str
    epochs: dict[str, tuple[int, ...]]
    rungs: list[float]
    share: float
    on_cuda: bool = False
    world_size: int = 1
    values: dict[str, list[float | None]] = field(default_factory=dict)
    winner: str | None = None
    queries: int = 0

    @classmethod
    def read(cls, folder: RunFolder) -> Standings | None:
        """Return what race.json of a run holds, or None if there is no such file."""
        if not folder.race.is_file():
            return None
        return cls(**json.loads(folder.race.read_text(encoding="utf-8")))

    def order(self, names: Sequence[str]) -> list[str]:
        """Return racers that have finished the same rungs, the best one first; ties keep order."""
        ranked: list[str] = []
        for name in names:
            place = len(ranked)
            while place and self._is_better(name, ranked[place - 1]):
                place -= 1
            ranked.insert(place, name)
        return ranked

    def staying(self, names: Sequence[str], rung: int) -> list[str]:
        """Return the racers that continue after a rung: all but the worst one beside ``SLOW``.

        Results of later rungs, which a resumed race has, do not count.
        """
        *_, worst = self._until(rung).order([name for name in names if name != SLOW])
        return [name for name in names if name != worst]

    def _until(self, rung: int) -> Standings:
        """Return the standings as they were after a rung."""
        return replace(self, values={name: v[: rung + 1] for name, v in self.values.items()})

    def finalists(self, names: Sequence[str]) -> list[str]:
        """Return the last two racers, the one that continues first.

        The better one continues only if it is ahead by at least a standard error. Otherwise
        ``SLOW`` does not continue, or the order of ``names`` decides.
        """
        best, other = self.order(names)
        value, others = self.projected(best), self.projected(other)
        error = self._error(self.values[best][-1] or 0.0)
        if value is None or others is None or abs(value - others) >= error:
            return [best, other]
        return sorted(names, key=lambda name: name == SLOW)

    def tells_apart(self, names: Sequence[str], rung: int) -> bool:
        """Return whether two racers differ by a standard error after a rung.

        Both their results and their projections must. It is also true if one of them diverged, or
        if the noise of the metric is not known.
        """
        known = self._until(rung)
        one, other = (known.values[name][-1] for name in names)
        if one is None or other is None:
            return True
        ahead = (known.projected(names[0]) or 0.0) - (known.projected(names[1]) or 0.0)
        return min(abs(one - other), abs(ahead)) >= self._error(max(one, other))

    def _error(self, mean: float) -> float:
        """Return the largest standard error that a result, between 0 and 1, can have.

        It is that of a share: no values between 0 and 1 with this mean vary more.
        """
        return math.sqrt(mean * (1 - mean) / self.queries) if self.queries else 0.0

    def _is_better(self, name: str, other: str) -> bool:
        mine, others = self.projected(name), self.projected(other)
        return mine is not None and (others is None or beats(self.metric, mine, others))

    def projected(self, name: str) -> float | None:
        """Return what a racer would reach at the end; None if it diverged. A mean rank stays."""
        *earlier, last = self.values[name]
        if last is None or not earlier or self.metric == "mr":
            return last
        doublings = math.log2(MOST_EPOCHS / self.rungs[len(earlier)])
        return last + PROJECTED * doublings * max(0.0, last - (earlier[-1] or 0.0))
