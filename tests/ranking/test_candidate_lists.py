"""Ranks among fixed and sampled lists of candidates, against loops and the exact ranking."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle_ranking import dense_scores
from ranking_cases import ColumnScorer, make_known, make_scorer, my_shard, random_triples, whole
from worlds import run_world

from kge_torchrec.errors import DataError
from kge_torchrec.models.scorers import SIDES
from kge_torchrec.ranking.candidate_lists import MISSING, FixedLists, SampledLists
from kge_torchrec.ranking.exact import RankOptions, rank_triples
from kge_torchrec.ranking.listed import rank_among_lists
from kge_torchrec.ranking.metrics import Ranks, metrics, ranked_among, results_table

ENTITIES, RELATIONS, DIM = 60, 4, 8
EDGES = {1: [0, 60], 2: [0, 17, 60], 4: [0, 30, 30, 31, 60]}  # uneven, one empty, one of one row
KINDS = ("optimistic", "pessimistic")


def model(ties: bool = True) -> tuple:
    scorer, generator = make_scorer("distmult", RELATIONS, DIM), torch.Generator().manual_seed(1)
    table = torch.randn(ENTITIES, DIM, generator=generator)
    return scorer, (table[:20].repeat(3, 1) if ties else table)


def distinct_triples(count: int) -> torch.Tensor:
    return torch.from_numpy(np.unique(random_triples(count, ENTITIES, RELATIONS, 3), axis=0))


def fixed_lists(triples: torch.Tensor) -> dict:
    """Repeated candidates, the true answer among them, and rows that end early."""
    random = np.random.default_rng(0)
    lists = {side: random.integers(ENTITIES, size=(len(triples), 9)) for side in SIDES}
    lists["head"][::3, 4] = triples[::3, 0]
    lists["tail"][:, 8] = lists["tail"][:, 7]
    lists["tail"][::4, 5:] = MISSING
    return lists


def as_lists(ranks: Ranks) -> dict:
    return {kind: {side: getattr(ranks, kind)[side].tolist() for side in SIDES} for kind in KINDS}


def rank_here(scorer, table, triples, lists, edges):
    options = RankOptions(batch_size=70)
    return as_lists(rank_among_lists(scorer, my_shard(table, edges), triples, lists, options))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.first_tier("2")
def test_fixed_lists_rank_as_the_definition_says(world_size):
    (scorer, table), triples = model(), distinct_triples(150)
    ids = fixed_lists(triples)
    expected = {kind: {} for kind in KINDS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for side, column in (("head", 0), ("tail", 2)):
        scores = dense_scores(scorer, table, triples, side).tolist()
        rows = zip(scores, triples[:, column].tolist(), ids[side].tolist(), strict=True)
        pairs = [([row[e] for e in listed if e >= 0], row[true]) for row, true, listed in rows]
        for kind, beats in (("optimistic", float.__gt__), ("pessimistic", float.__ge__)):
            expected[kind][side] = [1 + sum(beats(s, true) for s in of) for of, true in pairs]
    torch.set_num_threads(threads)
    assert expected["optimistic"] != expected["pessimistic"]
    lists = FixedLists(triples.numpy(), ids, "a file")
    for results in run_world(
        world_size, rank_here, scorer, table, triples, lists, EDGES[world_size]
    ):
        assert results == expected


def test_blocks_of_candidates_do_not_change_counts(monkeypatch):
    (scorer, table), triples = model(), distinct_triples(150)
    lists = FixedLists(triples.numpy(), fixed_lists(triples), "a file")
    expected = as_lists(rank_among_lists(scorer, whole(table), triples, lists))
    monkeypatch.setattr("kge_torchrec.ranking.listed.block_height", lambda *_: 7)
    assert as_lists(rank_among_lists(scorer, whole(table), triples, lists)) == expected


def test_nan_counts_against_the_model_in_lists():
    triples = torch.tensor([[0, 0, 1], [2, 0, 3]])
    lists = FixedLists(triples.numpy(), {side: np.array([[4, 5], [4, 5]]) for side in SIDES}, "it")
    table = torch.tensor([[1.0], [1.0], [1.0], [torch.nan], [torch.nan], [0.0]])
    ranks = rank_among_lists(ColumnScorer(), whole(table), triples, lists)
    assert ranks.optimistic["tail"].tolist() == [2, 3]  # behind a NaN; last as a NaN
    assert ranks.pessimistic["tail"].tolist() == [2, 3]


def test_triples_without_a_list_are_refused():
    triples = random_triples(5, ENTITIES, RELATIONS, 0).numpy()
    lists = FixedLists(triples[:4], {s: np.zeros((4, 2), int) for s in SIDES}, "some file")
    with pytest.raises(DataError, match="some file gives no candidates for the triple"):
        lists.of("head", triples)
    with pytest.raises(DataError, match="some file gives candidates twice"):
        FixedLists(triples[[0, 1, 0]], {s: np.zeros((3, 2), int) for s in SIDES}, "some file")


def known_triples(triples):
    """Return the triples and many answers of one query."""
    many = [(triples[0, 0], triples[0, 1], entity) for entity in range(5, 50)]
    return np.concatenate([triples, many])


def known_of(triples):
    return make_known(known_triples(triples), ENTITIES, RELATIONS)


def test_samples_are_of_wrong_entities_and_depend_on_the_triple_only():
    triples = random_triples(40, ENTITIES, RELATIONS, 2).numpy()
    known = known_triples(triples)
    lists = SampledLists(known_of(triples), ENTITIES, 30, seed=7)
    for side, anchor, answer in (("head", 2, 0), ("tail", 0, 2)):
        ids, pools = lists.of(side, triples)
        for row, (triple, pool) in enumerate(zip(triples, pools, strict=True)):
            same = (known[:, anchor] == triple[anchor]) & (known[:, 1] == triple[1])
            true = set(known[same, answer].tolist())
            drawn = ids[row][ids[row] != MISSING].tolist()
            assert pool == ENTITIES - len(true)
            assert len(drawn) == len(set(drawn)) == min(30, pool) and not true & set(drawn)
            assert min(drawn) >= 0 and max(drawn) < ENTITIES
        again = lists.of(side, triples[::-3])
        assert (again.ids == ids[::-3]).all()
        other = SampledLists(known_of(triples), ENTITIES, 30, seed=8).of(side, triples)
        assert (other.ids != ids).any()
    assert (lists.of("head", triples).ids != lists.of("tail", triples).ids).any()


def test_samples_are_uniform():
    triple = np.array([[3, 1, 4]])
    counts = np.zeros(10, int)
    for seed in range(600):
        counts[SampledLists(None, 10, 3, seed).of("tail", triple).ids] += 1
    assert counts[4] == 0
    expected = 600 * 3 / 9
    assert (abs(np.delete(counts, 4) - expected) < 4 * np.sqrt(expected)).all()


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.first_tier("2")
def test_samples_of_everything_give_the_exact_ranks(world_size):
    (scorer, table), triples = model(), random_triples(90, ENTITIES, RELATIONS, 5)
    known = known_of(triples.numpy())
    exact = rank_triples(scorer, whole(table), triples, known)
    lists = SampledLists(known, ENTITIES, ENTITIES, 0)
    for results in run_world(
        world_size, rank_here, scorer, table, triples, lists, EDGES[world_size]
    ):
        assert results == as_lists(exact)


def case_of_a_good_model(entities=3000, queries=1500):
    """Tail queries whose true answers have ranks from 1 to some hundreds; and the exact ranks."""
    scorer, generator = make_scorer("distmult", RELATIONS, DIM), torch.Generator().manual_seed(4)
    table = torch.randn(entities, DIM, generator=generator)
    triples = random_triples(queries, entities, RELATIONS, 6)
    order = dense_scores(scorer, table, triples, "tail").argsort(1, descending=True)
    ranks = (torch.rand(queries, generator=generator) ** 2 * 6.3).exp().long().clamp(max=entities)
    triples[:, 2] = order[torch.arange(queries), ranks - 1]
    return scorer, whole(table), triples


@pytest.mark.slow
def test_sampled_metrics_flatter_and_estimates_correct_them():
    scorer, shard, triples = case_of_a_good_model()
    exact = metrics(rank_triples(scorer, shard, triples, None, RankOptions(sides=("tail",))))
    exact = exact["both"]["realistic"]
    above = []
    for count, seed in ((30, 0), (30, 1), (30, 2), (300, 0)):
        lists = SampledLists(None, shard.num_entities, count, seed)
        results = metrics(rank_among_lists(scorer, shard, triples, lists, RankOptions(("tail",))))
        sampled, estimate = results["both"]["realistic"], results["candidates"]["exact_estimate"]
        estimate = estimate["both"]
        for metric in ("mrr", "hits@1", "hits@3", "hits@10"):
            assert sampled[metric] > exact[metric] + 0.05, "the bias has one direction"
            assert abs(estimate[metric] - exact[metric]) < 0.5 * (sampled[metric] - exact[metric])
        assert sampled["mr"] < exact["mr"]
        assert abs(estimate["mr"] - exact["mr"]) < 3 * estimate["mr_error"]
        assert estimate["mr_error"] < 0.1 * exact["mr"]
        above.append(estimate["mr"] > exact["mr"])
    assert set(above) == {True, False}, "estimates lie on both sides of the exact rank"


@pytest.mark.slow
def test_mean_rank_estimate_is_unbiased_and_its_error_is_right():
    scorer, shard, triples = case_of_a_good_model(entities=200, queries=40)
    exact = metrics(rank_triples(scorer, shard, triples, None, RankOptions(sides=("tail",))))
    estimates = []
    for seed in range(200):
        lists = SampledLists(None, 200, 20, seed)
        ranks = rank_among_lists(scorer, shard, triples, lists, RankOptions(("tail",)))
        estimates.append(metrics(ranks)["candidates"]["exact_estimate"]["both"])
    values, errors = (np.array([e[name] for e in estimates]) for name in ("mr", "mr_error"))
    deviation = values.std()
    assert abs(values.mean() - exact["both"]["realistic"]["mr"]) < 3 * deviation / np.sqrt(200)
    assert 0.85 < np.sqrt((errors**2).mean()) / deviation < 1.15


def test_estimates_from_all_candidates_are_exact():
    scorer, shard, triples = case_of_a_good_model(entities=300, queries=100)
    exact = metrics(rank_triples(scorer, shard, triples, None))["both"]["realistic"]
    ranks = rank_among_lists(scorer, shard, triples, SampledLists(None, 300, 300, 0))
    estimate = metrics(ranks)["candidates"]["exact_estimate"]["both"]
    assert estimate.pop("mr_error") == 0
    assert estimate == pytest.approx({name: exact[name] for name in estimate})


@pytest.mark.parametrize(("values", "count"), [(1, 30), (1, 300), (10, 300)])
def test_ties_do_not_flatter_estimates(values, count):
    """A model with one score, or with ten different ones, stays as bad as it is."""
    table = torch.arange(300.0).remainder(values)[:, None]
    shard, triples = whole(table), random_triples(60, 300, 1, 0)
    exact = metrics(rank_triples(ColumnScorer(), shard, triples, None))["both"]["realistic"]
    ranks = rank_among_lists(ColumnScorer(), shard, triples, SampledLists(None, 300, count, 0))
    estimate = metrics(ranks)["candidates"]["exact_estimate"]["both"]
    assert estimate["mrr"] == pytest.approx(exact["mrr"], rel=0.05 if count < 300 else 1e-9)
    assert estimate["hits@10"] == pytest.approx(exact["hits@10"], abs=1e-6)


def test_one_candidate_per_query_has_the_largest_error():
    scorer, shard, triples = case_of_a_good_model(entities=100, queries=50)
    ranks = rank_among_lists(scorer, shard, triples, SampledLists(None, 100, 1, 0))
    estimate = metrics(ranks)["candidates"]["exact_estimate"]["tail"]
    assert estimate["mr_error"] == pytest.approx(99 * np.sqrt((1 - 1 / 99) / 4 / 50))


def test_lists_are_labeled():
    scorer, shard, triples = case_of_a_good_model(entities=100, queries=9)
    results = metrics(rank_among_lists(scorer, shard, triples, SampledLists(None, 100, 5, 3)))
    assert results["candidates"]["kind"] == "sampled"
    lines = results_table(results).splitlines()
    assert lines[0].startswith("SAMPLED candidates, not comparable") and "seed 3" in lines[0]
    assert lines[-1].startswith("estimates of the exact figures") and "unbiased" in lines[-1]
    lists = FixedLists(triples.numpy(), {s: np.zeros((9, 2), int) for s in SIDES}, "them.npz")
    results = metrics(rank_among_lists(scorer, shard, triples, lists))
    assert set(results["candidates"]) == {"restricted_to", "kind", "per_query"}
    assert ranked_among(results).startswith("FIXED candidates") and "unfiltered" in lines[0] + (
        ranked_among(results)
    )
    assert "them.npz" in results_table(results) and "estimate" not in results_table(results)
