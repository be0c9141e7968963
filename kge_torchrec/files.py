"""Files and folders that are there whole or not at all, whenever a program ends.

What is written gets a hidden name first, is brought to the disk, and then takes its place by a
rename.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any


def partial_of(path: Path) -> Path:
    """Return where a file or folder is written until it is whole.

    Raises IsADirectoryError for the root folder, beside which nothing can lie.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, "the root folder; name a file in it", str(path))
    return path.with_name(f".{path.name}.partial")


def write_text(path: Path, text: str) -> None:
    """Writes or replaces a file; a symbolic link stays, and the file behind it is replaced."""
    check_place(path)
    path = path.resolve()
    partial = partial_of(path)
    try:
        partial.write_text(text, encoding="utf-8")
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """The same with a value as JSON."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def check_place(path: Path) -> None:
    """Raises OSError, which names the path or its folder, unless a file can have this name."""
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
    """The file and what is wrong with it, as a clause."""
    what = _WORDS.get(error.errno or 0, error.strerror or str(error))
    return what if error.filename is None else f"{error.filename}: {what}"


def put_in_place(made: Path, target: Path) -> None:
    """Gives a folder its name.

    What has that name steps aside by a rename first, so that the name is free for a moment only,
    and is removed when the new folder has it.
    """
    old = made.with_name(f"{made.name}.old")
    if old.exists():  # of a program that was killed here
        shutil.rmtree(old)
    replaces = target.exists()
    if replaces:
        target.rename(old)
    try:
        made.rename(target)
    except OSError:
        if replaces:  # what was there stays
            old.rename(target)
        raise
    sync(target.parent)
    if replaces:
        shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Waits until a file, or the list of files in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_space(folder: Path) -> str:
    """On the disk of a folder, which may not exist yet; for people."""
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB"
