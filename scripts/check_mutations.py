"""Deliberate faults, each of which the tests named beside it must notice.

    python scripts/check_mutations.py            # all of them, some ten seconds each
    python scripts/check_mutations.py dropout    # those with that word in their name

Every fault is put into a copy of the working tree by replacing one piece of text, which must be
there exactly once; the tests run in that copy, and one of them has to fail.  Whoever moves the code
of a fault moves the fault along.  Exit code 1 if a fault goes unnoticed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import faults
import faults_answers
import faults_exports
import faults_growth
import faults_of_config
import faults_of_data
import faults_of_gpus
import faults_of_kernels
import faults_of_plans
import faults_of_processes
import faults_of_scorers
from faults import Fault

FAULTS = [
    *faults.FAULTS, *faults_answers.FAULTS, *faults_exports.FAULTS, *faults_growth.FAULTS,
    *faults_of_data.DATA_FAULTS, *faults_of_gpus.FAULTS, *faults_of_kernels.FAULTS,
    *faults_of_plans.FAULTS, *faults_of_processes.FAULTS, *faults_of_scorers.FAULTS,
    *faults_of_config.CONFIG_FAULTS,
]  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]


def copy_of_tree(folder: Path) -> None:
    """What git tracks, or would, as it stands."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def is_noticed(fault: Fault, tree: Path) -> bool:
    """Whether a test fails with the fault in; the file is as before afterwards."""
    file = tree / "kge_torchrec" / fault.file
    right = file.read_text(encoding="utf-8")
    if right.count(fault.right) != 1:
        sys.exit(f"{fault.name}: {fault.file} has {fault.right!r} {right.count(fault.right)} times")
    file.write_text(right.replace(fault.right, fault.wrong), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--show-capture=no", "-p",
                   "no:cacheprovider", *words(fault.tests)]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    finally:
        file.write_text(right, encoding="utf-8")
    if done.returncode not in (0, 1):
        sys.exit(f"{fault.name}: {fault.tests}: pytest ended with {done.returncode}\n{done.stdout}")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    print(f"    {failed[0][:140] if failed else done.stdout.splitlines()[-1]}", flush=True)
    return done.returncode == 1


def words(tests: str) -> list[str]:
    """Arguments of pytest: what follows -k is one of them."""
    paths, _, chosen = tests.partition(" -k ")
    return paths.split() + (["-k", chosen] if chosen else [])


def table(faults: list[Fault]) -> str:
    """In Markdown."""
    lines = [f"| {f.name} | `{f.file}` | `{f.tests}` |" for f in faults]
    return "\n".join(["| fault | in | noticed by |", "|---|---|---|", *lines])


def main() -> int:
    """Runs the faults asked for; 1 if one went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only faults with one of these in their name")
    parser.add_argument("--table", action="store_true", help="print them as a table in Markdown")
    args = parser.parse_args()
    chosen = [f for f in FAULTS if not args.words or any(word in f.name for word in args.words)]
    if args.table:
        print(table(chosen))
        return 0
    unnoticed = []
    with tempfile.TemporaryDirectory() as folder:
        copy_of_tree(Path(folder))
        for fault in chosen:
            print(fault.name, flush=True)
            start = time.perf_counter()
            if not is_noticed(fault, Path(folder)):
                unnoticed.append(fault.name)
            print(f"    {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} faults are noticed")
    for name in unnoticed:
        print(f"UNNOTICED: {name}")
    return bool(unnoticed)


if __name__ == "__main__":
    sys.exit(main())
