"""Neighbours of an entity, by the metric that the scorer compares entities with."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from ranking_cases import whole

from kge_torchrec.answers.queries import metric_of, nearest
from kge_torchrec.config import ConfigError, ModelConfig
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import UnknownLabelError
from kge_torchrec.models.scorers import build_scorer
from kge_torchrec.trained_model import TrainedModel

N, D = 150, 8


def moduli(x, y):
    return torch.view_as_complex((x - y).unflatten(-1, (-1, 2))).abs().sum(-1)


BY_HAND = {
    "cosine": lambda x, y: torch.cosine_similarity(x, y, dim=-1),
    "euclidean": lambda x, y: -torch.linalg.vector_norm(x - y, dim=-1),
    "manhattan": lambda x, y: -(x - y).abs().sum(-1),
    "moduli": lambda x, y: -moduli(x, y),
}


@pytest.mark.parametrize("name, biases, metric", [
    ("distmult", False, "cosine"), ("complex", True, "cosine"), ("transe_l1", True, "manhattan"),
    ("transe_l2", False, "euclidean"), ("rotate", False, "moduli"), ("pairre", False, "manhattan"),
    ("mure", False, "euclidean"), ("roth", True, "euclidean"), ("conve", False, "cosine"),
    ("rotate_l2", True, "euclidean"),
])  # fmt: skip
def test_nearest_matches_hand_computation(name, biases, metric):
    columns = 2 * (biases or name == "mure")
    dim = 2 * D
    scorer = build_scorer(ModelConfig(scorer=name, dim=dim + columns, biases=biases), 3)
    assert metric_of(scorer) == metric
    table = torch.randn(N, dim + columns, generator=torch.Generator().manual_seed(1))
    labels = Vocabulary(pa.array([f"e{i}" for i in range(N)], pa.large_string()), "entity")
    model = TrainedModel(scorer, whole(table), SimpleNamespace(entities=labels))
    with torch.no_grad():
        points = scorer.eval().entity(table)[:, :dim]
    scores = BY_HAND[metric](points[5], points)
    scores[5] = -torch.inf
    (results,) = nearest(model, model.entity_ids(["e5"]), 20)
    assert [n.label for n in results] == [f"e{i}" for i in scores.argsort(descending=True)[:20]]
    assert [n.score for n in results] == pytest.approx(
        scores.sort(descending=True)[0][:20].tolist(), rel=1e-4
    )
    assert [n.rank for n in results] == list(range(1, 21))


def test_an_entity_is_not_its_own_neighbor(run):
    every = run.nearest("e3", 1000)
    assert len(every) == 36 and "e3" not in {n.label for n in every}
    with pytest.raises(ConfigError, match="k must be"):
        run.nearest("e3", 0)
    with pytest.raises(UnknownLabelError, match=r"unknown entity 'e333'.*did you mean"):
        run.nearest("e333")
