"""The pipeline really pipelines, trains every batch, and is not disturbed by validation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from training_runs import config_of, fit, kernels_of_cuda, largest_difference
from worlds import run_world

from kge_torchrec.embeddings.torchrec.collection import CpuFusedTable, DeferredEmbedding, kernel_of


def rank_watches(store: Path, run: Path) -> tuple[bool, str, list[str]]:
    """Return whether the lookup is pipelined, the class of its forward, and the order of events."""
    events, calls = [], []
    distribute, backward = ShardedEmbeddingCollection.input_dist, torch.Tensor.backward

    def watched_distribute(self, ctx, features):
        calls.append(1)
        events.append(f"distribute {len(calls)}")
        return distribute(self, ctx, features)

    def watched_backward(self, *args, **kwargs):
        number = sum(event.startswith("backward") for event in events) + 1
        backward(self, *args, **kwargs)
        events.append(f"backward {number} ends")

    ShardedEmbeddingCollection.input_dist = watched_distribute
    torch.Tensor.backward = watched_backward
    try:
        session = fit(config_of(store, run, train__epochs=1))  # several ranks take it by default
    finally:
        ShardedEmbeddingCollection.input_dist, torch.Tensor.backward = distribute, backward
    modules = session.backend.model.modules()
    (table,) = (m for m in modules if isinstance(m, ShardedEmbeddingCollection))
    return table.is_pipelined, type(table.forward).__name__, events


def test_next_batch_is_distributed_before_the_current_one_ends(store, tmp_path):
    for pipelined, forward, events in run_world(2, rank_watches, store, tmp_path):
        assert pipelined and forward == "PipelinedForward"
        assert Counter(event.split()[0] for event in events) == {"distribute": 5, "backward": 5}
        for batch in range(1, 5):
            ahead = events.index(f"distribute {batch + 1}")
            assert ahead < events.index(f"backward {batch} ends")


@pytest.mark.parametrize(
    "changes, kernel",
    [({}, CpuFusedTable),
     ({"train__optimizer": "rowwise_adagrad"}, BatchedFusedEmbedding),
     ({"train__optimizer": "adagrad", "train__clip__norm": 0.1}, DeferredEmbedding)],
    ids=["cpu", "fbgemm", "fbgemm deferred"],
)  # fmt: skip
def test_one_rank_is_not_pipelined(store, tmp_path, changes, kernel):
    """Checks every kind of table, also that of FBGEMM on GPUs; both modes train the same bits."""
    results = []
    with kernels_of_cuda(kernel is not CpuFusedTable):
        for pipeline in ("sparse_dist", "auto"):
            config = config_of(store, tmp_path / pipeline, train__pipeline=pipeline, **changes)
            results.append(fit(config))
    (table,) = (m for m in results[1].backend.model.modules()
                if isinstance(m, ShardedEmbeddingCollection))  # fmt: skip
    assert not table.is_pipelined and type(kernel_of(results[1].backend.model)) is kernel
    assert largest_difference(results[0].parameters, results[1].parameters) == 0


def test_validation_changes_nothing(store, tmp_path):
    options = {"train__optimizer": "adam", "train__pipeline": "sparse_dist"}
    often = fit(config_of(store, tmp_path / "a", evaluation__every=1, **options))
    never = fit(config_of(store, tmp_path / "b", evaluation__every=0, **options))
    assert largest_difference(often.parameters, never.parameters) == 0
