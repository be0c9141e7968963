"""Whether the answers of predict rank as evaluation does, on a run of any size: `... RUN`.

Of some test triples, head and tail are asked for.  The rank of the true answer among the answers
of predict, known ones left out, must be evaluation's filtered rank, optimistic and pessimistic, and
the scores that `score` gives the triples must be those of predict, to the last bit.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import torch

from kge_torchrec import open_run
from kge_torchrec.answers.predictions import find_best
from kge_torchrec.models.scorers import SIDES

BATCH = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    random, wrong = np.random.default_rng(parsed.seed), 0
    with open_run(parsed.run) as run:
        test = np.asarray(run.model.store.test, np.int64)
        triples = test[random.integers(len(test), size=-(-parsed.queries // 2))]
        ranks = run.model.ranks_of(triples, "test", run.config.evaluation)
        for side in SIDES:
            start = time.perf_counter()
            found = answer_ranks(run, triples, side)
            seconds = time.perf_counter() - start
            kinds = ranks.optimistic[side], ranks.pessimistic[side]
            differ = sum(int((x != y).sum()) for x, y in zip(found, kinds, strict=True))
            print(f"{side}: {len(triples):,} queries, {differ} ranks differ, {seconds:.1f} s")
            wrong += differ
    return int(wrong > 0)


def answer_ranks(run, triples: np.ndarray, side: str) -> tuple[np.ndarray, np.ndarray]:
    """Optimistic and pessimistic ranks (T,) of the true answers among those of predict."""
    model, column = run.model, 0 if side == "head" else 2
    index, found = run.model.store.filter_index(), []
    for first in range(0, len(triples), BATCH):
        part = triples[first : first + BATCH]
        scores, ids = (x.numpy() for x in find_best(model, side, torch.from_numpy(part), 10**9))
        true = model.scores(torch.from_numpy(part), side).numpy()[:, None]
        own = ids == part[:, column, None]
        if not np.array_equal(scores[own][:, None], true):
            sys.exit(f"{side}: score and predict give other scores")
        others = ~index.contains(side, part[:, 2 - column], part[:, 1], ids)
        better, equal = ((others & compared).sum(1) for compared in (scores > true, scores >= true))
        found.append((better + 1, equal + 1))
    optimistic, pessimistic = (np.concatenate(kind) for kind in zip(*found, strict=True))
    return optimistic, pessimistic


if __name__ == "__main__":
    sys.exit(main())
