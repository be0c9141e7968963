"""Process-wide settings around torch: installed packages, notices, memory, threads, precision.

Importing the package changes none of them.  The command-line programs of this package call
``prepare_process`` first; other programs may call it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from kge_torchrec.errors import KGEError

if TYPE_CHECKING:
    import torch

# Versions released together, by major.minor: torch -> (torchrec, fbgemm).
KNOWN_SETS = {
    "2.14": ("1.9", "1.9"),
    "2.13": ("1.8", "1.8"),
    "2.12": ("1.7", "1.7"),
    "2.11": ("1.6", "1.6"),
}
_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")
_NOISY = (
    "torchrec",
    "fbgemm_gpu",
    "torch.fx._symbolic_trace",
    "torch.distributed.elastic.multiprocessing.redirects",
    "torch.distributed.checkpoint",
)
_HOW = "run `make setup` (CPU) or `make setup VARIANT=gpu`, or see 'Set-up' in the README"


class PackageSetError(KGEError, ImportError):
    """The installed torch, torchrec and fbgemm do not belong together."""


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed, without importing them."""
    versions_of = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions_of[name] = metadata.version(name)
    return versions_of


def _short(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def versions() -> dict[str, str | None]:
    """Return the versions of Python, torch, torchrec and FBGEMM; None for a missing one."""
    names = ("torch", "torchrec", *(installed(_FBGEMM) or _FBGEMM[:1]))
    python = ".".join(map(str, sys.version_info[:3]))
    return {**dict.fromkeys(names), **installed(names), "Python": python}


def has_torchrec() -> bool:
    """Return whether TorchRec or FBGEMM is installed.  The hand-rolled backend needs neither."""
    return bool(installed(("torchrec", *_FBGEMM)))


def check_torchrec(key: str, instead: str) -> None:
    """Raise PackageSetError unless TorchRec and FBGEMM are installed, which a key needs."""
    if not has_torchrec():
        raise PackageSetError(
            f"{key} needs torchrec and fbgemm, which are not installed: set {instead}, which needs "
            f"neither, or {_HOW}."
        )


def check_packages() -> None:
    """Raise PackageSetError unless the packages are a known set, or torch without the others.

    It imports none of them, so it runs before a broken set fails to import.
    """
    there = installed(("torch", "torchrec", *_FBGEMM))
    fbgemm = {name: version for name, version in there.items() if name in _FBGEMM}
    missing = [name for name in ("torch", "torchrec") if name not in there]
    if missing == ["torchrec"] and not fbgemm:
        return
    if not fbgemm:
        missing.append("fbgemm-gpu-cpu (CPU) or fbgemm-gpu (CUDA)")
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise PackageSetError(f"{' and '.join(missing)} {verb} not installed: {_HOW}.")
    if len(fbgemm) > 1:
        raise PackageSetError(
            "fbgemm-gpu and fbgemm-gpu-cpu are both installed and overwrite each other: "
            f"uninstall both and {_HOW}."
        )
    torch, torchrec = there["torch"], there["torchrec"]
    ((fbgemm_name, fbgemm_version),) = fbgemm.items()
    expected = KNOWN_SETS.get(_short(torch))
    if expected is None:
        known = ", ".join(KNOWN_SETS)
        raise PackageSetError(f"torch {torch} is not among the supported ones ({known}): {_HOW}.")
    if (_short(torchrec), _short(fbgemm_version)) != expected:
        raise PackageSetError(
            f"torch {torch} goes with torchrec {expected[0]} and {fbgemm_name} {expected[1]}, but "
            f"torchrec {torchrec} and {fbgemm_name} {fbgemm_version} are installed: {_HOW}."
        )
    # PyPI's wheels of these sets are for CUDA 13; only wheels of torch's own index have a tag.
    built, needed = (
        tag[1] if (tag := re.search(r"\+(cpu|cu\d\d)", version)) else "cu13"
        for version in (torch, fbgemm_version)
    )
    if fbgemm_name == "fbgemm-gpu" and built != needed:
        raise PackageSetError(
            f"torch {torch} is built for {built}, but fbgemm-gpu {fbgemm_version} for {needed}: "
            f"{_HOW}."
        )


def prepare_process() -> None:
    """Silence dependencies and limit spinning, before torch is loaded, for the whole process."""
    silence_dependencies()
    limit_spinning()


@contextmanager
def loading_torch() -> Iterator[None]:
    """Disable garbage collection while the caller imports torch, then flush denormals.

    Garbage collection takes a tenth of the import time and finds nothing.  The imported objects
    are also excluded from later collections.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if "torch" in sys.modules:
            flush_denormals()


def flush_denormals() -> None:
    """Flush denormal numbers (below 1.2e-38) to zero, in this thread and threads started later.

    A matrix product with softmax gradients of widely spread scores took 150 times as long.  Only
    the command line calls this: Python programs may need denormals (hypothesis does).
    """
    import torch

    torch.set_flush_denormal(True)  # returns False if the processor does not support it


def _not_fbgemms(record: logging.LogRecord) -> bool:
    """Filter out the warnings of FBGEMM's import, sent to the root logger (1.6.0 sends 14)."""
    is_theirs = "fbgemm_gpu" in record.pathname.replace("\\", "/").split("/")
    return record.levelno >= logging.ERROR or not is_theirs


def silence_dependencies() -> None:
    """Hide notices below ERROR of torch, torchrec and FBGEMM, for the whole process."""
    _set_levels(dict.fromkeys(_NOISY, logging.ERROR))
    logging.getLogger().addFilter(_not_fbgemms)
    for module in (r"torch(\..*)?", r"torchrec(\..*)?", r"fbgemm_gpu(\..*)?", r"tensordict(\..*)?"):
        warnings.filterwarnings("ignore", module=module)
    # torch 2.13 renames this argument of DDP and attributes the warning to our call.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)


@contextmanager
def quiet_dependencies() -> Iterator[None]:
    """Call ``silence_dependencies`` inside a block only.  Do not wrap user code in it."""
    levels = {name: logging.getLogger(name).level for name in _NOISY}
    root = logging.getLogger()
    is_filtered = _not_fbgemms in root.filters
    # Without a handler, FBGEMM's calls would add one permanently.  lastResort is what logging
    # uses without a handler anyway.
    handler = None if root.handlers else logging.lastResort
    if handler:
        root.addHandler(handler)
    with warnings.catch_warnings():
        silence_dependencies()
        try:
            yield
        finally:
            if not is_filtered:
                root.removeFilter(_not_fbgemms)
            if handler:
                root.removeHandler(handler)
            _set_levels(levels)


def _set_levels(levels: dict[str, int]) -> None:
    """Set the levels of loggers by name, where they differ: each change visits all loggers."""
    for name, level in levels.items():
        if logging.getLogger(name).level != level:
            logging.getLogger(name).setLevel(level)


def keep_large_blocks() -> bool:
    """Make glibc keep freed blocks up to 32 MiB, for the whole process; return whether it does.

    By default it returns the temporaries of a step to the kernel and faults them in again in the
    next step, which takes a third of a CPU training step.  MALLOC_* variables take precedence.
    """
    if not sys.platform.startswith("linux") or any(k.startswith("MALLOC_") for k in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # from malloc.h
    sizes = {mmap_threshold: 32 << 20, trim_threshold: 512 << 20, top_pad: 16 << 20}
    return all([mallopt(option, size) for option, size in sizes.items()])


def limit_spinning() -> None:
    """Make idle OpenMP workers sleep after a short time.

    By default they spin for milliseconds, possibly on a core that other work needs: a step next to
    other work took 20 times longer.  On a host in use they spin for about 50 microseconds, and on
    an idle one five times as long, where sleeping early would make a small step a fifth longer.
    OpenMP reads the setting once, when torch is loaded.  OMP_WAIT_POLICY and GOMP_SPINCOUNT in the
    environment take precedence.
    """
    if "torch" in sys.modules or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return
    in_use = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1 or not hasattr(os, "getloadavg")
    in_use = in_use or os.getloadavg()[0] > (os.cpu_count() or 1) / 2
    os.environ["GOMP_SPINCOUNT"] = "2000" if in_use else "10000"


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_threads(requested: int, local_world_size: int) -> int:
    """Set and return the number of CPU threads of this rank, and call ``keep_large_blocks``.

    0 requests an equal share of the cores among the ranks of this host: with more threads,
    OpenMP's spinning workers compete for cores.
    """
    import torch

    keep_large_blocks()
    threads = requested or max(1, cores() // local_world_size)
    torch.set_num_threads(threads)
    return threads


def free_memory(device: torch.device) -> int:
    """Return the bytes that tensors can still take on a GPU; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    import torch

    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 in float32 products and convolutions on CUDA, for the whole process.

    It uses torch's older settings, which also set the newer ones.  Setting only the newer
    ``fp32_precision`` makes reading the older settings fail, as in Inductor (pytorch issue 166387).
    """
    import torch

    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def rounds_as_it_multiplies() -> bool:
    """Return whether this CPU should round float32 operands to bfloat16 inside matrix products.

    With AMX that is free.  With only AVX512-BF16, products of bfloat16 tensors are twice as fast.
    A CPU without either rounds nothing, which is also correct.
    """
    import torch

    has_tiles, has_dots = (
        getattr(torch.cpu, name, bool)()
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )
    return has_tiles or not has_dots


@contextmanager
def products_in_bf16() -> Iterator[None]:
    """Round operands of float32 matrix products to bfloat16 in the block, on CPUs that can.

    Sums are float32, and tensors keep their dtype.
    """
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Disable TF32 inside the block, and restore the setting afterwards."""
    import torch

    cudnn = torch.backends.cudnn
    with ExitStack() as held:
        try:
            products, convolutions = torch.get_float32_matmul_precision(), cudnn.allow_tf32
        except RuntimeError:  # only the newer settings were set
            for backend in (torch.backends.cuda.matmul, cudnn.conv):  # type: ignore[attr-defined]
                held.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
                backend.fp32_precision = "ieee"
        else:
            held.callback(setattr, cudnn, "allow_tf32", convolutions)
            held.callback(torch.set_float32_matmul_precision, products)
            allow_tf32(False)
        yield


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process in bytes, or 0 if unknown (Windows).

    On Linux it reads VmHWM, because ru_maxrss may include the parent process.
    """
    status = Path("/proc/self/status")
    if status.exists() and (kib := _numbers(status).get("VmHWM:")):
        return kib << 10
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB, except on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def host_memory() -> int:
    """Return the main memory of this machine, or the limit of its container, in bytes."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return physical if text == "max" else min(physical, int(text))


def available_memory() -> int:
    """Return the bytes of main memory that tensors can still take here, without swap."""
    stats = Path("/proc/meminfo")
    if not stats.exists():
        return host_memory()
    free = _numbers(stats)["MemAvailable:"] << 10
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        kept = _numbers(group / "memory.stat")  # pages of files, which the kernel gives up
        files = kept.get("inactive_file", 0) + kept.get("active_file", 0)
        free = min(free, int(text) - int(used.read_text()) + files)
    return max(0, free)


def _numbers(file: Path) -> dict[str, int]:
    """Return the numbers of a file of the kernel, one line each, by name."""
    lines = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {words[0]: int(words[1]) for words in lines if words[1:] and words[1].isdigit()}
