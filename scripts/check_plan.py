"""Compare the planner's predictions with real runs on this CPU.

python scripts/check_plan.py [--entities 2_000_000] [--dim 64] [--worlds 2 4] [--optimizers ...]
    [--key.sub value ...]

Trains at least 240 steps on random triples that contain every entity, for every optimizer and
number of ranks, with the loop of `kge-torchrec train`. Prints rows, bytes of values and of state
(which must be equal), peak memory of the fullest rank (within 10 %) and bytes sent per step (within
5 %). Bytes sent are counted at the collectives. The exit code is 1 if a figure is further off.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kge_torchrec.planning.devices import Cluster
    from kge_torchrec.planning.plan import TrainingPlan

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # for sent_bytes

HELD_OUT = 50
STEPS = 240  # at least; glibc's heap grows over the first hundreds of steps
TOLERANCE = {"peak memory": 0.10, "sent in a step": 0.05}


def prepare_store(entities: int, relations: int, folder: Path) -> Path:
    """Return a store in which every entity is a head once, so an epoch uses every row."""
    import pyarrow as pa
    import pyarrow.csv

    from kge_torchrec.data.prepare import prepare

    stream, raw = np.random.default_rng(0), folder / "raw"
    raw.mkdir()
    some = stream.integers(entities, size=HELD_OUT)
    for split, heads in (("train", np.arange(entities)), ("valid", some), ("test", some[::-1])):
        columns = [heads, np.arange(len(heads)) % relations,
                   stream.integers(entities, size=len(heads))]  # fmt: skip
        table = pa.table(dict(zip("hrt", map(pa.array, columns), strict=True)))
        style = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t")
        pyarrow.csv.write_csv(table, raw / f"{split}.txt", style)
    prepare(raw, folder / "store", progress=False)
    return folder / "store"


def settings_of(options: argparse.Namespace, store: Path) -> dict:
    """Return the keys of the config."""
    return {
        "data.path": str(store),
        "model.scorer": options.scorer,
        "model.dim": options.dim,
        "negatives.count": options.negatives,
        "train.batch_size": options.batch,
        "train.epochs": -(-STEPS * options.batch // options.entities),
        "evaluation.every": 0,
        "run.progress": False,
        "device": "cpu",
    }


def planned(settings: dict, cluster: Cluster) -> TrainingPlan:
    """Return the plan of a run on some devices."""
    from kge_torchrec.config.parser import load_config
    from kge_torchrec.data.store import TripleStore
    from kge_torchrec.planning.layout import Layout
    from kge_torchrec.planning.plan import plan_training
    from kge_torchrec.planning.workload import Workload

    store = TripleStore.open(settings["data.path"])
    config = load_config(None, settings).settled(store.size, False, cluster.world_size)
    return plan_training(Workload.of_store(config, store), cluster, Layout())


def predict(settings: dict, world_size: int) -> dict:
    """Return the planner's figures for every rank."""
    from kge_torchrec.planning.devices import parse_devices

    plan = planned(settings, parse_devices(f"{world_size}xCPU"))
    return {
        "rows": [(shard.first_row, shard.rows) for shard in plan.shards],
        "weights": [parts["weights"].main for parts in plan.memory],
        "optimizer state": [parts["optimizer state"].main for parts in plan.memory],
        "peak memory": max(plan.total(rank).main for rank in range(world_size)),
        "sent in a step": sum(plan.traffic.total()),
        "by kind": {kind: sum(plan.traffic.total(kind)) for kind in plan.traffic.sent},
        "parts": {part: size.main for part, size in plan.memory[plan.fullest].items()},
    }


