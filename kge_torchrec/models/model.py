"""A knowledge-graph model: the entity lookup, then scorer and loss, to one number.

With what the number is made of besides the loss: regularizers on the rows that a batch touches;
relation prediction as an auxiliary objective (Chen et al. 2021); and the taking of rows, whose
gradients meet in one buffer.

Shapes: U unique entities of the batch, M indices, D numbers a row, C chunks, b triples a chunk, K
candidates a chunk of a side, R relation rows (inverses included).  Of queries with any number of
answers: Q queries, M answers, K sampled entities a side; q and m of one side.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn, promote_types
from torch.nn.functional import cross_entropy

from kge_torchrec.data.loader import ENTITY
from kge_torchrec.models.distances import has_kernels
from kge_torchrec.models.loss_scaling import GradientBarrier, LossScale
from kge_torchrec.models.ops import Dropout
from kge_torchrec.models.regularizers import Regularizers
from kge_torchrec.models.scorers.base import SIDES, Scorer, Side
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


class EntityDropout(Dropout):
    """Drops numbers of entity rows, whoever they are looked up for (LibKGE's embedder dropout).

    biases: columns at the end of a row that are no part of its vector and stay.
    """

    def __init__(self, share: float, biases: int = 0):
        super().__init__(share)
        self.biases = biases

    def forward(self, rows: Tensor) -> Tensor:
        """(..., D) -> (..., D)"""
        if not self.drops:
            return rows
        if not self.biases:
            return super().forward(rows)
        vector, biases = rows.split([rows.shape[-1] - self.biases, self.biases], -1)
        return torch.cat([super().forward(vector), biases], -1)

    @property
    def drops(self) -> bool:
        """Whether numbers are dropped now."""
        return self.training and self.p > 0


class Objective(nn.Module):
    """Mean over the batch's triples and sides of the loss, plus regularizers.

    All dense parameters of a model live below this module, which is what the dense wrappers wrap.

    precision: scores are computed under autocast to it; losses and regularizers are float32.
    hardest: of a query's candidates only so many with the highest scores count; 0 takes all.
    entity_dropout: share of the numbers of entity rows that are dropped; penalties see them all.
    """

    def __init__(
        self,
        scorer: Scorer,
        loss: nn.Module,
        sides: tuple[Side, ...] = SIDES,
        regularizers: Regularizers | None = None,
        relation_weight: float = 0.0,
        precision: torch.dtype = torch.float32,
        hardest: int = 0,
        entity_dropout: float = 0.0,
    ):
        super().__init__()
        self.scorer, self.loss, self.sides = scorer, loss, sides
        self.regularizers = regularizers or Regularizers()
        self.relation_weight, self.precision = relation_weight, precision
        self.hardest = hardest
        self.entity_dropout = EntityDropout(entity_dropout, scorer.bias_columns)
        self._compiles = self._replays_graphs = False

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
        if count == 0:  # a rank without triples still takes part in every exchange
            return rows.sum() * 0 + sum(p.sum() for p in self.scorer.parameters()) * 0
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
            x.to(promote_types(x.dtype, torch.float32)) for x in (positive, negative)
        )
        if log_expected is not None:
            negative = negative - log_expected[:, None]
        if 0 < self.hardest < negative.shape[-1]:
            negative, mask = hardest_of(negative, mask, self.hardest)
        return self.loss(positive, negative, mask)

    def _picks_rows(self, rows: Tensor) -> bool:
        """Whether candidates are scored where they are among the batch's rows."""
        return isinstance(self.scorer, QueryScorer) and self.scorer.picks_rows and has_kernels(rows)

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """In which scores are computed."""
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, self.precision)

    @property
    def penalizes(self) -> bool:
        """Whether there is a penalty on anything."""
        return self.regularizers.any or self.scorer.penalizes_relations

    @property
    def penalizes_relations(self) -> bool:
        """Whether there is a penalty on relations."""
        return self.regularizers.any_of_relations or self.scorer.penalizes_relations

    def penalty_of_entities(self, rows: Tensor) -> Tensor:
        """(..., D) -> (...): their weighted regularizers."""
        return self.regularizers.of(self.scorer.entity_factors(rows), self.scorer.is_complex)

    def penalty_of_relations(self, relation: Tensor, side: Side) -> Tensor:
        """(...) ids of queries -> (...): weighted regularizers, and what the scorer has itself."""
        factors = self.scorer.relation_factors(relation, side)
        total = self.regularizers.of_relations(factors, self.scorer.relation_is_complex)
        if self.scorer.penalizes_relations:
            total = total + self.scorer.relation_penalty(relation, side)
        return total


def relation_prediction(
    scorer: Scorer, anchor: Tensor, relation: Tensor, target: Tensor, side: Side
) -> Tensor:
    """-log p(r | h, t): cross-entropy of a triple's relation among all, given its two entities.

    anchor, target: (C, b, D); relation: (C, b) int64 ids.  Returns (C, b).  With reciprocal
    relations the choice is among relations and inverses, and on side "head" the inverse is right,
    as if the inverse triples were in the data; else both sides are the same but for dropout.
    """
    scores = scorer.score_relations(anchor, target, side)  # (C, b, R)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    answer, _ = scorer.direct(relation, side)
    return cross_entropy(scores.movedim(-1, 1), answer, reduction="none")


