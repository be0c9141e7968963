"""Compare what two commits compute: bits of training, ranks, plans, races, data, speed.

    python scripts/golden_results.py 1dd3a234 HEAD                     # all parts
    python scripts/golden_results.py 1dd3a234 HEAD --only runs plans
    python scripts/golden_results.py 1dd3a234 HEAD --only runs --names fp16 disk

Parts (default: all, in this order; `speed` wants a machine that does nothing else):

    runs    parameters, losses and metrics of short trainings on small graphs, on 1, 2 and 4 ranks
    ranks   md5 of every rank of five scorers on FB15k-237 and WN18RR
    plans   14 plans, value by value
    races   the race of defaults on the embedded graph and on UMLS
    data    labelled triples of every split, and known answers
    speed   seconds and peak memory of whole commands, both commits alternating

Each commit is checked out in --folder and runs with this Python. Results are kept there, so a
second start continues. Parameters are compared by the labels of their rows. Bits depend on the
processor: compare on one machine. `golden_cases.py` has the cases.
Graphs are read from --graphs (default: ../shared/data); what is missing is skipped and named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from golden_cases import DATA, PLANS, RACES, RANKED, RUNS, TIMED, Missing, graph_of

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "scripts" / "golden_cases.py"
PARTS = ("runs", "ranks", "plans", "races", "data", "speed")


def names_of(part: str) -> Iterator[tuple[str, str, int]]:
    """Yield (name, graph, ranks) of the entries of a part."""
    if part == "runs":
        yield from ((name, graph, ranks) for name, (graph, ranks, *_) in RUNS.items())
    elif part == "ranks":
        yield from ((f"{g}/{scorer}", g, 1) for g in ("fb15k-237", "wn18rr") for scorer in RANKED)
    elif part == "plans":
        yield from ((name, "countries", 1) for name in PLANS)
    elif part == "races":
        yield from ((name, name, 1) for name in RACES)
    elif part == "data":
        yield from ((name, graph, 1) for name, (graph, _) in DATA.items())
    else:
        yield from ((name, graph or "countries", 1) for name, (graph, *_) in TIMED.items())


def child(
    tree: Path, part: str, name: str, folder: Path, graph: str, ranks: int, attempt: int
) -> str:
    """Run one entry in new processes; return what it printed if it failed."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(CASES), part, name, str(folder), graph, str(attempt)]
    threads = {} if part == "speed" else {"OMP_NUM_THREADS": "1"}
    environment = {**os.environ, "PYTHONPATH": str(tree), **threads}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    said = (done.stdout + done.stderr)[-3000:]
    return "" if done.returncode == 0 else f"exit code {done.returncode}\n{said}"


def result(tree: Path, part: str, name: str, work: Path, graph: str, ranks: int) -> Any:
    """Return the outcome of an entry, from the folder if it is there already."""
    folder = work / part / name.replace("/", "-")
    file = folder / "result.json"
    if not file.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if name.startswith("killed"):
            if not child(tree, part, name, folder, graph, ranks, 1):
                return {"failed": "the run was not killed"}
            trouble = child(tree, part, name, folder, graph, ranks, 2)
        else:
            trouble = child(tree, part, name, folder, graph, ranks, 0)
        if trouble:
            return {"failed": trouble}
        for left in ("run", "store", "extended-0", "extended-1"):
            shutil.rmtree(folder / left, ignore_errors=True)
    return json.loads(file.read_text())


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every plain value."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from leaves(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def difference(part: str, name: str, works: list[Path], outcomes: list[Any]) -> str:
    """Return in words how the second outcome differs from the first; "" if not at all."""
    for outcome, which in zip(outcomes, ("first", "second"), strict=True):
        if "failed" in outcome:
            return f"FAILED at the {which} commit:\n{outcome['failed']}"
    first, second = (dict(leaves(outcome)) for outcome in outcomes)
    gone, new = sorted(first.keys() - second), sorted(second.keys() - first)
    changed = [path for path in first if path in second and first[path] != second[path]]
    words = [f"{len(paths)} values {how}: {', '.join(paths[:8])}{' ...' if len(paths) > 8 else ''}"
             for paths, how in ((gone, "gone"), (new, "new")) if paths]  # fmt: skip
    if part == "runs" and any(path.startswith("hashes") for path in changed):
        files = [np.load(work / part / name / "parameters.npz") for work in works]
        for key in files[0].files:
            if key in files[1].files and files[0][key].shape == files[1][key].shape:
                apart = np.abs(files[0][key] - files[1][key]).max(initial=0)
                words.append(f"{key} differs by at most {apart:.2g}")
    for path in changed[:12]:
        if not path.startswith("hashes"):
            words.append(f"{path}: {first[path]!r:.60} -> {second[path]!r:.60}")
    if len(changed) > 12:
        words.append(f"{len(changed)} values changed in all")
    return "; ".join(words)


