"""Micro-batches: a step has the examples of one piece, and reduces once; test_exact trains so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import config_of, fit, small_store
from worlds import run_world

from kge_torchrec.data import SIDES
from kge_torchrec.data.batches import BatchPlan, Delivery
from kge_torchrec.data.batches.queries import QueryBatches, TripleQueries
from kge_torchrec.data.batches.triples import TripleBatches
from kge_torchrec.data.negatives import UniformSampler
from kge_torchrec.training.trainer import Trainer


def test_micro_batches_drop_different_elements():
    triples = np.tile(np.arange(6)[:, None], 3)
    batches = QueryBatches(TripleQueries(triples, ("tail",)), BatchPlan(6, accumulation=3))
    seeds = [batch.seed for batch in batches.epoch(0)]
    (whole_batch,) = QueryBatches(TripleQueries(triples, ("tail",)), BatchPlan(6)).epoch(0)
    assert len(set(seeds)) == 3 and seeds[0] == whole_batch.seed


def rank_counts_reductions(store: Path, folder: Path) -> tuple[int, int]:
    """All-reduces of dense gradients of a step in one piece, and of one in four."""
    results = []
    for parts in (1, 4):
        calls = []

        def count(bucket_state, bucket, calls=calls):
            calls.append(1)
            work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        def watch(loop: Trainer, count=count) -> None:
            loop.session.backend.model.register_comm_hook(None, count)
            loop._save = lambda ends=False: None

        changes = {"train__accumulation": parts, "entities__engine": "handrolled"}
        fit(config_of(store, folder / str(parts), **changes), watch)
        results.append(len(calls))
    return results[0], results[1]


def test_dense_gradients_are_reduced_once_per_step(tmp_path):
    for whole, in_parts in run_world(2, rank_counts_reductions, small_store(), tmp_path):
        assert whole == in_parts == 10


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 17),
    chunk_size=st.integers(0, 6),
    ranks=st.integers(1, 3),
    parts=st.integers(1, 5),
)
@settings(max_examples=40)
def test_micro_batches_contain_the_examples_of_the_whole_step(
    size, batch_size, chunk_size, ranks, parts
):
    triples = np.stack([np.arange(size), np.arange(size) % 3, np.arange(size)[::-1]], 1)

    def step_of(ranks: int, parts: int) -> list[dict]:
        """Return by step the weight, relation and negatives of each head."""
        steps = [{} for _ in range(-(-size // batch_size))]
        for rank in range(ranks):
            drawn = UniformSampler(size), dict.fromkeys(SIDES, 4), chunk_size
            plan = BatchPlan(batch_size, 7, SIDES, *drawn, accumulation=parts)
            builder = TripleBatches(triples, plan, Delivery(rank, ranks))
            batches = list(builder.epoch(1))
            assert len(batches) == parts * len(steps)
            for number, batch in enumerate(batches):
                steps[number // parts].update(contents(batch, ranks))
        return steps

    assert step_of(ranks, parts) == step_of(1, 1)


def contents(batch, ranks: int) -> dict:
    chunks, width = batch.relation.shape
    ids = batch.ids[batch.entities]
    heads = ids[: chunks * width].view(chunks, width)
    negatives = ids[2 * chunks * width :].view(2, chunks, -1) if chunks else None
    return {
        int(heads[c, i]): (
            round(float(batch.weight[c, i]) / ranks, 6),
            int(batch.relation[c, i]),
            negatives[:, c].tolist(),
        )
        for c in range(chunks)
        for i in range(width)
        if batch.weight[c, i] > 0
    }
