import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_ranking import oracle_ranks
from ranking_cases import (
    RANKED,
    ColumnScorer,
    make_known,
    make_scorer,
    my_shard,
    on_every_rank,
    random_triples,
    whole,
)

from kge_torchrec.models.scorers import SIDES
from kge_torchrec.ranking import blocks
from kge_torchrec.ranking.blocks import ModelScores, Queries, score_block
from kge_torchrec.ranking.ranks import metrics, rank_triples
from kge_torchrec.ranking.search import RankOptions

N, R, D, T = 300, 3, 16, 100
TRIPLES = random_triples(T, N, R, seed=1)
# Few anchors, so that a query has many known answers; test triples are known as well.
KNOWN = np.concatenate([random_triples(2000, N, R, seed=2).numpy() % [9, R, N], TRIPLES])
KNOWN = np.concatenate([KNOWN, KNOWN[:, [2, 1, 0]], KNOWN[:50]])
QUERIES = torch.cat([TRIPLES, torch.from_numpy(KNOWN[:100])])


def duplicated_table(seed=3):
    """Every row stands three times, in shuffled places: ties between all blocks and shards."""
    generator = torch.Generator().manual_seed(seed)
    distinct = torch.randn(N // 3, D, generator=generator)
    return distinct[torch.randperm(N, generator=generator) % len(distinct)]


def rank_on_my_shard(scorer, table, triples, known):
    known, options = make_known(known), RankOptions(block_bytes=1, batch_size=64)
    return as_lists(rank_triples(ModelScores(scorer, my_shard(table)), triples, known, options))


def as_lists(ranks):
    kinds = (ranks.optimistic, ranks.pessimistic)
    return {side: tuple(kind[side].tolist() for kind in kinds) for side in SIDES}


def oracle(scorer, table, triples, known=()):
    return {side: oracle_ranks(scorer, table, triples, known, side) for side in SIDES}


@pytest.mark.parametrize("name", ["transe_l2", "distmult"])
def test_ranks_match_the_oracle_on_every_world_size(name):
    table, scorer = duplicated_table(), make_scorer(name, R, D)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have, so that queries round alike
    expected = oracle(scorer, table, QUERIES, KNOWN.tolist())
    torch.set_num_threads(threads)
    for result in on_every_rank(rank_on_my_shard, scorer, table, QUERIES, KNOWN):
        assert result == expected


@pytest.mark.parametrize("name", RANKED)
def test_equal_rows_tie_exactly(name):
    """Unfiltered, the true answer ties with its two copies and with nothing else."""
    table, scorer = duplicated_table(), make_scorer(name, R, D)
    for block_bytes in (1, 1 << 16, None):
        ranks = rank_triples(
            ModelScores(scorer, whole(table)), QUERIES, None, RankOptions(block_bytes=block_bytes)
        )
        for side in SIDES:
            assert (ranks.pessimistic[side] - ranks.optimistic[side] == 2).all()


@pytest.mark.parametrize("name", RANKED)
def test_scores_do_not_depend_on_blocks(name):
    for dim in (2, 10, 130):
        scorer, table = make_scorer(name, R, dim), torch.randn(700, dim)
        anchor, relation = torch.randn(90, dim), torch.arange(90) % R
        with torch.no_grad():
            expected = score_block(scorer, anchor, relation, table, "tail")
            for start, stop in ((0, 1), (3, 20), (5, 70), (1, 700), (650, 700)):
                part = score_block(scorer, anchor, relation, table[start:stop], "tail")
                assert torch.equal(part, expected[:, start:stop])


@pytest.mark.parametrize(
    ("block_bytes", "batch_size", "fetched", "dtype"),
    [
        (1, 7, None, torch.float32),
        (40_000, 1, None, torch.float32),
        (1 << 28, 512, None, torch.float32),
        (None, 7, 1, torch.float32),  # scores of 128 answers at once
        (None, 512, None, torch.bfloat16),
    ],
)
def test_ranks_do_not_depend_on_blocks_batches_and_precision(
    block_bytes, batch_size, fetched, dtype, monkeypatch
):
    table, scorer = duplicated_table().to(dtype), make_scorer("complex", R, D)
    if fetched is not None:
        monkeypatch.setattr(blocks, "FETCH_BYTES", fetched)
    options = RankOptions(None, block_bytes, batch_size)
    scores = ModelScores(scorer, whole(table))
    ranks = rank_triples(scores, QUERIES, make_known(KNOWN), options)
    assert as_lists(ranks) == oracle(scorer, table.float(), QUERIES, KNOWN.tolist())


@settings(max_examples=30)
@given(st.data())
def test_filter_and_ties_match_the_oracle(data):
    entities = data.draw(st.integers(1, 8))
    values = st.sampled_from([0.0, 1.0, float("nan"), float("inf"), float("-inf"), -3.4028235e38])
    table = torch.tensor(data.draw(st.lists(values, min_size=entities, max_size=entities)))[:, None]
    ids = st.integers(0, entities - 1)
    triple = st.tuples(ids, st.integers(0, 1), ids)
    triples = torch.tensor(data.draw(st.lists(triple, min_size=1, max_size=6)))
    known = data.draw(st.lists(triple, max_size=40))
    ranks = rank_triples(ModelScores(ColumnScorer(), whole(table)), triples, make_known(known))
    assert as_lists(ranks) == oracle(ColumnScorer(), table, triples, known)


def test_constant_scorer_ranks_like_chance():
    table, entities = torch.zeros(1001, 1), 1001
    ranks = rank_triples(
        ModelScores(ColumnScorer(), whole(table)), random_triples(50, entities, 1, 0), None
    )
    realistic = metrics(ranks)["both"]["realistic"]
    assert realistic["mr"] == (entities + 1) / 2
    assert realistic["mrr"] == pytest.approx(2 / (entities + 1))
    assert realistic["hits@10"] == 0


def test_no_score_matrix_exceeds_the_block():
    scorer, bound = ColumnScorer(), 1 << 17
    scores, options = (
        ModelScores(scorer, whole(torch.randn(5000, 1))),
        RankOptions(None, bound, 128),
    )
    rank_triples(scores, random_triples(600, 5000, 1, 0), None, options)
    assert max(scorer.comparison.bytes) <= bound


def test_training_mode_is_restored():
    scorer = make_scorer("distmult", R, D)
    for mode in (True, False):
        scorer.train(mode)
        rank_triples(ModelScores(scorer, whole(duplicated_table())), QUERIES[:2], None)
        assert scorer.training is mode
    scorer.train()
    scores, wrong = ModelScores(scorer, whole(duplicated_table())), np.array([[0, 0, N]])
    for work in (
        lambda: rank_triples(scores, wrong, None), lambda: scores.of(*Queries.of(wrong, "tail"))
    ):  # fmt: skip
        with pytest.raises(IndexError):
            work()
    assert scorer.training


def test_progress_counts_every_answer():
    """The ten answers have five queries, so a batch of four queries has eight answers."""
    counts = []
    triples = torch.arange(30).view(10, 3) // 6 * torch.tensor([1, 0, 1])
    rank_triples(ModelScores(ColumnScorer(), whole(torch.zeros(5, 1))), triples, None,
        RankOptions(batch_size=4, progress=counts.append),
    )  # fmt: skip
    assert counts == [8, 2] * 2


def test_empty_and_misshapen_triples_are_handled():
    none = torch.empty(0, 3, dtype=torch.int64)
    ranks = rank_triples(ModelScores(ColumnScorer(), whole(torch.zeros(4, 1))), none, None)
    assert all(len(ranks.values(side, "realistic")) == 0 for side in SIDES)
    with pytest.raises(ValueError, match=r"\(T, 3\)"):
        rank_triples(ModelScores(ColumnScorer(), whole(torch.zeros(4, 1))), none[:, :2], None)


def test_query_with_millions_of_answers_is_filtered_in_pieces():
    """Never are all answers of a batch in memory: here 16 MB as int64."""
    entities = 2_000_000
    answers = np.arange(0, entities, 2)[::-1]
    triples = np.stack([answers * 0, answers * 0, answers], 1)
    known = make_known(np.concatenate([triples, triples + np.array([1, 0, 1])]))
    table = torch.arange(entities, dtype=torch.float32)[:, None]
    queries = torch.tensor([[0, 0, 10], [1, 0, 11]])
    rank_triples(ModelScores(ColumnScorer(), whole(table[:64])), queries, make_known([]))
    tracemalloc.start()
    ranks = rank_triples(ModelScores(ColumnScorer(), whole(table)), queries, known)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    better = entities // 2 - 5, entities // 2 - 6  # those of the other parity
    assert ranks.pessimistic["tail"].tolist() == [1 + better[0], 1 + better[1]]
    assert peak < 12 << 20
