"""A copy of a run at a URL of fsspec: its form, its file system, and how a machine fetches it.

    URL/config.yaml, ...      the small files of the run
    URL/store/                files that meta.json names
    URL/checkpoints/step-*/   files that manifest.json names
    URL/copy.json             which run it is, its newest checkpoint, and the small files

A manifest is written after the files that it names, and copy.json last, since object stores have no
rename.  ``copied.json`` in the folder of a run says which copy is its own; ``.fetching`` is the
lock of processes that fetch into it.  ``copier`` writes the copy while the run trains.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from kge_torchrec import files
from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import check_url, is_url
from kge_torchrec.config.keys import replace_keys
from kge_torchrec.data.store import META
from kge_torchrec.errors import KGEError, first_line
from kge_torchrec.training.checkpoint_files import MANIFEST, Checkpoint, Damaged
from kge_torchrec.training.checkpoints import names_in
from kge_torchrec.training.run_folder import RunFolder

MARK, FORMAT, ORIGIN = "copy.json", 2, "copied.json"
CONFIG, LOCK, PARTIAL = "config.yaml", ".fetching", ".fetched"
KEY = "checkpoint.options.copy_to"
# config.yaml, the last, makes a folder a run.  tensorboard/ and the files of a race stay.
SMALL = ("frozen.npy", "race.json", "plan.txt", "metrics.jsonl", "trackers.json", "results.json",
         "extended.json", CONFIG)  # fmt: skip
log = logging.getLogger(__name__)


class CopyError(KGEError, RuntimeError):
    """The copy of a run could not be written or read; the message says which one and why."""

    on_every_rank = True


class RemoteFolder:
    """A folder at a URL.

    Raises:
        ConfigError: The URL has a password, or its file system is not installed.
    """

    def __init__(self, url: str):
        check_url("the URL of a run", url)
        self.url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem

            self.fs, self.root = url_to_fs(self.url)
        except ImportError as error:
            raise ConfigError(f"{self.url} needs another package: {first_line(error)}") from error
        except ValueError as error:
            raise ConfigError(f"{self.url}: {first_line(error)}") from error
        self.is_local = isinstance(self.fs, LocalFileSystem)

    @contextmanager
    def failing_as(self, does: str) -> Iterator[None]:
        """Turn any error of the file system into a CopyError; ``does``: "cannot be read"."""
        try:
            yield
        except KGEError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            raise CopyError(f"{self.url} {does}: {why}") from error

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it is missing."""
        with self.failing_as(f"cannot be read ({name})"):
            try:
                content: bytes = self.fs.cat_file(f"{self.root}/{name}")
                return content
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file; a reader sees the old or the new content."""
        path = self._path_to_write(name)
        if self.is_local:
            with files.replacing(Path(path)) as partial:
                partial.write_bytes(content)
        else:
            self.fs.pipe_file(path, content)

    def send(self, folder: Path, sizes: dict[str, int]) -> None:
        """Upload files of a folder; raise CopyError if one does not arrive in its size."""
        there = [self._path_to_write(name) for name in sizes]
        self.fs.put([str(folder / name) for name in sizes], there)
        self.fs.invalidate_cache()
        for name, size in zip(sizes, self.fs.sizes(there), strict=True):
            if size != sizes[name]:
                raise CopyError(f"{name} arrived with {size:,} of {sizes[name]:,} bytes")

    def _path_to_write(self, name: str) -> str:
        path = f"{self.root}/{name}"
        if not self.fs.async_impl:  # object stores have no folders
            self.fs.makedirs(str(PurePosixPath(path).parent), exist_ok=True)
        return path

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints, also of incomplete ones, newest first."""
        self.fs.invalidate_cache()
        folder = f"{self.root}/checkpoints"
        paths = self.fs.ls(folder, detail=False) if self.fs.exists(folder) else []
        names = (PurePosixPath(path).name for path in paths)
        return sorted((name for name in names if name.startswith("step-")), reverse=True)

    def mark(self) -> dict[str, Any] | None:
        """Return copy.json, or None if there is no copy."""
        content = self.read(MARK)
        if content is None:
            return None
        with self.failing_as(f"has a damaged {MARK}"):
            mark: dict[str, Any] = json.loads(content)
            if mark["format"] != FORMAT:
                known = f"the only known is {FORMAT}"
                raise CopyError(f"{self.url} is a copy of format {mark['format']}; {known}")
            return {key: mark[key] for key in ("run", "state", "newest", "files")}


