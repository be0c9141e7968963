"""Measure times and count operations on a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


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


def profiled(work: Callable[[], object], device: torch.device, steps: int) -> profile:
    """Return torch's profile of some runs, after one warm-up run."""
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    work()
    synchronize(device)
    with profile(activities=activities) as watched:
        for _ in range(steps):
            work()
        synchronize(device)
    return watched


def kernels(watched: profile, device: torch.device, steps: int) -> dict[str, float]:
    """Return ms per step of each kernel, on a CPU of each operation, the longest first."""
    events = watched.key_averages()
    if device.type == "cuda":
        events = [e for e in events if e.device_type != DeviceType.CPU]
        events = [e for e in events if not getattr(e, "is_user_annotation", False)]
        times = {e.key: e.self_device_time_total for e in events}
    else:
        times = {e.key: e.self_cpu_time_total for e in events}
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return {name: microseconds / 1e3 / steps for name, microseconds in ordered}


def counted(work: Callable[[], object], device: torch.device, steps: int) -> dict[str, float]:
    """Return the counts of torch's profiler per step; on a CPU only operations."""
    watched = profiled(work, device, steps)
    events = watched.key_averages()

    def count(*words: str) -> float:
        return sum(e.count for e in events if any(word in e.key for word in words)) / steps

    if device.type != "cuda":
        return {"operations": count("aten::")}
    return {
        "kernel launches": count("LaunchKernel"),
        "synchronisations": count("cudaStreamSynchronize", "cudaDeviceSynchronize",
                                  "cudaEventSynchronize"),
        "copies from the host": count("Memcpy HtoD"),
        "copies to the host": count("Memcpy DtoH"),
        "ms of the GPU": sum(kernels(watched, device, steps).values()),
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
