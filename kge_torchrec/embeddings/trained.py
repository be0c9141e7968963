"""A trained model to read: rows and scorer alone, as ranking, prediction and export need them.

No optimizer, no lookup, no TorchRec, hence no plan either: it takes what any backend wrote into a
checkpoint, on any number of ranks, and is there a second after the program has started.
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

_SCORER = "objective.scorer."  # where backends keep the scorer, in the names of a checkpoint


class _Whole:
    """Dense parameters that every rank has."""

    gathered = staticmethod(nullcontext)


class TrainedModel:
    """Rows dealt evenly to the ranks and the whole scorer on each; zeros until they are loaded.

    Has the parts of an ``EmbeddingBackend`` that read.  Everything is float32.
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
        """This rank's rows."""
        return self._shard

    def parameter_state(self) -> dict[str, Any]:
        """The parameters by their names in a checkpoint; loading into them loads the model."""
        return {ENTITY_WEIGHT: self._table(), **self.scorer.state_dict(prefix=_SCORER)}

    def load_parameter_state(self, state: dict[str, Any]) -> None:
        """Takes back what ``parameter_state`` gave; tensors were filled in place."""
        dense = {k.removeprefix(_SCORER): v for k, v in state.items() if k != ENTITY_WEIGHT}
        self.scorer.load_state_dict(dense)

    def _table(self) -> Tensor:
        shard = self._shard
        if self._processes.world_size == 1:
            return shard.rows
        # Loads most of torch.distributed, and with the first DTensor torch's compiler.
        from kge_torchrec.embeddings.chunks import row_sharded

        return row_sharded(shard.rows, shard.first_row, shard.num_entities, self._processes.group)
