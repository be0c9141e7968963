"""The folder of an export: written under a hidden name, renamed when complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from kge_torchrec.export.description import DESCRIPTION, is_export
from kge_torchrec.export.errors import ExportError


class ExportFolder:
    """A new export on its way to ``path``.  Only rank 0 calls it."""

    def __init__(self, path: str | Path, overwrite: bool = False):
        self.path, self.overwrite = Path(path), overwrite
        # A link to another disk stays: the export is made where it points to.
        self._target = self.path.resolve()
        self.partial = self._target.with_name(f".{self._target.name}.partial")
        self._old = self._target.with_name(f".{self._target.name}.old")

    def check(self) -> None:
        """Raises ExportError unless an export may be put at ``path``."""
        if not self._target.exists():
            return
        if not self.overwrite:
            raise ExportError(
                f"{self.path} exists already; name another folder, or replace it with",
                overwrite=True,
            )
        empty = self._target.is_dir() and not any(self._target.iterdir())
        if not empty and not is_export(self._target):
            raise ExportError(
                f"{self.path} holds something else than an export and is not overwritten; "
                "name another folder"
            )

    def begin(self) -> None:
        """Makes the hidden folder, dropping what an export that was killed left there."""
        self.check()
        if self.partial.exists():
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True)

    def append(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Appends to a file."""
        with (self.partial / name).open("ab") as file:
            for piece in pieces:
                file.write(piece)

    def finish(self, description: dict) -> None:
        """Adds model.json with the size of every file, then gives the folder its name."""
        sizes = {file.name: file.stat().st_size for file in sorted(self.partial.iterdir())}
        text = json.dumps(description | {"files": sizes}, indent=1, ensure_ascii=False)
        self.append(DESCRIPTION, [f"{text}\n".encode()])
        for file in self.partial.iterdir():
            _sync(file)
        self.check()  # somebody may have made it meanwhile
        if self._target.exists():
            # It steps aside by a rename, so that the path is without an export only for a moment.
            shutil.rmtree(self._old, ignore_errors=True)
            self._target.rename(self._old)
        self.partial.rename(self._target)
        _sync(self._target.parent)
        shutil.rmtree(self._old, ignore_errors=True)

    def discard(self) -> None:
        """Removes what was written."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def free(self) -> str:
        """Free space on the disk of the export."""
        folder = self._target
        while not folder.exists():
            folder = folder.parent
        return f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB"


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
