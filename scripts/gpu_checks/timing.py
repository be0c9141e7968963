"""Measure times and count operations on a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Return the mean seconds of ``repeats`` runs, after two warm-up runs."""
    for _ in range(2):
        work()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def step_seconds(work: Callable[[], object], device: torch.device, steps: int) -> tuple:
    """Return seconds per step until the device is done, and until the host is."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        work()
    issued = time.perf_counter() - start
    synchronize(device)
    return (time.perf_counter() - start) / steps, issued / steps


def counted(work: Callable[[], object], device: torch.device, steps: int) -> dict[str, float]:
    """Return the counts of torch's profiler per step; on a CPU only operations."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    work()
    synchronize(device)
    with profile(activities=activities) as watched:
        for _ in range(steps):
            work()
    events = watched.key_averages()

    def count(*words: str) -> float:
        return sum(e.count for e in events if any(word in e.key for word in words)) / steps

    if not on_cuda:
        return {"operations": count("aten::")}
    on_device = [e for e in events if e.device_type != DeviceType.CPU]
    on_device = [e for e in on_device if not getattr(e, "is_user_annotation", False)]
    return {
        "kernel launches": count("LaunchKernel"),
        "synchronisations": count("cudaStreamSynchronize", "cudaDeviceSynchronize",
                                  "cudaEventSynchronize"),
        "copies from the host": count("Memcpy HtoD"),
        "copies to the host": count("Memcpy DtoH"),
        "ms of the GPU": sum(e.self_device_time_total for e in on_device) / 1e3 / steps,
    }  # fmt: skip


class Waited:
    """An iterator that measures how long its user waits for it."""

    def __init__(self, items: Iterator):
        self._items, self.seconds = items, 0.0

    def __iter__(self) -> Waited:
        return self

    def __next__(self):
        start = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.seconds += time.perf_counter() - start
