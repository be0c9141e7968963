"""The objective for triples against sampled candidates: from the rows of a batch to its loss.

Rows of triples and candidates are gathered, except where the scorer reads them from the batch's
rows directly.

Shapes: U unique entities of the batch, M indices, D elements per entity row, C chunks, b triples
per chunk, K candidates per chunk and side.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kge_torchrec.models.distances import has_kernels
from kge_torchrec.models.model import Objective, relation_prediction, take_rows
from kge_torchrec.models.scorers.base import SIDES, Side
from kge_torchrec.models.scorers.queries import QueryScorer


class TripleBatch(Protocol):
    """The fields of a batch that the objective reads; entities are positions in its unique ids."""

    entities: Tensor  # (2 C b + C K per side): heads, tails, then the candidates by side
    relation: Tensor  # (C, b)
    weight: Tensor  # (C, b): share of each triple in the global mean, 0 on padding
    known_head: Tensor  # (C, b, K) bool, known facts among the negatives; or empty
    known_tail: Tensor
    candidates: tuple[int, ...]  # K per side
    log_expected: Tensor  # (C K per side) log expected count per chunk; or empty
    deduplicated: bool  # False: the rows are those of ``entities``, in the same order


# mask (C, b, K), weight (C, b), log_expected (C, K) or None
OfSide = tuple[Tensor, Tensor, "Tensor | None"]
# With more queries per chunk than this, candidates are copied: one matrix product then saves more
# time than the copy costs.
_COPIED_FROM = 32
REPLAYING_MODES = ("reduce-overhead", "max-autotune")  # modes of torch.compile that use CUDA graphs


class TripleObjective(Objective):
    """Mean over the batch's triples and sides of the loss, plus regularizers."""

    _compiles = _replays_graphs = False

    def compile_parts(self, device: str, mode: str = "default") -> None:
        """Compile scorer, loss and entity penalties. The lookup of rows is not compiled.

        Args:
            device: "cpu" or "cuda", where the parts will run.
            mode: The mode of torch.compile.
        """
        self._compiles = True
        for part in ("_loss_of_side", "_penalty_of_ends"):
            setattr(self, part, torch.compile(getattr(self, part), mode=mode))
        self._replays_graphs = device == "cuda" and mode in REPLAYING_MODES

    def forward(self, rows: Tensor, batch: TripleBatch) -> Tensor:
        """Compute the scalar loss from the rows (U, D) of the batch's ids."""
        if self._replays_graphs:  # one step for both sides, so that no side overwrites the other
            torch.compiler.cudagraph_mark_step_begin()
        chunks, triples = batch.relation.shape
        count = chunks * triples
        if count == 0:
            return self.nothing(rows)
        sizes = [count, count, *(chunks * size for size in batch.candidates)]
        places = batch.entities.split(sizes)
        ends = dict(zip(SIDES, places[:2], strict=True))
        candidates = {
            side: part.view(chunks, -1) for side, part in zip(self.sides, places[2:], strict=True)
        }
        log_expected: list[Tensor | None] = [None] * len(self.sides)
        if batch.log_expected.numel():
            log_expected = [x.view(chunks, -1) for x in batch.log_expected.split(sizes[2:])]
        of_sides = {
            side: (self._mask(batch, side, candidates[side], ends[side]), batch.weight, expected)
            for side, expected in zip(self.sides, log_expected, strict=True)
        }
        # With few queries per chunk, read candidates in place if possible.
        many = sum(sizes[2:]) > len(rows) and triples <= _COPIED_FROM
        in_place = batch.deduplicated and many and self._picks_rows(rows)
        if batch.deduplicated and not in_place and self._encodes_rows(rows):
            total = self._loss_of_encoded(rows, batch, ends, candidates, of_sides)
        else:
            picked = candidates if in_place else None
            total = self._loss_of_taken(rows, batch, sizes, picked, of_sides)
        if self.penalizes_relations:
            total = total + self._penalty_of_all_relations(batch)
        return total

    def _loss_of_encoded(
        self,
        rows: Tensor,
        batch: TripleBatch,
        ends: dict[Side, Tensor],
        candidates: dict[Side, Tensor],
        of_sides: dict[Side, OfSide],
    ) -> Tensor:
        """Compute the loss with a scorer that reads the batch's rows directly.

        Only rows for penalties are copied.

        Args:
            rows: (U, D) entity rows.
            batch: The batch.
            ends: Positions of heads and tails in ``rows``, (C b,) each.
            candidates: Positions of the candidates of each side, (C, K).
            of_sides: Mask, weight and log_expected of each side.
        """
        scorer, losses = self.scorer, []
        assert isinstance(scorer, QueryScorer)  # checked by _encodes_rows
        penalised, shares = rows.new_empty(0, dtype=torch.int64), rows.new_empty(0)
        if self.regularizers.any_of_entities:
            both = torch.cat([ends[side] for side in SIDES])
            penalised, shares = _once(both, batch.weight.flatten().repeat(2), len(rows))
        parts = rows, ends, batch.relation, candidates, penalised
        encoded, copies = scorer.encode_rows(*parts)
        for (query, positive, others), given in zip(encoded, of_sides.values(), strict=True):
            mask, weight, log_expected = given
            with self.autocast(rows.device):
                negative = scorer.similarity_in_training(query, others)
            loss = self._loss_of_scores(positive, negative, mask, log_expected)
            losses.append((loss * weight).sum())
        total = torch.stack(losses).sum() / len(self.sides)
        if self.regularizers.any_of_entities:
            total = total + (self.penalty_of_entities(copies) * shares).sum()
        return total

    def _loss_of_taken(
        self,
        rows: Tensor,
        batch: TripleBatch,
        sizes: list[int],
        picked: dict[Side, Tensor] | None,
        of_sides: dict[Side, OfSide],
    ) -> Tensor:
        """Compute the loss from gathered rows.

        Args:
            rows: (U, D) entity rows.
            batch: The batch.
            sizes: Sizes of the parts of ``batch.entities``.
            picked: (C, K) positions of each side's candidates, which are then not gathered; or
                None.
            of_sides: Mask, weight and log_expected of each side.
        """
        ids, shape = batch.entities, batch.relation.shape
        if picked is not None:
            taken = take_rows(rows, ids[: sum(sizes[:2])], sizes[:2])
        else:
            taken = take_rows(rows, ids, sizes) if batch.deduplicated else rows.split(sizes)
        head, tail = (part.view(*shape, -1) for part in taken[:2])
        losses = []
        for position, (side, (mask, weight, log_expected)) in enumerate(of_sides.items()):
            anchor, target = (head, tail) if side == "tail" else (tail, head)
            if picked is not None:
                others, index = rows, picked[side]
            else:
                others, index = taken[2 + position].view(len(mask), -1, rows.shape[1]), None
            given = anchor, batch.relation, target, others, mask, weight
            losses.append(self._loss_of_side(*given, side, index, log_expected))
        total = torch.stack(losses).sum() / len(self.sides)
        if self.regularizers.any_of_entities:  # the same on every side
            total = total + self._penalty_of_ends(head, tail, batch.weight)
        return total

    def _penalty_of_ends(self, head: Tensor, tail: Tensor, weight: Tensor) -> Tensor:
        """Sum the entity penalties of triples: heads and tails (C, b, D), weight (C, b)."""
        penalties = self.penalty_of_entities(head) + self.penalty_of_entities(tail)
        return (penalties * weight).sum()

    def _penalty_of_all_relations(self, batch: TripleBatch) -> Tensor:
        """Average the relation penalties over triples and sides."""
        ids, shares = batch.relation.flatten(), batch.weight.flatten()
        if ids.device.type == "cpu":  # a GPU would have to synchronize to return the number of ids
            ids, shares = _once(ids, shares, self.scorer.relation_rows)
        penalties = [self.penalty_of_relations(ids, side) for side in self.sides]
        return (torch.stack(penalties).mean(0) * shares).sum()

    def _mask(self, batch: TripleBatch, side: Side, candidates: Tensor, targets: Tensor) -> Tensor:
        """Return which candidates (C, K) are negatives of a side's queries: (C, b, K) bool."""
        # A drawn entity that is the answer itself is not a negative.
        mask = candidates[:, None] != targets.view(len(candidates), -1, 1)
        known = batch.known_tail if side == "tail" else batch.known_head
        if known.numel():
            mask &= ~known
        return mask

    def _encodes_rows(self, rows: Tensor) -> bool:
        """Whether the scorer reads the batch's rows directly and no other part needs copies."""
        wants_copies = self.regularizers.any_of_triples or self.relation_weight
        if wants_copies or self.entity_dropout.drops:
            return False
        scorer = self.scorer
        return isinstance(scorer, QueryScorer) and not self._compiles and scorer.encodes_rows(rows)

    def _loss_of_side(
        self,
        anchor: Tensor,
        relation: Tensor,
        target: Tensor,
        candidates: Tensor,
        mask: Tensor,
        weight: Tensor,
        side: Side,
        index: Tensor | None = None,
        log_expected: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum of the losses of the queries of one side.

        Args:
            anchor: (C, b, D) entity rows.
            relation: (C, b) int64 relation ids.
            target: (C, b, D) entity rows.
            candidates: (C, K, D) entity rows, or (U, D) with an index.
            mask: (C, b, K) bool, true for negatives.
            weight: (C, b) weights of the queries.
            side: The end that targets and candidates are.
            index: (C, K) positions of the candidates, or None.
            log_expected: See ``_loss_of_scores``.
        """
        with self.autocast(anchor.device):
            kept, answer, others = (self.entity_dropout(x) for x in (anchor, target, candidates))
            if index is None:
                scores = self.scorer.score_contrast(kept, relation, answer, others, side)
            else:
                assert isinstance(self.scorer, QueryScorer)  # checked by _picks_rows
                given = kept, relation, answer, others, index, side
                scores = self.scorer.score_contrast_at(*given)
        loss = self._loss_of_scores(*scores, mask, log_expected)
        if self.relation_weight:
            with self.autocast(anchor.device):
                relation_loss = relation_prediction(self.scorer, kept, relation, answer, side)
            loss = loss + self.relation_weight * relation_loss
        if self.regularizers.any_of_triples:
            triples = anchor, relation, target, side
            loss = loss + self.regularizers.of_triples(self.scorer, *triples)
        return (loss * weight).sum()

    def _loss_of_scores(
        self, positive: Tensor, negative: Tensor, mask: Tensor, log_expected: Tensor | None
    ) -> Tensor:
        """Return the losses (C, b) of the queries.

        Args:
            positive: (C, b) scores of the triples.
            negative: (C, b, K) scores of the candidates.
            mask: (C, b, K) bool, true for negatives.
            log_expected: (C, K) subtracted from the candidates' scores, or None. The sum of their
                exponentials is then an unbiased estimate of the sum over all entities (sampled
                softmax as importance sampling, Bengio and Senecal 2008).
        """
        positive, negative = (
            x.to(torch.promote_types(x.dtype, torch.float32)) for x in (positive, negative)
        )
        if log_expected is not None:
            negative = negative - log_expected[:, None]
        return self.loss(positive, negative, mask)

    def _picks_rows(self, rows: Tensor) -> bool:
        """Whether candidates are scored in place among the batch's rows."""
        return isinstance(self.scorer, QueryScorer) and self.scorer.picks_rows and has_kernels(rows)


def _once(ids: Tensor, shares: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Deduplicate ids and sum their shares.

    Args:
        ids: (M,) ids in [0, count).
        shares: (M,) weight of each id.
        count: Upper bound of the ids.

    Returns:
        The distinct ids with a share other than 0, and their summed shares.
    """
    sums = torch.bincount(ids, shares, count)
    used = sums.nonzero().squeeze(1)
    return used, sums.index_select(0, used).to(shares.dtype)
