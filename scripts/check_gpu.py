"""Check results, speed and memory of this package on a GPU.

    python scripts/check_gpu.py                    # all parts, under 10 minutes on one card
    python scripts/check_gpu.py --list             # their names and time limits
    python scripts/check_gpu.py bags speed --json check.json
    python scripts/check_gpu.py --write-oracle oracle.npz   # on a CPU, before a card is at hand
    python scripts/check_gpu.py --oracle oracle.npz         # does not wait for its CPU then

This process imports the packages once. It forks a process per part and kills it at its time limit.
A line is PASS, FAIL, NOTE (a figure without a limit) or SKIP. The exit code is 0 if no line failed,
1 if one did, and 2 without a GPU. docs/how-to/run-on-a-gpu.md explains the lines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = 2
CPU_PATIENCE = 4.0  # the time limits are for a GPU
_FORK = multiprocessing.get_context("fork")
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
    _prepare()
    if options.device == "cuda" and not options.write_oracle and not _has_gpu():
        return NO_GPU
    seconds = _import_parts()
    if options.write_oracle:
        return _write_oracle(Path(options.write_oracle))
    try:
        _oracle(options)
    except ValueError as error:
        _parser().error(f"--oracle: {error}")
    if options.worker:
        _work(options.parts[0], options, Path(options.worker))
    print(f"NOTE  {'import':<14} packages and parts, once: {seconds:.1f} s", flush=True)
    return _run(options.parts or list(PARTS), options)


def _prepare() -> None:
    """Set what must be set before torch is loaded.

    A process forked after CUDA has started cannot use it. FBGEMM calls ``torch.cuda.is_available``
    at its import, which starts CUDA unless the driver's management library (NVML) may answer.
    """
    from kge_torchrec.environment import prepare_process

    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # no threads before the forks
    prepare_process()


def _import_parts() -> float:
    """Import the parts and their packages; return the seconds."""
    started = time.perf_counter()
    for part in PARTS.values():
        import_module(part.module)
    return time.perf_counter() - started


def _write_oracle(path: Path) -> int:
    """Compute what parts compare with, as they do on a GPU, and write it."""
    from gpu_checks import oracle, ranking, training

    with tempfile.TemporaryDirectory() as folder:
        computations = training.computations(Path(folder)) | ranking.computations()
        oracle.write_oracle(path, computations)
    print(f"{path}: {len(computations)} results, {path.stat().st_size / 1e3:,.0f} kB", flush=True)
    return 0


def _oracle(options: argparse.Namespace):
    from gpu_checks.oracle import Oracle

    return Oracle(options.oracle and Path(options.oracle))


def _run(names: list[str], options: argparse.Namespace) -> int:
    """Run the parts one after another; return the exit code."""
    started, parts = time.time(), []
    for name in names:
        parts.append(_run_part(name, options))
        if options.json:  # after each part, so that an interrupted check keeps its results
            _write(Path(options.json), started, options.device, parts)
    counts = _counts(parts)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"{said} in {time.time() - started:.0f} s", flush=True)
    return 1 if counts["FAIL"] else 0


def _counts(parts: list[dict]) -> dict[str, int]:
    verdicts = [line["verdict"] for part in parts for line in part["lines"]]
    return {verdict: verdicts.count(verdict) for verdict in ("PASS", "FAIL", "NOTE", "SKIP")}


def _write(path: Path, started: float, device: str, parts: list[dict]) -> None:
    from kge_torchrec.environment import versions

    content = {
        "what": "scripts/check_gpu.py",
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime(started)),
        "commit": _commit(),
        "device": device,
        "packages": versions(),
        "seconds": time.time() - started,
        "counts": _counts(parts),
        "parts": parts,
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _run_part(name: str, options: argparse.Namespace) -> dict:
    """Run a part in a forked process, which is killed at its time limit."""
    patience = options.patience or (1.0 if options.device == "cuda" else CPU_PATIENCE)
    limit, started = patience * PARTS[name].seconds, time.time()
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "stderr"
        process = _FORK.Process(target=_work, args=(name, options, Path(folder)))
        process.start()
        try:
            process.join(limit)
            problem = f"ended with code {process.exitcode}" if process.exitcode else ""
            if process.exitcode is None:
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


def _end(process: multiprocessing.Process) -> None:
    """Kill the process of a part and all of its children."""
    process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _work(name: str, options: argparse.Namespace, folder: Path) -> NoReturn:
    """Run a part in this process, and end it once its lines are complete."""
    import torch

    with contextlib.suppress(PermissionError):  # a worker leads a session already
        os.setsid()
    with (folder / "stderr").open("ab") as stderr:
        os.dup2(stderr.fileno(), 2)
    if torch.cuda._is_in_bad_fork():  # an import has started CUDA: start over, without a fork
        command = [sys.executable, __file__, name, "--device", options.device]
        for option in ("oracle", "trace"):
            value = getattr(options, option)
            command += [f"--{option}", value] if value else []
        os.execv(sys.executable, [*command, "--worker", str(folder)])

    from gpu_checks.report import Report

    with (folder / "lines").open("w", encoding="utf-8") as lines:
        traces = Path(options.trace) if options.trace else None
        PARTS[name].run(Report(name, options.device, folder, lines, _oracle(options), traces))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of NCCL, of a profiler or of a compiler


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
    """Return the commit of the checkout, or an empty string outside of one."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all parts")
    parser.add_argument("--list", action="store_true", help="list the parts with their time limits")
    parser.add_argument(
        "--patience", type=float, metavar="TIMES",
        help=f"factor for the time limits (default: 1, on a CPU {CPU_PATIENCE:g})",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="file for the results")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu runs the parts in small sizes, to check the parts themselves",
    )  # fmt: skip
    parser.add_argument("--oracle", metavar="FILE", help="results of a CPU to compare with")
    parser.add_argument(
        "--write-oracle", metavar="FILE", help="write these results, on any machine, and end"
    )
    parser.add_argument(
        "--trace", metavar="FOLDER", help="folder for a kernel table and a trace of a step"
    )
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
