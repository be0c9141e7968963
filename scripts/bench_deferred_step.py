"""Measure the cost of a deferred step of FBGEMM's table, as accumulation and clipping need it.

python scripts/bench_deferred_step.py [--device cpu|cuda] [--rows N] [--dim D] [--ids M]

Compares a kernel that steps inside backward with one whose gradients are kept for a separate
lookup and backward, on one table with distinct ids, alternating. Prints the median ms per step
and the ratio. On a CPU FBGEMM has only adagrad, rowwise_adagrad and sgd.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

from kge_torchrec.data import ENTITY
from kge_torchrec.embeddings.optimizers import TableOptimizer
from kge_torchrec.embeddings.row_gradients import TableBlock
from kge_torchrec.embeddings.torchrec.collection import step_rows, steps_taken
from kge_torchrec.embeddings.torchrec.settings import fused_params, of_fbgemm


def fbgemm_table(rows: int, dim: int, optimizer: str, device: torch.device) -> nn.Module:
    """Return a table of zeros."""
    on_cuda = device.type == "cuda"
    place = EmbeddingLocation.DEVICE if on_cuda else EmbeddingLocation.HOST
    kind = ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, place, kind)],
        pooling_mode=PoolingMode.NONE,
        device=device,
        **of_fbgemm(fused_params(TableOptimizer(optimizer))),
    )


def inside_backward(table: nn.Module, ids: Tensor, grad: Tensor) -> None:
    """Step inside backward."""
    offsets = torch.arange(ids.numel() + 1, device=ids.device)
    table(indices=ids, offsets=offsets).backward(grad)


def deferred(table: nn.Module, ids: Tensor, grad: Tensor) -> None:
    """Keep the gradient, then step."""
    (rows,) = table.split_embedding_weights()
    block = TableBlock(rows, 0, {ENTITY: range(len(rows))})
    block.lookup(ids).backward(grad)
    step_rows(table, block.take(ENTITY), steps_taken(table) + 1)


def main() -> None:
    """Print one line per optimizer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=100)
    parser.add_argument("--ids", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    device = torch.device(args.device)
    optimizers = ["adagrad", "rowwise_adagrad", "sgd"]
    for name in optimizers + (["adam", "rowwise_adam"] if device.type == "cuda" else []):
        table = fbgemm_table(args.rows, args.dim, name, device)
        times: dict = {inside_backward: [], deferred: []}
        for turn in range(args.repeats + 1):
            ids = torch.randperm(args.rows, device=device)[: args.ids].sort().values
            grad = torch.randn(args.ids, args.dim, device=device)
            for way, seconds_of_way in times.items():
                seconds = timed(way, table, ids, grad)
                if turn:  # the first one warms up
                    seconds_of_way.append(seconds)
        fused, later = (
            1e3 * statistics.median(seconds_of_way) for seconds_of_way in times.values()
        )
        pairs = zip(times[deferred], times[inside_backward], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{name:16} inside backward {fused:7.2f} ms, deferred {later:7.2f} ms, x {ratio:.2f}")


def timed(way, table: nn.Module, ids: Tensor, grad: Tensor) -> float:
    """Return the seconds of one step."""
    if ids.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    way(table, ids, grad)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
