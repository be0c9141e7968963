"""A copy of a run at a URL of fsspec: its form, its file system, and how a machine fetches it.

    URL/copy.json             the mark: what the copy has.  It is written last.
    URL/config.yaml, ...      the small files of the run
    URL/store/, frozen.npy    files that never change
    URL/checkpoints/step-*/   its complete checkpoints

Object stores have no rename, so a file is part of the copy once the mark lists it.  The mark has
the texts of the small files, the size and the checksum of each other file, and the checksum of each
checkpoint's manifest, which lists that checkpoint's files.  ``copied.json`` in the folder of a run
says which copy is its own; ``.fetching`` is the lock of processes that fetch into it.  ``copier``
writes the copy while the run trains.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from kge_torchrec import files
from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import check_url, is_url
from kge_torchrec.errors import KGEError, first_line
from kge_torchrec.training.run_folder import RunFolder

MARK, FORMAT = "copy.json", 1
MANIFEST, ORIGIN = "manifest.json", "copied.json"
KEY = "checkpoint.options.copy_to"
CONFIG, LOCK = "config.yaml", ".fetching"
_TOGETHER = 8  # files that one call sends to a file system with parallel streams
log = logging.getLogger(__name__)


class CopyError(KGEError, RuntimeError):
    """The copy of a run could not be written or read; the message says which one and why."""

    on_every_rank = True


class RemoteFolder:
    """A folder at a URL.

    Args:
        url: The URL.

    Raises:
        ConfigError: The URL has a password, or its file system is not installed.
    """

    def __init__(self, url: str):
        check_url("the URL of a run", url)
        self.url = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem
            from fsspec.registry import known_implementations

            self.fs, self.root = url_to_fs(self.url)
        except ImportError as error:
            package = known_implementations[protocol]["class"].partition(".")[0]
            how = f"pip install {package}" if package != "fsspec" else first_line(error)
            raise ConfigError(f"{self.url} needs another package: {how}") from error
        except ValueError as error:
            raise ConfigError(f"{self.url}: {first_line(error)}") from error
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self._together = _TOGETHER if self.fs.async_impl else 1

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
        path = f"{self.root}/{name}"
        self._make_folder(path)
        if not self.is_local:
            self.fs.pipe_file(path, content)
            return
        with files.replacing(Path(path)) as partial:
            partial.write_bytes(content)

    def send(self, folder: Path, names: Sequence[str], goes_on: Callable[[str], object]) -> None:
        """Upload files of a folder, and compare their sizes; ``goes_on`` is called after each."""
        for group in _groups(names, self._together):
            there = [f"{self.root}/{name}" for name in group]
            for path in there:
                self._make_folder(path)
            self.fs.put([str(folder / name) for name in group], there)
            self.fs.invalidate_cache()
            for name, size in zip(group, self.fs.sizes(there), strict=True):
                expected = (folder / name).stat().st_size
                if size != expected:
                    raise CopyError(f"{name} arrived with {size:,} of {expected:,} bytes")
                goes_on(name)

    def get(self, names: Sequence[str], folder: Path) -> None:
        """Download files into a folder."""
        for group in _groups(names, self._together):
            here = [folder / name for name in group]
            for path in here:
                path.parent.mkdir(parents=True, exist_ok=True)
            self.fs.get([f"{self.root}/{name}" for name in group], list(map(str, here)))

    def remove_checkpoints(self, kept: Iterable[str]) -> None:
        """Remove checkpoints, also incomplete ones, except those of these names."""
        self.fs.invalidate_cache()
        folder = f"{self.root}/checkpoints"
        for path in self.fs.ls(folder, detail=False) if self.fs.exists(folder) else ():
            name = PurePosixPath(path).name
            if name.startswith("step-") and name not in kept:
                self.fs.rm(path, recursive=True)

    def check_writable(self) -> None:
        """Raise CopyError if no file can be written here."""
        with self.failing_as(f"cannot be written ({KEY} null trains without a copy)"):
            self.write(".can-be-written", b"yes")
            with suppress(Exception):  # some may write and not remove
                self.fs.rm_file(f"{self.root}/.can-be-written")

    def _make_folder(self, path: str) -> None:
        if not self.fs.async_impl:  # object stores have no folders
            self.fs.makedirs(str(PurePosixPath(path).parent), exist_ok=True)

    def mark(self) -> dict[str, Any] | None:
        """Return what the copy has, or None if there is no copy."""
        content = self.read(MARK)
        if content is None:
            return None
        with self.failing_as(f"has a damaged {MARK}"):
            mark: dict[str, Any] = json.loads(content)
            if mark["format"] != FORMAT:
                known = f"the latest known is {FORMAT}"
                raise CopyError(f"{self.url} is a copy of format {mark['format']}; {known}")
            for name in (*mark["texts"], *mark["files"], *mark["checkpoints"]):
                _check_name(name)
        return mark


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


def folder_to_resume(run: str | Path, name: Callable[[], str | None]) -> RunFolder:
    """Return the folder in which a run resumes, given by its path or by its URL.

    A run at a URL continues in the folder ``name()``, or in runs/NAME with the end of the URL.
    """
    if not is_url(run):
        return RunFolder(run)
    folder = RunFolder(name() or f"runs/{str(run).rstrip('/').rpartition('/')[2]}")
    if not take_over(str(run), folder, str(folder.path)):
        raise _no_run_at(run)
    return folder


def take_over(url: str, folder: RunFolder, name: str) -> bool:
    """Fetch a run to resume it in a folder, and to copy it to the same URL.

    Args:
        url: The URL.
        folder: The folder.
        name: Its name in the config.

    Returns:
        Whether there is a run at the URL.

    Raises:
        ConfigError: The folder holds something else.
        CopyError: The run cannot be fetched.
    """
    if not fetch(url, folder.path, resumes=True):
        return False
    config = folder.load_config()
    saving = {**config.checkpoint.options, "copy_to": url}
    checkpoint, run = replace(config.checkpoint, options=saving), replace(config.run, dir=name)
    if (moved := replace(config, checkpoint=checkpoint, run=run)) != config:
        folder.save_config(moved)
    return True


def _no_run_at(url: str | Path) -> ConfigError:
    return ConfigError(
        f"there is no run at {url}: {KEY} copies a run to a URL, where it is complete with its "
        "first checkpoint"
    )


def cache_of(url: str) -> Path:
    """Return the folder in the user's cache for the run at a URL."""
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(os.path.join("~", ".cache"))
    url = url.rstrip("/")
    name = f"{url.rpartition('/')[2]}-{sha256(url.encode()).hexdigest()[:12]}"
    return Path(users, "kge_torchrec", "runs", name)