def hardest_of(negative: Tensor, mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` highest scores of each query, and whether they count: (C, b, K) twice.

    What is no negative is among them only where there are too few others.
    """
    order = negative.detach().masked_fill(~mask, -torch.inf).topk(count, sorted=False).indices
    return negative.gather(-1, order), mask.gather(-1, order)


def _once(ids: Tensor, shares: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each of the ids (M,) in [0, count) once, with the sum of its shares (M,); none with 0."""
    sums = torch.bincount(ids, shares, count)
    used = sums.nonzero().squeeze(1)
    return used, sums.index_select(0, used).to(shares.dtype)


def take_rows(rows: Tensor, index: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """rows[index] in parts of the given sizes: (U, D), (M,) int64 -> (size, D) each.

    Indexing separately would give autograd one gradient of all rows per part, to be added up.
    On a CPU duplicate indices sum their gradients in a fixed order, so that runs repeat bitwise.
    """
    return _TakeRows.apply(rows, index, sizes)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(index)
        ctx.count, ctx.sizes = rows.shape[0], sizes
        return tuple(rows.index_select(0, part) for part in index.split(sizes))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        if has_kernels(grads[0]) and grads[0].dtype == torch.float32:
            from kge_torchrec.models.row_sums import sums_by_row  # numba takes its time to load

            return sums_by_row(index, grads, ctx.count), None, None
        out = grads[0].new_zeros(ctx.count, grads[0].shape[1])
        for part, grad in zip(index.split(ctx.sizes), grads, strict=True):
            out.index_add_(0, part, grad)
        return out, None, None


class SampledQueries(Protocol):
    """What the objective reads of a batch; everything side after side."""

    entities: Tensor  # (Q + M + sides K): anchors, answers, sampled entities
    relation: Tensor  # (Q,)
    query: Tensor  # (M,) which query of its side an answer belongs to
    known: Tensor  # (Q, K) bool: answers among the entities sampled for the query's side
    weight: Tensor  # (): share of a query in the global mean
    queries: tuple[int, ...]  # of each side
    answers: tuple[int, ...]  # of each side
    deduplicated: bool  # False: there is a row for each of ``entities``, in their order


class QueryObjective(Objective):
    """Mean over the batch's queries of a loss over their answers, plus regularizers.

    Answers are penalised by their mean, as if each query were one triple.
    """

    scorer: QueryScorer

    # It is fed batches of its own.
    def forward(self, rows: Tensor, batch: SampledQueries) -> Tensor:  # type: ignore[override]
        """rows: (U, D) of the batch's ids.  Returns the loss, a scalar."""
        if batch.relation.numel() == 0:  # a rank without queries takes part in every exchange
            return self._nothing(rows)
        sizes = [*batch.queries, *batch.answers, *[batch.known.shape[1]] * len(self.sides)]
        ids = batch.entities
        taken = take_rows(rows, ids, sizes) if batch.deduplicated else rows.split(sizes)
        count = len(self.sides)
        parts = zip(
            taken[:count],
            batch.relation.split(batch.queries),
            taken[count : 2 * count],
            batch.query.split(batch.answers),
            taken[2 * count :],
            batch.known.split(batch.queries),
            self.sides,
            strict=True,
        )
        return sum(self._loss_of_side(*part) for part in parts) * batch.weight

    def _nothing(self, rows: Tensor) -> Tensor:
        """0, with a gradient for everything."""
        return rows.sum() * 0 + sum(p.sum() for p in self.scorer.parameters()) * 0

    def _loss_of_side(  # type: ignore[override]  # and has parts of its own
        self,
        anchor: Tensor,
        relation: Tensor,
        answer: Tensor,
        query: Tensor,
        sampled: Tensor,
        known: Tensor,
        side: Side,
    ) -> Tensor:
        """The sum over the queries of one side; anchor (q, D), answer (m, D), sampled (K, D)."""
        if relation.numel() == 0:
            return self._nothing(sampled)
        with self.autocast(anchor.device):
            rows = [self.entity_dropout(x) for x in (anchor, answer, sampled)]
            scores = self.scorer.score_answers(rows[0], relation, rows[1], query, rows[2], side)
        positive, negative = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in scores)
        total = self.loss(positive, query, negative, ~known).sum()
        if self.penalizes:
            share = 1 / torch.bincount(query, minlength=len(anchor)).index_select(0, query)
            total = total + self.penalty_of_entities(anchor).sum()
            total = total + self.penalty_of_relations(relation, side).sum()
            total = total + (self.penalty_of_entities(answer) * share).sum()
        return total


class KGEModel(nn.Module):
    """entities -> rows -> loss.

    ``entities`` is called as ``entities(batch.ids)[ENTITY].values()``, (U, D).  The forward stays
    this short because TorchRec traces it to find the lookup that it pipelines; everything with
    control flow lives in the objective.

    scales_loss: multiply the loss by a dynamic scale and hold the rows' gradients back.
    """

    def __init__(self, entities: nn.Module, objective: Objective, scales_loss: bool = False):
        super().__init__()
        self.entities, self.objective = entities, objective
        self.hold = GradientBarrier() if scales_loss else nn.Identity()
        self.scale = LossScale() if scales_loss else nn.Identity()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns (loss to differentiate, the loss itself, detached)."""
        rows = self.entities(batch.ids)[ENTITY].values()
        loss = self.objective(self.hold(rows), batch)
        return self.scale(loss), loss.detach()
