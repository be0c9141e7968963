"""Working on several items at once, for functions that release Python's lock (as pyarrow's do)."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# More threads than this would hold more batches in memory than they save time.
WORKERS = max(1, min(4, os.cpu_count() or 1))
# For a GPU, which trains a batch in the time that several cores take to make one.
BATCH_WORKERS = 8


def map_prefetched(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """``map`` with a few results computed ahead, in order; memory for a few items at a time."""
    with ThreadPoolExecutor(WORKERS) as pool:
        yield from _in_order(pool, WORKERS, function, items)


def prefetched(build: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """The same for batches, beside a GPU: at most 8 workers, which share torch's CPU threads."""
    import torch  # not at the head: preparing triples does without it

    workers = max(1, min(BATCH_WORKERS, torch.get_num_threads()))
    with _pool_of_shares(workers, torch.get_num_threads()) as pool:
        yield from _in_order(pool, workers, build, items)


def _in_order(
    pool: ThreadPoolExecutor,
    workers: int,
    function: Callable[[Item], Result],
    items: Iterable[Item],
) -> Iterator[Result]:
    running: deque[Future[Result]] = deque()
    try:
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _pool_of_shares(workers: int, threads: int) -> Iterator[ThreadPoolExecutor]:
    """Workers with equal shares of the CPU threads, that of the calling thread being left alone.

    Otherwise each would start as many as there are cores.  ``set_num_threads`` holds for the thread
    that calls it, but for threads that start later and for MKL too, hence the order.
    """
    import torch

    started = threading.Barrier(workers + 1)

    def take_share() -> None:
        torch.get_num_threads()  # a thread takes up the number of all where it first needs one
        torch.set_num_threads(max(1, threads // workers))
        started.wait()

    with ThreadPoolExecutor(workers, initializer=take_share) as pool:
        try:
            for _ in range(workers):
                pool.submit(int)  # starts one, as the others wait for the last
            started.wait()
        except BaseException:
            started.abort()
            raise
        finally:
            torch.set_num_threads(threads)
        yield pool
