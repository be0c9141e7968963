"""A knowledge-graph model: entity lookup, scorer and loss, down to one scalar.

``TripleObjective`` trains triples against sampled candidates, ``QueryObjective`` queries with any
number of answers. Training against all entities has no forward: ``training.full_candidates``.

Shapes: U unique entities of the batch, D elements per entity row, C chunks, b triples per chunk, K
candidates per chunk and side, R relation rows (inverses included); q queries and m answers of one
side.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only

from kge_torchrec.data import ENTITY
from kge_torchrec.kernels.operators import unequal
from kge_torchrec.kernels.side_rows import Gather, SideRows, read_rows, summed_weights
from kge_torchrec.models.loss_scaling import GradientBarrier, LossScale
from kge_torchrec.models.losses import Loss
from kge_torchrec.models.regularizers import Regularizers
from kge_torchrec.models.scorers.base import SIDES, Scorer, Side
from kge_torchrec.models.scorers.layers import Dropout

if TYPE_CHECKING:
    from kge_torchrec.data.batches.queries import QuerySample
    from kge_torchrec.data.batches.triples import Batch


def at_least_float32(scores: Tensor) -> Tensor:
    """Return scores in float32, or unchanged if their type is wider."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


class EntityDropout(Dropout):
    """Dropout of entity rows (LibKGE's embedder dropout), whose last columns, the biases, stay."""

    def __init__(self, share: float, biases: int = 0):
        super().__init__(share)
        self.biases = biases

    def forward(self, rows: Tensor) -> Tensor:
        if not self.biases or not self.p:
            return super().forward(rows)
        vector, biases = rows.split([rows.shape[-1] - self.biases, self.biases], -1)
        return torch.cat([super().forward(vector), biases], -1)


