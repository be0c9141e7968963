"""Measure memory per rank of a scorer with 50 million dense parameters, by dense.wrapper.

python scripts/check_dense_memory.py [--ranks 1 2 4] [--wrappers ddp fsdp]

TuckER with dim 368 has a core of 368^3 parameters, and Adam keeps two more elements for each.
Every world trains a few steps on gloo ranks with one thread. Prints for the largest rank the MiB
of parameters, gradients and optimizer state, and the growth of the process since before the model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from process_memory import resident_bytes
from random_graph import RandomGraph

HERE = Path(__file__).resolve()
DIM, ENTITIES, RELATIONS, STEPS = 368, 1000, 20, 3


def rank_memory(wrapper: str) -> dict[str, float]:
    """Return bytes of this rank: "held" by tensors, "process" for the process's growth."""
    import torch
    from torch.distributed.tensor import DTensor

    from kge_torchrec.config.parser import load_config
    from kge_torchrec.data.batches import BatchPlan, Candidates, Delivery
    from kge_torchrec.data.batches.triples import TripleBatches
    from kge_torchrec.data.negatives import UniformSampler
    from kge_torchrec.distributed.processes import processes
    from kge_torchrec.environment import set_threads
    from kge_torchrec.training.assembly import build_backend, build_pipeline

    set_threads(1, 1)
    settings = {
        "model.scorer": "tucker",
        "model.dim": DIM,
        "model.init_scale": 0.01,
        "loss.n3": 0.0,
        "loss.relation_weight": 0.0,
        "train.optimizer": "adam",
        "train.lr": 0.001,
        "dense.wrapper": wrapper,
    }
    graph = RandomGraph(ENTITIES, RELATIONS, STEPS * 64)
    with processes("cpu") as ranks:
        base = resident_bytes()
        config = graph.settled(load_config(None, settings))
        engine = build_backend(config, graph, ranks)
        plan = BatchPlan(64, candidates=Candidates(UniformSampler(ENTITIES), 16))
        delivery = Delivery(ranks.rank, ranks.world_size)
        batches = TripleBatches(graph.train, plan, delivery).epoch(0)
        pipeline = build_pipeline(config, engine, ranks)
        for _ in range(STEPS):
            pipeline.progress(batches)
        states = engine.optimizer.state
        held = 0
        for parameter in engine.dense.parameters():
            for tensor in (parameter, parameter.grad, *states[parameter].values()):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                held += local.nbytes
        gc.collect()
        mine = torch.tensor([held, resident_bytes() - base], dtype=torch.float64)
        torch.distributed.all_reduce(mine, op=torch.distributed.ReduceOp.MAX)
    return {"held": float(mine[0]), "process": float(mine[1])}


def world_memory(ranks: int, wrapper: str) -> dict[str, float]:
    """Run a world of this file and return the largest rank's bytes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    workers = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
                 "MASTER_ADDR": "localhost", "MASTER_PORT": port}  # fmt: skip
        environment = os.environ | {key: str(value) for key, value in place.items()}
        command = [sys.executable, str(HERE), "--worker", wrapper]
        workers.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit(f"a rank of {wrapper} on {ranks} ranks failed")
    return json.loads(outputs[0].splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--wrappers", nargs="+", default=["ddp", "fsdp"])
    options = parser.parse_args()
    for wrapper in options.wrappers:
        for ranks in options.ranks:
            sizes = world_memory(ranks, wrapper)
            for kind, size in sizes.items():
                print(f"{kind}_{wrapper}_{ranks} {size / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(rank_memory(sys.argv[2])))
    else:
        main()
