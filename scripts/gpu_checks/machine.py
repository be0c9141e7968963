"""Check that the packages match the card, and the card its data sheet."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from gpu_checks.report import Report
from gpu_checks.timing import seconds, synchronize
from kge_torchrec.planning.devices import PRESETS, Device

ROOT = Path(__file__).resolve().parents[2]
OLDEST_CAPABILITY = (8, 0)  # compute capabilities in FBGEMM's wheels
CUDA_OF_WHEELS = "13"


def machine(report: Report) -> None:
    """Check package set, CUDA and capability, then bandwidths, products and launches."""
    with report.check("package set"):
        from kge_torchrec.environment import check_packages, versions

        check_packages()
        said = ", ".join(f"{name} {version}" for name, version in versions().items())
        report.passes("package set", True, said)
    preset = None
    if report.device.type == "cuda":
        preset = _card(report)
    _speeds(report, preset)


def _card(report: Report) -> Device | None:
    """Report the card; return its preset in the planner."""
    name = torch.cuda.get_device_name(report.device)
    built = torch.version.cuda or "none"
    good = built.split(".")[0] == CUDA_OF_WHEELS
    report.passes("CUDA that torch is built for", good, f"{built} (FBGEMM's wheels need 13)")
    capability = torch.cuda.get_device_capability(report.device)
    report.passes(
        "compute capability",
        capability >= OLDEST_CAPABILITY,
        f"{name}: {capability[0]}.{capability[1]} (8.0 or more)",
    )
    free, total = torch.cuda.mem_get_info(report.device)
    report.note("memory", total / 2**30, "GiB")
    report.note("free memory", free / 2**30, "GiB")
    preset = preset_of(report.device)
    if preset is not None:
        off = abs(total / preset.memory - 1)
        report.at_most(f"memory is what the planner has for {preset.name}, off by", off, 0.02)
    return preset


def preset_of(device: torch.device) -> Device | None:
    """Return the planner's preset for the card, or None."""
    if device.type != "cuda":
        return None
    name, (_, total) = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)
    known = [p for p in PRESETS.values() if p.is_cuda and p.name.split("-")[0] in name]
    return min(known, key=lambda preset: abs(preset.memory - total), default=None)


def _speeds(report: Report, preset: Device | None) -> None:
    """Require half of the data sheet's speeds; the planner assumes 0.7 of them."""
    device = report.device
    numbers = 1 << (18 if report.small else 28)
    with report.check("copy"):
        one, other = torch.zeros(2, numbers, device=device)
        rate = 8 * numbers / seconds(lambda: other.copy_(one), device) / 1e9
        report.speed("copy in memory", rate, preset.memory_bandwidth / 2e9 if preset else 0, "GB/s")
    with report.check("product"):
        size = 128 if report.small else 8192
        left, right = torch.rand(2, size, size, device=device)
        rate = 2 * size**3 / seconds(lambda: left @ right, device) / 1e12
        report.speed("float32 product", rate, preset.flops / 2e12 if preset else 0, "TFLOP/s")
    with report.check("gather"):
        rows = (
            10_000 if report.small else min(20_000_000, preset.memory // 1600 if preset else 10**6)
        )
        table = torch.zeros(rows, 100, device=device)
        ids = torch.randint(rows, (131_072,), device=device)
        rate = 2 * 400 * len(ids) / seconds(lambda: table.index_select(0, ids), device) / 1e9
        report.note("gather of 131k rows of dim 100, read and written", rate, "GB/s")
    with report.check("launch"):
        small = torch.zeros(8, device=device)
        report.note("one tiny kernel after another", 1e6 * seconds(small.neg, device, 1000), "us")
    if device.type == "cuda":
        pinned = torch.empty(1 << 26).pin_memory()
        moved = torch.empty(1 << 26, device=device)
        rate = 4 * (1 << 26) / seconds(lambda: moved.copy_(pinned, non_blocking=True), device) / 1e9
        report.note("copy from pinned main memory", rate, "GB/s")
    synchronize(device)


def gpu_tests(report: Report) -> None:
    """Run the tests that are marked gpu."""
    if report.device.type != "cuda":
        report.skip("pytest -m gpu", "needs a GPU")
        return
    if not (find_spec("pytest") and find_spec("hypothesis")):
        report.skip("pytest -m gpu", "pytest or hypothesis is not installed")
        return
    files = [str(f) for f in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in f.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not slow"]
    command += ["-p", "no:cacheprovider", "--durations", "5"]
    if find_spec("xdist"):  # Triton compiles most of the time, on a CPU
        command += ["-n", "8", "--dist", "worksteal"]
    done = subprocess.run(command + files, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-4000:], file=sys.stderr)
    last = next(
        (x for x in reversed(done.stdout.splitlines()) if "passed" in x or "failed" in x), ""
    )
    passed = re.search(r"(\d+) passed", last)
    good = done.returncode == 0 and passed is not None
    report.passes("pytest -m gpu", good, last.strip("= ") or f"exit code {done.returncode}")
