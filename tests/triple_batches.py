"""Batches of triples with random positions, as an objective reads them."""

from dataclasses import dataclass

import torch

from kge_torchrec.models.scorers import SIDES

ENTITIES, RELATIONS, DIM = 7, 3, 4
NONE = torch.zeros(0, dtype=torch.bool)


@dataclass
class Triples:
    """A batch as the objective reads it, and its parts for the oracle."""

    head: torch.Tensor  # (C, b)
    tail: torch.Tensor
    relation: torch.Tensor
    weight: torch.Tensor
    negatives: dict  # side -> (C, K)
    known_head: torch.Tensor = NONE
    known_tail: torch.Tensor = NONE
    deduplicated: bool = True
    log_expected: torch.Tensor = NONE
    bags: None = None

    @property
    def parts(self):
        return [part.flatten() for part in (self.head, self.tail, *self.negatives.values())]

    @property
    def sizes(self):
        return tuple(map(len, self.parts))

    @property
    def entities(self):
        return torch.cat(self.parts)


def random_batch(chunks, triples, count, sides=SIDES, known=False):
    draw = lambda *shape: torch.randint(ENTITIES, shape)  # noqa: E731
    mask = torch.rand(2, chunks, triples, count) < 0.3
    return Triples(
        head=draw(chunks, triples),
        tail=draw(chunks, triples),
        relation=torch.randint(RELATIONS, (chunks, triples)),
        weight=torch.rand(chunks, triples, dtype=torch.float64),
        negatives={side: draw(chunks, count) for side in sides},
        known_head=mask[0] if known else NONE,
        known_tail=mask[1] if known else NONE,
    )
