"""Training as plain dense torch, in one process and float64: what every run must equal.

The whole entity table is one tensor with gradients, a step takes the whole global batch, scores
and losses are written from the papers' formulas.  Only the order of the triples, the negatives
and the initial values are the package's, as they define the run.

Shapes: B triples per step, K negatives, N entities, D elements per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from oracle_rows import composition, dense_table, table_optimizer, with_features
from oracle_table import DenseTable
from torch import Tensor

from kge_torchrec.config import Config
from kge_torchrec.data.batches.order import EpochShuffle, WeightedOrder
from kge_torchrec.data.batches.staged import StagedBatches
from kge_torchrec.data.negatives import Chunks, NegativeSampler, UniformSampler, random_numbers
from kge_torchrec.data.parts import PartLayout
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.typed_negatives import typed_sampler


def train_dense(
    config: Config,
    store: TripleStore,
    start: dict[str, Tensor],
    losses: list[float] | None = None,
    watch: Callable[[dict[str, Tensor]], object] = lambda parameters: None,
    staged: StagedBatches | None = None,
) -> dict[str, Tensor]:
    """The parameters after ``config``'s epochs, from ``start`` {"entities", "relations"}.

    losses: takes the loss of every step.
    watch: is called with the parameters after every step.
    staged: says which triples and candidates a step has where the run's table lies on disk.
    """
    train = config.train
    table = dense_table(config, store, start["entities"])
    (relations,) = (
        v.double().clone().requires_grad_() for k, v in start.items() if k != "entities"
    )
    optimizer = relation_optimizer(config, relations)
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
            clip(config, [entities, relations])
            optimizer.step()
            ids = [rows[:, 0], rows[:, 2], *(drawn.reshape(-1) for drawn in negatives.values())]
            touched = with_features(composing, torch.cat(ids).unique())
            table.step(touched, entities.grad[touched])
            watch(now(table, relations, start))
    return now(table, relations, start)


def now(table: DenseTable, relations: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """The parameters by name."""
    return {key: table.weights if key == "entities" else relations.detach() for key in names}


def clip(config: Config, parameters: list[Tensor]) -> None:
    """Clips the gradients of the whole step, as one process has them."""
    if config.train.clip_value is not None:
        torch.nn.utils.clip_grad_value_(parameters, config.train.clip_value)
    if config.train.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, config.train.clip_norm)


def relation_optimizer(config: Config, relations: Tensor) -> torch.optim.Optimizer:
    """torch's own optimizer of the same family."""
    train, table = config.train, table_optimizer(config)
    rest = {"weight_decay": table.weight_decay}
    if train.optimizer.endswith("adam"):
        return torch.optim.AdamW([relations], train.lr, table.betas, table.eps, **rest)
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


