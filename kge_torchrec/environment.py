"""The process around torch: the package set, its noise, memory, threads.

Importing the package changes nothing of it.  The programs of this package, whose process is their
own, call ``prepare_process`` before anything else; a program that uses the package may.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import logging
import os
import re
import runpy
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from kge_torchrec.errors import KGEError

# Versions released together: torch's first two numbers -> (torchrec, fbgemm) first two numbers.
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
_CUDA = "13"  # of PyPI's fbgemm-gpu in all these sets: its libraries link to libcudart.so.13
_HOW = "run `make setup` (CPU) or `make setup VARIANT=gpu`, or see 'Set-up' in the README"


class PackageSetError(KGEError, ImportError):
    """The installed torch, torchrec and fbgemm do not belong together."""


def installed(names: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are there.  Imports none of them."""
    found = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _short(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def versions() -> dict[str, str | None]:
    """Of what results depend on, by name; None for what is not installed.  Imports nothing."""
    names = ("torch", "torchrec", *(installed(_FBGEMM) or _FBGEMM[:1]))
    python = ".".join(map(str, sys.version_info[:3]))
    return {**dict.fromkeys(names), **installed(names), "Python": python}


def has_torchrec() -> bool:
    """Whether TorchRec or any FBGEMM is installed; without them the hand-rolled engine remains."""
    return bool(installed(("torchrec", *_FBGEMM)))


def check_torchrec() -> None:
    """Raises PackageSetError where TorchRec is asked for and not there."""
    if not has_torchrec():
        raise PackageSetError(
            "entities.engine torchrec needs torchrec and fbgemm, which are not installed: set "
            f"entities.engine handrolled, which needs neither, or {_HOW}."
        )


def check_packages() -> None:
    """Raises PackageSetError, in one sentence, unless the installed packages fit together.

    That is one known set, or torch without TorchRec and FBGEMM.  Imports none of them, so that it
    can speak before a broken set fails to import.
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
    if fbgemm_name == "fbgemm-gpu":
        _check_cuda(torch, fbgemm_version)


def _check_cuda(torch: str, fbgemm: str) -> None:
    """Raises PackageSetError where the two were built for different CUDA: nothing would load."""
    tag = re.search(r"\+cu(\d+)\d$", fbgemm)  # of wheels from torch's own index
    needed, found = tag[1] if tag else _CUDA, _torch_cuda()
    if found is None or found.split(".")[0] != needed:
        built = f"CUDA {found}" if found else "CPUs only"
        raise PackageSetError(
            f"torch {torch} is built for {built}, but fbgemm-gpu {fbgemm} for CUDA {needed}: "
            f"{_HOW}."
        )


def _torch_cuda() -> str | None:
    """torch.version.cuda without importing torch: "13.0", or None of a build for CPUs."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        raise PackageSetError(f"torch is installed, but its files are not where it says: {_HOW}.")
    return runpy.run_path(str(Path(package.origin).with_name("version.py")))["cuda"]


def prepare_process() -> None:
    """Makes this process a program of ours: quiet, and without spinning workers.

    For the whole process, and before torch is loaded.
    """
    silence_dependencies()
    limit_spinning()


@contextmanager
def loading_torch() -> Iterator[None]:
    """Inside, Python looks for no garbage, nor later among what was made: modules leave none.

    The looking is a tenth of the time that torch takes to load.  Where torch is loaded already this
    does nothing.  Torch then flushes denormal numbers, in threads that it starts later as well.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        with announced("loading torch"):
            yield
    finally:
        gc.freeze()
        gc.enable()
        if "torch" in sys.modules:
            flush_denormals()


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Shows ``what`` on the first rank's terminal while the block runs, after one second."""
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield
        return
    shown = threading.Event()

    def show() -> None:
        shown.set()
        print(f"{what} ...", end="", file=sys.stderr, flush=True)

    timer = threading.Timer(1.0, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if shown.is_set():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def flush_denormals() -> None:
    """Makes numbers below 1.2e-38 zero, in this thread and those that it starts from now on.

    A processor takes such numbers one by one: a product of matrices with softmax's slopes of scores
    that are far apart was seen to take 150 times as long.  Only in programs of ours: whoever uses
    the package from Python may need such numbers (hypothesis does).
    """
    import torch

    torch.set_flush_denormal(True)  # False where the processor cannot


def _not_fbgemms(record: logging.LogRecord) -> bool:
    """False of notices of fbgemm, which speaks through the root logger when it is imported.

    Of 1.6.0 these are 14 warnings, one a library, that it does not know its torch; we do.
    """
    is_theirs = "fbgemm_gpu" in record.pathname.replace("\\", "/").split("/")
    return record.levelno >= logging.ERROR or not is_theirs


def silence_dependencies() -> None:
    """Drops the notices that torch, torchrec and fbgemm print at import and while sharding.

    For the whole process.  Only theirs: our own warnings and all of level ERROR still show.
    """
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger().addFilter(_not_fbgemms)
    for module in (r"torch(\..*)?", r"torchrec(\..*)?", r"fbgemm_gpu(\..*)?", r"tensordict(\..*)?"):
        warnings.filterwarnings("ignore", module=module)
    # said at our own call of DDP, whose argument torch 2.13 would like to be called otherwise
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)


@contextmanager
def quiet_dependencies() -> Iterator[None]:
    """The same inside a block; around what is known to be noisy, not around a user's code."""
    levels = {name: logging.getLogger(name).level for name in _NOISY}
    root = logging.getLogger()
    is_filtered = _not_fbgemms in root.filters
    # What logging would use anyhow; without one, fbgemm's calls would add one for good.
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
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def keep_large_blocks() -> bool:
    """Tells glibc to keep freed blocks up to 32 MiB, for the whole process; True if it took it.

    By default it returns a step's temporaries to the kernel and faults them in again at the next
    step, which costs a CPU training step a third of its time.  Settings made through the
    MALLOC_* environment variables win.
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


def limit_spinning() -> bool:
    """Makes idle OpenMP workers sleep after a while; True if it could be set.

    By default they spin for milliseconds on the core that another thread or process needs: a step
    next to other work was seen to take 20 times longer.  Waking them costs as well: on a quiet
    machine a small step takes a fifth longer where they sleep after some 50 microseconds (as here
    on a host that is in use) instead of five times that (as here on one that is not).  OpenMP reads
    this once, when torch is loaded.  OMP_WAIT_POLICY or GOMP_SPINCOUNT in the environment win.
    """
    if "torch" in sys.modules or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return False
    os.environ["GOMP_SPINCOUNT"] = "2000" if _is_in_use() else "10000"
    return True


def _is_in_use() -> bool:
    """Whether other ranks, or something else, may want this host's cores."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1 or not hasattr(os, "getloadavg"):
        return True
    return os.getloadavg()[0] > (os.cpu_count() or 1) / 2


def set_threads(requested: int, local_world_size: int) -> int:
    """CPU threads of this rank: as requested, or an equal share of the cores; returns the number.

    More threads than cores make OpenMP's spinning workers fight.
    """
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = requested or max(1, (cores or 1) // local_world_size)
    torch.set_num_threads(threads)
    return threads


def allow_tf32(allowed: bool) -> None:
    """Whether CUDA may round the factors of float32 products and convolutions to 10 bits.

    For the whole process.  By torch's older settings: its newer ``fp32_precision`` alone makes the
    older ones raise where they are read, as Inductor does (pytorch issue 166387); these set both.
    """
    import torch

    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def rounds_as_it_multiplies() -> bool:
    """Whether float32 factors are best left to a product in bfloat16 of this CPU to round.

    With AMX that costs nothing.  A CPU that has AVX512-BF16 alone multiplies factors of type
    bfloat16 twice as fast as it rounds them again for every block; one without either rounds
    nothing, which is right as well.
    """
    import torch

    has_tiles, has_dots = (
        getattr(torch.cpu, name, bool)()
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )
    return has_tiles or not has_dots


@contextmanager
def products_in_bf16() -> Iterator[None]:
    """Inside, a CPU that multiplies bfloat16 rounds the factors of float32 products to it.

    It sums in float32 and converts where it multiplies, so that no tensor changes its type; other
    CPUs go on as before.
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
    """Whole float32 products inside, whatever is allowed outside; that is put back."""
    import torch

    try:
        products = torch.get_float32_matmul_precision()
        convolutions = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # somebody set the newer ones alone
        with _newer_settings("ieee"):
            yield
        return
    allow_tf32(False)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def _newer_settings(precision: str) -> Iterator[None]:
    import torch

    # torch puts an object with these attributes in the module's place, which mypy cannot see
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    backends = torch.backends.cuda.matmul, convolutions
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = precision
    try:
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


def peak_resident_bytes() -> int:
    """The largest resident size of this process so far; 0 where the system does not say (Windows).

    Linux's ru_maxrss may be that of the process which started this one; VmHWM is our own.
    """
    status = Path("/proc/self/status")
    if status.exists():
        kib = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8"), re.MULTILINE)
        if kib:
            return int(kib[1]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB but on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def host_memory() -> int:
    """Bytes of main memory of this machine, or of the container it runs in."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return physical if text == "max" else min(physical, int(text))