def compare(part: str, trees: list[Path], works: list[Path], args: argparse.Namespace) -> int:
    """Compare the entries of a part; return the number that differ."""
    differing = total = 0
    for name, graph, ranks in names_of(part):
        if args.names and name not in args.names:
            continue
        try:
            path = graph_of(graph, args.graphs, args.folder)
        except Missing as missing:
            print(f"{part} {name}: skipped: {missing}", flush=True)
            continue
        sides = zip(trees, works, strict=True)
        outcomes = [result(tree, part, name, work, path, ranks) for tree, work in sides]
        words = difference(part, name, works, outcomes)
        total += 1
        differing += bool(words)
        print(f"{part} {name}: {words or 'the same'}", flush=True)
    print(f"{part}: {total - differing} of {total} the same", flush=True)
    return differing


def time_both(trees: list[Path], works: list[Path], args: argparse.Namespace) -> int:
    """Print the speed of both commits, alternating: medians and their ratio."""
    for name, (graph, _, _, rounds) in TIMED.items():
        if args.names and name not in args.names:
            continue
        try:
            path = graph_of(graph or "countries", args.graphs, args.folder)
        except Missing as missing:
            print(f"speed {name}: skipped: {missing}", flush=True)
            continue
        figures: list[list[dict[str, float]]] = [[], []]
        for turn in range(rounds + 1):  # the first round compiles and is not counted
            for k in (0, 1) if turn % 2 else (1, 0):
                shutil.rmtree(works[k] / "speed" / name, ignore_errors=True)
                outcome = result(trees[k], "speed", name, works[k], path, 1)
                if "failed" in outcome:
                    print(f"speed {name}: FAILED: {outcome['failed']}", flush=True)
                    return 1
                if turn:
                    figures[k].append(outcome)
        for unit in figures[0][0]:
            before, now = ([f[unit] for f in side] for side in figures)
            ratio = statistics.median(now) / statistics.median(before)
            shown = [
                f"{statistics.median(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in (before, now)
            ]
            print(f"speed {name} {unit}: {shown[0]} -> {shown[1]}, ratio {ratio:.3f}", flush=True)
    return 0


def checkout(commit: str, folder: Path) -> tuple[Path, Path]:
    """Return (tree, folder of results) of a commit, checked out without touching this one."""
    full = subprocess.run(["git", "rev-parse", f"{commit}^{{commit}}"], cwd=ROOT, check=True,
                          capture_output=True, text=True).stdout.strip()  # fmt: skip
    work = folder / full[:12]
    tree = work / "tree"
    if not tree.exists():
        (work / "partial").mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(
            ["git", "archive", full], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", str(work / "partial")], input=archive.stdout, check=True)
        (work / "partial").rename(tree)
    return tree, work


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs=2, help="the commit to compare with, and the other one")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--names", nargs="+", help="only these entries of the parts")
    whole = {"type": lambda text: Path(text).resolve()}
    parser.add_argument("--folder", default=ROOT / "runs" / "golden", **whole,
                        help="work and results (default: runs/golden)")  # fmt: skip
    parser.add_argument("--graphs", default=ROOT.parent / "shared" / "data", **whole)
    args = parser.parse_args()
    trees, works = map(list, zip(*(checkout(c, args.folder) for c in args.commits), strict=True))
    differing = 0
    for part in args.only:
        if part == "speed":
            differing += time_both(trees, works, args)
        else:
            differing += compare(part, trees, works, args)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
