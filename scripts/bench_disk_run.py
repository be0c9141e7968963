"""Take a large run on disk through its life: train, kill, resume, rank, predict, export.

    python scripts/bench_disk_run.py FOLDER [--entities 60_000_000] [--parts 64] [--buffer 8]

One run trains an epoch without a break.  Another one writes a checkpoint within the epoch, is
killed soon after, and resumes.  Their checkpoints must have the same checksums.  Each step prints a
line: seconds, peak memory (that of training beside the plan's), and the bytes that the disk read
and wrote.  The folder needs space for two versions of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench_disk import GIB, RELATIONS, add_sizes, config_of
from random_graph import RandomGraph

import kge_torchrec
from kge_torchrec import files
from kge_torchrec.config import GraphSize
from kge_torchrec.data.parts import PartLayout, least_exchanges

TEST = 200  # triples


def write_config(folder: Path, options: argparse.Namespace, every: int) -> Path:
    """Write the config of a run that writes a checkpoint after this number of steps, or never."""
    config = config_of(options, "disk")
    size = GraphSize(options.entities, RELATIONS, options.triples)
    values = config.settled(size).to_dict()
    values["data"]["path"] = str(options.folder / "store")
    values["run"]["dir"] = str(folder)
    values["checkpoint"] |= {"keep": 1, "every": {"steps": every} if every else {}}
    path = folder.with_suffix(".yaml")
    files.write_json(path, values)  # JSON is YAML
    return path


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a verb."""
    command = [sys.executable, "-m", "kge_torchrec", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def finished(name: str, process: subprocess.Popen[bytes], code: int = 0) -> dict[str, float]:
    """Wait for a verb; print and return its figures."""
    begin = time.perf_counter()
    _, status, used = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == code, name
    figures = {
        "seconds": round(time.perf_counter() - begin, 1),
        "CPU seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak GiB": round(used.ru_maxrss * 1024 / GIB, 2),
        "read GiB": round(used.ru_inblock * 512 / GIB, 2),
        "written GiB": round(used.ru_oublock * 512 / GIB, 2),
    }
    print(name, json.dumps(figures), flush=True)
    return figures


def print_training(folder: Path, options: argparse.Namespace) -> None:
    """Print speed, memory beside the plan, and the bytes of parts beside the least possible."""
    train = json.loads((folder / "results.json").read_text())["train"]
    plan = kge_torchrec.plan(folder / "config.yaml", devices="1xCPU")
    disk, planned = plan["disk"], plan["memory"][0]["main"]
    layout = PartLayout.of(options.entities, 4 * options.dim, 1, options.parts, options.buffer)
    least = least_exchanges(layout.parts, layout.places) * disk["part_bytes"]
    figures = {
        "triples/s": round(train["triples_per_second"]),
        "peak GiB": round(train["peak_memory_bytes"] / GIB, 2),
        "planned GiB": round(sum(planned.values()) / GIB, 2),
        "table GiB": round(disk["table_bytes"] / GIB, 2),
        "read GiB": round(disk["epoch_bytes"] / GIB, 2),
        "at least GiB": round(least / GIB, 2),
        "steps": json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"],
    }
    print("training", json.dumps(figures), flush=True)


def checksums(folder: Path) -> dict[str, list[list[int]]]:
    """Return the first row and the checksum of every piece of a run's newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step-*"))
    index = json.loads((newest / "index.json").read_text())["tensors"]
    return {
        name: sorted([*piece["offset"][:1], piece["crc32"]] for piece in entry["pieces"])
        for name, entry in index.items()
    }


def train_whole(options: argparse.Namespace) -> None:
    """Train without a break, rank, predict and export; keep the checksums."""
    folder = options.folder / "whole"
    finished("train and rank", start("train", str(write_config(folder, options, 0))))
    print_training(folder, options)
    files.write_json(options.folder / "checksums.json", checksums(folder))
    finished("rank", start("evaluate", str(folder)))
    query = ["--head", "e1", "--relation", "r1", "--top", "3"]
    finished("predict", start("predict", str(folder), *query))
    export = options.folder / "export"
    finished("export", start("export", str(folder), "--output", str(export)))
    shutil.rmtree(folder)
    finished("predict from the export", start("predict", str(export), *query))
    shutil.rmtree(export)


def kill_and_resume(options: argparse.Namespace) -> None:
    """Kill a run some time after a checkpoint within its epoch, resume it, compare checksums."""
    folder = options.folder / "killed"
    process = start("train", str(write_config(folder, options, options.checkpoint)))
    while not [*folder.glob("checkpoints/step-*")]:
        assert process.poll() is None, "training ended before its checkpoint"
        time.sleep(0.2)
    time.sleep(options.later)
    process.send_signal(signal.SIGKILL)
    finished("killed", process, -signal.SIGKILL)
    finished("resume and rank", start("train", "--resume", str(folder)))
    print_training(folder, options)
    whole, again = json.loads((options.folder / "checksums.json").read_text()), checksums(folder)
    assert whole.keys() == again.keys()
    differing = sum(a != b for name in whole for a, b in zip(whole[name], again[name], strict=True))
    pieces = sum(map(len, whole.values()))
    print(f"{differing} of {pieces} pieces differ from those of the run without a break")
    shutil.rmtree(folder)


def main() -> None:
    """Take the steps of --steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    add_sizes(parser, entities=60_000_000, triples=60_000_000, parts=64, buffer=8)
    parser.add_argument("--checkpoint", type=int, default=2_400, help="step of the checkpoint")
    parser.add_argument("--later", type=float, default=10, help="seconds until the kill")
    parser.add_argument("--steps", default="store,whole,killed")
    parser.set_defaults(epochs=1, threads=1, biggraph=None)  # for config_of
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if "store" in options.steps:
        graph = RandomGraph(options.entities, RELATIONS, options.triples + TEST)
        graph.write(options.folder / "store", TEST)
    if "whole" in options.steps:
        train_whole(options)
    if "killed" in options.steps:
        kill_and_resume(options)


if __name__ == "__main__":
    main()
