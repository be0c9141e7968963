"""Models with random parameters, and the scores of 1,000 triples.

Shapes: N entities, R relations, n triples, D elements per row.
"""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from scorer_cases import case_of
from torch import Tensor

from kge_torchrec.config import ModelConfig
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models.scorers import build_scorer
from kge_torchrec.trained_model import TrainedModel

N, R, COUNT = 40, 3, 1000


def model_of(
    name: str | None,
    reciprocal: bool,
    normalization: str = "none",
    biases: bool = False,
    case: Any = None,
) -> TrainedModel:
    """A model of N entities and R relations, described as an export is."""
    torch.manual_seed(0)
    name, dim, options = case or case_of(name)
    config = ModelConfig(
        name, dim + 2 * biases, reciprocal, normalization=normalization, biases=biases,
        options=options,
    )  # fmt: skip
    scorer = build_scorer(config, R).eval()
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    labels = SimpleNamespace(
        entities=Vocabulary(pa.array([f"e{i}" for i in range(N)], pa.large_string()), "entity"),
        relations=Vocabulary(pa.array([f"r{i}" for i in range(R)], pa.large_string()), "relation"),
    )
    whole = EntityShard(torch.randn(N, config.dim), 0, N, replicated=True)
    return TrainedModel(
        scorer,
        whole,
        labels,
        description={"model": asdict(config), "reciprocal": reciprocal},
    )


def triples() -> tuple[Tensor, Tensor, Tensor]:
    random = np.random.default_rng(0)
    return tuple(torch.from_numpy(random.integers(0, n, COUNT)) for n in (N, R, N))


def our_scores(model: TrainedModel, side: str) -> Tensor:
    """Scores of ``triples()`` (n,), in float64."""
    head, relation, tail = triples()
    rows, scorer = model.shard.rows.double(), model.scorer.double()
    anchor, target = (head, tail) if side == "tail" else (tail, head)
    with torch.no_grad():
        return scorer.score(rows[anchor], relation, rows[target], side)


def same(results: Tensor, model: TrainedModel, side: str) -> None:
    torch.testing.assert_close(results.double(), our_scores(model, side), rtol=1e-6, atol=1e-6)
