"""item-kNN: the sum of an item's similarities to the items that the user has in train.

It counts the items that are among the ``NEIGHBORS`` most similar ones of the item. A similarity is
the cosine of the items' sets of users (the values of RecBole's ItemKNN). A sum is one of float64,
in order of the user's items, rounded to float32.

Shapes: B queries, n entities of a block, I items, V users, T pairs of a user and an item, K similar
items, M pairs of similar items.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data import OTHER
from kge_torchrec.data.sort import pointers
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import Ranges, anchors_of, keys_of, relations_of
from kge_torchrec.distributed.processes import reduced
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.kernels.jit import kernel
from kge_torchrec.models.scorers.base import Side
from kge_torchrec.ranking.blocks import Queries, Scores

NEIGHBORS = 100  # similar items per item, RecBole's default
PAIRS = 2 * 10**10  # pairs of items of one user that are visited at most: half a minute
ITEMS = 500_000  # items at most: 800 MB


def is_feasible(store: TripleStore, side: Side, relations: np.ndarray) -> bool:
    """Return whether item-kNN for queries of some relations keeps to ``PAIRS`` and ``ITEMS``."""
    users, items = (store.side_index("train", end) for end in (side, OTHER[side]))
    sizes = np.diff(users.starts)[np.isin(relations_of(users.queries), relations)]
    pairs = (sizes.astype(np.float64) ** 2).sum()
    return bool(pairs <= PAIRS and np.isin(relations_of(items.queries), relations).sum() <= ITEMS)


class NeighborScores(Scores):
    """The scores of item-kNN for queries of a side, whose relations train has.

    Args:
        shard: The entities of this rank, the only ones whose similar items it finds.
        store: The data.
        side: The side of the items.
        relations: The relations of the queries.
    """

    def __init__(self, shard: EntityShard, store: TripleStore, side: Side, relations: np.ndarray):
        super().__init__(shard)
        index = store.side_index("train", side)
        users = np.flatnonzero(np.isin(relations_of(index.queries), relations))
        starts, stops = index.starts[users], index.starts[users + 1]
        user, entity = Ranges(index.answers, starts, stops).gathered()
        self._users = index.queries[users]
        # An entity is an item of each relation on its own; the items are in order of the entity.
        keys, self._items = np.unique(
            keys_of(entity, relations_of(self._users)[user]), return_inverse=True
        )
        self._items_at = pointers(user, len(users))
        own = np.searchsorted(keys, np.array(shard.row_range) << 32)
        by_item = user[np.argsort(self._items, kind="stable")]
        ids, cosines = similar_items(
            self._items_at, self._items, pointers(self._items, len(keys)), by_item, *own, NEIGHBORS
        )
        # Turn the lists around: the entities of this rank that each item is similar to.
        item, column = np.nonzero(ids >= 0)
        order = np.argsort(ids[item, column], kind="stable")
        self._lists_at = pointers(ids[item, column], len(keys))
        self._listed = anchors_of(keys)[own[0] + item[order]]
        self._cosines = cosines[item, column][order]

    def blocks(self, queries: Queries, block_bytes: int | None) -> Iterator[tuple[int, Tensor]]:
        anchors, relations = queries.anchors.numpy(), queries.relations.numpy()
        for first, stop in self._ranges(len(anchors), block_bytes):
            firsts = np.full(len(anchors), first)
            yield first, self._sums(anchors, relations, firsts, stop - first)

    def of(self, queries: Queries, entities: np.ndarray) -> Tensor:
        anchors, relations = (
            x.numpy().repeat(entities.shape[1]) for x in (queries.anchors, queries.relations)
        )
        sums = self._sums(anchors, relations, entities.ravel(), 1)
        return reduced(sums).view(entities.shape)  # one rank has the entity

    def _sums(
        self, anchors: np.ndarray, relations: np.ndarray, firsts: np.ndarray, width: int
    ) -> Tensor:
        """Return the scores (B, width) of the entities from ``firsts`` (B,) on."""
        sums, wanted = np.zeros((len(anchors), width)), keys_of(anchors, relations)
        users = np.searchsorted(self._users, wanted)
        users[np.append(self._users, -1)[users] != wanted] = -1
        add_cosines(
            users, firsts, self._items_at, self._items, self._lists_at, self._listed, self._cosines,
            sums,
        )  # fmt: skip
        return torch.from_numpy(sums.astype(np.float32)).to(self.shard.device)


@kernel
def similar_items(
    items_at: np.ndarray,
    items: np.ndarray,
    users_at: np.ndarray,
    users: np.ndarray,
    start: int,
    stop: int,
    k: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k items with the largest cosine to each of the items from start to stop - 1.

    They are ids, -1 where there are fewer, and cosines (stop - start, k). Of equal cosines, the
    items with the smaller numbers are taken. ``items`` (T,) are those of each user, from
    ``items_at`` (V + 1,) on, and ``users`` (T,) those of each item, from ``users_at`` (I + 1,) on.
    """
    count = len(users_at) - 1
    ids = np.full((stop - start, k), -1, np.int32)
    cosines = np.zeros((stop - start, k), np.float32)
    shared = np.zeros(count, np.int64)
    touched = np.empty(count, np.int64)
    for item in range(start, stop):
        size = 0
        for at in range(users_at[item], users_at[item + 1]):
            user = users[at]
            for other_at in range(items_at[user], items_at[user + 1]):
                other = items[other_at]
                if shared[other] == 0:
                    touched[size] = other
                    size += 1
                shared[other] += 1
        own = users_at[item + 1] - users_at[item]
        others = np.sort(touched[:size])
        values = np.zeros(size, np.float32)
        for place in range(size):
            other = others[place]
            degree = users_at[other + 1] - users_at[other]
            values[place] = shared[other] / np.sqrt(float(own * degree)) if other != item else -1
            shared[other] = 0
        least = np.float32(0)
        if size > k:
            least = np.partition(values, size - k)[size - k]
        filled = 0
        for is_tie in range(2):  # first what is above the least one, then those equal to it
            for place in range(size):
                value = values[place]
                fits = value == least if is_tie else value > least
                if fits and value > 0 and filled < k:
                    ids[item - start, filled] = others[place]
                    cosines[item - start, filled] = value
                    filled += 1
    return ids, cosines


@kernel
def add_cosines(
    users: np.ndarray,
    firsts: np.ndarray,
    items_at: np.ndarray,
    items: np.ndarray,
    lists_at: np.ndarray,
    listed: np.ndarray,
    cosines: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Add the cosines of each user's items to the sums of the entities that are similar to them.

    A query has a user, -1 for one without items, and sums (B, n) float64 of the entities from
    ``firsts`` (B,) on. ``listed`` (M,) are the entities that each item is similar to, ascending,
    from ``lists_at`` (I + 1,) on.
    """
    for query in range(len(users)):
        user, first = users[query], firsts[query]
        if user < 0:
            continue
        for at in range(items_at[user], items_at[user + 1]):
            start, stop = lists_at[items[at]], lists_at[items[at] + 1]
            place = start + np.searchsorted(listed[start:stop], first)
            while place < stop and listed[place] < first + sums.shape[1]:
                sums[query, listed[place] - first] += cosines[place]
                place += 1
