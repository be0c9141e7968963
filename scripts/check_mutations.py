"""Check that the tests notice each deliberate fault.

    python scripts/check_mutations.py            # all faults, some ten seconds each
    python scripts/check_mutations.py dropout    # faults with this word in their name

A fault replaces one piece of text, which must occur exactly once, in a copy of the working tree.
Then its tests run in that copy, those of the first tier and, if none fails, those of the second.
One of them must fail. If you change the replaced text, change
the fault too. The exit code is 1 if a fault goes unnoticed.
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
import faults_of_batches
import faults_of_checkpoints
import faults_of_config
import faults_of_copies
import faults_of_data
import faults_of_disk
import faults_of_features
import faults_of_gpus
import faults_of_kernels
import faults_of_losses
import faults_of_parts
import faults_of_plans
import faults_of_processes
import faults_of_races
import faults_of_ranking
import faults_of_schedules
import faults_of_scorers
import faults_of_scripts
import faults_of_splits
import faults_of_tables
from faults import Fault

FAULTS = [
    *faults.FAULTS, *faults_answers.FAULTS, *faults_exports.FAULTS, *faults_growth.FAULTS,
    *faults_of_data.DATA_FAULTS, *faults_of_gpus.FAULTS, *faults_of_kernels.FAULTS,
    *faults_of_losses.FAULTS, *faults_of_parts.FAULTS, *faults_of_schedules.FAULTS,
    *faults_of_plans.FAULTS, *faults_of_processes.FAULTS, *faults_of_races.FAULTS,
    *faults_of_ranking.FAULTS, *faults_of_scorers.FAULTS, *faults_of_scripts.FAULTS,
    *faults_of_config.CONFIG_FAULTS, *faults_of_splits.FAULTS, *faults_of_tables.FAULTS,
    *faults_of_features.FAULTS, *faults_of_batches.FAULTS, *faults_of_disk.FAULTS,
    *faults_of_checkpoints.FAULTS, *faults_of_copies.COPY_FAULTS,
]  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
TIERS = ("not slow and not gpu", "slow and not gpu")  # the second where no test of the first fails
NO_TESTS = 5  # exit code of pytest


def copy_of_tree(folder: Path) -> None:
    """Return the files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def is_noticed(fault: Fault, tree: Path) -> bool:
    """Return whether a test fails with the fault; restore the file."""
    file = tree / "kge_torchrec" / fault.file
    right = file.read_text(encoding="utf-8")
    if right.count(fault.right) != 1:
        sys.exit(f"{fault.name}: {fault.file} has {fault.right!r} {right.count(fault.right)} times")
    file.write_text(right.replace(fault.right, fault.wrong), encoding="utf-8")
    try:
        codes = []
        for tier in TIERS:
            done = run_tests(fault, tree, tier)
            codes.append(done.returncode)
            if done.returncode == 1:
                break
    finally:
        file.write_text(right, encoding="utf-8")
    if {*codes} - {0, 1, NO_TESTS} or {*codes} == {NO_TESTS}:
        sys.exit(f"{fault.name}: {fault.tests}: pytest ended with {codes}\n{done.stdout}")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    print(f"    {failed[0][:140] if failed else done.stdout.splitlines()[-1]}", flush=True)
    return done.returncode == 1


def run_tests(fault: Fault, tree: Path, tier: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a fault in one tier, up to the first that fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--show-capture=no", "-p",
               "no:cacheprovider", *words(fault.tests), "-m", tier]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def words(tests: str) -> list[str]:
    """Return the arguments of pytest; the words after -k are one argument."""
    paths, _, chosen = tests.partition(" -k ")
    return paths.split() + (["-k", chosen] if chosen else [])


def table(faults: list[Fault]) -> str:
    """Return the faults as a Markdown table."""
    lines = [f"| {f.name} | `{f.file}` | `{f.tests}` |" for f in faults]
    return "\n".join(["| fault | in | noticed by |", "|---|---|---|", *lines])


def main() -> int:
    """Run the selected faults; return 1 if one went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "words", nargs="*", help="run only faults with one of these words in their name"
    )
    parser.add_argument("--table", action="store_true", help="print the faults as a Markdown table")
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
