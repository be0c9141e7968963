"""Training of queries with all their answers as plain dense torch, in one process and float64.

The whole table is one tensor with gradients, every query is scored against all its candidates (all
of the table, or what was sampled) at once, and losses are torch's own over dense labels.  Only the
order of the examples, the samples and the initial values are the package's, as they define the run.

Shapes: Q queries, N entities, D elements per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from oracle_losses import loss_of_query
from oracle_rows import composition, dense_table, unfrozen, with_features
from oracle_training import (
    clip,
    dura,
    ivr,
    penalty_of_rows,
    rate_factor,
    relation_optimizer,
    score_of,
)
from oracle_training import score as score_triples
from torch import Tensor
from torch.nn.functional import cross_entropy

from kge_torchrec.config import Config
from kge_torchrec.data.negatives import random_numbers
from kge_torchrec.data.shuffle import EpochShuffle
from kge_torchrec.data.store import TripleStore

Query = tuple[str, int, int]  # side of the answers, anchor, relation


def train_dense(
    config: Config,
    store: TripleStore,
    start: dict[str, Tensor],
    losses: list[float] | None = None,
    frozen: Sequence[int] = (),
) -> dict[str, Tensor]:
    """The parameters after ``config``'s epochs, from ``start`` {"entities", "relations", ...}.

    losses: takes the loss of every step.
    frozen: ids of rows that no step changes.
    """
    table = dense_table(config, store, start["entities"])
    dense = {k: v.double().clone().requires_grad_() for k, v in start.items() if k != "entities"}
    optimizers = [relation_optimizer(config, parameter) for parameter in dense.values()]
    examples = all_examples(config, store)
    size = config.train.batch_size
    step_count = -(-len(examples) // size)
    composing, all_ids = composition(store), torch.arange(store.num_rows)
    suited = suited_entities(config, store)
    for epoch in range(config.train.epochs):
        order = order_of(config, store, epoch, len(examples))
        for step in range(step_count):
            factor = rate_factor(config, epoch * step_count + step, step_count)
            table.lr = config.train.lr * factor
            chosen = queries_of_step(order, range(len(examples))[step * size :][:size], examples)
            queries = [
                (query, answers, drawn_answers(config, store, epoch, query, answers))
                for i, number in chosen
                for query, answers in [examples[i][number]]
            ]
            others = candidates(config, store.num_entities, epoch, step)
            entities = table.weights.clone().requires_grad_()
            each = weights_of(config, store, chosen)
            vectors = entities if composing is None else composing @ entities
            parts = vectors, dense, queries, others, each, suited
            loss = batch_loss(config, store.num_relations, *parts)
            if losses is not None:
                losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] = config.train.lr * factor
            loss.backward()
            entities.grad[list(frozen)] = 0
            clip(config, [entities, *dense.values()])
            for optimizer in optimizers:
                optimizer.step()
            if config.negatives.regime == "kvssample":
                ids = [i for (_, anchor, _), _, drawn in queries for i in (anchor, *drawn)]
                touched = torch.cat([torch.tensor(ids), *others.values()]).unique()
                touched = unfrozen(with_features(composing, touched), frozen)
                table.step(touched, entities.grad[touched])
            else:
                touched = unfrozen(all_ids, frozen)  # every row is a candidate
                table.step(touched, entities.grad[touched])
    return {"entities": table.weights} | {k: v.detach() for k, v in dense.items()}


def order_of(config: Config, store: TripleStore, epoch: int, count: int) -> np.ndarray:
    """Positions of the examples of an epoch in their order, (count,)."""
    order = EpochShuffle(count, config.seed, epoch)
    return order(np.arange(count))


def queries_of_step(order: np.ndarray, positions: range, examples: list) -> list[tuple[int, int]]:
    """(example, number of its query): of two queries the first comes half an epoch later."""
    count = len(order)
    places = [(order[position], 0) for position in positions]
    if len(examples[0]) == 2:
        places += [(order[(position + count // 2) % count], 1) for position in positions]
    return places


def weights_of(config: Config, store: TripleStore, chosen: list[tuple[int, int]]) -> Tensor | None:
    """Weights of the queries of a step, divided by the mean weight of all training triples."""
    if config.data.weights != "loss":
        return None
    weights = torch.from_numpy(np.array(store.weights("train"))).double()
    return weights[[triple for triple, _ in chosen]] / weights.mean()


def all_examples(config: Config, store: TripleStore) -> list[list[tuple[Query, list[int]]]]:
    """Return the examples of an epoch: lists of queries with their answers."""
    names = ("head", "tail") if config.negatives.sides == "both" else (config.negatives.sides,)
    answers: dict[Query, list[int]] = {}
    single = []
    for head, relation, tail in store.train.tolist():
        both = {"head": (tail, head), "tail": (head, tail)}
        queries = [((side, both[side][0], relation), [both[side][1]]) for side in names]
        single.append(queries)
        for query, answer in queries:
            answers.setdefault(query, []).extend(answer)
    if config.negatives.regime == "1vsall":
        return single
    if config.negatives.regime == "allvsall":
        for side in names:
            for anchor in range(store.num_entities):
                for relation in range(store.num_relations):
                    answers.setdefault((side, anchor, relation), [])
    return [[(query, answers[query])] for query in sorted(answers)]


def candidates(config: Config, num_entities: int, epoch: int, step: int) -> dict[str, Tensor]:
    """Return by side the candidates of its queries besides their answers."""
    if config.negatives.regime != "kvssample":
        return dict.fromkeys(("head", "tail"), torch.arange(num_entities))
    own = config.negatives.sides
    results = {}
    for side in ("head", "tail") if own == "both" else (own,):
        place = epoch, step, side
        numbers = random_numbers(config.seed, place, range(1), config.negatives.count)
        results[side] = (numbers[0] * num_entities).long()
    return results


def drawn_answers(config, store, epoch: int, query: Query, answers: list[int]) -> list[int]:
    """The answers that a step takes of a query."""
    limit, (side, anchor, relation) = config.negatives.max_answers, query
    if config.negatives.regime != "kvssample" or limit == 0 or len(answers) <= limit:
        return answers
    query = ("head", "tail").index(side), anchor, relation
    random = np.random.default_rng([config.seed, epoch, 3, *query])
    return [sorted(answers)[place] for place in random.choice(len(answers), limit, replace=False)]


def suited_entities(config: Config, store: TripleStore) -> dict[tuple[str, int], set[int]] | None:
    """Return by side and relation the entities whose label has a prefix of an answer in train."""
    if config.negatives.among in (None, "all"):
        return None
    kinds = [label.partition(":")[0] for label in store.entities.labels(range(store.num_entities))]
    types: dict[tuple[str, int], set[str]] = {}
    for head, relation, tail in store.train.tolist():
        types.setdefault(("head", relation), set()).add(kinds[head])
        types.setdefault(("tail", relation), set()).add(kinds[tail])
    return {
        place: {i for i, kind in enumerate(kinds) if kind in some} for place, some in types.items()
    }


def batch_loss(
    config, num_relations, entities, dense, queries, others, weights=None, suited=None
) -> Tensor:
    """Mean over the queries, by their weights if they have any."""
    losses = []
    for query, answers, drawn in queries:
        wrong = [i for i in others[query[0]].tolist() if i not in answers]
        if suited is not None:
            wrong = [i for i in wrong if i in suited[query[0], query[2]]]
        losses.append(query_loss(config, num_relations, entities, dense, query, drawn, wrong))
    if weights is not None:
        return (torch.stack(losses) * weights).mean()
    return torch.stack(losses).mean()


def query_loss(config, num_relations, entities, dense, query, answers, others) -> Tensor:
    side, anchor, relation = query
    candidates = entities[torch.tensor([*answers, *others])]
    inverse = config.model.reciprocal and side == "head"
    relation = relation + num_relations * inverse
    backwards = side == "head" and not inverse
    relations = dense["relations"]
    factors = relations[relation]
    formula = partial(score, config.model.scorer, dense=dense)
    head, tail = (candidates, entities[anchor]) if backwards else (entities[anchor], candidates)
    scores = score_of(config, head, factors, tail, formula)
    loss = loss_of_query(config.loss, scores[: len(answers)], scores[len(answers) :])
    regularizers = penalty_of_rows(config, entities[anchor])
    regularizers = regularizers + penalty_of_rows(config, factors, is_relation=True)
    if answers:
        regularizers = regularizers + penalty_of_rows(config, entities[answers]).mean()
    if {"dura", "ivr"} & config.loss.regularizers.keys():
        ends = (answers[0], anchor) if backwards else (anchor, answers[0])
        triple = entities[ends[0]], factors, entities[ends[1]]
        regularizers = regularizers + dura(config, *triple)
        regularizers = regularizers + ivr(config, *triple)
    if config.loss.relation_weight:
        head, tail = (
            entities[i] for i in ((*answers, anchor) if backwards else (anchor, *answers))
        )
        relation_scores = score_of(config, head, relations, tail, formula)[None]
        relation_loss = cross_entropy(relation_scores, torch.tensor([relation]))
        loss = loss + config.loss.relation_weight * relation_loss
    of = config.loss.options_in("options")
    each = len(answers) if getattr(of, "answers", "mean") == "sum" else 1
    return (loss + regularizers) * each


def score(name: str, head: Tensor, relation: Tensor, tail: Tensor, dense) -> Tensor:
    """(..., D) rows -> (...)"""
    if name == "meim":
        count = len(dense["core"])
        rows = (x.unflatten(-1, (count, -1)) for x in (head, relation, tail))
        return torch.einsum("...pi, ...pw, ...pj, pwij -> ...", *rows, dense["core"])
    if name == "tucker":
        return torch.einsum("...i, ...w, ...j, wij -> ...", head, relation, tail, dense["core"])
    if name != "keci":
        return score_triples(name, head, relation, tail)
    factor = dense["coefficients"]  # p = 0, q = 1: one basis vector, its square -1
    (a, b), (c, d) = ((x[..., 0::2], factor * x[..., 1::2]) for x in (head, relation))
    real, imaginary = a * c - b * d, a * d + b * c
    return (real * tail[..., 0::2] + imaginary * tail[..., 1::2]).sum(-1)