def needed_of(folder: Path) -> list[str]:
    """Return the newest readable checkpoint of a run, and the best one if it is another."""
    names = names_in(folder / "checkpoints")
    for name in reversed(names):
        with suppress(OSError, Damaged):
            best = Checkpoint.open(folder / "checkpoints" / name).progress.best_checkpoint
            return [name, *(x for x in names if x == best != name)]
    return []


def newest_of(folder: Path) -> str:
    """Return the newest readable checkpoint of a run, or ""."""
    return next(iter(needed_of(folder)), "")


def origin_of(folder: Path) -> dict[str, Any]:
    """Return copied.json of a folder, or {}."""
    try:
        origin = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}


def copy_problem(folder: Path) -> str:
    """Return why the copy of a run was not complete when its training ended, or ""."""
    return str(origin_of(folder).get("problem", ""))


def folder_of(run: str | Path) -> RunFolder:
    """Return the folder of a run, given by its path or by its URL.

    A run at a URL is fetched into the user's cache, unless its present state is there.

    Raises:
        ConfigError: There is no run at the URL.
        CopyError: The run cannot be fetched.
    """
    if not is_url(run):
        return RunFolder(run)
    folder = RunFolder(cache_of(str(run)))
    if not fetch(str(run), folder.path):
        raise _no_run_at(run)
    return folder


def cache_of(url: str) -> Path:
    """Return the folder in the user's cache for the run at a URL."""
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(os.path.join("~", ".cache"))
    url = url.rstrip("/")
    name = f"{url.rpartition('/')[2]}-{sha256(url.encode()).hexdigest()[:12]}"
    return Path(users, "kge_torchrec", "runs", name)


def folder_to_resume(url: str, name: str | None) -> RunFolder:
    """Bring the run at a URL into a folder to resume it there; by default runs/NAME of the URL."""
    folder = RunFolder(name or f"runs/{url.rstrip('/').rpartition('/')[2]}")
    if not take_over(url, folder, str(folder.path)):
        raise _no_run_at(url)
    return folder


def take_over(url: str, folder: RunFolder, name: str) -> bool:
    """Fetch a run to resume it in a folder, ``name`` in the config, and to copy it to the same URL.

    Returns whether there is a run at the URL.
    """
    if not fetch(url, folder.path, resumes=True):
        return False
    config = folder.load_config()
    moved = replace_keys(config, {"checkpoint.options.copy_to": url, "run.dir": name})
    if moved != config:
        folder.save_config(moved)
    return True


def _no_run_at(url: str | Path) -> ConfigError:
    return ConfigError(
        f"there is no run at {url}: {KEY} copies a run to a URL, where it is complete with its "
        "first checkpoint"
    )


def fetch(url: str, folder: Path, resumes: bool = False) -> bool:
    """Bring the run at a URL into a folder: its newest and its best checkpoint, and other files.

    Processes of one host may call it at once.  A folder that has this state stays as it is, and so
    does a cache if the URL cannot be reached.

    Args:
        url: The URL.
        folder: The folder.
        resumes: Whether training continues in the folder, which may then be further than the copy
            and must not hold another run.  Otherwise the folder is a cache.

    Returns:
        Whether there is a run at the URL.
    """
    remote, is_run = RemoteFolder(url), (folder / CONFIG).is_file
    try:
        mark = remote.mark()
    except CopyError as error:
        if resumes or not is_run():
            raise
        log.warning("%s; using what was fetched before into %s", error, folder)
        return True
    if mark is None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file, remote.failing_as("cannot be fetched"):
        with suppress(OSError):  # a disk without locks
            files.lock(file, wait=True)
        origin = origin_of(folder)
        if origin.get("run") == mark["run"]:
            is_as_far = resumes and newest_of(folder) >= mark["newest"]
            if is_run() and (is_as_far or origin.get("copy") == mark):
                return True
        elif any((folder / name).exists() for name in (CONFIG, "store", "checkpoints")):
            if resumes:
                raise ConfigError(
                    f"run.dir: {folder} holds something else than the run at {remote.url}; name "
                    "another folder by --run.dir"
                )
            others = (path.name for path in folder.glob("*") if path.name not in (CONFIG, LOCK))
            RunFolder(folder).remove(CONFIG, *others)
        _fetch(remote, mark, folder, resumes)
    return True


