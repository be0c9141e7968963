"""Bytes that a step sends, by kind and by whether they leave the host.

What is sent is what TorchRec's sequence embeddings send: the ids to the ranks that hold their rows
(int64, with their number for each rank), rows back (float32 whatever the table's type), gradients
of rows home (float32); and the dense parameters' collectives, as rings.  Bytes a rank keeps for
itself are not sent.  Every micro-batch of a step has ids, rows and gradients of its own.

Rows are taken to be asked of the ranks in proportion to the rows that they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kge_torchrec.embeddings.torchrec.planned import Shard
from kge_torchrec.planning.choice import Choice
from kge_torchrec.planning.devices import Cluster, Ring
from kge_torchrec.planning.layout import DenseLayout
from kge_torchrec.planning.memory import Exchange
from kge_torchrec.planning.workload import Workload

KINDS = ("ids", "rows", "gradients", "dense", "replicas")
# Numbers that say how many ids come, for each pair of ranks.  TorchRec sends how many lengths and
# values there are and the batch size, then the length itself; on a CPU distinct ids go directly.
_COUNTS, _DIRECT_COUNTS = 4, 1


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank sends in a step: kind -> (W,), within its host and to others."""

    within: dict[str, np.ndarray]
    between: dict[str, np.ndarray]

    def total(self, kind: str | None = None) -> tuple[float, float]:
        """(within, between) hosts, over all ranks; of one kind, or of all."""
        kinds = KINDS if kind is None else (kind,)
        return (
            float(sum(self.within[k].sum() for k in kinds)),
            float(sum(self.between[k].sum() for k in kinds)),
        )


def exchanges(
    cluster: Cluster,
    choice: Choice,
    shards: Sequence[Shard],
    workload: Workload,
    wanted: np.ndarray,
) -> list[Exchange]:
    """What each rank asks for and is asked for, given (W,) rows wanted by each."""
    if choice.sharding == "data_parallel":
        return [Exchange(float(rows), float(rows)) for rows in wanted]
    share, _ = _shares(cluster, shards, workload)
    asked = np.zeros(cluster.world_size)
    for group in groups(cluster, choice):
        asked[group] = share[group] * np.sum(wanted[group])
    return [Exchange(float(w), float(a)) for w, a in zip(wanted, asked, strict=True)]


def traffic(
    cluster: Cluster,
    choice: Choice,
    shards: Sequence[Shard],
    workload: Workload,
    wanted: np.ndarray,
    table_bytes: np.ndarray,
) -> Traffic:
    """Of a step in which each rank wants (W,) rows.

    table_bytes: (W,) values and optimizer state of each rank, which 2-D replicas average.
    """
    found = no_traffic(cluster)
    within, between = found.within, found.between
    if choice.sharding == "data_parallel":
        table = 4 * workload.num_entities * workload.dim
        ring = Ring(cluster, np.arange(cluster.world_size))
        ring.all_reduce(table, within["gradients"], between["gradients"])
    else:
        for group in groups(cluster, choice):
            _add_lookup(cluster, shards, workload, wanted, group, within, between)
    dense = DenseLayout.of(workload.config.dense, cluster)
    micro_batches = workload.config.train.accumulation
    numbers = workload.dense_parameters
    dense.send(numbers, cluster, micro_batches, within["dense"], between["dense"])
    if choice.replicas > 1:
        _add_replicas(cluster, choice, table_bytes, within, between)
    return found


def no_traffic(cluster: Cluster) -> Traffic:
    """Nothing sent yet; to be added to."""
    within, between = ({kind: np.zeros(cluster.world_size) for kind in KINDS} for _ in range(2))
    return Traffic(within, between)


def groups(cluster: Cluster, choice: Choice) -> list[np.ndarray]:
    """The ranks of each whole table: neighbours, so that rows travel as little as possible."""
    return np.split(np.arange(cluster.world_size), choice.replicas)


def _shares(
    cluster: Cluster, shards: Sequence[Shard], workload: Workload
) -> tuple[np.ndarray, np.ndarray]:
    """(W,) ids asked of a rank for each id wanted, and the numbers that it answers with."""
    ids, numbers = np.zeros(cluster.world_size), np.zeros(cluster.world_size)
    for shard in shards:
        share = shard.rows / workload.num_entities
        ids[shard.rank] += share
        numbers[shard.rank] += share * shard.columns
    return ids, numbers


def _add_lookup(
    cluster: Cluster,
    shards: Sequence[Shard],
    workload: Workload,
    wanted: np.ndarray,
    group: np.ndarray,
    within: dict[str, np.ndarray],
    between: dict[str, np.ndarray],
) -> None:
    """Ids, rows and gradients among the ranks of one whole table."""
    ids, numbers = (share[group] for share in _shares(cluster, shards, workload))
    wanted = wanted[group]
    hosts = np.array([cluster.host_of(rank) for rank in group])
    is_direct = cluster.device.kind == "cpu" and workload.config.entities.deduplicate
    numbers_each = _DIRECT_COUNTS if is_direct else _COUNTS
    for away, out in ((False, within), (True, between)):
        peers = _others(hosts, np.ones(len(group)), away)
        asked = _others(hosts, ids, away)
        answered = _others(hosts, numbers, away)
        counts = numbers_each * workload.config.train.accumulation * peers
        out["ids"][group] += 8 * (wanted * asked + counts)
        out["gradients"][group] += 4 * wanted * answered
        out["rows"][group] += 4 * numbers * _others(hosts, wanted, away)


def _others(hosts: np.ndarray, values: np.ndarray, away: bool) -> np.ndarray:
    """For each rank the sum of the others' values: of those on its host, or of those away."""
    of_host = np.bincount(hosts, weights=values)[hosts]
    return values.sum() - of_host if away else of_host - values


def _add_replicas(
    cluster: Cluster,
    choice: Choice,
    table_bytes: np.ndarray,
    within: dict[str, np.ndarray],
    between: dict[str, np.ndarray],
) -> None:
    """The mean over replicas, values and optimizer state, spread over the steps between."""
    peers = np.arange(cluster.world_size).reshape(choice.replicas, -1).T
    for group in peers:
        size = table_bytes[group[0]] / choice.sync_every
        Ring(cluster, group).all_reduce(size, within["replicas"], between["replicas"])
