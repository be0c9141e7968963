"""Find the entity rows that differ from an earlier run, to export only those.

Extending a graph keeps the ids of its entities. So the rows of a run and of the run it was extended
from are compared by id, bit for bit. Rows of new entities count as changed.

Shapes: N entities, D elements per entity row, M changed rows, m rows per chunk.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kge_torchrec.data.store import TripleStore, Vocabulary
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.errors import ExportError
from kge_torchrec.export.description import ExportFolder
from kge_torchrec.training.checkpoint_index import Damaged
from kge_torchrec.training.checkpoints import BEST, Checkpoints
from kge_torchrec.training.growth import entity_rows
from kge_torchrec.training.run_folder import RunFolder

CHANGED_IDS = "ids.npy"  # (M,) int64 entity ids of the rows in an export of changes


def write_ids(folder: ExportFolder, changed: np.ndarray) -> None:
    """Write the ids (M,) of the changed entities, in the order of the exported rows and labels.

    Args:
        folder: The export.
        changed: (N,) bool.
    """
    out = io.BytesIO()
    np.save(out, np.flatnonzero(changed))
    folder.append(CHANGED_IDS, [out.getbuffer()])


@dataclass(frozen=True)
class Earlier:
    """The run whose rows the readers of an export of changes already have."""

    checkpoint: Path  # the best, or else the newest, as ``export`` uses
    entities: int

    @classmethod
    def open(cls, path: str | Path, entities: Vocabulary, ranks: Processes) -> Earlier:
        """Open an earlier run. Collective.

        Args:
            path: Folder of the earlier run.
            entities: Entity labels of the run to export.
            ranks: The ranks.

        Raises:
            ExportError: An entity of the earlier run has another id in this run.
            ConfigError: There is no such run.
            CheckpointError: The run has no checkpoint.
        """
        folder = RunFolder(path)
        data = on_first_rank(ranks, lambda: folder.load_config().data.path)
        checkpoint = Checkpoints(folder.checkpoints, ranks).find(BEST)

        def same_ids() -> int:
            store = TripleStore.open(folder.store_of(data))
            old = store.entities.array
            if not entities.array[: len(old)].equals(old):
                raise ExportError(
                    f"the entities of {path} have different ids than in this run, so their rows "
                    "cannot be compared; name the run that this run was extended from"
                )
            return len(old)

        return cls(checkpoint, on_first_rank(ranks, same_ids))

    def changed(
        self, chunks: Iterable[tuple[int, np.ndarray | None]], ranks: Processes
    ) -> np.ndarray:
        """Return which entities have a different or a new row: (N,) bool. Collective.

        Args:
            chunks: First id and rows (m, D) of consecutive chunks. The rows are None except on rank
                0.
            ranks: The ranks.

        Raises:
            ExportError: The checkpoint has another width or cannot be read.
        """
        parts = [on_first_rank(ranks, partial(self._changed, *chunk)) for chunk in chunks]
        return np.concatenate(parts)

    def _changed(self, first: int, rows: np.ndarray | None) -> np.ndarray:
        assert rows is not None  # true on rank 0, where this runs
        changed = np.ones(len(rows), bool)
        stop = min(first + len(rows), self.entities)
        if first >= stop:
            return changed
        try:
            before = torch.cat(list(entity_rows(self.checkpoint, stop, first))).float().numpy()
        except (OSError, Damaged) as error:
            raise ExportError(f"{self.checkpoint} cannot be read: {error}") from error
        if before.shape[1] != rows.shape[1]:
            raise ExportError(
                f"{self.checkpoint} has dim {before.shape[1]}, this run "
                f"{rows.shape[1]}: export the whole run"
            )
        same = before.view(np.int32) == rows[: stop - first].view(np.int32)
        changed[: stop - first] = ~same.all(1)
        return changed

    def describe(self, changed: np.ndarray) -> dict[str, Any]:
        """Return the section of model.json about an export of changed rows."""
        return {
            "since": {
                "run": str(self.checkpoint.parent.parent),
                "checkpoint": self.checkpoint.name,
                "entities": self.entities,
            },
            "ids": CHANGED_IDS,
            "rows": int(changed.sum()),
            "new": len(changed) - self.entities,
        }
