"""Scorers, shards and known triples that the ranking tests share."""

import numpy as np
import torch
import torch.distributed as dist
from scorer_cases import SCORERS
from worlds import run_world

from kge_torchrec.data.store.filter_index import Answers, FilterIndex, Ranges
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.kernels.comparisons import Comparison
from kge_torchrec.models.scorers.base import Scorer

# Those whose scores are a matrix product, distances and blocks of distances; that the others'
# bits depend only on query and row is in tests/models/test_scorers.py.
RANKED = ("transe_l1", "transe_l2", "distmult", "complex", "rotate")


def make_scorer(name, num_relations, dim, seed=0):
    scorer = SCORERS[name](num_relations, dim)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.normal_(generator=generator)
    return scorer


class FirstColumn(Comparison):
    """The score is the first element of the entity's row for every query."""

    def __init__(self):
        self.bytes = []  # of every score matrix that it makes

    def matrix(self, query, rows, index=None, exact=True):
        self.bytes.append(4 * query.shape[1] * rows.shape[1])
        return rows[:, None, :, 0].expand(-1, query.shape[1], -1)


class ColumnScorer(Scorer):
    """A scorer with a comparison of its own."""

    def __init__(self):
        super().__init__(1, 1)
        self.comparison = FirstColumn()

    def query_of_ids(self, anchor, relation, side):
        return anchor


def make_known(triples):
    return FilterIndex.of(np.asarray(triples, np.int64).reshape(-1, 3))


def answers_of(query, entity, queries):
    """Answers given as pairs of a query and an entity."""
    index = np.lexsort((entity, query))
    query, entity = np.asarray(query)[index], np.asarray(entity)[index]
    numbers = np.arange(queries)
    starts, stops = (np.searchsorted(query, numbers, side) for side in ("left", "right"))
    return Answers(queries, [Ranges(entity, starts, stops)])


def random_triples(count, num_entities, num_relations, seed):
    generator = np.random.default_rng(seed)
    sizes = (num_entities, num_relations, num_entities)
    return torch.from_numpy(np.stack([generator.integers(n, size=count) for n in sizes], 1))


def whole(table):
    return EntityShard(table, 0, len(table))


def my_shard(table):
    """This rank's rows: uneven parts, of four ranks one without and one with a single row."""
    count, half = len(table), len(table) // 2
    edges = {1: [0, count], 2: [0, count // 4, count], 4: [0, half, half, half + 1, count]}
    start, stop = edges[dist.get_world_size()][dist.get_rank() :][:2]
    return EntityShard(table[start:stop], start, count)


def on_every_rank(function, *arguments):
    """Yield what ``function(*arguments)`` returns on each rank of worlds of 1, 2 and 4 ranks."""
    for world_size in (1, 2, 4):
        yield from run_world(world_size, function, *arguments)
