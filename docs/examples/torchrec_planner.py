"""What TorchRec's own planner says of a table of entities, beside ``kge_torchrec.plan``.

python docs/examples/torchrec_planner.py [--entities 86_000_000] [--dim 400] [--ranks 8]
"""

from __future__ import annotations

import argparse

import torch
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints

import kge_torchrec

GIB = 1 << 30


def of_torchrec(entities: int, dim: int, ranks: int) -> tuple[float, float]:
    """Return (GiB of GPU memory, milliseconds) of the fullest rank, of one row-wise table."""
    config = EmbeddingConfig(
        name="entity", num_embeddings=entities, embedding_dim=dim, feature_names=["entity"]
    )
    tables = EmbeddingCollection(tables=[config], device=torch.device("meta"))
    fused = {"optimizer": "adam"}  # where state is made; the planner does not look there
    sharder = EmbeddingCollectionSharder(fused_params=fused)
    topology = Topology(world_size=ranks, compute_device="cuda", hbm_cap=80 * GIB)
    rows = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(topology=topology, constraints={"entity": rows})
    planner.plan(torch.nn.ModuleDict({"entities": tables}), [sharder])
    (best,) = planner._best_plan
    used = max(shard.storage.hbm for shard in best.shards)
    return used / GIB, max(shard.perf.total for shard in best.shards)


def main() -> None:
    """Print a line for each planner."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entities", type=int, default=86_000_000)
    parser.add_argument("--dim", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    memory, time = of_torchrec(args.entities, args.dim, args.ranks)
    print(f"TorchRec's planner: {memory:.2f} GiB per GPU, {time:.3f} ms per step")
    keys = {"model.dim": args.dim, "train.optimizer": "adam"}
    sizes = {"entities": args.entities, "relations": 14_824, "triples": "339M"}
    plan = kge_torchrec.plan(keys, devices=f"{args.ranks}xH100-80GB", **sizes)
    memory, step = plan["memory"], plan["step"]["seconds"]
    print(f"kge-torchrec plan:  {memory['total']['device'] / GIB:.2f} GiB, {1e3 * step:.3f} ms")
    for part, size in memory["device"].items():
        print(f"  {part:<18} {size / GIB:6.2f} GiB")


if __name__ == "__main__":
    main()
