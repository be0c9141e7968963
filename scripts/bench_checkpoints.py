"""Measure how long checkpoints pause training, and kill runs while they write them.

    python scripts/bench_checkpoints.py FOLDER [--entities 10_000_000] [--ranks 1] [--kills 20]

A run of random triples trains with Adam and writes checkpoints within the epoch, once for each way
of ``checkpoint.options.background``.  A line says the longest time between two steps, the median
step before, during and after the first checkpoint, and the peak memory of all its processes.
``--kills`` ends a run that often by SIGKILL at random times of a save.  It is the first save of a
start, or one after up to ``--whole-saves`` complete ones, from which the next start resumes.  After
each kill, all checkpoints must be whole, and the newest at most one save behind.  At the end the
run must have the checksums of a run without kills.  ``--kills-per-call`` ends before all kills are
done, and the next call continues them.  ``--copy`` also copies the run to a folder by URL.  The
folder needs space for three checkpoints of each run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
from bench_disk import GIB
from process_memory import children, tree_bytes
from random_graph import RandomGraph

from kge_torchrec.config import Config
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.environment import keep_large_blocks, set_threads
from kge_torchrec.training.checkpoint_index import open_checkpoint
from kge_torchrec.training.copier import Copier
from kge_torchrec.training.runs import Extras, start_run
from kge_torchrec.training.session import Session
from kge_torchrec.training.state import TrainState
from kge_torchrec.training.trainer import Trainer

RELATIONS = 10


def config_of(options: argparse.Namespace, run: Path, way: str) -> Config:
    """Return DistMult with Adam and 128 candidates that a batch shares."""
    copy = (options.folder / f"copy-of-{run.name}").resolve().as_uri()
    copied = {"copy_to": copy} if options.copy else {}
    return config_from_dict({
        "data.path": str(options.folder / "store"), "run.dir": str(run), "run.resume": "auto",
        "model.scorer": "distmult", "model.dim": options.dim, "model.reciprocal": False,
        "negatives.count": 128, "train.batch_size": options.batch_size, "train.epochs": 1,
        "train.optimizer": "adam", "train.lr": 0.003, "loss.relation_weight": 0.0, "loss.n3": 0.0,
        "evaluation.every": 0, "threads": 1, "device": options.device, "train.log_every": 10,
        "checkpoint.every": {"steps": options.every}, "checkpoint.keep": 1,
        "checkpoint.options": {"background": way, **copied}, "run.progress": False,
        "run.trackers": {"tensorboard": False},
    })  # fmt: skip


def train(options: argparse.Namespace, run: Path, way: str) -> None:
    """Train; print the times of steps, of this rank, beside the checkpoints."""
    keep_large_blocks()
    set_threads(1, 1)
    ends: list[float] = []
    saves: list[tuple[float, float]] = []
    copies: list[tuple[float, float]] = []
    step, save, copy = Trainer.train_step, Trainer._save, Copier._copy
    restore, restored = Session.restore, 0.0

    def timed_step(self: Trainer, batches: object) -> int:
        trained = step(self, batches)
        ends.append(time.perf_counter())
        if len(ends) == 1 and os.environ.get("RANK", "0") == "0":
            first = round(time.time() - options.started, 1)
            print(json.dumps({"restored s": restored, "first step s": first}), flush=True)
        return trained

    def timed_restore(self: Session) -> TrainState:
        nonlocal restored
        begun = time.perf_counter()
        progress = restore(self)
        restored = round(time.perf_counter() - begun, 1)
        return progress

    def timed_save(self: Trainer) -> None:
        begun = time.perf_counter()
        save(self)
        saves.append((begun, time.perf_counter()))

    def timed_copy(self: Copier) -> None:
        begun = time.perf_counter()
        copy(self)
        copies.append((begun, time.perf_counter()))

    Trainer.train_step, Trainer._save, Copier._copy = timed_step, timed_save, timed_copy
    Session.restore = timed_restore
    start_run(config_of(options, run, way), Extras(rank_test=False))
    times, gaps = np.array(ends), np.diff(ends)
    starts = times[:-1]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    written = [line for line in lines if line["kind"] == "checkpoint"]
    if os.environ.get("RANK", "0") != "0" or len(saves) < 2:
        return
    first = saves[0]
    during = first[1] + (written[0]["seconds"] if written else 0.0)
    # The last checkpoint ends training, which waits for it.
    within = (starts < saves[-1][0]) & (starts > starts[5])  # compiled and warm
    later = within & (starts > first[1]) & ~_during(saves, starts, times[1:])
    copying = _during(copies, starts, times[1:])
    print(json.dumps({
        "way": way,
        "longest pause s": round(float(gaps[within].max()), 3),
        "saves s": [round(end - begun, 3) for begun, end in saves],
        "step before ms": _median(gaps[5:][starts[5:] < first[0] - 1e-9][:-1]),
        "step during ms": _median(gaps[(starts > first[1]) & (starts < during)]),
        "longest during ms": _largest(gaps[(starts > first[1]) & (starts < during)]),
        "step after ms": _median(gaps[(starts > during) & (times[1:] < saves[1][0])]),
        "checkpoints": written,
        "step copying ms": _median(gaps[later & copying]),
        "steps copying": int((later & copying).sum()),
        "step without copying ms": _median(gaps[later & ~copying]),
        "copies s": [round(end - begun, 2) for begun, end in copies],
    }))  # fmt: skip


def _during(spans: list[tuple[float, float]], starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return whether each step overlaps one of the spans."""
    result = np.zeros(len(starts), bool)
    for first, last in spans:
        result |= (starts < last) & (ends > first)
    return result


