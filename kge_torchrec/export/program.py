"""A model as one file that PyTorch alone can run: a program of torch.export.

Shapes: n triples, N entities, D elements per entity row.
"""

from __future__ import annotations

import io

import torch
from torch import Tensor, nn

from kge_torchrec.export.description import ENTITIES, RELATIONS, ExportFolder
from kge_torchrec.export.foreign import Contents, ForeignFormat
from kge_torchrec.export.text import label_lines
from kge_torchrec.models.scorers import Scorer
from kge_torchrec.pages import render

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
        return self.scorer.score_triples(anchor, relation, target, "tail")


def program_of(content: Contents) -> torch.export.ExportedProgram:
    """Return the traced module, for any number of triples."""
    for parameter in content.model.scorer.parameters():
        parameter.requires_grad_(False)
    module = TripleScores(content.model.scorer, content.model.shard.rows).eval()
    ids = torch.zeros(3, dtype=torch.int64)
    count = {0: torch.export.Dim("triples", min=1)}
    return torch.export.export(
        module, (ids, ids.clone(), ids.clone()), dynamic_shapes=(count, count, count)
    )


def write(folder: ExportFolder, content: Contents) -> str:
    """Write scores.pt2 and the labels; return how to load them, as Markdown."""
    buffer = io.BytesIO()  # see foreign.saved
    torch.export.save(program_of(content), buffer)
    folder.append(PROGRAM, [buffer.getbuffer()])
    folder.append(ENTITIES, label_lines(content.model.entity_labels))
    folder.append(RELATIONS, label_lines(content.model.relation_labels))
    count = len(content.model.relation_labels)
    return render("load_torch.md", count=count, reciprocal=content.config.reciprocal)


FORMAT = ForeignFormat("torch.export", None, True, True, write)
