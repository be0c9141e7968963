"""Atomic writes of files and folders, safe against crashes at any time.

Data is written under a hidden name, synced to disk, and then renamed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


def partial_of(path: Path) -> Path:
    """Return a new hidden path under which a file or folder is written, another in each process."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, "the root folder; name a file in it", str(path))
    return path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:8]}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden path, whose file replaces ``path`` when the block ends without an error.

    For a symbolic link, its target is replaced.
    """
    check_place(path)
    path = path.resolve()
    partial = partial_of(path)
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write or replace a file atomically."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write or replace a JSON file atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def finite(value: Any) -> Any:
    """Replace NaN and infinity by None, because JSON has neither."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_place(path: Path) -> None:
    """Raise an OSError with the name if no file can be written at a path."""
    folder = path.resolve().parent
    if not folder.is_dir():
        number = errno.ENOTDIR if folder.exists() else errno.ENOENT
        raise OSError(number, os.strerror(number), str(path.parent))
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


_WORDS = {
    errno.ENOENT: "no such file or folder",
    errno.EEXIST: "a file of this name exists, and a folder is to be made; choose another name",
    errno.ENOTDIR: "this is, or lies in, a file, and a folder is needed",
    errno.EISDIR: "this is a folder, and a file is needed",
    errno.EACCES: "permission denied",
    errno.ENOSPC: "no space is left on the disk",
}


def in_words(error: OSError) -> str:
    """Return the file of an OSError and what is wrong with it, as a clause."""
    what = _WORDS.get(error.errno or 0, error.strerror or str(error))
    return what if error.filename is None else f"{error.filename}: {what}"


def put_in_place(made: Path, target: Path, replace: bool = True) -> None:
    """Rename a folder to ``target``.

    An existing ``target`` is first renamed, not removed, so that the name is missing only for a
    moment. A folder that another process renames to ``target`` in this moment is replaced as well.
    Unless it may ``replace`` one, an existing folder raises FileExistsError.
    """
    old = made.with_name(f"{made.name}.old")
    while True:
        if old.exists():  # left by another process, or by one that was killed in this function
            shutil.rmtree(old)
        if replace:
            with suppress(FileNotFoundError):
                target.rename(old)
        try:
            made.rename(target)
            break
        except OSError as error:
            is_taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
            if is_taken and not replace:
                raise FileExistsError(errno.EEXIST, _WORDS[errno.EEXIST], str(target)) from error
            if not is_taken:
                if old.exists():  # restore the old target
                    old.rename(target)
                raise
    sync(target.parent)
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def crc32_of(path: Path) -> int:
    """Return the checksum of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def lock(file: IO[Any] | int, wait: bool = False) -> bool:
    """Lock an open file or folder against other processes, until it is closed or this one ends.

    Return False if another process has the lock and it is not to ``wait`` for it. On Windows
    nothing is locked; a file system without locks raises OSError.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def free_space(folder: Path) -> str:
    """Return the free space on the disk of a folder (which need not exist), such as "12.0 MiB"."""
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB"
