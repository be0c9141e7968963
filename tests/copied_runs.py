"""Runs that are copied to a URL while they train, and what is there."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from training_runs import config_of, random_triples

from kge_torchrec.training import copier as copying
from kge_torchrec.training.remote_runs import RemoteFolder

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


@contextmanager
def sending(hook: Callable[[str, Path], object]) -> Iterator[None]:
    """Call ``hook(name, file)`` before a file is sent; if it returns False, the file is not."""
    put = MemoryFileSystem.put_file

    def put_file(self, here, there, **more):
        place, name = there.rpartition("/")[0], there.removeprefix("/copies/run/")
        manifests = [f"{place}/{manifest}" for manifest in ("manifest.json", "meta.json")]
        assert not any(map(self.exists, manifests)), "a manifest is sent after its files"
        if hook(name, Path(here)) is not False:
            put(self, here, there, **more)

    with patch.object(MemoryFileSystem, "put_file", put_file):
        yield


def failing(times: int):
    """A file system whose network fails a few times in the middle of a checkpoint."""
    left, sent = [times], set()

    def fails(name, here):
        if name.endswith(".safetensors") and left[0]:
            left[0] -= 1
            raise ConnectionError("the network is down")
        assert name not in sent or left[0] > 9, "it is sent again"
        sent.add(name)

    return sending(fails)


@contextmanager
def newest_copied() -> Iterator[list[str]]:
    """Yield a list that gets the newest checkpoint of each copy.json."""
    write, newest = RemoteFolder.write, []

    def noted(self, name, content):
        newest.extend([json.loads(content)["newest"]] if name == "copy.json" else [])
        write(self, name, content)

    with patch.object(RemoteFolder, "write", noted):
        yield newest
