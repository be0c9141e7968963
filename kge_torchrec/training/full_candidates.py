"""Training steps with all entities as candidates, over a row-wise sharded table.

Every rank scores its own rows for all queries of the step:

    gather    owners send the rows of the anchors to every rank; every rank encodes the queries
    forward   score this rank's rows block by block
    loss      reduce the partial statistics of blocks and ranks
    backward  turn the gradients of each block of scores into those of its rows and of the queries
    reduce    sum the gradients of gathered rows and of dense parameters over the ranks

The loss has a closed form over all entities (``full_losses``).  Scores stay in memory between
forward and backward if they fit.  Otherwise they are computed twice.  No rank ever holds the whole
table or the full score matrix.  Rows step as soon as their gradient is complete; gathered rows,
which get gradients from every block, step last.  If a step has several micro-batches, is clipped,
or may be skipped, each rank first sums the gradients of all its rows, which takes as much memory as
the rows.

Every row is a candidate, so every row has a gradient and steps in every step.

Entities with features are scored by their vectors, which every rank sums once per step.  The sums
of gradients are then those of vectors, and become those of rows before the step.

Shapes: n rows on this rank, D elements per row, N entities.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from kge_torchrec.config import TrainConfig
from kge_torchrec.data.batches.queries import QueryBatch
from kge_torchrec.data.features import Features
from kge_torchrec.distributed.processes import reduced
from kge_torchrec.embeddings.backend import EmbeddingBackend, EntityShard
from kge_torchrec.embeddings.feature_rows import EntityVectors, FeatureBags, entity_vectors
from kge_torchrec.embeddings.row_gradients import RowGradients
from kge_torchrec.environment import free_memory, products_in_bf16, rounds_as_it_multiplies
from kge_torchrec.models.full_losses import (
    FullLoss,
    block_bytes_of,
    kept_bytes,
    score_blocks,
)
from kge_torchrec.training.query_pass import FullObjective, QueryPass
from kge_torchrec.training.query_shards import directed
from kge_torchrec.training.step import Step


class FullCandidates(Step):
    """A step that trains batches of queries against all entities.  Collective.

    Args:
        backend: Table, scorer and optimizers.
        loss: The loss in closed form over all entities.
        train: The ``train`` section of the config.
        device: Device of this rank.
        features: Those of the entities, if they have any.
    """

    def __init__(
        self,
        backend: EmbeddingBackend,
        loss: FullLoss,
        train: TrainConfig,
        device: torch.device,
        features: Features | None = None,
    ):
        super().__init__(backend, train, device)
        self._bags = None if features is None else FeatureBags(features, backend.shard())
        self._shard = entity_vectors(backend.shard(), features)
        objective = backend.unwrapped_model.objective
        in_bf16 = objective.precision == torch.bfloat16
        # Otherwise autocast converts whole operands and also rounds scores and gradients.
        self._rounds_products = in_bf16 and device.type == "cpu" and rounds_as_it_multiplies()
        self.full = FullObjective(
            objective,
            loss,
            device,
            _kept_by_all(backend.shard()),
            block_bytes_of(device.type),
            objective.precision != torch.float32 and not self._rounds_products,
        )
        self._sums_rows = train.needs_whole_gradient or features is not None
        self._row_sums: Tensor | None = None  # (n, D) float32, of a step

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Give each rank the whole dense parameters; then set their gradients, over all ranks."""
        rounding = products_in_bf16() if self._rounds_products else nullcontext()
        with rounding, self.backend.dense.gathered():
            full = self.full
            full.scale = 1.0 if self.scale is None else self.scale.value
            full.parameters = [p for p in full.objective.parameters() if p.requires_grad]
            full.sums = [torch.zeros_like(p) for p in full.parameters]
            vectors, self._shard = None, self.backend.shard()
            if self._bags is not None:
                vectors = EntityVectors(self._bags, self._shard)
                self._shard = vectors.shard
            if self._sums_rows:
                rows = self.backend.shard().rows
                self._row_sums = torch.zeros_like(rows, dtype=torch.float32)
            yield
            if vectors is not None:
                assert self._row_sums is not None
                vectors.write_row_gradients(self._row_sums)
                self._shard = self.backend.shard()  # frees the vectors
        self.backend.dense.set_gradients(self.full.sums)

    def forward_backward(self, batches: Iterator[QueryBatch], last: bool) -> Tensor:
        """Run forward and backward of a micro-batch.  Rows step at once where they can."""
        batch, shard = next(batches), self._shard
        if not batch.queries_by_side:
            return torch.zeros((), device=shard.rows.device)
        sides = directed(batch.queries_by_side, self.full.scorer)
        queries = QueryPass(self.full, replace(batch, queries_by_side=tuple(sides)), shard)
        if self._row_sums is None:
            self.backend.step_rows(queries.row_gradients())
        else:
            for rows in queries.row_gradients():  # each row once
                self._row_sums.index_add_(0, rows.ids, rows.grad)
        return queries.loss()

    def scaled_row_gradients(self) -> list[Tensor]:
        assert self._row_sums is not None  # of TrainConfig.needs_whole_gradient
        return [self._row_sums]

    def unscale_rows(self, factor: float | None) -> None:
        assert self._row_sums is not None
        if factor is None:
            self._row_sums = None
        elif factor != 1:
            self._row_sums.mul_(factor)

    def row_gradients(self) -> Tensor:
        assert self._row_sums is not None
        if self.backend.pending is not None and self.backend.pending.frozen is not None:
            self._row_sums[self.backend.pending.frozen] = 0  # does not count in the norm
        return self._row_sums

    def update(self) -> None:
        sums, self._row_sums = self._row_sums, None
        if sums is not None:
            blocks = score_blocks(len(sums), sums.shape[1], self.full.block_bytes)
            ids = torch.arange(len(sums), device=sums.device)
            self.backend.step_rows(
                RowGradients(ids[own.start : own.stop], sums[own.start : own.stop], None, True)
                for own in blocks
            )
        self.backend.optimizer.step()


def _kept_by_all(shard: EntityShard) -> int:
    """Return the size up to which all ranks keep scores, the least of any rank.  Collective."""
    device = shard.rows.device
    kept = torch.tensor(kept_bytes(free_memory(device), *shard.rows.shape), device=device)
    return int(reduced(kept, dist.ReduceOp.MIN))
