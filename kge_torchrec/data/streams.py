"""Opening a data file, compressed or not, as one stream of bytes."""

import io
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from kge_torchrec.data.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

OnBytes = Callable[[int], object]


def bare_name(path: Path) -> str:
    """The file name without a compression suffix: ``train.tsv.gz`` -> ``train.tsv``."""
    return path.stem if path.suffix.lower() in COMPRESSIONS else path.name


class CountingFile(io.RawIOBase):
    """A file that reports how many of its bytes on disk were read (for a progress bar)."""

    def __init__(self, path: Path, on_bytes: OnBytes | None = None):
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 closed by close()
        self._on_bytes = on_bytes or (lambda count: None)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._file.readinto(buffer)
        self._on_bytes(count)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def open_bytes(path: Path, on_bytes: OnBytes | None = None) -> pa.NativeFile:
    """The decompressed bytes of ``path``; ``on_bytes(n)`` hears of every n bytes read from disk."""
    source = pa.PythonFile(CountingFile(path, on_bytes), mode="r")
    compression = COMPRESSIONS.get(path.suffix.lower())
    return pa.CompressedInputStream(source, compression) if compression else source


def lines(path: Path):
    """Numbered lines ``(1, b"...")`` of a file, without line ends or byte order mark.

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
    return DataError(f"{path}: cannot be read or decompressed: {error}")
