"""A program of torch.export that scores triples with PyTorch alone, without this package.

Shapes: N entities, D elements per entity row, n triples.
"""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch import Tensor, nn

from kge_torchrec.export.description import ENTITIES, RELATIONS
from kge_torchrec.export.table_files import write_labels
from kge_torchrec.models.scorers import Scorer
from kge_torchrec.trained_model import TrainedModel

PROGRAM = "scores.pt2"


class TripleScores(nn.Module):
    """Scores triples of ids: (n,), (n,), (n,) int64 -> (n,) float32.

    With reciprocal relations the ids of inverses follow those of relations.
    """

    def __init__(self, scorer: Scorer, rows: Tensor):
        super().__init__()
        self.scorer = scorer
        self.entities = nn.Parameter(rows, requires_grad=False)

    def forward(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        anchor, target = self.entities[head], self.entities[tail]
        return self.scorer.score(anchor, relation, target, "tail")


def write_program(folder: Path, model: TrainedModel) -> None:
    """Write scores.pt2, for any number of triples, and the labels.

    The model is in evaluation mode, and this process has all of its rows.
    """
    for parameter in model.scorer.parameters():
        parameter.requires_grad_(False)
    module, ids = TripleScores(model.scorer, model.shard.rows).eval(), torch.zeros(3).long()
    count = {0: torch.export.Dim("triples", min=1)}
    program = torch.export.export(
        module, (ids, ids.clone(), ids.clone()), dynamic_shapes=(count, count, count)
    )
    # torch does not write to the file: on a full disk its error lacks the reason, and its C++ code
    # can end the process.
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    (folder / PROGRAM).write_bytes(buffer.getbuffer())
    write_labels(folder / ENTITIES, model.entity_labels)
    write_labels(folder / RELATIONS, model.relation_labels)
