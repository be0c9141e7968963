"""Training triples against sampled candidates: rows of a batch to its loss.

Rows of triples and candidates are copied to their places, unless the scorer takes those of the
batch as they are, or picks candidates among them.

Shapes: U unique entities of the batch, M indices, D numbers a row, C chunks, b triples a chunk, K
candidates a chunk of a side.
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
    """What the objective reads of a batch; entities are positions in the batch's unique ids."""

    entities: Tensor  # (2 C b + C K of each side): heads, tails, then the candidates by side
    relation: Tensor  # (C, b)
    weight: Tensor  # (C, b): share of each triple in the global mean, 0 on padding
    known_head: Tensor  # (C, b, K) bool, known facts among the negatives; or empty
    known_tail: Tensor
    candidates: tuple[int, ...]  # K of each side
    log_expected: Tensor  # (C K of each side) log of how often a chunk has it; or empty
    deduplicated: bool  # False: there is a row for each of ``entities``, in their order


# mask (C, b, K), weight (C, b), log_expected (C, K) if it is asked for
OfSide = tuple[Tensor, Tensor, "Tensor | None"]
# Queries of a chunk from which a copy of its candidates pays: a product of matrices then takes less
# time than the pairs one by one by more than the copy.
_COPIED_FROM = 32
REPLAYING_MODES = ("reduce-overhead", "max-autotune")  # of torch.compile: by CUDA graphs


class TripleObjective(Objective):
    """Mean over the batch's triples and sides of the loss, plus regularizers."""

    _compiles = _replays_graphs = False

    def compile_parts(self, device: str, mode: str = "default") -> None:
        """Compiles scorer, loss and penalties of entities; the looking up of rows stays as it is.

        device: "cpu" or "cuda", where they will run.  mode: as torch.compile takes it.
        """
        self._compiles = True
        for part in ("_loss_of_side", "_penalty_of_ends"):
            setattr(self, part, torch.compile(getattr(self, part), mode=mode))
        self._replays_graphs = device == "cuda" and mode in REPLAYING_MODES

    def forward(self, rows: Tensor, batch: TripleBatch) -> Tensor:
        """rows: (U, D) of the batch's ids.  Returns the loss, a scalar."""
        if self._replays_graphs:  # both sides are one step: neither may overwrite the other
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
        # Candidates of few queries each: whatever can reads them where they are.
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
        """By a scorer that takes the batch's rows as they are, but for those of penalties."""
        scorer, losses = self.scorer, []
        assert isinstance(scorer, QueryScorer)  # as _encodes_rows
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
        """From copies of rows for each place; of candidates unless they are picked.

        picked: (C, K) of each side.
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
        if self.regularizers.any_of_entities:  # the same of every side
            total = total + self._penalty_of_ends(head, tail, batch.weight)
        return total

    def _penalty_of_ends(self, head: Tensor, tail: Tensor, weight: Tensor) -> Tensor:
        """The sum over triples, (C, b, D) twice and (C, b), of the penalties on their entities."""
        penalties = self.penalty_of_entities(head) + self.penalty_of_entities(tail)
        return (penalties * weight).sum()

    def _penalty_of_all_relations(self, batch: TripleBatch) -> Tensor:
        """The mean over triples and sides of the relations' penalties."""
        ids, shares = batch.relation.flatten(), batch.weight.flatten()
        if ids.device.type == "cpu":  # elsewhere it would wait for their number
            ids, shares = _once(ids, shares, self.scorer.relation_rows)
        penalties = [self.penalty_of_relations(ids, side) for side in self.sides]
        return (torch.stack(penalties).mean(0) * shares).sum()

    def _mask(self, batch: TripleBatch, side: Side, candidates: Tensor, targets: Tensor) -> Tensor:
        """(C, b, K) bool: which candidates (C, K) are negatives of the queries for a side."""
        # The accidental positive is none: a drawn entity that is the answer itself.
        mask = candidates[:, None] != targets.view(len(candidates), -1, 1)
        known = batch.known_tail if side == "tail" else batch.known_head
        if known.numel():
            mask &= ~known
        return mask

    def _encodes_rows(self, rows: Tensor) -> bool:
        """Whether the scorer takes the batch's rows as they are, and nobody else needs copies."""
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
        """The weighted sum over the queries of one side.

        anchor, target: (C, b, D); candidates: (C, K, D), or the rows that index (C, K) picks.
        log_expected: see ``_loss_of_scores``.
        """
        with self.autocast(anchor.device):
            kept, answer, others = (self.entity_dropout(x) for x in (anchor, target, candidates))
            if index is None:
                scores = self.scorer.score_contrast(kept, relation, answer, others, side)
            else:
                assert isinstance(self.scorer, QueryScorer)  # as _picks_rows
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
        """(C, b) of the queries.

        log_expected: (C, K), subtracted from the candidates' scores: then the sum of their
        exponentials estimates that over all entities without bias (sampled softmax as importance
        sampling, Bengio and Senecal 2008).
        """
        positive, negative = (
            x.to(torch.promote_types(x.dtype, torch.float32)) for x in (positive, negative)
        )
        if log_expected is not None:
            negative = negative - log_expected[:, None]
        return self.loss(positive, negative, mask)

    def _picks_rows(self, rows: Tensor) -> bool:
        """Whether candidates are scored where they are among the batch's rows."""
        return isinstance(self.scorer, QueryScorer) and self.scorer.picks_rows and has_kernels(rows)


def _once(ids: Tensor, shares: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each of the ids (M,) in [0, count) once, with the sum of its shares (M,); none with 0."""
    sums = torch.bincount(ids, shares, count)
    used = sums.nonzero().squeeze(1)
    return used, sums.index_select(0, used).to(shares.dtype)
