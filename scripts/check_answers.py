"""Check that predict orders answers as evaluation ranks them: check_answers.py RUN.

The script queries head and tail of some test triples. The rank of the true answer among the new
answers of predict must equal the filtered rank of evaluation, optimistic and pessimistic. The
scores of the verbs score and predict must be equal bit for bit.
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
            answered = answer_ranks(run, triples, side)
            seconds = time.perf_counter() - start
            kinds = ranks.optimistic[side], ranks.pessimistic[side]
            differ = sum(int((x != y).sum()) for x, y in zip(answered, kinds, strict=True))
            print(f"{side}: {len(triples):,} queries, {differ} ranks differ, {seconds:.1f} s")
            wrong += differ
    return int(wrong > 0)


def answer_ranks(run, triples: np.ndarray, side: str) -> tuple[np.ndarray, np.ndarray]:
    """Return optimistic and pessimistic ranks (T,) of the true answers in predict's order."""
    model, column = run.model, 0 if side == "head" else 2
    index, ranks = run.model.store.filter_index(), []
    for first in range(0, len(triples), BATCH):
        part = triples[first : first + BATCH]
        scores, ids = (x.numpy() for x in find_best(model, side, torch.from_numpy(part), 10**9))
        true = model.scores(torch.from_numpy(part), side).numpy()[:, None]
        own = ids == part[:, column, None]
        if not np.array_equal(scores[own][:, None], true):
            sys.exit(f"{side}: score and predict give different scores")
        others = ~index.contains(side, part[:, 2 - column], part[:, 1], ids)
        better, equal = ((others & compared).sum(1) for compared in (scores > true, scores >= true))
        ranks.append((better + 1, equal + 1))
    optimistic, pessimistic = (np.concatenate(kind) for kind in zip(*ranks, strict=True))
    return optimistic, pessimistic


if __name__ == "__main__":
    sys.exit(main())
