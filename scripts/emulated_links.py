"""Compare the plan's step time with runs over emulated links between hosts of this machine.

python scripts/emulated_links.py [--worlds 1 2 4] [--rates 1000 100] [--dtypes fp32] [--steps 40]
    [--entities 200_000] [--dim 64] [--batch 8192] [--negatives 512] [--key.sub value ...]

Each host is a network namespace with one rank. A bridge joins the namespaces, and token buckets
(tc tbf) limit what a namespace sends and receives to a rate in Mbit/s. The ranks train with gloo
over their interface. The script prints the time of a step and the bytes that leave an interface,
beside those of the plan. The ranks share the cores of this machine, so the plan's computation is
scaled to a run of the same ranks without a limit; sizes, messages and link times are the plan's.
The exit code is 1 if a predicted step with a limit is more than 25 % off. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count, pairwise
from pathlib import Path
from statistics import median

from check_plan import parse, planned, prepare_store

TOLERANCE = 0.25
WARM_UP = 5  # steps before the first one that counts
_BRIDGE = f"kgb{os.getpid() % 10**8}"
_SUBNET = "10.83.7"


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextmanager
def hosts(number: int, mbit: int) -> Iterator[list[str]]:
    """Make namespaces that send and receive at most ``mbit`` (0: no limit); yield their names."""
    names = [f"{_BRIDGE}h{host}" for host in range(number)]
    try:
        run("ip", "link", "add", _BRIDGE, "type", "bridge")
        run("ip", "link", "set", _BRIDGE, "up")
        for host, name in enumerate(names):
            outer = f"{_BRIDGE}v{host}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", outer, "master", _BRIDGE, "up")
            run("ip", "-n", name, "addr", "add", f"{_SUBNET}.{host + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")
            if mbit:  # the bucket holds a millisecond of bytes
                bucket = ["root", "tbf", "rate", f"{mbit}mbit", "latency", "50ms", "burst",
                          str(max(16_000, mbit * 125))]  # fmt: skip
                run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *bucket)
                run("tc", "qdisc", "add", "dev", outer, *bucket)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", _BRIDGE], stderr=subprocess.DEVNULL)


def measure(settings: dict, world_size: int, mbit: int, steps: int) -> dict:
    """Return the median seconds of a step, rank 0's bytes in it, and the speed of its link."""
    with tempfile.TemporaryDirectory() as out, hosts(world_size, mbit) as names:
        task = json.dumps({"settings": settings, "out": out, "steps": steps})
        ranks = []
        for rank, name in enumerate(names):
            world = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1,
                     "MASTER_ADDR": f"{_SUBNET}.1", "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1,
                     "GLOO_SOCKET_IFNAME": "eth0"}  # fmt: skip
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "--worker", task]
            environment = os.environ | {key: str(value) for key, value in world.items()}
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        try:
            codes = [rank.wait(timeout=600) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return json.loads(Path(out, "0.json").read_text())


def work(task: dict) -> None:
    """Run one rank: train some steps, with the time and the bytes of its interface."""
    from kge_torchrec.environment import prepare_process

    prepare_process()

    from kge_torchrec.config.parser import load_config
    from kge_torchrec.distributed.processes import processes
    from kge_torchrec.training.run_folder import RunFolder
    from kge_torchrec.training.session import Session
    from kge_torchrec.training.state import TrainState
    from kge_torchrec.training.trainer import Trainer

    with tempfile.TemporaryDirectory() as name, processes("cpu") as ranks:
        folder = RunFolder(ranks.broadcast(name))
        session = Session(load_config(None, task["settings"]), folder, ranks)
        trainer = Trainer(session, TrainState(data=session.store.fingerprint), None)
        batches = chain.from_iterable(map(trainer.batches.epoch, count()))
        speed = link_speed(ranks) if ranks.world_size > 1 else 0.0
        for _ in range(WARM_UP):
            trainer.pipeline.progress(batches)
        ranks.barrier()
        before, ends = sent_bytes(), [time.perf_counter()]
        for _ in range(task["steps"]):
            trainer.pipeline.progress(batches)
            ends.append(time.perf_counter())
        ranks.barrier()
        seconds = median(stop - start for start, stop in pairwise(ends))
        sent = (sent_bytes() - before) / task["steps"]
        facts = {"seconds": seconds, "sent": sent, "speed": speed}
        Path(task["out"], f"{ranks.rank}.json").write_text(json.dumps(facts))
        ranks.barrier()


def sent_bytes() -> int:
    """Return the bytes that have left this namespace's interface."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def link_speed(ranks) -> float:
    """Return the bytes per second that this rank sends in rows of 1 MB to every other rank."""
    import torch

    from kge_torchrec.embeddings.exchange import exchanged

    counts, times = [1000] * ranks.world_size, 9
    rows = torch.zeros(sum(counts), 250)
    exchanged(rows, counts, counts, ranks.group)
    ranks.barrier()
    ends = [time.perf_counter()]
    for _ in range(times):
        exchanged(rows, counts, counts, ranks.group)
        ends.append(time.perf_counter())
    ranks.barrier()
    return 10**6 * (ranks.world_size - 1) / median(b - a for a, b in pairwise(ends))


def over_links(settings: dict, world_size: int, speed: float):
    """Return the plan with a rank on each host and a speed between hosts in bytes per second."""
    from kge_torchrec.planning.devices import parse_devices

    cluster = parse_devices(f"{world_size}xCPU", world_size).with_links(between=speed or None)
    return planned(settings, cluster)


def compare(settings: dict, world_size: int, options: argparse.Namespace) -> bool:
    """Print a line per rate, the unlimited link first; return whether all are near the plan."""
    from kge_torchrec.planning.step import ETHERNET_EFFICIENCY

    free = measure(settings, world_size, 0, options.steps)
    plan = over_links(settings, world_size, free["speed"] / ETHERNET_EFFICIENCY)
    factor = (free["seconds"] - plan.exchange_seconds) / plan.compute_seconds
    print_line(world_size, "none", settings, [sum(plan.traffic.total()) / world_size, None], free)
    near = True
    for mbit in options.rates if world_size > 1 else ():
        result = measure(settings, world_size, mbit, options.steps)
        plan = over_links(settings, world_size, mbit * 1e6 / 8)
        step = factor * plan.compute_seconds + plan.exchange_seconds
        sent = sum(plan.traffic.total()) / world_size
        print_line(world_size, f"{mbit:,}", settings, [sent, step], result)
        near &= abs(step / result["seconds"] - 1) <= TOLERANCE
    return near


def print_line(world_size: int, rate: str, settings: dict, predicted: list, result: dict) -> None:
    sent, step = predicted
    dtype = settings["entities.exchange.dtype"]
    time_text = f"{1e3 * step:8.1f}" if step else "        "
    error = f"{step / result['seconds'] - 1:+6.1%}" if step else ""
    print(
        f"{world_size:5} {rate:>6} {dtype:>5} {sent:12,.0f} {result['sent']:12,.0f} {time_text} "
        f"{1e3 * result['seconds']:8.1f} {error:>7} {result['speed'] / 1e6:8.1f}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entities", type=int, default=200_000)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rates", type=int, nargs="+", default=[1000, 100], help="Mbit/s")
    parser.add_argument("--dtypes", nargs="+", default=["fp32"], help="entities.exchange.dtype")
    parser.add_argument("--steps", type=int, default=15)
    options, changes = parse(parser)
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        print("skipped: network namespaces need root, and ip and tc of iproute2")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces must go
    good = True
    with tempfile.TemporaryDirectory() as name:
        store = prepare_store(options.entities, options.relations, Path(name))
        settings = {
            "data.path": str(store), "model.scorer": "complex", "model.dim": options.dim,
            "negatives.count": options.negatives, "train.batch_size": options.batch,
            "train.epochs": 1, "evaluation.every": 0, "run.progress": False, "device": "cpu",
            **changes,
        }  # fmt: skip
        print(f"{'':18} bytes per step and rank    ms per step           error  MB/s")
        print("ranks Mbit/s dtype         plan    interface     plan      run           link")
        for world_size in options.worlds:
            for dtype in options.dtypes:
                chosen = {**settings, "entities.exchange.dtype": dtype}
                good &= compare(chosen, world_size, options)
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