class Objective(nn.Module):
    """Scorer, loss and regularizers of a training type.

    All dense parameters of a model belong to this module, which the dense wrappers wrap.

    Args:
        scorer: The scorer.
        loss: The loss.
        sides: The sides to train.
        regularizers: Penalties on rows and triples.
        relation_weight: Weight of the relation-prediction loss.
        precision: dtype of autocast for scores. Losses and regularizers are float32.
        entity_dropout: Dropout probability for entity rows. Penalties use rows without dropout.
    """

    def __init__(
        self,
        scorer: Scorer,
        loss: Loss,
        sides: tuple[Side, ...] = SIDES,
        regularizers: Regularizers | None = None,
        relation_weight: float = 0.0,
        precision: torch.dtype = torch.float32,
        entity_dropout: float = 0.0,
    ):
        super().__init__()
        self.scorer, self.loss, self.sides = scorer, loss, sides
        self.regularizers = regularizers or Regularizers()
        self.relation_weight, self.precision = relation_weight, precision
        self.entity_dropout = EntityDropout(entity_dropout, scorer.bias_columns)

    def nothing(self, rows: Tensor) -> Tensor:
        """Return 0 with a gradient for every parameter and row.

        A rank whose part of a batch is empty uses it, because it must still take part in every
        collective.
        """
        return rows.sum() * 0 + sum(p.sum() for p in self.scorer.parameters()) * 0

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context in which scores are computed."""
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, self.precision)


def relation_prediction(
    scorer: Scorer, anchor: Tensor, relation: Tensor, target: Tensor, side: Side
) -> Tensor:
    """Return the relation-prediction losses -log p(r | h, t) (Chen et al. 2021), (C, b).

    The loss is the cross-entropy of a triple's relation among all relations. With reciprocal
    relations the choices include inverses, and on side "head" the inverse is the right answer, as
    if the inverse triples were in the data. Otherwise both sides give the same loss except for
    dropout. Anchors and targets are entity rows (C, b, D); the target is the end named by ``side``.
    """
    scores = at_least_float32(scorer.relation_scores(anchor, target, side))  # (C, b, R)
    answer, _ = scorer.direct(relation, side)
    # A GPU takes many times as long for a softmax over any dimension but the last of two.
    losses = cross_entropy(scores.flatten(0, -2), answer.flatten(), reduction="none")
    return losses.view(answer.shape)


class TripleObjective(Objective):
    """Mean over the batch's triples and sides of the loss, plus regularizers.

    ``objective(rows, batch)`` takes the rows (U, D) of the batch's ids.
    """

    _compiles = False

    def compile_parts(self) -> None:
        """Compile scorer, loss and entity penalties. The lookup of rows is not compiled."""
        self._compiles = True
        for owner, part in ((self, "_loss_of_side"), (self.regularizers, "of_entities")):
            setattr(owner, part, torch.compile(getattr(owner, part)))

    def forward(self, rows: Tensor, batch: Batch) -> Tensor:
        relation, weight = batch.relation, batch.weight  # (C, b)
        if relation.numel() == 0:
            return self.nothing(rows)
        if batch.bags is not None:
            rows = batch.bags.composed(rows)
        regularizers, drops = self.regularizers, self.entity_dropout.p > 0
        # Whether anything but an encoded query reads the rows of anchors and targets.
        others = bool(regularizers.on_triples) or self.relation_weight > 0
        heads, tails, *drawn = batch.entities.split(batch.sizes)
        ends = {"head": heads.view_as(relation), "tail": tails.view_as(relation)}
        candidates: dict[str, Tensor] = {
            side: x.view(len(relation), -1) for side, x in zip(self.sides, drawn, strict=True)
        }
        penalized = weight if regularizers.on_entities else None
        gathers = others or self._compiles or drops
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
            mask = unequal(candidates[side], ends[side])  # (C, b, K)
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

        ``mask`` (C, b, K) is true for negatives. ``log_expected`` (C, K) is subtracted from the
        scores of candidates, so that the sum of their exponentials is an unbiased estimate of the
        sum over all entities (sampled softmax as importance sampling, Bengio and Senecal 2008).
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
        loss = self.loss(positive.flatten(), None, negative, mask).view_as(weight)
        if self.relation_weight:
            with self.autocast(weight.device):
                predicted = relation_prediction(scorer, anchor, relation, target, side)
            loss = loss + self.relation_weight * predicted
        if self.regularizers.on_triples:
            triples = rows.anchor, relation, rows.target, side
            loss = loss + self.regularizers.of_triples(scorer, *triples)
        return (loss * weight).sum()


class QueryObjective(Objective):
    """Mean over the batch's queries of a loss over their answers, plus regularizers.

    The penalties of a query's answers are averaged, as if each query were one triple.
    ``objective(rows, batch)`` takes the rows (U, D) of the batch's ids.
    """

    def forward(self, rows: Tensor, batch: QuerySample) -> Tensor:
        if batch.relation.numel() == 0:
            return self.nothing(rows)
        if batch.bags is not None:
            rows = batch.bags.composed(rows)
        sizes = [*batch.queries, *batch.answers, *[batch.known.shape[1]] * len(self.sides)]
        taken = (
            Gather.apply(rows, batch.entities, sizes) if batch.deduplicated else rows.split(sizes)
        )
        count, losses = len(self.sides), []
        parts = zip(
            self.sides,
            taken[:count],
            batch.relation.split(batch.queries),
            taken[count : 2 * count],
            batch.query.split(batch.answers),
            taken[2 * count :],
            batch.known.split(batch.queries),
            strict=True,
        )
        for side, anchor, relation, answer, query, sampled, known in parts:
            if relation.numel() == 0:
                losses.append(self.nothing(sampled))
                continue
            with self.autocast(rows.device):
                x, y, candidates = (self.entity_dropout(x) for x in (anchor, answer, sampled))
                encoded = self.scorer.encode(x[None], relation[None], side)  # (1, q)
                for_each_answer = partial(torch.index_select, dim=1, index=query)
                each = tree_map_only(Tensor, for_each_answer, encoded)
                positive = at_least_float32(self.scorer.pairs(each, y[None])[0])  # (m,)
                negative = self.scorer.matrix(encoded, candidates[None], exact=False)[0]  # (q, K)
                negative = at_least_float32(negative)
            loss = self.loss(positive, query, negative, ~known).sum()
            if self.regularizers:
                # bincount would wait for the GPU to return the largest value.
                counts = query.new_zeros(len(anchor)).index_add_(0, query, torch.ones_like(query))
                share = 1 / counts.index_select(0, query)
                penalties = self.regularizers
                loss = loss + penalties.of_entities(self.scorer, anchor).sum()
                loss = loss + penalties.of_relations(self.scorer, relation, side).sum()
                loss = loss + (penalties.of_entities(self.scorer, answer) * share).sum()
            losses.append(loss)
        return sum(losses) * batch.weight


class KGEModel(nn.Module):
    """Maps entity ids to rows and rows to a loss.

    The forward stays short because TorchRec traces it to find the lookup that it pipelines. With
    ``scales_loss`` the loss has a dynamic scale and the gradients of rows are held back.
    """

    def __init__(self, entities: nn.Module, objective: Objective, scales_loss: bool = False):
        super().__init__()
        self.entities, self.objective = entities, objective
        self.hold = GradientBarrier() if scales_loss else nn.Identity()
        self.scale = LossScale() if scales_loss else nn.Identity()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss to differentiate (scaled) and the plain loss, detached."""
        rows = self.entities(batch.ids)
        if not isinstance(rows, Tensor):  # TorchRec gives them by the name of the feature
            rows = rows[ENTITY].values()
        loss = self.objective(self.hold(rows), batch)
        return self.scale(loss), loss.detach()