def _median(values: np.ndarray) -> float | None:
    return round(1000 * float(np.median(values)), 2) if len(values) else None


def _largest(values: np.ndarray) -> float | None:
    return round(1000 * float(values.max()), 2) if len(values) else None


def start(options: argparse.Namespace, run: Path, way: str) -> subprocess.Popen[str]:
    """Start a run in processes of its own."""
    began = f"--started={time.time()}"
    command = [__file__, *sys.argv[1:], "--train", str(run), "--way", way, began]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *(launcher if options.ranks > 1 else []), *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def measure(options: argparse.Namespace, way: str) -> None:
    """Train by one way and print the figures."""
    run = options.folder / way
    remove(options, way)
    process, peak, rest = start(options, run, way), 0, 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak, rest
        while not done.wait(1.0):
            # A look stops a fork for some time: look only while a checkpoint is written.
            if any((run / "checkpoints").glob(".partial-*/*.bin")):
                peak = max(peak, tree_bytes(process.pid))
            elif not rest and any((run / "checkpoints").glob("step-*")):
                rest = tree_bytes(process.pid)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, errors = process.communicate()
    done.set()
    watcher.join()
    assert process.returncode == 0, errors
    figures = json.loads(output.splitlines()[-1])
    figures |= {"peak GiB": round(peak / GIB, 2), "between saves GiB": round(rest / GIB, 2)}
    print(json.dumps(figures), flush=True)


def remove(options: argparse.Namespace, name: str) -> None:
    """Remove a run of an earlier call, and its copy."""
    for folder in (name, f"copy-of-{name}"):
        shutil.rmtree(options.folder / folder, ignore_errors=True)


def verify(run: Path) -> int:
    """Check every checkpoint of a run; return the step of the newest one."""
    steps = [0]
    for folder in sorted((run / "checkpoints").glob("step-*")):
        index, progress = open_checkpoint(folder)
        for entry in (index or {}).values():
            for piece in entry["pieces"]:
                size = int(np.prod(piece["size"])) * np.dtype(entry["dtype"]).itemsize
                with (folder / piece["file"]).open("rb") as file:
                    file.seek(piece["start"])
                    assert zlib.crc32(file.read(size)) == piece["crc32"], folder
        steps.append(progress.global_step)
    return steps[-1]


