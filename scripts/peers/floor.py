"""The floor: what plain torch reaches with gradients derived by hand and a sparse Adam.

No autograd, no modules, no framework. `scripts/bench.py` compares this package with it.

    python scripts/peers/floor.py          # check the gradients against autograd

Shapes: B triples of a batch, K negatives, N entities, D elements per row, U distinct ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SCORERS = ("ComplEx", "DistMult", "TransE", "RotatE")
MARGIN = 9.0  # a distance d scores MARGIN - d
TINY = 1e-12  # under the root of a modulus
PIECE = 16  # triples whose own negatives are scored at a time
Splits = dict[str, np.ndarray]


def read_graph(folder: Path) -> tuple[Splits, int, int]:
    """Return triples (T, 3) int64 by split, and the numbers of entities and relations."""
    entities: dict[str, int] = {}
    relations: dict[str, int] = {}
    splits = {}
    for name in ("train", "valid", "test"):
        lines = (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        splits[name] = np.array(
            [
                (
                    entities.setdefault(head, len(entities)),
                    relations.setdefault(relation, len(relations)),
                    entities.setdefault(tail, len(entities)),
                )
                for head, relation, tail in (line.split("\t") for line in lines)
            ]
        )
    return splits, len(entities), len(relations)


class SparseAdam:
    """A table of rows with Adam's moments; a step touches the rows that have a gradient."""

    def __init__(self, rows: int, dim: int, lr: float = 1e-3):
        self.weight = torch.randn(rows, dim).mul_(0.1)
        self.first, self.second = torch.zeros(rows, dim), torch.zeros(rows, dim)
        self.lr, self.steps = lr, 0

    def step_rows(self, ids: Tensor, gradient: Tensor) -> None:
        """Step rows with ids (U,), each once, by their gradients (U, D)."""
        self.steps += 1
        first, second = self.first.index_select(0, ids), self.second.index_select(0, ids)
        first.lerp_(gradient, 0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        self.first.index_copy_(0, ids, first)
        self.second.index_copy_(0, ids, second)
        size, root = self._corrections()
        first.div_(second.sqrt_().div_(root).add_(1e-8)).mul_(-size)
        self.weight.index_add_(0, ids, first)

    def step_all(self, gradient: Tensor) -> None:
        """Step all rows by their gradients (rows, D)."""
        self.steps += 1
        self.first.lerp_(gradient, 0.1)
        self.second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        size, root = self._corrections()
        self.weight.addcdiv_(self.first, self.second.sqrt().div_(root).add_(1e-8), value=-size)

    def _corrections(self) -> tuple[float, float]:
        bias = 1 - 0.9**self.steps
        return self.lr / bias, math.sqrt(1 - 0.999**self.steps)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a product of complex numbers; real parts come first in a row."""
    half = a.shape[-1] // 2
    ar, ai, br, bi = a[..., :half], a[..., half:], b[..., :half], b[..., half:]
    return torch.cat([ar * br - ai * bi, ar * bi + ai * br], -1)


def conjugate(a: Tensor) -> Tensor:
    half = a.shape[-1] // 2
    return torch.cat([a[..., :half], -a[..., half:]], -1)


class Sampled:
    """Training on tail queries with bce and K negatives, shared by the batch or per triple."""

    def __init__(
        self, scorer: str, entities: int, relations: int, dim: int, negatives: int, shared: bool
    ):
        self.scorer, self.negatives, self.shared = scorer, negatives, shared
        self.entities = SparseAdam(entities, dim)
        self.relations = SparseAdam(relations, dim // 2 if scorer == "RotatE" else dim)

    def step(self, triples: Tensor) -> None:
        """Draw negatives and step both tables by a batch of triples (B, 3)."""
        head, relation, tail = triples.unbind(1)
        heads = self.entities.weight.index_select(0, head)
        tails = self.entities.weight.index_select(0, tail)
        rows = self.relations.weight.index_select(0, relation)
        factor = torch.cat([rows.cos(), rows.sin()], 1) if self.scorer == "RotatE" else rows
        query = self._query(heads, factor)
        of_pairs = self._shared if self.shared else self._per_triple
        count, of_query, of_tail, negatives, of_negatives = of_pairs(query, tails)
        of_head, of_relation = self._of_factors(of_query, heads, rows, factor)
        self.relations.step_all(
            torch.zeros_like(self.relations.weight).index_add_(0, relation, of_relation)
        )
        ids, place = torch.unique(torch.cat([negatives, head, tail]), return_inverse=True)
        gradient = of_negatives(place[:count], len(ids))
        gradient.index_add_(0, place[count:], torch.cat([of_head, of_tail]))
        self.entities.step_rows(ids, gradient)

    def _query(self, heads: Tensor, factor: Tensor) -> Tensor:
        if self.scorer == "TransE":
            return heads + factor
        return heads * factor if self.scorer == "DistMult" else product(heads, factor)

    def _of_factors(
        self, of_query: Tensor, heads: Tensor, rows: Tensor, factor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of heads and of the relations' rows."""
        if self.scorer == "TransE":
            return of_query, of_query
        if self.scorer == "DistMult":
            return of_query * rows, of_query * heads
        of_factor = product(of_query, conjugate(heads))
        if self.scorer == "RotatE":
            half = rows.shape[1]
            of_factor = (
                of_factor[:, half:] * factor[:, :half] - of_factor[:, :half] * factor[:, half:]
            )
        return product(of_query, conjugate(factor)), of_factor

    def _true_distance(self, query: Tensor, tails: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distances (B,) of the true tails, and their gradients for the query."""
        apart = query - tails
        if self.scorer == "TransE":
            return apart.abs().sum(1), apart.sign_()
        half = apart.shape[1] // 2
        modulus = (apart[:, :half] ** 2 + apart[:, half:] ** 2).add_(TINY).sqrt_()
        return modulus.sum(1), apart / torch.cat([modulus, modulus], 1)

    def _shared(self, query: Tensor, tails: Tensor) -> tuple:
        batch, count = len(query), self.negatives
        ids = torch.randint(0, len(self.entities.weight), (count,))
        negatives = self.entities.weight.index_select(0, ids)
        true_weight, weight = 0.5 / batch, 0.5 / (batch * count)
        if self.scorer in ("ComplEx", "DistMult"):
            true = (torch.sigmoid((query * tails).sum(1)) - 1).mul_(true_weight)[:, None]
            slopes = torch.sigmoid(query @ negatives.T).mul_(weight)
            of_query = torch.addmm(true * tails, slopes, negatives)
            return count, of_query, true * query, ids, _summed(slopes.T @ query)
        distance, direction = self._true_distance(query, tails)
        true = (torch.sigmoid(MARGIN - distance) - 1).mul_(true_weight)[:, None]
        of_tail = true * direction
        if self.scorer == "TransE":
            distances = torch.cdist(query, negatives, p=1)
            slopes = torch.sigmoid(MARGIN - distances).mul_(weight)
            backward = torch.ops.aten._cdist_backward
            of_query = backward(-slopes, query, negatives, 1.0, distances)
            of_rows = backward(
                (-slopes).T.contiguous(), negatives, query, 1.0, distances.T.contiguous()
            )
            return count, of_query - of_tail, of_tail, ids, _summed(of_rows)
        of_query, of_rows = -of_tail, torch.zeros_like(negatives)
        half = query.shape[1] // 2
        for at in range(0, batch, PIECE):
            piece = slice(at, at + PIECE)
            real = query[piece, None, :half] - negatives[:, :half]
            imaginary = query[piece, None, half:] - negatives[:, half:]
            modulus = torch.addcmul(real * real, imaginary, imaginary).add_(TINY).sqrt_()
            slope = torch.sigmoid(MARGIN - modulus.sum(2)).mul_(-weight)[:, :, None] / modulus
            real *= slope
            imaginary *= slope
            of_query[piece, :half] += real.sum(1)
            of_query[piece, half:] += imaginary.sum(1)
            of_rows[:, :half] -= real.sum(0)
            of_rows[:, half:] -= imaginary.sum(0)
        return count, of_query, of_tail, ids, _summed(of_rows)

    def _per_triple(self, query: Tensor, tails: Tensor) -> tuple:
        batch, count, dim = len(query), self.negatives, query.shape[1]
        ids = torch.randint(0, len(self.entities.weight), (batch * count,))
        true_weight, weight = 0.5 / batch, 0.5 / (batch * count)
        if self.scorer in ("ComplEx", "DistMult"):
            negatives = self.entities.weight.index_select(0, ids).view(batch, count, dim)
            true = (torch.sigmoid((query * tails).sum(1)) - 1).mul_(true_weight)[:, None]
            slopes = torch.sigmoid(torch.bmm(negatives, query[:, :, None]).squeeze(2)).mul_(weight)
            of_query = torch.baddbmm((true * tails)[:, None], slopes[:, None], negatives)[:, 0]

            def by_row(place: Tensor, rows: int) -> Tensor:
                """Return sums of slope times query by a sparse product, without (B K, D)."""
                order = torch.argsort(place)
                starts = torch.searchsorted(place[order], torch.arange(rows + 1))
                sparse = torch.sparse_csr_tensor(
                    starts, order // count, slopes.view(-1)[order], (rows, batch),
                    check_invariants=False,
                )  # fmt: skip
                return torch.sparse.mm(sparse, query)

            return batch * count, of_query, true * query, ids, by_row
        distance, direction = self._true_distance(query, tails)
        true = (torch.sigmoid(MARGIN - distance) - 1).mul_(true_weight)[:, None]
        of_tail = true * direction
        of_query, of_rows = -of_tail, torch.empty(batch * count, dim)
        for at in range(0, batch, PIECE):
            own = slice(at * count, (at + PIECE) * count)
            rows = self.entities.weight.index_select(0, ids[own]).view(-1, count, dim)
            apart = query[at : at + PIECE, None] - rows
            if self.scorer == "TransE":
                slope = torch.sigmoid(MARGIN - apart.abs().sum(2)).mul_(-weight)[:, :, None]
                apart.sign_().mul_(slope)
            else:
                real, imaginary = apart.chunk(2, 2)
                modulus = torch.addcmul(real * real, imaginary, imaginary).add_(TINY).sqrt_()
                slope = torch.sigmoid(MARGIN - modulus.sum(2)).mul_(-weight)[:, :, None] / modulus
                real.mul_(slope)
                imaginary.mul_(slope)
            of_query[at : at + PIECE] += apart.sum(1)
            torch.neg(apart.view(-1, dim), out=of_rows[own])
        return batch * count, of_query, of_tail, ids, _summed(of_rows)


def _summed(of_rows: Tensor) -> Callable[[Tensor, int], Tensor]:
    """Return a function that sums rows (M, D) by their places (M,) among the distinct ids."""
    return lambda place, rows: torch.zeros(rows, of_rows.shape[1]).index_add_(0, place, of_rows)


class AllEntities:
    """ComplEx on tail queries with a softmax over all entities (1vsAll)."""

    def __init__(self, entities: int, relations: int, dim: int, batch: int):
        self.entities, self.relations = SparseAdam(entities, dim), SparseAdam(relations, dim)
        self._scores = torch.empty(batch, entities)

    def step(self, triples: Tensor) -> None:
        head, relation, tail = triples.unbind(1)
        heads, rows = self.entities.weight[head], self.relations.weight[relation]
        query = product(heads, rows)
        scores = torch.mm(query, self.entities.weight.T, out=self._scores)
        slopes = torch.softmax(scores, 1)
        slopes[torch.arange(len(tail)), tail] -= 1
        slopes /= len(tail)
        of_query = slopes @ self.entities.weight
        gradient = slopes.T @ query
        gradient.index_add_(0, head, product(of_query, conjugate(rows)))
        of_relations = torch.zeros_like(self.relations.weight)
        of_relations.index_add_(0, relation, product(of_query, conjugate(heads)))
        self.entities.step_all(gradient)
        self.relations.step_all(of_relations)


@torch.no_grad()
def rank(entities: Tensor, relations: Tensor, splits: Splits, batch: int = 512) -> float:
    """Return the filtered MRR of the test triples, both sides, by ComplEx with these rows."""
    everything, test = np.concatenate(list(splits.values())), splits["test"]
    total = 0.0
    for anchor, answer in ((0, 2), (2, 0)):
        keys = everything[:, anchor] * 100_000 + everything[:, 1]
        order = np.argsort(keys, kind="stable")
        keys, answers = keys[order], everything[order, answer]
        asked = test[:, anchor] * 100_000 + test[:, 1]
        starts, stops = np.searchsorted(keys, asked), np.searchsorted(keys, asked, "right")
        for at in range(0, len(test), batch):
            part = torch.from_numpy(test[at : at + batch])
            factor = relations[part[:, 1]]
            query = product(entities[part[:, anchor]], conjugate(factor) if anchor else factor)
            scores = query @ entities.T
            true = scores.gather(1, part[:, answer, None])
            first, counts = starts[at : at + batch], (stops - starts)[at : at + batch]
            within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            known = answers[np.repeat(first, counts) + within]
            scores[np.repeat(np.arange(len(part)), counts), known] = -1e9
            total += (1 / (1 + (scores > true).sum(1).double())).sum().item()
    return total / (2 * len(test))


def check() -> None:
    """Compare the gradients of every scorer with autograd's."""
    entities, relations, dim, batch, count = 50, 5, 8, 6, 4
    for scorer in SCORERS:
        for shared in (True, False):
            trainer = Sampled(scorer, entities, relations, dim, count, shared)
            trainer.entities.weight = torch.randn(entities, dim)
            found: dict[str, Tensor] = {}
            trainer.entities.step_rows = lambda ids, gradient, found=found: found.update(
                entities=torch.zeros(entities, dim).index_add_(0, ids, gradient)
            )
            trainer.relations.step_all = lambda gradient, found=found: found.update(
                relations=gradient
            )
            sizes = (entities, relations, entities)
            triples = torch.stack([torch.randint(0, size, (batch,)) for size in sizes], 1)
            torch.manual_seed(7)
            trainer.step(triples)
            rows = trainer.entities.weight.clone().requires_grad_()
            factors = trainer.relations.weight.clone().requires_grad_()
            torch.manual_seed(7)
            shape = (count,) if shared else (batch * count,)
            negatives = torch.randint(0, entities, shape)
            negatives = negatives.expand(batch, count) if shared else negatives.view(batch, count)
            head, relation, tail = triples.unbind(1)
            heads, factor = rows[head], factors[relation]
            true = _score(scorer, heads, factor, rows[tail])
            false = _score(scorer, heads[:, None], factor[:, None], rows[negatives])
            loss = (F.softplus(-true).mean() + F.softplus(false).mean()) / 2
            loss.backward()
            torch.testing.assert_close(found["entities"], rows.grad, atol=1e-5, rtol=0)
            torch.testing.assert_close(found["relations"], factors.grad, atol=1e-5, rtol=0)
    print("the floor's gradients agree with autograd's")


def _score(scorer: str, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
    if scorer == "ComplEx":
        return (product(*torch.broadcast_tensors(head, relation)) * tail).sum(-1)
    if scorer == "DistMult":
        return (head * relation * tail).sum(-1)
    if scorer == "TransE":
        return MARGIN - (head + relation - tail).abs().sum(-1)
    turn = torch.cat([relation.cos(), relation.sin()], -1)
    real, imaginary = (product(head, turn) - tail).chunk(2, -1)
    return MARGIN - (real**2 + imaginary**2 + TINY).sqrt().sum(-1)


if __name__ == "__main__":
    check()
