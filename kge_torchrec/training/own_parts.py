"""Checks of a scorer, a loss and a sampler on a small batch, before a run trains.

Those of another package may break their contract.  Training would broadcast some results of a wrong
shape without an error, such as one loss where a loss per query is due.  Here they become errors on
every rank.

Shapes: C chunks, b queries per chunk, K candidates per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.registry import is_built_in
from kge_torchrec.data.negatives import BELOW_ONE, Chunks, NegativeSampler
from kge_torchrec.distributed.processes import Processes, on_all_ranks
from kge_torchrec.models.losses import Loss
from kge_torchrec.models.model import Objective
from kge_torchrec.models.over_all import BlockAnswers
from kge_torchrec.models.scorers.base import Scorer, Side
from kge_torchrec.ranking.blocks import scoring

_C, _B, _K = 2, 3, 4  # C, b and K of the small batch


def check_parts(config: Config, objective: Objective, processes: Processes) -> None:
    """Raise ConfigError on every rank if an own scorer or loss breaks its contract.

    Collective if there is one.
    """
    own_scorer = not is_built_in("scorer", config.model.scorer)
    own_loss = not is_built_in("loss", config.loss.name)

    @torch.no_grad()
    def check() -> None:
        with torch.random.fork_rng(devices=[]):  # a part may draw random numbers
            if own_scorer:
                scorer = objective.scorer.to(processes.device)
                _check_scorer(f"model.scorer: {config.model.scorer}", scorer, objective.sides)
            if own_loss:
                loss = deepcopy(objective.loss).to(processes.device)  # it may keep state
                key, regime = f"loss.name: {config.loss.name}", config.negatives.regime
                _check_loss(key, loss, regime, processes.device)

    if own_scorer or own_loss:
        on_all_ranks(processes, check)


def _check_scorer(key: str, scorer: Scorer, sides: tuple[Side, ...]) -> None:
    device, width = scorer.relations.device, scorer.relations.shape[1]
    # Rows of length about 1: no saturation in hyperbolic space.
    rows = _random(_C, _B + _K, scorer.row_dim, device=device) / scorer.row_dim**0.5
    anchor, candidates = rows.split([_B, _K], 1)
    relation = torch.arange(_C * _B, device=device).view(_C, _B) % scorer.num_relations
    # Each pair of a query and a candidate, (C, b * K, ...).
    x, y = anchor.repeat_interleave(_K, 1), candidates.repeat(1, _B, 1)
    ids = relation.repeat_interleave(_K, 1)
    pairs = {}
    mixes = any(isinstance(module, _BatchNorm) for module in scorer.modules())
    with scoring(scorer):
        for side in sides:
            try:
                query = scorer.encode(anchor, relation, side)
            except (RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"{key}: query fails for anchors {(_C, _B, scorer.dim)} and relation rows "
                    f"{(_C, _B, width)} on side {side}: {error}. Return the elements per relation "
                    "row from relation_dim"
                ) from error
            pairs[side] = scorer.score(x, ids, y, side)
            matrix = scorer.matrix(query, candidates)
            alone = scorer.score(x[:1, :1], ids[:1, :1], y[:1, :1], side)
            due = "score for each query and row"
            _check_result(f"{key}: pairs", pairs[side], (_C, _B * _K), due)
            _check_result(f"{key}: matrix", matrix, (_C, _B, _K), due)
            if not _are_close(matrix.flatten(), pairs[side].flatten()):
                raise ConfigError(
                    f"{key}: matrix and pairs of its comparison give one pair different scores; "
                    "let both compute the same formula"
                )
            if mixes or not _are_close(alone, pairs[side][:1, :1]):
                raise ConfigError(
                    f"{key}: the score of a triple depends on the others of its batch, which "
                    "differ with the number of ranks; compute it from its own rows, with LayerNorm "
                    "in place of BatchNorm"
                )
        if len(sides) < 2 or scorer.reciprocal:
            return
        as_head, as_tail = scorer.score(y, ids, x, "head"), pairs["tail"]
        if not _are_close(as_head, as_tail):
            raise ConfigError(
                f"{key}: query gives a triple the score {as_tail[0, 0]:.4g} on side tail and "
                f"{as_head[0, 0]:.4g} on side head; let it depend on side, or set "
                "model.reciprocal true"
            )


def _are_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-2, atol=1e-3)


def _check_loss(key: str, loss: Loss, regime: str, device: torch.device) -> None:
    due = "loss for each query, without their sum or mean"
    if regime not in ("sampled", "kvssample"):
        closed_form = loss.over_all(_K)  # as build_pipeline
        query = torch.arange(_B, device=device)
        answers = BlockAnswers(query, query, torch.ones(_B, device=device), torch.ones_like(query))
        statistics = closed_form.partial_statistics(_random(_B, _K, device=device), answers)
        _check_result(f"{key}: partial_statistics", statistics, (3, _B), due)
        losses = closed_form.loss(closed_form.reduce(statistics[None]))
        _check_result(f"{key}: loss", losses, (_B,), due)
        return
    answered = torch.tensor([0, 1, 1, 2], device=device) if regime == "kvssample" else None
    positive = _random(_B if answered is None else len(answered), device=device)
    negative, mask = _random(_B, _K, device=device), torch.ones(_B, _K, dtype=torch.bool)
    mask[0, 0] = False
    mask = mask.to(device)
    results = []
    for scores in (negative, negative + ~mask):  # where they do not count, scores differ
        torch.default_generator.manual_seed(0)  # of a loss that draws random numbers
        try:
            results.append(loss(positive, answered, scores, mask))
        except (IndexError, RuntimeError, TypeError) as error:
            several = "" if answered is None else "; mean_over_answers may compute it"
            raise ConfigError(
                f"{key}: forward(positive, query, negative, mask) fails: {error}{several}"
            ) from error
    _check_result(f"{key}: forward", results[0], (_B,), due)
    if not torch.equal(*results):
        raise ConfigError(
            f"{key}: forward ignores mask: its result depends on candidates that are not "
            "negatives; multiply each candidate's part of the loss by mask"
        )


def _check_result(
    what: str, result: Any, shape: tuple[int, ...], due: str, dtype: torch.dtype | None = None
) -> None:
    """Raise ConfigError unless a result is a tensor of a shape, and of a dtype if that matters."""
    if isinstance(result, Tensor) and result.shape == shape and dtype in (None, result.dtype):
        return
    got, wanted = type(result).__name__, f"{dtype} {shape}" if dtype else f"{shape}"
    if isinstance(result, Tensor):
        got = f"{result.dtype if dtype else 'shape'} {tuple(result.shape)}"
    raise ConfigError(f"{what} returns {got} where {wanted} is due; return one {due}")


def _random(*shape: int, device: torch.device) -> Tensor:
    """Return the same normal numbers on every rank."""
    numbers = np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
    return torch.from_numpy(numbers).to(device)


def check_sampler(
    sampler: NegativeSampler, num_entities: int, sides: Sequence[Side], triples: np.ndarray | None
) -> None:
    """Raise ConfigError if candidates have a wrong form, or depend on more than their chunk.

    ``triples``, (T, 3), are those of training; None where all queries share their candidates.
    """
    name = f"negatives.sampling: {type(sampler).__name__}"
    shared = ConfigError(
        f"{name} looks at triples, and with negatives.regime kvssample all queries of a batch "
        "share their candidates; use negatives.regime sampled"
    )
    if triples is None and type(sampler).excluded is not NegativeSampler.excluded:
        raise shared
    if type(sampler).sample is NegativeSampler.sample:
        raise ConfigError(f"{name} samples nothing; give it a method sample")

    def some_triples() -> Tensor:
        if triples is None:
            raise shared
        return torch.from_numpy(np.resize(triples[:8], (4, 2, 3)).astype(np.int64))

    random = np.append(np.random.default_rng(0).random(62), [0.0, BELOW_ONE]).reshape(4, 16)
    numbers = torch.from_numpy(random)
    for side in sides:
        chunks = Chunks(side, numbers.clone(), some_triples)
        turned = Chunks(side, numbers.flip(0), lambda: some_triples().flip(0))
        ids = sampler.sample(chunks)
        due = "id for each random number, such as (chunks.numbers * store.num_entities).long()"
        _check_result(f"{name}: sample", ids, (4, 16), due, torch.int64)
        if ids.min() < 0 or ids.max() >= num_entities:
            raise ConfigError(
                f"{name}: sample returns ids from {ids.min()} to {ids.max()}, outside "
                f"[0, {num_entities}); return one {due}"
            )
        if not torch.equal(ids, sampler.sample(turned).flip(0)):
            raise ConfigError(
                f"{name}: sample returns ids that depend on more than their chunk: ranks would not "
                "agree. Compute them from the chunk's random numbers and triples only, without a "
                "generator, a counter or the position of the chunk"
            )
        if triples is None:
            continue
        mask = sampler.excluded(chunks, chunks.triples.reshape(-1, 3), ids)
        if mask is not None:
            due = "row per triple with a column per candidate of its chunk"
            _check_result(f"{name}: excluded", mask, (8, 16), due, torch.bool)
