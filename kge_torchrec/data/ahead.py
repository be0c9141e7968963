"""Working on several items at once, for functions that release Python's lock (as pyarrow's do)."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# More threads than this would hold more batches in memory than they save time.
WORKERS = max(1, min(4, os.cpu_count() or 1))


def map_ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """``map`` with a few results computed ahead, in order; memory for a few items at a time."""
    running: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(WORKERS)
    try:
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > WORKERS:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
