"""Training as plain dense torch, in one process and float64: what every run must equal.

The whole entity table is one tensor with gradients, a step takes the whole global batch, scores
and losses are written from the papers' formulas.  Only the order of the triples, the negatives
and the initial values are the package's, as they define the run.

Shapes: B triples per step, K negatives, N entities, D elements per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from oracle_batches import global_batch, log_expected, same_relation, suits, weights_of
from oracle_losses import loss_of_query
from oracle_rows import composition, dense_table, table_optimizer, unfrozen, with_features
from oracle_table import DenseTable
from torch import Tensor

from kge_torchrec.config import Config
from kge_torchrec.data.batches.staged import StagedBatches
from kge_torchrec.data.store import TripleStore


def train_dense(
    config: Config,
    store: TripleStore,
    start: dict[str, Tensor],
    losses: list[float] | None = None,
    watch: Callable[[dict[str, Tensor]], object] = lambda parameters: None,
    staged: StagedBatches | None = None,
    frozen: Sequence[int] = (),
    frozen_relations: Sequence[int] = (),
    squares: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The parameters after ``config``'s epochs, from ``start`` {"entities", "relations"}.

    losses: takes the loss of every step.
    watch: is called with the parameters after every step.
    staged: says which triples and candidates a step has where the run's table lies on disk.
    frozen, frozen_relations: ids of rows that no step changes.
    squares: the sums of squares that Adagrad has at the start, of rows and of relations.
    """
    train = config.train
    table = dense_table(config, store, start["entities"])
    (relations,) = (
        v.double().clone().requires_grad_() for k, v in start.items() if k != "entities"
    )
    optimizer = relation_optimizer(config, relations)
    if squares is not None:
        table.squares, optimizer.state[relations]["sum"] = (x.double() for x in squares)
    known = {tuple(row) for row in store.train.tolist()}
    composing = composition(store)
    step_count = -(-len(store.train) // train.batch_size)
    if staged is not None:
        step_count = staged.steps_per_epoch
    for epoch in range(train.epochs):
        for step in range(step_count):
            factor = rate_factor(config, epoch * step_count + step, step_count)
            table.lr = train.lr * factor
            for group in optimizer.param_groups:
                group["lr"] = (train.relation_lr or train.lr) * factor
            rows, negatives = global_batch(config, store, epoch, step, staged)
            entities = table.weights.clone().requires_grad_()
            shares = weights_of(config, store, epoch, step, staged)
            vectors = entities if composing is None else composing @ entities
            loss = batch_loss(config, store, vectors, relations, rows, negatives, known, shares)
            if losses is not None:
                losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            parts = [rows[:, 0], rows[:, 2], *(drawn.reshape(-1) for drawn in negatives.values())]
            ids = torch.cat(parts)
            if config.entities.preset == "dgl":
                entities.grad /= occurrences(composing, ids, len(entities))
            entities.grad[list(frozen)] = 0
            relations.grad[list(frozen_relations)] = 0
            clip(config, [entities, relations])
            optimizer.step()
            touched = unfrozen(with_features(composing, ids.unique()), frozen)
            table.step(touched, entities.grad[touched])
            watch(now(table, relations, start))
    return now(table, relations, start)


def occurrences(composing: Tensor | None, ids: Tensor, count: int) -> Tensor:
    """(N, 1) how often a row occurs in a batch: itself, or an entity that has the feature."""
    times = torch.bincount(ids, minlength=count if composing is None else len(composing)).double()
    if composing is not None:
        times = times @ (composing != 0).double()
    return times.clamp(min=1)[:, None]


def now(table: DenseTable, relations: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """The parameters by name."""
    return {key: table.weights if key == "entities" else relations.detach() for key in names}


def clip(config: Config, parameters: list[Tensor]) -> None:
    """Clips the gradients of the whole step, as one process has them."""
    if config.train.clip.value is not None:
        torch.nn.utils.clip_grad_value_(parameters, config.train.clip.value)
    if config.train.clip.norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, config.train.clip.norm)


def relation_optimizer(config: Config, relations: Tensor) -> torch.optim.Optimizer:
    """torch's own optimizer of the same family."""
    train, table = config.train, table_optimizer(config)
    rest = {"weight_decay": getattr(table, "weight_decay", 0.0)}
    if train.optimizer.endswith("adam"):
        betas = table.beta1, table.beta2
        return torch.optim.AdamW([relations], train.lr, betas, table.eps, **rest)
    if train.optimizer.endswith("adagrad"):
        return torch.optim.Adagrad([relations], train.lr, eps=table.eps, **rest)
    return torch.optim.SGD([relations], train.lr, **rest)


def rate_factor(config: Config, step: int, steps_per_epoch: int) -> float:
    """Return the factor of the learning rate: constant or cosine, after a warm-up."""
    warmup, total = config.train.warmup_steps, config.train.epochs * steps_per_epoch
    if step < warmup:
        return (step + 1) / warmup
    if config.train.schedule == "constant":
        return 1.0
    assert config.train.schedule == "cosine"
    return (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2


def batch_loss(
    config: Config,
    store: TripleStore,
    entities: Tensor,
    relations: Tensor,
    rows: Tensor,
    negatives: dict[str, Tensor],
    known: set[tuple[int, int, int]],
    shares: Tensor,
) -> Tensor:
    """Mean over the sides of the sum over the triples, by their shares (B,)."""
    total = torch.zeros((), dtype=torch.float64)
    for side, drawn in negatives.items():
        anchors, answers = (rows[:, 2], rows[:, 0]) if side == "head" else (rows[:, 0], rows[:, 2])
        inverse = config.model.reciprocal and side == "head"
        relation = relations[rows[:, 1] + (store.num_relations if inverse else 0)]

        def scores(
            ids: Tensor, anchors=anchors, relation=relation, inverse=inverse, side=side
        ) -> Tensor:
            anchor, other = entities[anchors][:, None], entities[ids]
            backwards = side == "head" and not inverse
            head, tail = (other, anchor) if backwards else (anchor, other)
            return score_of(config, head, relation[:, None], tail)

        mask = drawn != answers[:, None]
        if config.negatives.filtered:
            mask &= ~is_known(rows, drawn, side, known)
        if config.negatives.in_batch == "same_relation":
            mask &= same_relation(config, rows, drawn)
        if config.negatives.among not in (None, "all"):
            mask &= suits(config, store, rows, side, drawn)
        negative = scores(drawn)
        if config.negatives.log_q:
            negative = negative - log_expected(config, store, side, drawn)
        each = zip(scores(answers[:, None]), negative, mask, strict=True)
        of_query = torch.stack([loss_of_query(config.loss, a, b[chosen]) for a, b, chosen in each])
        of_query = of_query + penalty(config, entities[anchors], relation, entities[answers])
        backwards = side == "head" and not inverse
        head, tail = (answers, anchors) if backwards else (anchors, answers)
        triple = entities[head], relation, entities[tail]
        of_query = of_query + dura(config, *triple) + ivr(config, *triple)
        total = total + (of_query * shares).sum()
    return total / len(negatives)


def is_known(rows: Tensor, drawn: Tensor, side: str, known: set) -> Tensor:
    """(B, K) bool: whether a negative makes a triple of the training set."""
    out = torch.zeros(drawn.shape, dtype=torch.bool)
    for i, (head, relation, tail) in enumerate(rows.tolist()):
        for j, other in enumerate(drawn[i].tolist()):
            made = (head, relation, other) if side == "tail" else (other, relation, tail)
            out[i, j] = made in known
    return out


def score_of(config: Config, head: Tensor, relation: Tensor, tail: Tensor, formula=None) -> Tensor:
    """(..., D) rows -> (...): by the scorer, or the formula given, and the biases if any."""
    formula = formula or partial(score, config.model.scorer)
    if not config.model.biases:
        return formula(head, relation, tail)
    (head, of_head), (tail, of_tail) = ((x[..., :-2], x[..., -2:]) for x in (head, tail))
    return formula(head, relation, tail) + of_head[..., 0] + of_tail[..., 1]


def score(name: str, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
    """(..., D) rows -> (...)"""
    if name.startswith("transe"):
        return -(head + relation - tail).norm(p=int(name[-1]), dim=-1)
    if name == "distmult":
        return (head * relation * tail).sum(-1)
    if name == "roth":
        return hyperbolic(head, relation, tail)
    if name == "rote":
        phases, shift = relation.tensor_split([head.shape[-1] // 2], -1)
        return -(turned_by(phases, head) + shift - tail).square().sum(-1)
    head, tail = (torch.complex(x[..., 0::2], x[..., 1::2]) for x in (head, tail))
    if name == "complex":
        factor = torch.complex(relation[..., 0::2], relation[..., 1::2])
        return (head * factor * tail.conj()).real.sum(-1)
    turned = head * torch.exp(1j * relation)
    return -(turned - tail).abs().sum(-1)


def turned_by(phases: Tensor, rows: Tensor) -> Tensor:
    x, y = rows[..., 0::2], rows[..., 1::2]
    cos, sin = phases.cos(), phases.sin()
    return torch.stack([cos * x - sin * y, sin * x + cos * y], -1).flatten(-2)


def hyperbolic(head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
    """RotH in the Poincare ball."""
    dim = head.shape[-1]
    phases, shift, curvature = relation.tensor_split([dim // 2, dim // 2 + dim], -1)
    c = torch.nn.functional.softplus(curvature)

    def exponential(rows: Tensor) -> Tensor:
        length = c.sqrt() * rows.norm(dim=-1, keepdim=True)
        return length.tanh() * rows / length

    def added(x: Tensor, y: Tensor) -> Tensor:
        xy, xx, yy = ((a * b).sum(-1, keepdim=True) for a, b in ((x, y), (x, x), (y, y)))
        above = (1 + 2 * c * xy + c * yy) * x + (1 - c * xx) * y
        return above / (1 + 2 * c * xy + c * c * xx * yy)

    query = added(turned_by(phases, exponential(head)), exponential(shift))
    between = added(-query, exponential(tail)).norm(dim=-1, keepdim=True)
    return -(2 / c.sqrt() * (c.sqrt() * between).atanh()).square()[..., 0]


def penalty(config: Config, anchor: Tensor, relation: Tensor, answer: Tensor) -> Tensor:
    """Return the penalty of the rows of each triple, (B,)."""
    of_entities = penalty_of_rows(config, anchor) + penalty_of_rows(config, answer)
    return of_entities + penalty_of_rows(config, relation, is_relation=True)


def penalty_of_rows(config: Config, rows: Tensor, is_relation: bool = False) -> Tensor:
    """Powers (of moduli, where numbers are complex) and squared norms: (..., D) -> (...)."""
    of_both = ("complex", "keci")
    of_entities = (*of_both, "rotate", "rotate_l2", "rote", "roth")
    is_complex = config.model.scorer in (of_both if is_relation else of_entities)
    if config.model.biases and not is_relation:
        rows = rows[..., :-2]
    weights = {"n3": config.loss.n3, **config.loss.regularizers}
    total = torch.zeros(rows.shape[:-1], dtype=rows.dtype)
    for name, weight in weights.items():
        if isinstance(weight, dict) and name in ("n3", "l2"):
            key = "relation_weight" if is_relation and "relation_weight" in weight else "weight"
            weight = weight[key]
        if name == "n3":
            total = total + weight * cubed(rows, is_complex)
        if name == "l2":
            total = total + weight * rows.square().sum(-1)
    return total


def dura(config: Config, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
    """DURA of ComplEx and DistMult: |h r|^2 + |t|^2 + |t conj(r)|^2 + |h|^2, (..., D) -> (...)."""
    weight = config.loss.regularizers.get("dura")
    if not weight:
        return torch.zeros(head.shape[:-1])
    if config.model.biases:
        head, tail = head[..., :-2], tail[..., :-2]
    if config.model.scorer == "complex":
        head, relation, tail = (
            torch.complex(x[..., 0::2], x[..., 1::2]) for x in (head, relation, tail)
        )
    parts = head * relation, tail, tail * relation, head  # a conjugate is as long
    return weight * sum(part.abs().square().sum(-1) for part in parts)


def ivr(config: Config, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
    """IVR by its definition, all intermediate variables built: (..., D) -> (...)."""
    options = config.loss.regularizers.get("ivr")
    if not options:
        return torch.zeros(head.shape[:-1])
    if config.model.biases:
        head, tail = head[..., :-2], tail[..., :-2]
    core = torch.ones(1, 1, 1).double()  # W_ijk of the score sum_ijk W_ijk h_i r_j t_k
    if config.model.scorer == "complex":
        core = torch.tensor([[[1.0, 0], [0, 1]], [[0, 1], [-1, 0]]]).double()
    size = len(core)
    head, relation, tail = (x.unflatten(-1, (-1, size)) for x in (head, relation, tail))
    rows, letters = (head, relation, tail), "ijk"
    totals = [torch.zeros(head.shape[:-2])] * 4

    def add(number: int, variable: Tensor) -> None:
        parts = variable.flatten(head.dim() - 1)
        totals[number] = totals[number] + parts.norm(dim=-1).pow(options["alpha"]).sum(-1)

    for n, row in enumerate(rows):
        after = (n + 1) % 3
        left = letters.replace(letters[n], "")
        last = left.replace(letters[after], "")
        pair = f"...{letters[n]}, ...{letters[after]}"
        add(0, row)
        add(1, torch.einsum(f"{pair} -> ...{letters[n]}{letters[after]}", row, rows[after]))
        one = torch.einsum(f"ijk, ...{letters[n]} -> ...{left}", core, row)
        add(2, one / size**0.5)
        add(3, torch.einsum(f"ijk, {pair} -> ...{last}", core, row, rows[after]))
    weights = 2 * (options["lambda1"], options["lambda2"])
    return sum(weight * total for weight, total in zip(weights, totals, strict=True))


def cubed(rows: Tensor, is_complex: bool) -> Tensor:
    """Sum of |x|^3."""
    modulus = rows.unflatten(-1, (-1, 2)).norm(dim=-1) if is_complex else rows.abs()
    return modulus.pow(3).sum(-1)
