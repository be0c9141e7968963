"""Data files as streams of bytes, compressed or not; work on several blocks."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from kge_torchrec.errors import DataError
from kge_torchrec.files import in_words

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Item = TypeVar("Item")
Result = TypeVar("Result")


def bare_name(path: Path) -> str:
    """Return the file name without a compression suffix: ``train.tsv.gz`` -> ``train.tsv``."""
    return path.stem if path.suffix.lower() in COMPRESSIONS else path.name


def suffix_of(path: Path) -> str:
    """Return the suffix of the format: ``TRAIN.TSV.GZ`` -> ``.tsv``."""
    return Path(bare_name(path)).suffix.lower()


def open_bytes(path: Path) -> Any:
    """Open the decompressed bytes of a file."""
    source = open(path, "rb", buffering=0)  # noqa: SIM115 - closes with the stream
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return source
    return pa.CompressedInputStream(pa.PythonFile(source, mode="r"), compression)


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines ``(1, b"...")`` of a file, without line ends or byte order mark.

    Slow (a Python object per line): for looking at the first line or for naming a faulty one.
    """
    try:
        with io.BufferedReader(open_bytes(path), 1 << 20) as stream:
            for number, line in enumerate(stream, 1):
                if number == 1:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                yield number, line.removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for a file that cannot be opened, or has other bytes than its name says."""
    if error.errno is not None and error.filename is not None:
        return DataError(in_words(error))
    return DataError(f"{path}: cannot be read or decompressed: {error}")


# More threads would hold more blocks in memory than they save time.
MOST_WORKERS = 4


def map_prefetched(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield ``map(function, items)``, a few results ahead, with memory for a few items at a time.

    The function should release Python's lock, as pyarrow's do.
    """
    workers = min(MOST_WORKERS, pa.cpu_count())
    with ThreadPoolExecutor(workers) as pool:
        yield from in_order(pool, workers, function, items)


def in_order(
    pool: ThreadPoolExecutor,
    workers: int,
    function: Callable[[Item], Result],
    items: Iterable[Item],
) -> Iterator[Result]:
    """Yield the results in order, computed ahead by the workers of a pool."""
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
