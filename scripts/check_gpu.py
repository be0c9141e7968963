"""One command that checks a GPU: right results, speed, and what a step is made of.

    python scripts/check_gpu.py                    # all parts, under 10 minutes on one card
    python scripts/check_gpu.py --list             # their names and time limits
    python scripts/check_gpu.py bags speed --json found.json

Each part runs in a process of its own, which is ended when its time is over; a line is PASS, FAIL,
NOTE (a figure of which nothing is asked) or SKIP.  Exit code 0 if no line failed, 1 if one did, 2
without a GPU.  docs/how-to/run-on-a-gpu.md says what the lines mean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = 2
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the package, and the oracles of its tests

from gpu_checks import PARTS  # noqa: E402


def main() -> int:
    options = _parser().parse_args()
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:<14} {part.seconds:>4} s  {part.what}")
        return 0
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        _parser().error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.worker:
        return _work(options.parts[0], options.device, Path(options.worker))
    if options.device == "cuda" and not _has_gpu():
        return NO_GPU
    return _run(options.parts or list(PARTS), options)


def _run(names: list[str], options: argparse.Namespace) -> int:
    """Runs the parts one after another; returns the exit code."""
    started, found = time.time(), []
    for name in names:
        found.append(_run_part(name, options.device, options.patience))
        if options.json:  # after each, so that whoever is stopped half-way has the first half
            _write(Path(options.json), started, options.device, found)
    counts = _counts(found)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"{said} in {time.time() - started:.0f} s", flush=True)
    return 1 if counts["FAIL"] else 0


def _counts(found: list[dict]) -> dict[str, int]:
    verdicts = [line["verdict"] for part in found for line in part["lines"]]
    return {verdict: verdicts.count(verdict) for verdict in ("PASS", "FAIL", "NOTE", "SKIP")}


def _write(path: Path, started: float, device: str, found: list[dict]) -> None:
    from kge_torchrec.environment import versions

    content = {
        "what": "scripts/check_gpu.py",
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime(started)),
        "commit": _commit(),
        "device": device,
        "packages": versions(),
        "seconds": time.time() - started,
        "counts": _counts(found),
        "parts": found,
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _run_part(name: str, device: str, patience: float = 1.0) -> dict:
    """Runs one in a process of its own, which ends with its time."""
    limit, started = patience * PARTS[name].seconds, time.time()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, __file__, name, "--device", device, "--worker", folder]
        errors = Path(folder) / "stderr"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(arguments, stderr=stderr, start_new_session=True)
            try:
                process.wait(limit)
                problem = f"ended with code {process.returncode}" if process.returncode else ""
            except subprocess.TimeoutExpired:
                problem = f"not done after {limit:g} s"
            finally:
                _end(process)
        kept = Path(folder) / "lines"
        text = kept.read_text(encoding="utf-8") if kept.is_file() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        if problem:
            lines.append(_line("FAIL", problem))
        elif not lines:
            lines.append(_line("FAIL", "said nothing"))
        if lines[-1]["name"] == "the part":
            print(f"FAIL  {name:<14} {lines[-1]['name']}: {lines[-1]['said']}", flush=True)
        if any(line["verdict"] == "FAIL" for line in lines):
            said = errors.read_text(encoding="utf-8", errors="replace")
            print(said[-4000:], file=sys.stderr, flush=True)
    return {"part": name, "seconds": time.time() - started, "limit": limit, "lines": lines}


def _line(verdict: str, said: str) -> dict:
    return {"verdict": verdict, "name": "the part", "said": said, "value": None, "unit": ""}


def _end(process: subprocess.Popen) -> None:
    """Ends the part and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _work(name: str, device: str, folder: Path) -> int:
    """In the process of a part."""
    from kge_torchrec.environment import prepare_process

    prepare_process()  # as the command line does, before torch is loaded

    from gpu_checks.report import Report

    with (folder / "lines").open("w", encoding="utf-8") as lines:
        PARTS[name].run(Report(name, device, folder, lines))
    return 0


def _has_gpu() -> bool:
    import torch

    if torch.cuda.is_available():
        return True
    print(
        f"torch {torch.__version__} finds no CUDA device: nothing was checked. On a machine with "
        "one, `make setup VARIANT=gpu` installs the CUDA packages; "
        "docs/how-to/run-on-a-gpu.md has the rest.",
        file=sys.stderr,
    )
    return False


def _commit() -> str:
    """Of the checkout; empty outside of one."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all of them")
    parser.add_argument("--list", action="store_true", help="names, time limits, what they check")
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="TIMES", help="multiplies the time limits"
    )
    parser.add_argument("--json", metavar="FILE", help="writes what was found")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu runs the parts in small sizes, to check the parts themselves",
    )  # fmt: skip
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
