"""The folder of one checkpoint: made under a hidden name, renamed when complete, and opened.

It has the tensors (``checkpoint_storage``), their ``index.json``, the run's ``progress.json`` and a
``manifest.json``.  The manifest has the size of every file and the checksums of the JSON files; the
index has the checksums of the tensors.
"""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch

from kge_torchrec import files
from kge_torchrec.training.checkpoint_index import Damaged, Index
from kge_torchrec.training.state import TrainState

FORMAT_VERSION = 2  # 1 was torch's own format
MANIFEST, _PROGRESS, _INDEX = "manifest.json", "progress.json", "index.json"


def make_empty(folder: Path) -> None:
    """Make an empty folder for a checkpoint, and remove unfinished checkpoints of killed runs."""
    for leftover in folder.parent.glob(".partial-*"):
        shutil.rmtree(leftover)
    folder.mkdir(parents=True)


def finish(partial: Path, target: Path, index: Index | None, progress: TrainState) -> None:
    """Write the JSON files of a checkpoint and rename it from ``partial`` to ``target``."""
    texts = {
        _INDEX: json.dumps({"tensors": index}),
        _PROGRESS: json.dumps(progress.to_dict(), indent=1),
    }
    for name, text in texts.items():
        (partial / name).write_text(text, encoding="utf-8")
    manifest = {
        "format": FORMAT_VERSION,
        "torch": torch.__version__,
        "files": {p.name: p.stat().st_size for p in sorted(partial.iterdir())},
        "crc32": {name: zlib.crc32(text.encode()) for name, text in texts.items()},
    }
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for name in (*texts, MANIFEST):  # the tensors are already synced
        files.sync(partial / name)
    files.put_in_place(partial, target)  # replaces a checkpoint of this step from before a resume


def open_checkpoint(path: Path) -> tuple[Index | None, TrainState]:
    """Read the index (None in format 1) and the progress of a checkpoint.

    It verifies all files except the contents of the tensors.

    Raises:
        Damaged: A file is missing or does not match the manifest.
        OSError: A file cannot be read.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version, files = manifest["format"], dict(manifest["files"])
        checksums = dict(manifest.get("crc32", {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} is not valid ({error})") from error
    if version not in (1, FORMAT_VERSION):
        raise Damaged(f"the checkpoint has format {version}; the latest known is {FORMAT_VERSION}")
    for name, size in files.items():
        actual = (path / name).stat().st_size if (path / name).is_file() else None
        if actual != size:
            has = "is missing" if actual is None else f"has {actual:,} bytes instead of {size:,}"
            raise Damaged(f"{name} {has}")
    progress = TrainState.from_dict(_read_json(path / _PROGRESS, checksums.get(_PROGRESS)))
    if version == 1:
        return None, progress
    return _read_json(path / _INDEX, checksums.get(_INDEX, -1))["tensors"], progress


def _read_json(file: Path, checksum: int | None) -> Any:
    """Read a JSON file and verify its checksum, unless ``checksum`` is None.

    Raises:
        Damaged: The checksum does not match or the file is not JSON.
    """
    content = file.read_bytes()
    if checksum is not None and zlib.crc32(content) != checksum:
        raise Damaged(f"{file.name} is damaged: its checksum does not match")
    try:
        return json.loads(content)
    except ValueError as error:
        raise Damaged(f"{file.name} is not valid ({error})") from error
