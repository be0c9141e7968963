"""Runs that are copied to a URL while they train, and what is there."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from unittest.mock import patch

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from training_runs import config_of, random_triples

from kge_torchrec.training import copier as copying

KEY = "checkpoint.options.copy_to"
URL = "memory://copies/run"


def files_of(folder: Path, seed: int) -> Path:
    lines = random_triples(37, 3, 150, seed)
    for name, part in (("train", lines[:130]), ("valid", lines[130:140]), ("test", lines[140:])):
        (folder / f"{name}.tsv").write_text("".join("\t".join(t) + "\n" for t in part))
    return folder


def keep_apart(tmp_path, monkeypatch) -> None:
    """Give a test its own cache, memory file system and working folder, and no pauses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(copying, "_PAUSE", 0.0)
    monkeypatch.chdir(tmp_path)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def copied_config(triples: Path, folder: Path | str, url: str = URL, **changes):
    options = {"checkpoint__options": {"copy_to": url}, "train__epochs": 3}
    return config_of(triples, folder, **{**options, **changes})


def mark(url: str = URL) -> dict:
    fs, root = fsspec.url_to_fs(url)
    return json.loads(fs.cat_file(f"{root}/copy.json"))


def checkpoints(url: str = URL) -> list[str]:
    fs, root = fsspec.url_to_fs(url)
    return sorted(path.rpartition("/")[2] for path in fs.ls(f"{root}/checkpoints", detail=False))


def warnings(caplog) -> list[str]:
    """Return the warnings about the copy."""
    ours = [r for r in caplog.records if r.name.endswith(("copier", "remote_runs"))]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def failing(times: int):
    """A file system whose network fails a few times in the middle of a checkpoint."""
    put, left, sent = MemoryFileSystem.put_file, [times], set()

    def fails(self, here, there, **more):
        if "checkpoints/" in there and here.endswith(".safetensors") and left[0]:
            left[0] -= 1
            raise ConnectionError("the network is down")
        assert there not in sent or left[0] > 9, "it is sent again"
        sent.add(there)
        put(self, here, there, **more)

    return patch.object(MemoryFileSystem, "put_file", fails)