def fetch(url: str, folder: Path, resumes: bool = False) -> bool:
    """Bring the run at a URL into a folder: its newest and its best checkpoint, and other files.

    Processes of one host may call it at once.  A folder that already has this state stays as it is.

    Args:
        url: The URL.
        folder: The folder.
        resumes: Whether training continues in the folder, which may then be further than the copy
            and must not hold another run.  Otherwise the folder is a cache.

    Returns:
        Whether there is a run at the URL.  If it cannot be reached, a cache that holds it is used.

    Raises:
        ConfigError: Something else is in the folder.
        CopyError: The copy cannot be read or is damaged.
    """
    remote = RemoteFolder(url)
    try:
        mark = remote.mark()
    except CopyError as error:
        if resumes or not (folder / CONFIG).is_file():
            raise
        log.warning("%s; using what was fetched before into %s", error, folder)
        return True
    if mark is None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder), remote.failing_as("cannot be fetched"):
        origin, version = origin_of(folder), f"{mark['writer']} {mark['version']}"
        if any((folder / name).exists() for name in (CONFIG, "store", "checkpoints")):
            if origin.get("run") == mark["run"]:
                is_as_far = resumes and newest_of(folder) >= mark["newest"]
                if (folder / CONFIG).is_file() and (is_as_far or origin.get("version") == version):
                    return True
            elif resumes:
                raise ConfigError(
                    f"run.dir: {folder} holds something else than the run at {remote.url}; name "
                    "another folder by --run.dir"
                )
            else:
                _clear(folder)
        _Fetch(remote, mark, folder).run(origin, version, resumes)
    return True


