"""Ranks among restricted candidates, against sets and the full matrix, on 1, 2 and 4 ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle_ranking import dense_scores
from ranking_cases import make_scorer, my_shard, on_every_rank

from kge_torchrec.data import sort
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.models.scorers import SIDES
from kge_torchrec.ranking.blocks import ModelScores
from kge_torchrec.ranking.candidates import Frequencies, SeenCandidates, TypedCandidates
from kge_torchrec.ranking.ranks import metrics, rank_triples
from kge_torchrec.ranking.search import RankOptions

ENTITIES, RELATIONS, DIM = 60, 4, 8


@pytest.fixture(scope="module")
def store(tmp_path_factory, types_file) -> TripleStore:
    """Few entities a relation, so that some answers of test were never seen with theirs."""
    random, rows = np.random.default_rng(0), {}
    for split, count in (("train", 150), ("valid", 40), ("test", 80)):
        relation = random.integers(RELATIONS, size=count)
        head, tail = ((5 * relation + random.integers(25, size=count)) % ENTITIES for _ in "ht")
        rows[split] = [
            (f"e{h}", f"r{r}", f"e{t}") for h, r, t in zip(head, relation, tail, strict=True)
        ]
    rows["train"] += [(f"e{i}", "r0", f"e{(i + 1) % ENTITIES}") for i in range(ENTITIES)]
    path = tmp_path_factory.mktemp("candidates") / "store"
    return prepare(rows, path, {"types": str(types_file)})


@pytest.fixture(scope="module")
def types_file(tmp_path_factory):
    """Two types an entity at most, none for every fifth; and an entity that nobody knows."""
    lines = [f"e{i}\tt{(i * k) % 23}\n" for i in range(ENTITIES) for k in (1, 3) if i % 5]
    path = tmp_path_factory.mktemp("types") / "types.tsv"
    path.write_text("".join([*lines, "stranger\tt1\n", "e1\t'quoted \"type\n"]))
    return path


def suiting(store: TripleStore, kind: str, types_file) -> dict:
    """By the definition: {(side, relation): candidates}."""
    types: dict[str, set] = {}
    for line in types_file.read_text().splitlines():
        entity, of = line.split("\t")
        types.setdefault(entity, set()).add(of)
    label = store.entities.labels(range(store.num_entities))
    results = {}
    for relation in range(store.num_relations):
        triples = [row for row in store.train.tolist() if row[1] == relation]
        for side, column in (("head", 0), ("tail", 2)):
            in_train = {row[column] for row in triples}
            good = set().union(*(types.get(label[e], set()) for e in in_train))
            alike = {e for e in range(store.num_entities) if types.get(label[e], set()) & good}
            results[side, relation] = in_train | (alike if kind == "types" else set())
    return results


def oracle(store, scorer, table, candidates) -> dict:
    triples = torch.from_numpy(store.test.astype(np.int64))
    known = {
        tuple(row) for split in ("train", "valid", "test") for row in store.split(split).tolist()
    }
    results = {}
    for side in SIDES:
        answer_at = 2 if side == "tail" else 0
        scores, ranks = dense_scores(scorer, table, triples, side), []
        for row, triple in zip(scores.tolist(), triples.tolist(), strict=True):
            right, allowed = triple[answer_at], candidates[side, triple[1]]
            other_scores = []
            for entity in allowed - {right}:
                one = list(triple)
                one[answer_at] = entity
                if tuple(one) not in known:
                    other_scores.append(row[entity])
            better = sum(not score <= row[right] for score in other_scores)  # a NaN is better
            ties = sum(score == row[right] for score in other_scores)
            first, last = 1 + better, 1 + better + ties
            ranks.append((first, last) if right in allowed else (len(table), len(table)))
        results[side] = tuple(list(kind) for kind in zip(*ranks, strict=True))
    return results


def candidates_of(store, rows, kind):
    frequencies = Frequencies(store, rows)
    return SeenCandidates(frequencies) if kind == "seen" else TypedCandidates(frequencies, store)


def rank_among(path, kind, scorer, table):
    store, shard = TripleStore.open(path), my_shard(table)
    ranks = rank_triples(ModelScores(scorer, shard), store.test, store.filter_index(),
        RankOptions(candidates=candidates_of(store, shard.row_range, kind),
                    block_bytes=1, batch_size=7),
    )  # fmt: skip
    kinds = (ranks.optimistic, ranks.pessimistic)
    results = {side: tuple(of[side].tolist() for of in kinds) for side in SIDES}
    return results, metrics(ranks)["candidates"]["answers_outside"]


@pytest.mark.parametrize("kind", ["seen", "types"])
def test_ranks_among_restricted_candidates_match_the_oracle(store, types_file, kind, monkeypatch):
    monkeypatch.setattr(sort, "CHUNK", 7)
    scorer, generator = make_scorer("distmult", RELATIONS, DIM), torch.Generator().manual_seed(1)
    table = torch.randn(30, DIM, generator=generator).repeat(2, 1)  # everyone ties with another
    table = table[: store.num_entities]
    candidates = suiting(store, kind, types_file)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = oracle(store, scorer, table, candidates)
    torch.set_num_threads(threads)
    outside = {
        side: sum(row[0 if side == "head" else 2] not in candidates[side, row[1]]
                  for row in store.test.tolist())
        for side in SIDES
    }  # fmt: skip
    assert min(outside.values()) > 0 and min(map(len, candidates.values())) < store.num_entities
    for results in on_every_rank(rank_among, store.path, kind, scorer, table):
        assert results == (expected, outside)
