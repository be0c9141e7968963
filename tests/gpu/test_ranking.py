"""Ranks, best answers and exports against a CPU; ties and precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_runs import FIFTY_STEPS, config_of, scorer_of, triples_of
from safetensors.torch import load_file

from kge_torchrec import api, load_model
from kge_torchrec.embeddings.entity_shard import EntityShard
from kge_torchrec.ranking.blocks import ModelScores, Queries
from kge_torchrec.ranking.ranks import rank_triples
from kge_torchrec.ranking.search import RankOptions, top_k

SCORERS = ("complex", "distmult", "transe_l1", "transe_l2", "rotate", "pairre", "transh",
           "rescal", "conve", "roth")  # fmt: skip
DIM = 32


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", SCORERS)
def test_ranks_and_best_answers_are_those_of_a_cpu(device, name):
    """A different order of sums may swap answers with almost equal scores."""
    entities = 50_000 if device.type == "cuda" else 2000
    triples, results = triples_of(300, entities), []
    for where in (device, torch.device("cpu")):
        scorer, shard = (
            scorer_of(name, DIM).to(where),
            EntityShard(rows_of(entities).to(where), 0, entities),
        )
        ranks = rank_triples(ModelScores(scorer, shard), triples, None).values("both", "realistic")
        queries = Queries(*torch.from_numpy(triples[:64, :2]).T.contiguous(), "tail")
        best = (
            part.detach().cpu().numpy() for part in top_k(ModelScores(scorer, shard), queries, 10)
        )
        results.append((ranks, *best))
    (ranks, scores, ids), (other_ranks, other_scores, other_ids) = results
    assert np.abs(ranks - other_ranks).max() <= 3
    assert (1 / ranks).mean() == pytest.approx((1 / other_ranks).mean(), abs=1e-4)
    assert (ids != other_ids).mean() < 0.01
    assert np.abs(scores - other_scores).max() < 1e-5 * np.abs(scores).max()


@pytest.mark.parametrize("name", SCORERS)
def test_equal_rows_tie(device, name):
    """Every row occurs twice, far apart, in blocks of different heights."""
    half = 40_000 if device.type == "cuda" else 1500
    scorer, triples = scorer_of(name, DIM).to(device), triples_of(300, 2 * half)
    shard = EntityShard(rows_of(half).repeat(2, 1).to(device), 0, 2 * half)
    for block_bytes in (None, 4 * 512 * 997, 4 * 512 * 4096):
        ranks = rank_triples(
            ModelScores(scorer, shard), triples, None, RankOptions(block_bytes=block_bytes)
        )
        behind = ranks.values("both", "pessimistic") - ranks.values("both", "optimistic")
        assert (behind >= 1).all()


ON_DISK = {"entities__placement": "disk", "train__batch_size": 64,
           "entities__placement_options": {"parts": 8, "buffer": 4}}  # fmt: skip


@pytest.mark.parametrize("keys", [{}, ON_DISK], ids=["in memory", "on disk"])
def test_export_answers_on_a_cpu_and_ranking_ignores_tf32(device, tmp_path, keys, monkeypatch):
    """TF32 has ten bits and would lose 2^-12."""
    precision = "tf32" if device.type == "cuda" else "fp32"
    config = config_of(device, tmp_path / "run", FIFTY_STEPS, train__precision=precision, **keys)
    with api.train(config) as run:
        here = run.predict("Austria", "borders")
        there = load_model(run.export(tmp_path / "export")).predict("Austria", "borders")
        assert [x.label for x in here] == [x.label for x in there]
        assert [x.score for x in here] == pytest.approx([x.score for x in there], abs=1e-4)
        written = load_file(tmp_path / "export" / "entities.safetensors")["entities"]
        assert torch.equal(written, run.model.shard.rows.cpu())
        products, matrix = [], run.model.scorer.matrix

        def watched(*arguments, **options):
            number = torch.full((64, 64), 1 + 2**-12, device=device)
            products.append(float((number @ torch.eye(64, device=device))[0, 0]))
            return matrix(*arguments, **options)

        monkeypatch.setattr(run.model.scorer, "matrix", watched)
        run.evaluate("test")
    assert set(products) == {1 + 2**-12}