def kill(options: argparse.Namespace) -> None:
    """End a run often while it writes a checkpoint; compare its result with another run's.

    ``killed.jsonl`` has a line for each kill, of earlier calls too.
    """
    run, record = options.folder / "killed", options.folder / "killed.jsonl"
    if not record.exists():
        remove(options, "killed")
        record.touch()
    kills = [json.loads(line) for line in record.read_text().splitlines()]
    last = min(options.kills, len(kills) + (options.kills_per_call or options.kills))
    while len(kills) < last and (killed := kill_once(options, run, random.Random(len(kills)))):
        kills.append(killed)
        record.write_text("".join(json.dumps(line) + "\n" for line in kills))
        print(f"kill {len(kills)}", json.dumps(killed), flush=True)
    if len(kills) == last < options.kills:
        return
    process = start(options, run, options.killed_way)
    errors = process.communicate()[1]
    assert process.returncode == 0, errors
    verify(run)
    sums = [
        {name: entry["pieces"] for name, entry in open_checkpoint(folder)[0].items()}
        for folder in (newest_of(run), newest_of(options.folder / "none"))
    ]
    print(json.dumps({
        "kills": len(kills), "during a save": sum(x["during"] for x in kills),
        "during a later save": sum(x["during"] and x["newest"] > x["resumed"] for x in kills),
        "resumed from a checkpoint": sum(x["resumed"] > 0 for x in kills),
        "more than a save lost": sum(x["save"] - x["newest"] > options.every for x in kills),
        "same checksums as without kills": sums[0] == sums[1],
        "left over": [p.name for p in (run / "checkpoints").glob(".*")],
    }))  # fmt: skip
    record.unlink()


def kill_once(options: argparse.Namespace, run: Path, chance: random.Random) -> dict | None:
    """Start or resume a run, and end it after a save began; None if it ended first.

    Returns:
        The step of the last save, whether it was not complete, the step of the newest checkpoint,
        that of the checkpoint from which this start resumed, and the seconds until its first step.
    """
    resumed = max(map(step_of, (run / "checkpoints").glob("step-*")), default=0)
    last_whole = resumed + options.every * chance.randint(0, options.whole_saves)
    begun, process, saves = time.time(), start(options, run, options.killed_way), False
    while not saves and process.poll() is None:
        # A killed save leaves its files, until the next one removes them.
        files = (run / "checkpoints").glob(".partial-*/rank-00000.bin")
        with contextlib.suppress(FileNotFoundError):
            begins = [step_of(file.parent) for file in files if file.stat().st_mtime > begun]
            saves = max(begins, default=0) > last_whole
        time.sleep(0.002)
    if saves:
        time.sleep(chance.uniform(0, options.kill_within))
    if process.poll() is not None:
        print("the run had ended", process.communicate()[1][-300:])
        return None
    ranks = children().get(process.pid, [])
    victim = chance.choice(ranks) if options.ranks > 1 else process.pid
    writing = list(map(step_of, (run / "checkpoints").glob(".partial-*")))
    os.kill(victim, signal.SIGKILL)
    output = process.communicate()[0]
    newest = verify(run)
    return {"save": max([newest, *writing]), "during": bool(writing), "newest": newest,
            "resumed": resumed, **json.loads(output.splitlines()[0])}  # fmt: skip


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint, complete or not."""
    return int(folder.name.rpartition("-")[2])


def newest_of(run: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return max((run / "checkpoints").glob("step-*"))


def main() -> None:
    """Measure each way, then kill."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--entities", type=int, default=10_000_000)
    parser.add_argument("--triples", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="of the table; cuda has the way copy")
    parser.add_argument("--ways", nargs="*", default=["none", "fork"])
    parser.add_argument("--copy", action="store_true", help="copy each run to a folder, by URL")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--kills-per-call", type=int, help="the next call does others; 0: all")
    parser.add_argument("--killed-way", default="fork")
    parser.add_argument("--whole-saves", type=int, default=1, help="at most, before a kill")
    parser.add_argument("--kill-within", type=float, default=1.0, help="seconds after a save began")
    parser.add_argument("--train", type=Path, help="train a run here")
    parser.add_argument("--way")
    parser.add_argument("--started", type=float, help="time.time() before this process")
    options = parser.parse_args()
    if options.train:
        return train(options, options.train, options.way)
    if not (options.folder / "store").exists():
        graph = RandomGraph(options.entities, RELATIONS, options.triples)
        graph.write(options.folder / "store")
    for way in options.ways:
        measure(options, way)
    if options.kills:
        kill(options)


if __name__ == "__main__":
    main()
