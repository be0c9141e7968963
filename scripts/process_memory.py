"""Memory of this process, and of all processes that a process has started, on Linux."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def children() -> dict[int, list[int]]:
    """Return the ids of the processes that each process has started."""
    result: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            result.setdefault(parent, []).append(int(stat.parent.name))
    return result


def tree(root: int) -> list[int]:
    """Return the ids of a process and of all that it started."""
    started, result = children(), [root]
    for process in result:
        result += started.get(process, [])
    return result


def tree_bytes(root: int) -> int:
    """Return the resident bytes of a process and of all that it started; shared ones count once."""
    return 1024 * sum(numbers(process, "smaps_rollup").get("Pss", 0) for process in tree(root))


def numbers(process: int, file: str) -> dict[str, int]:
    """Return the numbers of a file in /proc of a process; none if the process has ended."""
    result = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/{file}").read_text().splitlines():
            name, _, value = line.partition(":")
            if value.split()[:1] and value.split()[0].isdigit():
                result[name] = int(value.split()[0])
    return result
