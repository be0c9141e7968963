"""Compare the planner's memory and bytes with real runs on this CPU.

python scripts/check_plan.py [--entities 2_000_000] [--worlds 2 4] [--optimizers adam sgd ...]

Trains at least 240 steps on random triples that contain every entity, for every optimizer and
number of ranks. Prints bytes of values and of state of the fullest rank (which must be equal), its
peak memory (within 10 %) and bytes that a rank sends per step, counted at the collectives (within
5 %). The exit code is 1 if a figure is further off.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

STEPS = 240  # at least; glibc's heap grows over the first hundreds of steps
CONFIG = {
    "model.dim": 64, "negatives.count": 512, "train.batch_size": 8192, "evaluation.every": 0,
    "run.progress": False, "device": "cpu", "default": "rules",
    "checkpoint.options": {"background": False},  # a copy of the rows, if there is room
}  # fmt: skip
TOLERANCE = {"weights": 0.0, "optimizer state": 0.0, "peak memory": 0.10, "sent per step": 0.05}


def write_store(entities: int, folder: Path) -> Path:
    """Write a store in which every entity is a head once, so an epoch uses every row."""
    import pyarrow as pa

    from kge_torchrec import prepare

    stream, splits = np.random.default_rng(0), {}
    for split, count in (("train", entities), ("valid", 50), ("test", 50)):
        columns = np.arange(count), np.arange(count) % 200, stream.integers(entities, size=count)
        arrays = [pa.array(column.astype(str)) for column in columns]
        splits[split] = pa.table(arrays, names=["head", "relation", "tail"])
    return prepare(splits, folder).path


def predicted(settings: dict, world_size: int) -> dict:
    """Return the planner's figures of the rank with the most rows."""
    from kge_torchrec import plan

    content = plan(settings, devices=f"{world_size}xCPU")
    memory = content["memory"]
    return {
        "weights": memory["main"]["weights"],
        "optimizer state": memory["main"].get("optimizer state", 0),
        "peak memory": memory["total"]["main"],
        "sent per step": sum(sum(x.values()) for x in content["sent"].values()),
    }


def measured(settings: dict, world_size: int, folder: Path) -> dict:
    """Return the same figures of a real run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={world_size}", __file__, "--worker", str(folder)]
    subprocess.run([*command, json.dumps(settings)], check=True, stdout=subprocess.DEVNULL)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    return {
        "weights": max(rank["weights"] for rank in ranks),
        "optimizer state": max(rank["state"] for rank in ranks),
        "peak memory": max(rank["peak"] for rank in ranks),
        "sent per step": sum(rank["sent"] for rank in ranks) / world_size,
    }


def work(out: Path, settings: dict) -> None:
    """Run one rank: train, rank, then count the bytes that some more steps send."""
    from kge_torchrec.environment import peak_resident_bytes, prepare_process

    prepare_process()
    from kge_torchrec.config.parser import load_config
    from kge_torchrec.distributed.processes import processes
    from kge_torchrec.distributed.traffic import Traffic
    from kge_torchrec.training.run_folder import RunFolder
    from kge_torchrec.training.session import Session
    from kge_torchrec.training.state import TrainState
    from kge_torchrec.training.trackers import MetricsLog
    from kge_torchrec.training.trainer import Trainer

    with tempfile.TemporaryDirectory() as name, processes("cpu") as ranks:
        folder = RunFolder(ranks.broadcast(name))
        session = Session(load_config(None, settings), folder, ranks)
        log = MetricsLog(folder) if ranks.is_first else None
        trainer = Trainer(session, TrainState(data=session.store.fingerprint), log)
        trainer.run()
        session.rank("test")
        shard = session.backend.shard()
        facts = {
            "peak": int(ranks.largest([peak_resident_bytes()])[0]),
            "weights": shard.rows.nbytes,
            "state": state_bytes(session.backend),
        }
        stream = trainer.batches.epoch(1)
        trainer.pipeline.progress(stream)
        with Traffic() as traffic:
            for _ in range(10):
                trainer.pipeline.progress(stream)
        facts["sent"] = sum(traffic.sent.values()) / 10
        (out / f"{ranks.rank}.json").write_text(json.dumps(facts))
        ranks.barrier()


def state_bytes(backend) -> int:
    """Return the bytes of the table's optimizer state on this rank, as saved."""
    from kge_torchrec.embeddings.backend import ENTITY_WEIGHT

    state = f"optimizer.{ENTITY_WEIGHT}."
    return sum(rows.local.nbytes for rows in backend.state() if rows.name.startswith(state))


def agree(title: str, plan: dict, run: dict) -> bool:
    """Print a line per figure; return whether all are within their bounds."""
    errors = {
        name: float(np.max(np.abs(np.divide(plan[name], np.maximum(run[name], 1)) - 1)))
        for name in TOLERANCE
        if np.any(plan[name]) or np.any(run[name])
    }
    for name, error in errors.items():
        print(f"{title}, {name}: plan {plan[name]}, run {run[name]} bytes, off by {error:.1%}")
    return all(error <= TOLERANCE[name] for name, error in errors.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entities", type=int, default=2_000_000)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    optimizers = ["adam", "rowwise_adam", "adagrad", "rowwise_adagrad", "sgd"]
    parser.add_argument("--optimizers", nargs="+", default=optimizers)
    options = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {**CONFIG, "data.path": str(write_store(options.entities, folder / "store"))}
        settings["train.epochs"] = -(-STEPS * CONFIG["train.batch_size"] // options.entities)
        for world_size in options.worlds:
            for optimizer in options.optimizers:
                keys = {**settings, "train.optimizer": optimizer}
                pair = predicted(keys, world_size), measured(keys, world_size, folder)
                good &= agree(f"{optimizer}, {world_size} ranks", *pair)
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        sys.exit(main())