def global_batch(
    config: Config,
    store: TripleStore,
    epoch: int,
    step: int,
    staged: StagedBatches | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The batch's triples (B, 3) and, by side, each one's negatives (B, K)."""
    size, options = config.train.batch_size, config.negatives
    sampler: NegativeSampler = UniformSampler(store.num_entities)
    rows = store.train[drawn_triples(config, store, epoch, step, staged)]
    if staged is not None:
        buffer = staged.buffer_at(epoch, step)
        sampler = OfBuffer(staged.layout, buffer)
    if options.sampling == "degree":
        degrees = np.bincount(store.train[:, [0, 2]].reshape(-1), minlength=store.num_entities)
        sums = np.cumsum(
            np.where(degrees > 0, degrees.clip(1) ** options.sampler_options().degree_power, 0)
        )
        sampler = ByWeight(sums)
    chunk = np.arange(len(rows)) // (options.chunk_size or size)
    negatives = {}
    for side in ("head", "tail") if options.sides == "both" else (options.sides,):
        count = (options.head_count if side == "head" else None) or options.count
        place, chunks = (epoch, step, side), range(int(chunk[-1]) + 1)
        numbers = random_numbers(config.seed, place, chunks, count)
        of_chunks = whole_chunks(rows, chunk, options.chunk_size or size)
        typed = typed_sampler(sampler, options, store)
        drawn = typed.sample(Chunks(side, numbers, lambda of_chunks=of_chunks: of_chunks))[chunk]
        if options.in_batch:
            drawn = np.concatenate([drawn, answers_of_chunks(rows, side, chunk, config)], 1)
        negatives[side] = torch.from_numpy(drawn)
    return torch.from_numpy(rows.astype(np.int64)), negatives


def whole_chunks(rows: np.ndarray, chunk: np.ndarray, size: int) -> np.ndarray:
    """(C, size, 3) the triples of each chunk, repeated where the batch cuts it short."""
    parts = [rows[chunk == number] for number in range(chunk[-1] + 1)]
    return np.stack([np.resize(part, (size, 3)) for part in parts]).astype(np.int64)


def suits(
    config: Config, store: TripleStore, rows: Tensor, side: str, candidates: Tensor
) -> Tensor:
    """(B, K) bool: by the definition, which candidates are of the kind that negatives are to be."""
    options, column = config.negatives, 0 if side == "head" else 2
    train, label = store.train.tolist(), store.entities.labels(range(store.num_entities))
    types: dict[str, set] = {}
    limits = options.restriction()
    if limits.types is not None:
        for line in Path(limits.types).read_text("utf-8").splitlines():
            entity, of = line.split("\t")
            types.setdefault(entity, set()).add(of)
    good = torch.ones(candidates.shape, dtype=torch.bool)
    count = (options.head_count if side == "head" else None) or options.count
    held = candidates.shape[1]
    if limits.share < 1:
        held = max(1, round(limits.share * count))
    for i, row in enumerate(rows.tolist()):
        right = set(range(store.num_entities))
        if options.among == "seen":
            right = {triple[column] for triple in train if triple[1] == row[1]}
        elif options.among == "types":
            own = types.get(label[row[column]], set())
            right = {e for e in right if types.get(label[e], set()) & own}
        if len(right) > 1:
            good[i, :held] = torch.tensor([e in right for e in candidates[i, :held].tolist()])
    return good


def drawn_triples(
    config: Config, store: TripleStore, epoch: int, step: int, staged: StagedBatches | None
) -> np.ndarray:
    """Return the (B,) indices of the training triples of each step."""
    if staged is not None:
        start, count = staged.positions(epoch, step)
        return staged.order(epoch)(np.arange(start, start + count))
    size, count = config.train.batch_size, len(store.train)
    order = EpochShuffle(count, config.seed, epoch)
    if config.data.weights == "sampling":
        order = WeightedOrder(store.weights("train")).of(order, config.seed, epoch)
    return order(np.arange(step * size, min((step + 1) * size, count)))


class OfBuffer(NegativeSampler):
    """Takes entities of some parts alike, in the order of ids of each part."""

    def __init__(self, layout: PartLayout, buffer: tuple[int, ...]):
        ids = np.arange(layout.num_entities)
        parts = layout.part_of(ids)
        self.ids = np.concatenate([ids[parts == part] for part in sorted(buffer)])

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        return self.ids[(numbers * len(self.ids)).astype(int)]


def weights_of(
    config: Config, store: TripleStore, epoch: int, step: int, staged: StagedBatches | None
) -> Tensor:
    """(B,) of the triples of a step; over an epoch their mean is 1 / B."""
    index = drawn_triples(config, store, epoch, step, staged)
    weights = torch.ones(len(index), dtype=torch.float64)
    all_weights = weights_of_triples(config, store)
    if all_weights is not None:
        weights = all_weights[index] / all_weights.mean()
    return weights / len(index)


def weights_of_triples(config: Config, store: TripleStore) -> Tensor | None:
    """(T,) by triple and by relation; None without."""
    named = config.loss.relation_weights
    if config.data.weights != "loss" and not named:
        return None
    weights = torch.ones(len(store.train), dtype=torch.float64)
    if config.data.weights == "loss":
        weights = torch.from_numpy(np.array(store.weights("train"))).double()
    labels = store.relations.labels(range(store.num_relations))
    of = torch.tensor([(named or {}).get(label, 1.0) for label in labels], dtype=torch.float64)
    return weights * of[store.train[:, 1].astype(np.int64)]


def answers_of_chunks(rows: np.ndarray, side: str, chunk: np.ndarray, config: Config) -> np.ndarray:
    """The answers of each triple's chunk, as often as make a whole one: (B, chunk size)"""
    answers, size = rows[:, 0 if side == "head" else 2], config.negatives.chunk_size
    of_chunk = [answers[chunk == number].tolist() for number in chunk]
    size = size or config.train.batch_size
    return np.array([(result * size)[:size] for result in of_chunk], np.int64)


def same_relation(config: Config, rows: Tensor, drawn: Tensor) -> Tensor:
    """(B, K) bool: drawn, or the answer of a triple of the chunk with the relation of the row."""
    chunk = np.arange(len(rows)) // (config.negatives.chunk_size or len(rows))
    as_answers = rows.numpy()[:, [1, 1, 1]]  # the relation in the place of the answer
    relations = torch.from_numpy(answers_of_chunks(as_answers, "tail", chunk, config))
    mask = torch.ones(drawn.shape, dtype=torch.bool)
    mask[:, -relations.shape[1] :] = relations == rows[:, 1:2]
    return mask


def log_expected(config: Config, store: TripleStore, side: str, entities: Tensor) -> Tensor:
    """Log of how often each of the entities (B, K) is expected among a query's candidates."""
    options, triples, count = config.negatives, store.train, store.num_entities
    ends = np.stack([np.bincount(triples[:, column], minlength=count) for column in (0, 2)])
    chance = np.full(count, 1 / count)
    if options.sampling == "degree":
        weights = np.where(
            ends.sum(0) > 0, ends.sum(0).clip(1) ** options.sampler_options().degree_power, 0
        )
        chance = weights / weights.sum()
    drawn = (options.head_count if side == "head" else None) or options.count
    expected = drawn * chance
    if options.in_batch:
        size = options.chunk_size or config.train.batch_size
        others = (size - 1) / (len(triples) - 1)  # without the triple itself
        expected = expected + others * ends[0 if side == "head" else 1]
    return torch.from_numpy(expected).log()[entities]


class ByWeight(NegativeSampler):
    """Entities by the sums of their weights, all in memory."""

    def __init__(self, sums: np.ndarray):
        self.sums = sums

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.sums, numbers * self.sums[-1], side="right")


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
        if config.negatives.hardest:
            usable = negative.detach().masked_fill(~mask, -math.inf)
            hardest = usable.argsort(1, descending=True)[:, : config.negatives.hardest]
            mask &= torch.zeros_like(mask).scatter(1, hardest, True)
        of_query = query_loss(config, scores(answers[:, None]), negative, mask)
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


