"""The objective for triples against sampled candidates: from the rows of a batch to its loss.

Shapes: U unique entities of the batch, M indices, D elements per entity row, C chunks, b triples
per chunk, K candidates per chunk and side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kge_torchrec.kernels.side_rows import SideRows, read_rows, summed_weights
from kge_torchrec.models.losses import hardest
from kge_torchrec.models.model import Objective, at_least_float32, relation_prediction
from kge_torchrec.models.scorers.base import Side

if TYPE_CHECKING:
    from kge_torchrec.data.batches.triples import Batch


class TripleObjective(Objective):
    """Mean over the batch's triples and sides of the loss, plus regularizers."""

    _compiles = False

    def compile_parts(self) -> None:
        """Compile scorer, loss and entity penalties. The lookup of rows is not compiled."""
        self._compiles = True
        for owner, part in ((self, "_loss_of_side"), (self.regularizers, "of_entities")):
            setattr(owner, part, torch.compile(getattr(owner, part)))

    def forward(self, rows: Tensor, batch: Batch) -> Tensor:
        """Compute the scalar loss from the rows (U, D) of the batch's ids."""
        relation, weight = batch.relation, batch.weight  # (C, b)
        if relation.numel() == 0:
            return self.nothing(rows)
        if batch.bags is not None:
            rows = batch.bags.composed(rows)
        # Whether anything but an encoded query reads the rows of anchors and targets.
        regularizers = self.regularizers
        others = bool(regularizers.on_triples) or self.relation_weight > 0
        drops = self.entity_dropout.p > 0
        gathers = others or self._compiles or drops
        heads, tails, *drawn = batch.entities.split(batch.sizes)
        ends = {"head": heads.view_as(relation), "tail": tails.view_as(relation)}
        candidates: dict[str, Tensor] = {
            side: x.view(len(relation), -1) for side, x in zip(self.sides, drawn, strict=True)
        }
        penalized = weight if regularizers.on_entities else None
        sides, end_rows, end_weight = read_rows(
            self.scorer, rows, batch, ends, candidates, penalized, gathers, drops
        )
        expected = [None] * len(drawn)
        if batch.log_expected.numel():
            counts = batch.log_expected.split(batch.sizes[2:])
            expected = [x.view(len(relation), -1) for x in counts]
        losses = []
        for side, log_expected in zip(self.sides, expected, strict=True):
            # A drawn entity that is the answer itself is not a negative.
            mask = candidates[side][:, None] != ends[side][..., None]  # (C, b, K)
            known = batch.known_tail if side == "tail" else batch.known_head
            if known.numel():
                mask &= ~known
            inputs = relation, weight, mask, log_expected
            losses.append(self._loss_of_side(side, sides[side], *inputs))
        total = torch.stack(losses).sum() / len(self.sides)
        if end_weight is not None:  # the same on every side
            penalty = sum([regularizers.of_entities(self.scorer, x) for x in end_rows])
            total = total + (penalty * end_weight).sum()
        if regularizers.on_relations:  # the mean over triples and sides
            ids, shares = relation.flatten(), weight.flatten()
            if ids.device.type == "cpu":  # a GPU would wait to return the number of ids
                ids, shares = summed_weights(ids, shares, self.scorer.relation_rows)
            penalties = [regularizers.of_relations(self.scorer, ids, side) for side in self.sides]
            total = total + (torch.stack(penalties).mean(0) * shares).sum()
        return total

    def _loss_of_side(
        self,
        side: Side,
        rows: SideRows,
        relation: Tensor,
        weight: Tensor,
        mask: Tensor,
        log_expected: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum of the losses of the queries of one side.

        Args:
            side: The end that targets and candidates are.
            rows: The entity rows of the side.
            relation: (C, b) int64 relation ids.
            weight: (C, b) weights of the queries.
            mask: (C, b, K) bool, true for negatives.
            log_expected: (C, K) subtracted from the candidates' scores, or None. The sum of their
                exponentials is then an unbiased estimate of the sum over all entities (sampled
                softmax as importance sampling, Bengio and Senecal 2008).
        """
        scorer = self.scorer
        with self.autocast(weight.device):
            anchor, target, candidates, *_ = rows
            if rows.encoded is not None:
                query, positive = rows.encoded  # (C, b, D), (C, b)
            else:
                if self.entity_dropout.p:
                    anchor, target, candidates = map(self.entity_dropout, rows[:3])
                query = scorer.encode(anchor, relation, side)  # (C, b)
                positive = scorer.pairs(query, target)  # (C, b)
            negative = scorer.matrix(query, candidates, rows.positions, exact=False)  # (C, b, K)
        if self.precision != torch.float32:
            positive, negative = at_least_float32(positive), at_least_float32(negative)
        if log_expected is not None:
            negative = negative - log_expected[:, None]
        negative, mask = negative.flatten(0, 1), mask.flatten(0, 1)  # (Q, K), Q = C b
        if self.hardest:
            negative, mask = hardest(negative, mask, self.hardest)
        loss = self.loss(positive.flatten(), None, negative, mask).view_as(weight)
        if self.relation_weight:
            with self.autocast(weight.device):
                predicted = relation_prediction(scorer, anchor, relation, target, side)
            loss = loss + self.relation_weight * predicted
        if self.regularizers.on_triples:
            triples = rows.anchor, relation, rows.target, side
            loss = loss + self.regularizers.of_triples(scorer, *triples)
        return (loss * weight).sum()
