"""Rows on their way to rank 0 need the memory of a few chunks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from worlds import run_world

from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.export.table_files import open_table
from kge_torchrec.export.write import write_entities
from kge_torchrec.training.session import Session  # noqa: F401 - loaded before memory is read


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
    assert max(peaks) < count * dim * 4 / 2
    table = open_table(tmp_path / "entities.safetensors", count, dim)
    assert table[-1].tolist() == [3] * dim and table[0].tolist() == [1] * dim