def _fetch(remote: RemoteFolder, mark: dict[str, Any], folder: Path, resumes: bool) -> None:
    """Bring the run of copy.json into a folder that holds an earlier state of it, or nothing."""
    stays = "" if resumes else "; what is written into the run stays there"
    print(f"fetching {remote.url} into {folder}{stays}", file=sys.stderr)
    origin = {"url": remote.url, "run": mark["run"]}
    files.write_json(folder / ORIGIN, origin)
    kept = needed_of(folder)  # somebody may be reading them
    if remote.read(f"store/{META}") is not None:
        _bring(remote, folder, "store", META)
    kept += _bring_checkpoints(remote, folder, mark["newest"])
    for path in () if resumes else (folder / "checkpoints").glob("step-*"):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)
    for name in (name for name in SMALL if name in mark["files"]):
        if (content := remote.read(name)) is None:
            raise CopyError(f"{remote.url} has no {name}, which its {MARK} names")
        with files.replacing(folder / name) as partial:
            partial.write_bytes(content)
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    files.write_json(folder / ORIGIN, origin | {"copy": mark})


def _bring_checkpoints(remote: RemoteFolder, folder: Path, newest: str) -> list[str]:
    """Bring the newest checkpoint that is whole, and the best one; return their names."""

    def brings(name: str) -> bool:
        try:
            _bring(remote, folder, f"checkpoints/{_checked(name)}", MANIFEST)
        except Damaged as error:
            log.warning("%s", error)
            return False
        return True

    if not brings(newest):
        newest = next((x for x in remote.checkpoints() if x != newest and brings(x)), "")
    if not newest:
        raise CopyError(f"{remote.url} has no checkpoint that is whole")
    best = Checkpoint.open(folder / "checkpoints" / newest).progress.best_checkpoint
    return [newest, best] if best not in (None, newest) and brings(best) else [newest]


def _bring(remote: RemoteFolder, folder: Path, place: str, manifest: str) -> None:
    """Bring the files that a manifest names, and then the manifest, unless it is here."""
    content, target = remote.read(f"{place}/{manifest}") or b"", folder / place
    with suppress(OSError):
        if (target / manifest).read_bytes() == content:
            return
    made = folder / PARTIAL / place
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        about = json.loads(content)
        names = [_checked(file) for file in about["files"]]
        there = [f"{remote.root}/{place}/{file}" for file in names]
        remote.fs.get(there, [str(made / file) for file in names])
        (made / manifest).write_bytes(content)
        if manifest == MANIFEST:
            Checkpoint.open(made)  # its rows have checksums of their own
        for file in names if manifest == META else ():
            if files.crc32_of(made / file) != about["crc32"][file]:
                raise Damaged(f"the checksum of {file} does not match")
    except (Damaged, FileNotFoundError, ValueError, KeyError, TypeError) as error:
        what = "lacks a file" if isinstance(error, FileNotFoundError) else "is damaged"
        raise Damaged(f"{remote.url}/{place} {what}: {first_line(error)}") from error
    target.parent.mkdir(exist_ok=True)
    files.put_in_place(made, target)


def _checked(name: str) -> str:
    """Return a name; raise CopyError if it leaves its folder."""
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise CopyError(f"the copy names a file outside of the run: {name!r}")
    return name
