"""A trained model for reading: the rows and the scorer, for ranking, prediction and export.

The model has no optimizer, no lookup and no sharding plan, and does not load TorchRec, so it is
ready about a second after the program starts.  It loads checkpoints of any backend and any number
of ranks.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor

from kge_torchrec.config import ModelConfig
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.embeddings.backend import ENTITY_WEIGHT, EntityShard
from kge_torchrec.embeddings.init import zeros_on_huge_pages
from kge_torchrec.models.scorers import build_scorer

_SCORER = "objective.scorer."  # prefix of the scorer's parameters in a checkpoint


class _Whole:
    """Dense parameters that are replicated on every rank."""

    gathered = staticmethod(nullcontext)


class TrainedModel:
    """Rows split evenly over the ranks, and the whole scorer on each rank, all in float32.

    It has the reading methods of ``EmbeddingBackend``.  The table is zero until a checkpoint is
    loaded.
    """

    def __init__(
        self, config: ModelConfig, num_entities: int, num_relations: int, processes: Processes
    ):
        self._processes, rank = processes, processes.rank
        start, stop = (num_entities * r // processes.world_size for r in (rank, rank + 1))
        rows = zeros_on_huge_pages(stop - start, config.dim, device=processes.device)
        self._shard = EntityShard(rows, start, num_entities)
        self.scorer = build_scorer(config, num_relations).to(processes.device)
        self.dense = _Whole()

    def shard(self) -> EntityShard:
        """Return this rank's rows."""
        return self._shard

    def parameter_state(self) -> dict[str, Any]:
        """Return the parameters by their names in a checkpoint."""
        return {ENTITY_WEIGHT: self._table(), **self.scorer.state_dict(prefix=_SCORER)}

    def load_parameter_state(self, state: dict[str, Any]) -> None:
        """Load the result of ``parameter_state`` after its tensors were filled in place."""
        dense = {k.removeprefix(_SCORER): v for k, v in state.items() if k != ENTITY_WEIGHT}
        self.scorer.load_state_dict(dense)

    def _table(self) -> Tensor:
        shard = self._shard
        if self._processes.world_size == 1:
            return shard.rows
        # Imported late: it loads most of torch.distributed and, with the first DTensor, torch's
        # compiler.
        from kge_torchrec.embeddings.chunks import row_sharded

        return row_sharded(shard.rows, shard.first_row, shard.num_entities, self._processes.group)
