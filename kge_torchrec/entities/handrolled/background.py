"""Work in a thread while the next batch is loaded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """At most one piece of work at a time; its exception surfaces at the next ``join``."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="table-step")
        self._work: Future | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Runs ``work`` in the thread, once the work before it is done (and raises its error)."""
        self.join()
        self._work = self._threads.submit(work)

    def join(self) -> None:
        """Waits for the work under way; raises what it raised."""
        work, self._work = self._work, None
        if work is not None:
            work.result()