class _Fetch:
    """Brings what a mark lists into a folder."""

    def __init__(self, remote: RemoteFolder, mark: dict[str, Any], folder: Path):
        self.remote, self.mark, self.folder = remote, mark, folder

    def run(self, origin: dict[str, Any], version: str, resumes: bool) -> None:
        """Bring everything; ``origin`` is copied.json, and ``version`` says which mark it is."""
        mark, folder = self.mark, self.folder
        stays = "" if resumes else "; what is written into the run stays there"
        print(f"fetching {self.remote.url} into {folder}{stays}", file=sys.stderr)
        state = {"url": self.remote.url, "run": mark["run"]}
        last = origin.get("last", []) if origin.get("run") == mark["run"] else []
        files.write_json(folder / ORIGIN, {**state, "last": last})
        for name, about in mark["files"].items():
            self._file(name, about)
        wanted = dict.fromkeys(name for name in (mark["newest"], mark["best"]) if name is not None)
        brought = [name for name in wanted if self._checkpoint(name)]
        others = sorted(mark["checkpoints"].keys() - wanted.keys(), reverse=True)
        if not brought:  # one of those before
            brought = [name for name in others if self._checkpoint(name)][:1]
        if not brought:
            raise CopyError(f"{self.remote.url} has no checkpoint that is whole")
        for path in () if resumes else (folder / "checkpoints").glob("step-*"):
            if path.name not in (*brought, *last):  # somebody may be reading the last ones
                shutil.rmtree(path, ignore_errors=True)
        for name in sorted(mark["texts"], key=CONFIG.__eq__):  # the config makes it a run
            files.write_text(folder / name, mark["texts"][name])
        shutil.rmtree(self._part, ignore_errors=True)
        files.write_json(folder / ORIGIN, {**state, "last": brought, "version": version})

    def _file(self, name: str, about: dict[str, int]) -> None:
        target = self.folder / name
        if target.is_file() and target.stat().st_size == about["size"]:
            return
        self.remote.get([name], self._part)
        if files.crc32_of(self._part / name) != about["crc32"]:
            raise CopyError(f"{self.remote.url}: {name} is damaged: its checksum does not match")
        target.parent.mkdir(parents=True, exist_ok=True)
        (self._part / name).replace(target)

    @property
    def _part(self) -> Path:
        return self.folder / ".fetched"

    def _checkpoint(self, name: str) -> bool:
        """Bring a checkpoint; return whether it is there and its files have their sizes."""
        target, place = self.folder / "checkpoints" / name, f"checkpoints/{name}"
        expected = self.mark["checkpoints"][name]
        with suppress(OSError):
            if files.crc32_of(target / MANIFEST) == expected:
                return True
        shutil.rmtree(self._part, ignore_errors=True)
        try:
            manifest = self.remote.read(f"{place}/{MANIFEST}") or b""
            if zlib.crc32(manifest) != expected:
                raise CopyError(f"its {MANIFEST} is missing or damaged")
            sizes = json.loads(manifest)["files"]
            for file in sizes:
                _check_name(file)
            self.remote.get([f"{place}/{file}" for file in sizes], self._part)
            for file, size in sizes.items():
                has = (self._part / place / file).stat().st_size
                if has != size:
                    raise CopyError(f"{file} has {has:,} bytes instead of {size:,}")
        except (CopyError, FileNotFoundError) as error:
            log.warning(
                "checkpoint %s at %s is damaged: %s", name, self.remote.url, first_line(error)
            )
            return False
        (self._part / place / MANIFEST).write_bytes(manifest)
        target.parent.mkdir(parents=True, exist_ok=True)
        files.put_in_place(self._part / place, target)
        return True


def _clear(folder: Path) -> None:
    """Remove another run that was at this URL before."""
    (folder / CONFIG).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process fetches into a folder."""
    with (folder / LOCK).open("a") as file:
        with suppress(OSError):  # a disk without locks
            files.lock(file, wait=True)
        yield


def origin_of(folder: Path) -> dict[str, Any]:
    """Return copied.json of a folder, or {}."""
    try:
        origin = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}


def record_of(folder: Path) -> tuple[str, str | None]:
    """Return the newest checkpoint of a run, or "", and the best one if it was chosen."""
    folder = folder / "checkpoints"
    newest = max((path.parent.name for path in folder.glob(f"step-*/{MANIFEST}")), default="")
    with suppress(OSError, ValueError, KeyError, TypeError):
        progress = json.loads((folder / newest / MANIFEST).read_text("utf-8"))["progress"]
        return newest, progress["best_checkpoint"]
    return newest, None


def newest_of(folder: Path) -> str:
    """Return the newest checkpoint of a run, or ""."""
    return record_of(folder)[0]


def _check_name(name: str) -> None:
    """Raise CopyError for a name that leaves the folder of the run."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
        raise CopyError(f"the copy names a file outside of the run: {name!r}")


def _groups(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for first in range(0, len(names), size):
        yield names[first : first + size]