def measure(settings: dict, world_size: int, folder: Path) -> dict:
    """Return the same figures of a real world."""
    out = folder / "measured"
    out.mkdir(exist_ok=True)
    task = {"settings": settings, "out": str(out)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={world_size}", __file__, "--worker", json.dumps(task)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(world_size)]
    kinds = ranks[0]["sent"]
    return {
        "rows": [tuple(rank["rows"]) for rank in ranks],
        "weights": [rank["weights"] for rank in ranks],
        "optimizer state": [rank["state"] for rank in ranks],
        "peak memory": max(rank["peak"] for rank in ranks),
        "sent in a step": sum(sum(rank["sent"].values()) for rank in ranks),
        "by kind": {kind: sum(rank["sent"][kind] for rank in ranks) for kind in kinds},
    }


def work(task: dict) -> None:
    """Run one rank: train, rank, then count the bytes that some more steps send."""
    from kge_torchrec.environment import prepare_process

    prepare_process()

    from kge_torchrec.config.parser import load_config
    from kge_torchrec.distributed.processes import processes
    from kge_torchrec.environment import peak_resident_bytes
    from kge_torchrec.training.run_folder import MetricsLog, RunFolder
    from kge_torchrec.training.session import Session
    from kge_torchrec.training.state import TrainState
    from kge_torchrec.training.trainer import Trainer

    with tempfile.TemporaryDirectory() as name, processes("cpu") as ranks:
        folder = RunFolder(ranks.broadcast(name))
        session = Session(load_config(None, task["settings"]), folder, ranks)
        metrics = MetricsLog(folder) if ranks.is_first else None
        fit = Trainer(session, TrainState(data=session.store.fingerprint), metrics)
        fit.run()
        session.rank("test")
        shard = session.backend.shard()
        facts = {
            "peak": int(ranks.largest([peak_resident_bytes()])[0]),
            "rows": (shard.first_row, shard.rows.shape[0]),
            "weights": shard.rows.numel() * shard.rows.element_size(),
            "state": state_bytes(session.backend),
            "sent": sent_in_a_step(fit, ranks.world_size),
        }
        Path(task["out"], f"{ranks.rank}.json").write_text(json.dumps(facts))
        ranks.barrier()


def state_bytes(engine) -> int:
    """Return the bytes of the table's optimizer state on this rank, as saved."""
    from torch.distributed.tensor import DTensor
    from torch.utils._pytree import tree_leaves

    from kge_torchrec.embeddings.backend import ENTITY_WEIGHT

    states = engine.state()["optimizer"]["state"]
    facts = [x for name, state in states.items() if ENTITY_WEIGHT in name for x in
             tree_leaves(state) if isinstance(x, DTensor)]  # fmt: skip
    pieces = [piece for x in facts for piece in x.to_local().local_shards()]
    return sum(piece.numel() * piece.element_size() for piece in pieces)


def sent_in_a_step(fit, world_size: int) -> dict[str, float]:
    """Return the bytes that this rank sends per step, by kind, over a few full steps."""
    from sent_bytes import WatchCollectives

    stream, full = fit.batches.epoch(1), fit.batches.examples // fit.batches.plan.batch_size
    steps = min(10, full - 1)
    fit.pipeline.progress(stream)
    with WatchCollectives() as watch:
        for _ in range(steps):
            fit.pipeline.progress(stream)
    return {kind: size / steps for kind, size in watch.sent.items()}


def compare(title: str, predicted: dict, measured: dict) -> bool:
    """Print one line per figure; return whether all are within their bounds."""
    good = True
    print(title)
    for key in ("rows", "weights", "optimizer state"):
        equal = predicted[key] == measured[key]
        good &= equal
        print(f"  {key:<16} {'equal' if equal else f'{predicted[key]} != {measured[key]}'}")
    for key, tolerance in TOLERANCE.items():
        error = predicted[key] / measured[key] - 1 if measured[key] else 0.0
        good &= abs(error) <= tolerance
        unit = 2**20
        print(
            f"  {key:<16} predicted {predicted[key] / unit:10.2f} MiB, measured "
            f"{measured[key] / unit:10.2f} MiB, {error:+.1%} (within {tolerance:.0%})"
        )
    for kind, size in measured["by kind"].items():
        print(f"    {kind:<14} {predicted['by kind'][kind]:14,.0f} {size:14,.0f} bytes")
    return good


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, dict[str, str]]:
    """Add the sizes of a run; return the options, and the keys of the config (--key.sub value)."""
    for name, size in {"relations": 200, "dim": 64, "batch": 8192, "negatives": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options, words = parser.parse_known_args()
    names = (word.removeprefix("--") for word in words[::2])
    return options, dict(zip(names, words[1::2], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entities", type=int, default=2_000_000)
    parser.add_argument("--scorer", default="complex")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    optimizers = ["adam", "rowwise_adam", "adagrad", "rowwise_adagrad", "sgd"]
    parser.add_argument("--optimizers", nargs="+", default=optimizers)
    options, changes = parse(parser)
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = prepare_store(options.entities, options.relations, folder)
        settings = {**settings_of(options, store), **changes}
        for world_size in options.worlds:
            for optimizer in options.optimizers:
                chosen = {**settings, "train.optimizer": optimizer}
                predicted = predict(chosen, world_size)
                measured = measure(chosen, world_size, folder)
                good &= compare(f"{optimizer}, {world_size} ranks", predicted, measured)
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
