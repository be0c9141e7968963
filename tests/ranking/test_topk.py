import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_ranking import dense_scores, oracle_top_k
from ranking_cases import (
    RANKED,
    ColumnScorer,
    answers_of,
    make_scorer,
    my_shard,
    on_every_rank,
    whole,
)

from kge_torchrec.models.scorers import SIDES
from kge_torchrec.ranking import blocks
from kge_torchrec.ranking.blocks import ModelScores, Queries
from kge_torchrec.ranking.search import top_k

N, R, D, B = 200, 3, 8, 20
EXCLUDE = (np.array([0, 0, 0, 3, 19]), np.array([0, 77, 199, 130, 131]))


def case(seed=0):
    """Rows in equal pairs far apart: ties across blocks and shards."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(N // 2, D, generator=generator).repeat(2, 1)
    return table, torch.randint(N, (B,), generator=generator), torch.arange(B) % R


def top_k_on_my_shard(table, anchors, relations, k):
    """Return the top-k of every scorer and side, in small blocks."""
    blocks.CPU_BLOCK_BYTES = 1  # of this process only
    exclude, shard = answers_of(*EXCLUDE, len(anchors)), my_shard(table)
    return {
        (name, side): top_k(
            ModelScores(make_scorer(name, R, D), shard), Queries(anchors, relations, side), k,
            exclude,
        )
        for name in RANKED
        for side in SIDES
    }  # fmt: skip


@pytest.fixture(scope="module")
def found():
    """The results of every rank of several worlds."""
    return [*on_every_rank(top_k_on_my_shard, *case(), 7)]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", RANKED)
def test_top_k_matches_the_oracle_on_every_world_size(found, name, side):
    (table, anchors, relations), scorer = case(), make_scorer(name, R, D)
    pairs = set(zip(*(ids.tolist() for ids in EXCLUDE), strict=True))
    expected = oracle_top_k(scorer, table, anchors, relations, side, 7, pairs)
    dense = dense_scores(scorer, table, torch.stack([anchors, relations, anchors], 1), side)
    for results in found:
        scores, ids = results[name, side]
        assert ids.tolist() == expected
        torch.testing.assert_close(scores, dense.gather(1, ids))


def test_k_above_number_of_entities():
    table = torch.tensor([[3.0], [1.0], [2.0]])
    zero = torch.zeros(1, dtype=torch.int64)
    scores, ids = top_k(ModelScores(ColumnScorer(), whole(table)), Queries(zero, zero, "tail"), 5)
    assert ids.tolist() == [[0, 2, 1, -1, -1]]
    assert scores.tolist() == [[3, 2, 1, -torch.inf, -torch.inf]]


def test_excluded_entities_never_appear():
    table = torch.zeros(3, 1)
    zero = torch.zeros(1, dtype=torch.int64)
    exclude = answers_of([0, 0], [0, 2], 1)
    _, ids = top_k(
        ModelScores(ColumnScorer(), whole(table)), Queries(zero, zero, "head"), 3, exclude
    )
    assert ids.tolist() == [[1, -1, -1]]


@settings(max_examples=30)
@given(st.data())
def test_special_values_sort_as_documented(data):
    special = [0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, np.nan, 1e-40, -1e-40]
    values = data.draw(st.lists(st.sampled_from(special), min_size=1, max_size=12))
    table = torch.tensor(values)[:, None]
    zero = torch.zeros(1, dtype=torch.int64)
    out = data.draw(st.sets(st.integers(0, len(values) - 1)))  # an excluded one is never the worst
    exclude = answers_of([0] * len(out), sorted(out), 1)
    queries = Queries(zero, zero, "tail")
    scores, ids = top_k(ModelScores(ColumnScorer(), whole(table)), queries, len(values), exclude)
    pairs = {(0, entity) for entity in out}
    (best,) = oracle_top_k(ColumnScorer(), table, zero, zero, "tail", len(values), pairs)
    assert ids[0].tolist() == best + [-1] * len(out)
    results = table[ids[0, : len(best)], 0]
    assert torch.equal(scores[0, : len(best)], torch.where(results.isnan(), -torch.inf, results))


def test_bad_arguments_raise():
    table, zero = torch.zeros(3, 1), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="k must"):
        top_k(ModelScores(ColumnScorer(), whole(table)), Queries(zero, zero, "tail"), 0)
    with pytest.raises(IndexError):
        top_k(ModelScores(ColumnScorer(), whole(table)), Queries(zero + 3, zero, "tail"), 1)
