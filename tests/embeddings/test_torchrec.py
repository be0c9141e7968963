"""What the package needs of TorchRec beyond its public names: each case says what would break."""

from __future__ import annotations

import inspect
import re
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import BaseRwEmbeddingSharding, RwSparseFeaturesDist
from worlds import run_world
from worlds_table import own_rows, sharded_table

from kge_torchrec.embeddings.optimizers import make_optimizer
from kge_torchrec.embeddings.torchrec import collection, sharder

PRIVATE = {
    "_create_embedding_kernel": (
        GroupedEmbeddingsLookup,
        "self._create_embedding_kernel(config, pg, device",
        "TorchRec's lookup would make FBGEMM's kernel, which has no Adam on CPUs",
    ),
    "_grouped_embedding_configs": (
        BaseRwEmbeddingSharding,
        "self._grouped_embedding_configs",
        "create_lookup has no description of the table",
    ),
    "_pg": (BaseRwEmbeddingSharding, "self._pg", "the lookup has no group of ranks"),
    "_device": (BaseRwEmbeddingSharding, "self._device", "the table has no device"),
    "_env": (BaseRwEmbeddingSharding, "self._env", "a single rank would exchange with itself"),
    "_lookups": (
        ShardedEmbeddingCollection,
        "self._lookups",
        "rows and states of the kernel are out of reach: modules() does not list it",
    ),
    "_optim": (
        BatchedFusedEmbedding,
        "return self._optim",
        "gradients that FBGEMM's table keeps would never step",
    ),
    "_dmp_wrapped_module": (
        DistributedModelParallel,
        "self._dmp_wrapped_module",
        "DDP and FSDP could not wrap the dense parameters",
    ),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_private_names_of_torchrec_are_there(name):
    kind, use, breaks = PRIVATE[name]
    assert use in inspect.getsource(kind), f"{kind.__name__}.{name} has changed: {breaks}"


def test_no_other_private_names_are_used():
    """Ours begin with an underscore as well, so each class tells them apart."""
    ours = {"_kernel", "_weight", "_optimizer", "_shard", "_table"}
    for module in (sharder, collection):
        source = inspect.getsource(module)
        used = {word for word in _attributes(source) if not word.startswith("__")}
        assert used - ours <= PRIVATE.keys()


def _attributes(source: str) -> set[str]:
    return set(re.findall(r"\b(?:self|super\(\)|collection|kernel)\.(_\w+)", source))


def rank_looks_up() -> tuple[list[str], torch.Tensor]:
    """Return what a lookup and its backward run of TorchRec, and the rows."""
    calls: list[str] = []

    def watch(kind: type, method: str):
        original = getattr(kind, method)

        def watched(self, *args, **kwargs):
            calls.append(f"{kind.__name__}.{method}")
            return original(self, *args, **kwargs)

        return patch.object(kind, method, watched)

    model = sharded_table(10, 8, make_optimizer("adam"), torch.arange(80.0).view(10, 8))
    kinds = [
        (ShardedEmbeddingCollection, "input_dist"),
        (RwSparseFeaturesDist, "forward"),
        (ShardedEmbeddingCollection, "compute_and_output_dist"),
        (GroupedEmbeddingsLookup, "forward"),
        (collection.CpuFusedTable, "forward"),
        (sharder.RwSequenceEmbeddingDist, "forward"),
    ]
    with ExitStack() as held:
        for kind in kinds:
            held.enter_context(watch(*kind))
        rows = model(torch.tensor([1, 4, 9]))
        rows.sum().backward()
    assert len(own_rows(model).gradients) == 1
    return calls, rows.detach()


def test_lookups_on_cpus_are_torchrecs():
    """Its own input distribution, lookup and output distribution, with our kernel inside."""
    for calls, rows in run_world(2, rank_looks_up):
        assert calls == [
            "ShardedEmbeddingCollection.input_dist",
            "RwSparseFeaturesDist.forward",
            "ShardedEmbeddingCollection.compute_and_output_dist",
            "GroupedEmbeddingsLookup.forward",
            "CpuFusedTable.forward",
            "RwSequenceEmbeddingDist.forward",
        ]
        assert rows[:, 0].tolist() == [8, 32, 72]


def test_no_forward_of_a_sharded_module_is_overridden():
    for kind in (sharder._EntityCollection, sharder._Lookup):
        assert "forward" not in vars(kind)
    assert {*vars(sharder._RowWiseSharding)} >= {"create_lookup", "create_input_dist"}
    assert issubclass(sharder._RowWiseSharding, RwSequenceEmbeddingSharding)
