"""Rows on their way to rank 0: every bit, from any split, in the memory of a chunk."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ranking_cases import my_shard
from worlds import run_world

from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.export import write as rows
from kge_torchrec.export.table_files import open_table
from kge_torchrec.export.write import write_entities
from kge_torchrec.training.session import Session  # noqa: F401 - loaded before memory is read

N, D = 23, 3
EDGES = {1: [0, N], 2: [0, 9, N], 4: [0, 0, 11, 11, N]}


def collect(tables, edges):
    """Every table as rank 0 puts it together from chunks of 1, 5 and 100 rows; else nothing."""
    results = []
    with processes("cpu") as ranks:
        for table, height in itertools.product(tables, (1, 5, 100)):
            with patch.object(rows, "CHUNK_ROWS", height):  # ranks serve other tests as well
                chunks = [
                    (first, chunk if chunk is None else chunk.copy())
                    for first, chunk in rows.chunks_on_first_rank(my_shard(table, edges), ranks)
                ]
            assert [first for first, _ in chunks] == list(range(0, N, height))
            if ranks.is_first:
                results.append(torch.from_numpy(np.concatenate([c for _, c in chunks])))
            else:
                assert all(chunk is None for _, chunk in chunks)
    return results


@pytest.mark.parametrize("world_size", EDGES)
def test_rows_arrive_bitwise_and_half_precision_as_float32(world_size):
    table = torch.randint(-(2**31), 2**31, (N, D)).int().view(torch.float32)  # NaNs among them
    table[3], table[12] = -0.0, torch.nan
    half = torch.randn(N, D).bfloat16()
    results, *rest = run_world(world_size, collect, [table, half], EDGES[world_size])
    for whole in results[:3]:
        assert torch.equal(whole.view(torch.int32), table.view(torch.int32))
    for whole in results[3:]:
        assert torch.equal(whole, half.float())
    assert len(results) == 6 and rest == [[]] * (world_size - 1)


def memory(kind: str) -> int:
    """VmRSS or VmHWM (its highest value so far) of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{kind}:\s+(\d+) kB", status)[1])


def peak_of_writing(folder, count, dim):
    """Bytes that writing a table adds to a rank's memory at its highest; the last rows written."""
    with processes("cpu") as ranks:
        height = count // ranks.world_size
        shard = EntityShard(torch.ones(height, dim), ranks.rank * height, count)
        shard.rows[-1] = ranks.rank + 2
        ranks.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
        before = memory("VmRSS")
        write_entities(Path(folder), "safetensors", shard, None, ranks, True)
        return memory("VmHWM") - before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux measures a peak from now on")
def test_export_needs_memory_for_a_few_chunks(tmp_path):
    count, dim = 400_000, 64
    peaks = run_world(2, peak_of_writing, str(tmp_path), count, dim)
    chunk, whole = rows.CHUNK_ROWS * dim * 4, count * dim * 4
    assert max(peaks) < 3 * chunk < whole / 2
    table = open_table(tmp_path / "entities.safetensors", count, dim)
    assert table[-1].tolist() == [3] * dim and table[0].tolist() == [1] * dim