def query_loss(config: Config, positive: Tensor, negative: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) and (B, K) scores -> (B,)"""
    loss, log_sigmoid = config.loss, torch.nn.functional.logsigmoid
    of = loss.loss_options()
    smooth, count = getattr(of, "label_smoothing", 0.0), mask.sum(1).clamp(min=1)
    is_libkge = getattr(of, "smoothing", None) == "libkge"
    if loss.name == "softmax":
        smooth = 1 / (2 - smooth) if is_libkge else smooth  # targets (2 - e) / (2 - e) in all
        both = torch.cat([positive, negative.masked_fill(~mask, -math.inf)], 1)
        chances = both.log_softmax(1)
        choices = torch.cat([torch.ones_like(mask[:, :1]), mask], 1)
        spread = chances.masked_fill(~choices, 0).sum(1) / choices.sum(1)
        return -(1 - smooth) * chances[:, 0] - smooth * spread
    if loss.name == "bce":
        low = 1 / (1 + mask.sum(1, keepdim=True)) if is_libkge else smooth / 2
        high = 1 - smooth + low
        positive_loss = -high * log_sigmoid(positive) - (1 - high) * log_sigmoid(-positive)
        negative_loss = -low * log_sigmoid(negative) - (1 - low) * log_sigmoid(-negative)
        total = positive_loss[:, 0] + (negative_loss * mask).sum(1)
        return total if of.reduction == "sum" else total / (1 + mask.sum(1))
    if loss.name == "bpr":
        return -(log_sigmoid(positive - negative) * mask).sum(1) / mask.sum(1).clamp(min=1)
    if loss.name == "margin":
        return ((of.margin - positive + negative).clamp(min=0) * mask).sum(1) / count
    if loss.name == "foreign_parts:MeanGap":
        mean = (negative.exp() * mask).sum(1) / count
        return torch.log1p(mean / positive[:, 0].exp())
    logits = (of.temperature * negative.detach()).masked_fill(~mask, -math.inf)
    shares = logits.softmax(1).nan_to_num()  # no candidate counts: all are nan
    negative_loss = (shares * log_sigmoid(-of.margin - negative)).sum(1)
    return -(negative_loss + log_sigmoid(of.margin + positive[:, 0])) / 2


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
    total = config.loss.n3 * cubed(rows, is_complex) + config.loss.l2 * rows.square().sum(-1)
    for name, options in config.loss.regularizers.items():
        if name in ("n3", "lp"):
            weight = options["weight"]
            if is_relation:
                weight = options.get("relation_weight", weight)
            total = total + weight * powers(rows, is_complex, options.get("p", 3))
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


def ivr(
    config: Config, head: Tensor, relation: Tensor, tail: Tensor, core: Tensor | None = None
) -> Tensor:
    """IVR by its definition, all intermediate variables built: (..., D) -> (...).

    core: (W, D, D) of TuckER, whose rows are one part each.
    """
    options = config.loss.regularizers.get("ivr")
    if not options:
        return torch.zeros(head.shape[:-1])
    if config.model.biases:
        head, tail = head[..., :-2], tail[..., :-2]
    size = config.model.dim
    if core is None:  # W_ijk of the score sum_ijk W_ijk h_i r_j t_k
        core = torch.ones(1, 1, 1).double()
        if config.model.scorer == "complex":
            core = torch.tensor([[[1.0, 0], [0, 1]], [[0, 1], [-1, 0]]]).double()
        size = len(core)
        head, relation, tail = (x.unflatten(-1, (-1, size)) for x in (head, relation, tail))
    else:
        core = core.transpose(0, 1)
        head, relation, tail = (x[..., None, :] for x in (head, relation, tail))
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
    first, second = options["lambda1"], options["lambda2"]
    weights = first, second, options.get("lambda3", first), options.get("lambda4", second)
    return sum(weight * total for weight, total in zip(weights, totals, strict=True))


def cubed(rows: Tensor, is_complex: bool) -> Tensor:
    """Sum of |x|^3."""
    return powers(rows, is_complex, 3)


def powers(rows: Tensor, is_complex: bool, exponent: float) -> Tensor:
    """Sum of |x|^p."""
    modulus = rows.unflatten(-1, (-1, 2)).norm(dim=-1) if is_complex else rows.abs()
    return modulus.pow(exponent).sum(-1)
