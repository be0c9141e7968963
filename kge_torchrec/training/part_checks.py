"""Checks of parts from other packages on a small batch, before a run trains.

Training would not notice some mistakes: an update that is lost, one number where a value per query
is due, two similarities that disagree.  Here they become errors on every rank.  The inputs are
fixed random numbers.  Parts that may keep state are copied first.

Shapes: C chunks, b queries per chunk, K candidates per chunk, Q queries, M answers, N entities, D
elements per entity row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.registry import is_built_in
from kge_torchrec.distributed.processes import Processes, on_all_ranks
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.models.full_losses import BlockAnswers, FullLoss
from kge_torchrec.models.losses import Loss
from kge_torchrec.models.model import Objective
from kge_torchrec.models.regularizers import Regularizer, TripleRegularizer
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.models.scorers.queries import QueryScorer
from kge_torchrec.ranking.blocks import scoring

_C, _B, _K = 2, 3, 4  # C, b and K of the small batch
_STEPS = 8  # an optimizer may skip some steps
_MATRIX_ERROR = 1e-2  # share of the scores' range that a matrix product may be off by
_ROUNDING = 1e-5  # the same as a share of the largest score


def check_parts(
    config: Config, objective: Objective, optimizer: TableOptimizer, processes: Processes
) -> None:
    """Check the parts of a run that are not built in.  Collective if there are any.

    Args:
        config: The config of the run.
        objective: Scorer, loss and regularizers with initial values.
        optimizer: The optimizer of the table; its ``rule`` takes steps here.
        processes: The ranks.

    Raises:
        ConfigError: A part violates its contract.  Raised on every rank.
    """
    checks = [*_checks(config, objective, optimizer, processes.device)]
    if not checks:
        return

    def run() -> None:
        with torch.random.fork_rng(devices=[]):  # a part may draw random numbers
            for check in checks:
                check()

    on_all_ranks(processes, run)


def _checks(
    config: Config, objective: Objective, optimizer: TableOptimizer, device: torch.device
) -> Iterator[Callable[[], None]]:
    """Yield the checks of the parts from other packages."""
    scorer = objective.scorer
    if not is_built_in("scorer", config.model.scorer):
        yield lambda: check_scorer(config.model.scorer, scorer.to(device), objective.sides)
    if not is_built_in("loss", config.loss.name):
        loss = deepcopy(objective.loss).to(device)
        yield partial(check_loss, config.loss.name, loss, config.negatives.regime, device)
    regularizers = zip(config.loss.regularizers, objective.regularizers.others, strict=True)
    for name, regularizer in regularizers:
        if not is_built_in("regularizer", name):
            inputs = name, deepcopy(regularizer), objective, device
            yield partial(check_regularizer, *inputs)
    if not optimizer.is_ours:
        yield partial(check_optimizer, optimizer, config.model.dim, device)


def check_scorer(name: str, scorer: Scorer, sides: tuple[Side, ...]) -> None:
    """Raise ConfigError unless a scorer scores single pairs and blocks of pairs alike."""
    device, dim = scorer.relations.device, scorer.dim
    one, block = "score_triples", "score_candidates"
    if isinstance(scorer, QueryScorer):
        one, block = "similarity", "similarity_matrix"
    # Rows of length about 1: similar scores, and no saturation in hyperbolic space.
    rows = _random(_C, _B + _K, dim, device=device) / dim**0.5
    anchor, candidates = rows.split([_B, _K], 1)
    relation = torch.arange(_C * _B, device=device).view(_C, _B) % scorer.num_relations
    pairs = anchor.repeat_interleave(_K, 1), relation.repeat_interleave(_K, 1)
    key = f"model.scorer: {name}"
    for side in sides:
        with scoring(scorer):
            single = scorer.score_triples(*pairs, candidates.repeat(1, _B, 1), side)
            matrix = scorer.score_candidates(anchor, relation, candidates, side)
        _check_shape(f"{key}: {one}", single, (_C, _B * _K), "score for each query and its row")
        _check_shape(f"{key}: {block}", matrix, (_C, _B, _K), "score for each query and row")
        single, matrix = single.double().view(_C, _B, _K), matrix.double()
        finite = single[single.isfinite()]
        allowed = 0.0
        if len(finite):
            span, largest = float(finite.max() - finite.min()), float(finite.abs().max())
            allowed = _MATRIX_ERROR * span + _ROUNDING * largest
        wrong = ~torch.isclose(single, matrix, rtol=0, atol=allowed, equal_nan=True)
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            raise ConfigError(
                f"{key}: {one} and {block} disagree: on side {side} they give the same query and "
                f"row {single[place]:.6g} and {matrix[place]:.6g}; compute both by one formula, "
                "such as pairwise(self.similarity, [query], [rows], self.dim)"
            )


def check_loss(name: str, loss: nn.Module, regime: str, device: torch.device) -> None:
    """Raise ConfigError unless a loss returns one value per query.

    Args:
        name: The name in the config.
        loss: A copy of the loss as the objective has it.
        regime: negatives.regime.
        device: Where the loss is computed.
    """
    key, per_query = f"loss.name: {name}", "loss for each query, without their sum or mean"
    closed_form = None
    if isinstance(loss, Loss) and regime not in ("sampled", "kvssample"):
        closed_form = loss.over_all(_K)
    if closed_form is not None:
        _check_closed_form(key, closed_form, device)
    elif regime == "kvssample":
        answer_query = torch.tensor([0, 1, 1, 2], device=device)
        positive = _random(len(answer_query), device=device)
        losses = loss(positive, answer_query, *_negatives(_B, device))
        _check_shape(f"{key}: over_answers", losses, (_B,), per_query)
    else:
        chunks = _C if regime == "sampled" else 1
        negatives = (x.view(chunks, _B, _K) for x in _negatives(chunks * _B, device))
        losses = loss(_random(chunks, _B, device=device), *negatives)
        _check_shape(f"{key}: forward", losses, (chunks, _B), per_query)


def _check_closed_form(key: str, loss: FullLoss, device: torch.device) -> None:
    scores = _random(_B, _K, device=device)
    query = torch.arange(_B, device=device)
    answers = BlockAnswers(query, query, torch.ones(_B, device=device), torch.ones_like(query))
    with torch.no_grad():
        statistics = loss.partial_statistics(scores.clone(), answers)
        _check_shape(f"{key}: partial_statistics", statistics, (3, _B), "column for each query")
        statistics = loss.reduce(statistics[None])
        _check_shape(f"{key}: reduce", statistics, (3, _B), "column for each query")
        losses = loss.loss(statistics)
        _check_shape(f"{key}: loss", losses, (_B,), "loss for each query, not their sum or mean")
        gradients = scores.clone()
        loss.backward(gradients, statistics, answers, torch.ones(_B, device=device))
    if torch.equal(gradients, scores):
        raise ConfigError(
            f"{key}: backward leaves the scores as they were, so the gradients are lost; overwrite "
            "`scores` by them in place, such as scores.mul_(...), and return nothing"
        )


def check_regularizer(
    name: str, regularizer: Regularizer, objective: Objective, device: torch.device
) -> None:
    """Raise ConfigError unless a regularizer returns one value per row or triple."""
    scorer, key = objective.scorer.to(device), f"loss.regularizers.{name}"
    relation = torch.arange(_C * _B, device=device).view(_C, _B) % scorer.num_relations
    rows = _random(2, _C, _B, scorer.dim, device=device)
    if isinstance(regularizer, TripleRegularizer):
        for side in objective.sides:
            penalty = regularizer.penalty_of_triples(scorer, rows[0], relation, rows[1], side)
            due = "penalty for each triple"
            _check_shape(f"{key}: penalty_of_triples", penalty, (_C, _B), due)
        return
    factors = scorer.relation_factors(relation, objective.sides[0])
    for part, is_complex in (
        (scorer.entity_factors(rows[0]), scorer.is_complex),
        (factors, scorer.relation_is_complex),
    ):
        penalty = regularizer.penalty(part, is_complex)
        due = "penalty for each row, such as rows.square().sum(-1)"
        _check_shape(f"{key}: penalty", penalty, (_C, _B), due)


def check_optimizer(optimizer: TableOptimizer, dim: int, device: torch.device) -> None:
    """Raise ConfigError if the updates of a row optimizer are lost."""
    key, count = f"train.optimizer: {optimizer.name}.step", 3
    rows = _random(count, dim, device=device)
    before, steps = rows.clone(), range(1, _STEPS + 1)
    states = {
        name: torch.zeros(count, 1 if by_row else dim, device=device)
        for name, by_row in optimizer.kind.states
    }
    gradients = _random(_STEPS, count, dim, device=device)
    with torch.no_grad():
        for step, grad in zip(steps, gradients, strict=True):
            held = dict(states)
            # A view, since dense parameters are views: a new ``data`` would be lost.
            optimizer.rule.step(rows.view(count, dim), grad, held, 0.1, step)
            for name in states:
                if held.get(name) is not states[name]:
                    raise ConfigError(
                        f"{key} replaces the state {name!r} in its dict, where the new value is "
                        f"lost; change it in place, such as states[{name!r}].mul_(...).add_(...)"
                    )
    if torch.equal(rows, before):
        raise ConfigError(
            f"{key} left the rows as they were in {_STEPS} steps, so its update is lost; change "
            "`rows` in place, such as rows.sub_(lr * grad), not by `rows = ...` or a return value"
        )


def _check_shape(what: str, result: Any, shape: tuple[int, ...], due: str) -> None:
    if isinstance(result, Tensor) and result.shape == shape:
        return
    got = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    raise ConfigError(f"{what} returns {got} where {shape} is due; return one {due}")


def _negatives(queries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scores of K candidates of each query, and which of them are negatives."""
    mask = torch.ones(queries, _K, dtype=torch.bool, device=device)
    mask[0, 0] = False
    return _random(queries, _K, device=device), mask


def _random(*shape: int, device: torch.device) -> Tensor:
    """Return the same normal numbers on every rank."""
    numbers = np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
    return torch.from_numpy(numbers).to(device)
