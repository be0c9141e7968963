"""Where the time of one training step goes, measured with the parts run one after another."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict

PARTS = ("data", "distribute", "lookup", "score", "backward", "update")


def split_of_a_step(session, batches, steps: int) -> dict[str, float]:
    """Median milliseconds of data, distribute, lookup, score, backward, update.

    The table's update happens inside backward; it is timed there and taken out of backward, so
    that ``update`` is table and dense parameters together.
    """
    from torchrec.distributed.embedding import ShardedEmbeddingCollection

    from kge_torchrec.data.batches import ENTITY

    engine, clock = session.engine, time.perf_counter
    (table,) = (m for m in engine.model.modules() if isinstance(m, ShardedEmbeddingCollection))
    kernel = table._lookups[0]._emb_modules[0].emb_module
    objective = next(m for m in engine.model.modules() if type(m).__name__ == "Objective")
    times: dict[str, list[float]] = defaultdict(list)
    inside = _timed_update(kernel)
    stream = batches.epoch(999)
    for _ in range(steps):
        t0 = clock()
        batch = next(stream)
        t1 = clock()
        engine.optimizer.zero_grad()
        context = table.create_context()
        distributed = table.input_dist(context, batch.ids).wait().wait()
        t2 = clock()
        found = table.compute_and_output_dist(context, distributed).wait()
        rows = found[ENTITY].values()
        t3 = clock()
        loss = objective(rows, batch)
        t4 = clock()
        inside.clear()
        loss.backward()
        t5 = clock()
        engine.optimizer.step()
        t6 = clock()
        update = sum(inside)
        marks = (t1 - t0, t2 - t1, t3 - t2, t4 - t3, t5 - t4 - update, update + t6 - t5)
        for part, seconds in zip(PARTS, marks, strict=True):
            times[part].append(seconds * 1e3)
    del kernel.update  # the wrapper: the method of the class is back
    return {part: statistics.median(times[part]) for part in PARTS}


def _timed_update(kernel) -> list[float]:
    """Wraps the table's update; returns the list that its seconds go to."""
    inside: list[float] = []
    update = kernel.update

    def timed(*args, **kwargs):
        start = time.perf_counter()
        update(*args, **kwargs)
        inside.append(time.perf_counter() - start)

    kernel.update = timed
    return inside
