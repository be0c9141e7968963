"""Traffic, against a count by hand of what each rank of two has to send."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_runs import config_of, tiny_store
from worlds import run_world

from kge_torchrec.comparison import COUNTED, measure_speed
from kge_torchrec.comparison import run_world as run_world_of_package
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.distributed.traffic import Traffic
from kge_torchrec.training.assembly import build_batches

DIM = 8


def rank_sends_known_sizes() -> dict:
    rank = dist.get_rank()
    with Traffic() as traffic:
        ids = torch.arange(5 + rank)  # 2 stay on rank 0 and 3 leave; 2 leave rank 1 and 4 stay
        splits = [2, 3 + rank]
        theirs = [2, 2] if rank == 0 else [3, 4]
        dist.all_to_all_single(torch.empty(sum(theirs), dtype=torch.int64), ids, theirs, splits)
        counts = torch.zeros(6, dtype=torch.int32)  # equal parts: half of them leave
        dist.all_to_all_single(torch.empty_like(counts), counts)
        rows = torch.zeros(sum(splits), 4, dtype=torch.bfloat16)
        dist.all_to_all_single(torch.empty(sum(theirs), 4, dtype=rows.dtype), rows, theirs, splits)
        dist.all_reduce(torch.zeros(10))
        dist.all_gather([torch.empty(3), torch.empty(3)], torch.zeros(3))
        if rank == 0:
            dist.send(torch.zeros(7), 1)
        else:
            dist.recv(torch.empty(7), 0)
        dist.barrier()
    return vars_of(traffic)


def vars_of(traffic: Traffic) -> dict:
    names = ("collectives", "payload_bytes", "integers_sent", "floats_sent", "bytes_sent")
    return {name: getattr(traffic, name) for name in names}


def test_collectives_of_known_sizes():
    first, second = run_world(2, rank_sends_known_sizes)
    kinds = {"all_to_all": 3, "all_reduce": 1, "all_gather": 1}
    assert second["collectives"] == kinds and first["collectives"] == kinds | {"send": 1}
    assert (first["floats_sent"], second["floats_sent"]) == (3 * 4 + 7, 2 * 4)
    assert (first["integers_sent"], second["integers_sent"]) == (3 + 3, 2 + 3)
    sent = {"first": 3 * 8 + 3 * 4 + 3 * 4 * 2 + 7 * 4, "second": 2 * 8 + 3 * 4 + 2 * 4 * 2}
    assert (first["bytes_sent"], second["bytes_sent"]) == (sent["first"], sent["second"])
    assert first["payload_bytes"] == {
        "all_to_all": 5 * 8 + 6 * 4 + 5 * 4 * 2,
        "all_reduce": 40,
        "all_gather": 12,
        "send": 28,
    }


def rank_trains_dense() -> dict:
    model = DistributedDataParallel(nn.Linear(3, 2))
    for _ in range(4):  # the first steps set DDP up, which takes collectives of its own
        with Traffic() as traffic:
            model(torch.ones(1, 3)).sum().backward()
    return vars_of(traffic)


def test_gradients_of_ddp_are_counted():
    for results in run_world(2, rank_trains_dense):
        assert results["collectives"] == {"all_reduce": 1}
        assert results["payload_bytes"] == {"all_reduce": (3 * 2 + 2) * 4}
        assert results["bytes_sent"] == 0  # of all_to_all, that is


def asked(config, store, world_size: int, duplicates: bool) -> list[list[np.ndarray]]:
    """[rank][step]: the ids that each rank looks up in the steps whose traffic is counted."""
    cpu = torch.device("cpu")
    results = []
    for rank in range(world_size):
        ranks = Processes(rank, world_size, world_size, cpu)
        batches = build_batches(config, store, ranks, duplicates=duplicates)
        stream = batches.epoch(0)
        results.append([next(stream).ids.values().numpy() for _ in range(COUNTED)])
    return results


def test_rows_ids_and_bytes_of_a_step_with_and_without_duplicates(tmp_path):
    """TorchRec tells the numbers of lengths and ids, the batch size and the lengths before ids."""
    second_starts, counts, exchanges = 19, 4, 5  # rank 0 has the larger part of 37 rows
    store = tiny_store(tmp_path / "store")
    config = config_of(store.path, tmp_path)
    ranks = run_world_of_package(2, "cpu", measure_speed, config, 2)
    for kind in ("deduplicated", "duplicated"):
        ids = asked(config, store, 2, kind == "duplicated")
        looked_up = np.array([[len(step) for step in rank] for rank in ids])
        from_first = np.array([[(step < second_starts).sum() for step in rank] for rank in ids])
        # What a rank looks up on the other one: its ids go there, their gradients as well.
        elsewhere = np.stack([(looked_up - from_first)[0], from_first[1]])
        for rank, sent in enumerate(one["traffic"][kind] for one in ranks):
            out, back = elsewhere[rank].mean(), elsewhere[1 - rank].mean()
            assert sent["ids_looked_up"] == pytest.approx(looked_up[rank].mean())
            assert sent["rows_sent"] == pytest.approx(out + back)
            assert sent["integers_sent"] == pytest.approx(out + counts)
            assert sent["bytes_sent"] == pytest.approx((out + back) * DIM * 4 + (out + counts) * 8)
            assert sent["collectives"] == {"all_to_all": exchanges, "all_reduce": 1}
            relations = 2 * store.num_relations * DIM * 4  # and their reciprocals
            assert sent["payload_bytes"]["all_reduce"] == relations
    distinct, duplicated = (ranks[0]["traffic"][kind] for kind in ("deduplicated", "duplicated"))
    assert duplicated["rows_sent"] > 1.5 * distinct["rows_sent"]
    # Heads and tails of 16 triples, of a single one in the last of five steps, and negatives.
    assert duplicated["ids_looked_up"] == (4 * 2 * 16 + 2) / 5 + 2 * 6


def test_single_rank_sends_nothing(tmp_path):
    store = tiny_store(tmp_path / "store")
    (result,) = run_world_of_package(1, "cpu", measure_speed, config_of(store.path, tmp_path), 2)
    for counts in result["traffic"].values():
        assert counts["rows_sent"] == counts["integers_sent"] == counts["bytes_sent"] == 0
        assert counts["ids_looked_up"] > 0
