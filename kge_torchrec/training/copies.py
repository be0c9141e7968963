"""A copy of a run at a URL of fsspec, written while the run trains, and fetched by run.resume.

    URL/config.yaml, ...      the small files of the run
    URL/store/                files that meta.json names
    URL/checkpoints/step-*/   files that manifest.json names
    URL/copy.json             which run it is, its newest checkpoint, and the small files

A manifest is written after the files that it names, and copy.json last, since object stores have no
rename.  The folder of the run has a copy.json too: which run it is, and what its copy lacks.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from kge_torchrec import files
from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import check_url
from kge_torchrec.data.store import META
from kge_torchrec.errors import KGEError, first_line
from kge_torchrec.lines import say
from kge_torchrec.training.checkpoint_files import MANIFEST, Checkpoint, Damaged
from kge_torchrec.training.checkpoints import Checkpoints, names_in

KEY = "checkpoint.options.copy_to"
MARK, CONFIG = "copy.json", "config.yaml"
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
        if (content := self.read(MARK)) is None:
            return None
        with self.failing_as(f"has a damaged {MARK}"):
            mark = json.loads(content)
            return {key: mark[key] for key in ("run", "newest", "files")}


def mark_of(folder: Path) -> dict[str, Any]:
    """Return copy.json of a run's folder, or {}."""
    with suppress(OSError, ValueError, TypeError):
        return dict(json.loads((folder / MARK).read_text(encoding="utf-8")))
    return {}


def _needed_of(folder: Path) -> list[str]:
    """Return the newest readable checkpoint of a run, and the best one if it is another."""
    names = names_in(folder / "checkpoints")
    for name in reversed(names):
        with suppress(OSError, Damaged):
            best = Checkpoint.open(folder / "checkpoints" / name).progress.best_checkpoint
            return [name, *(x for x in names if x == best != name)]
    return []


def newest_of(folder: Path) -> str:
    """Return the newest readable checkpoint of a run, or ""."""
    return next(iter(_needed_of(folder)), "")


class Copier:
    """Copies a run to a URL, in a thread of rank 0, whenever a checkpoint is complete.

    Raises:
        ConfigError: Another run or a later state of this run is there.
        CopyError: The URL cannot be read or written.
    """

    def __init__(self, folder: Path, url: str):
        self.folder, self.remote, self.problem = folder, RemoteFolder(url), ""
        self._held: list[str] = []  # checkpoints that are being copied
        self._sent: dict[str, bytes] = {}  # manifests that are there, by name
        self._due, self._ends = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="copy of the run", daemon=True)
        own = mark_of(folder).get("run")
        self._check(self.remote.mark(), own)
        with self.remote.failing_as(f"cannot be written ({KEY} null trains without a copy)"):
            self.remote.write(".can-be-written", b"yes")
            with suppress(Exception):  # some may write and not remove
                self.remote.fs.rm_file(f"{self.remote.root}/.can-be-written")
        self._id = own or uuid.uuid4().hex

    def _check(self, mark: dict[str, Any] | None, own: str | None) -> None:
        url, folder, newest = self.remote.url, self.folder, newest_of(self.folder)
        there, here = Path(self.remote.root).resolve(), folder.resolve()
        if self.remote.is_local and (
            there == here or there in here.parents or here in there.parents
        ):
            raise ConfigError(
                f"{KEY}: {url} is, holds or is in the folder of the run, {folder}; name another "
                "place"
            )
        if mark and mark["run"] != own:
            raise ConfigError(
                f"{KEY}: {url} already holds another run; name another URL, or resume that run "
                "by --run.resume auto in a new folder"
            )
        if mark and mark["newest"] > newest:
            raise ConfigError(
                f"{KEY}: {url} is further than {folder} ({mark['newest']} instead of "
                f"{newest or 'none'}): resume that state by --run.resume auto"
            )

    def follow(self, checkpoints: Checkpoints) -> None:
        """Start to copy, and copy again whenever a checkpoint is complete."""
        checkpoints.completed, checkpoints.held = self._due.set, lambda: self._held
        self._due.set()
        self._thread.start()

    def _run(self) -> None:
        ends = False
        while not ends:
            self._due.wait()
            self._due.clear()
            ends = self._ends  # what was written before is then copied
            self._attempt(ends)

    def finish(self) -> None:
        """Copy what is left, and say whether the copy is complete."""
        if self._thread.ident is None:  # the run could not be started
            return
        self._ends = True
        self._due.set()
        try:
            self._thread.join()
        except BaseException:
            self.problem = "interrupted"
            raise
        finally:
            if newest_of(self.folder):
                self._report()

    def _report(self) -> None:
        with suppress(OSError):  # a full disk must not end a training that is complete
            self._save_mark()
        url, folder = self.remote.url, self.folder
        if self.problem:
            log.warning(
                "the copy of the run at %s is NOT complete: %s. The whole run is in %s, and `train "
                "--resume %s` copies the rest", url, self.problem, folder, folder,
            )  # fmt: skip
        else:
            log.info("the run is copied to %s", url)

    def _save_mark(self) -> None:
        files.write_json(self.folder / MARK, {"run": self._id, "problem": self.problem})

    def _attempt(self, ends: bool) -> None:
        """Copy what is new.  An error is a warning, and the next checkpoint brings the rest."""
        try:
            with self.remote.failing_as("cannot be written"):
                self._copy()
            self.problem = ""
        except Exception as error:
            self.problem = first_line(error)
            if not ends:
                log.warning(
                    "the run could not be copied to %s: %s; the copy is tried again with the next "
                    "checkpoint", self.remote.url, self.problem,
                )  # fmt: skip

    def _copy(self) -> None:
        """Send what is new, then copy.json, and remove the checkpoints that the run has removed."""
        self._send("store", META)
        self._held = _needed_of(self.folder)
        while self._held != (now := _needed_of(self.folder)):  # some were pruned just before
            self._held = now
        if not self._held:
            return
        for name in self._held:
            self._send(f"checkpoints/{name}", MANIFEST)
        names = [name for name in SMALL if (self.folder / name).is_file()]
        for name in names:
            self.remote.write(name, (self.folder / name).read_bytes())
        self._save_mark()  # before the one at the URL, which is another run's without it
        mark = {"run": self._id, "newest": self._held[0], "files": names}
        self.remote.write(MARK, json.dumps(mark).encode())
        self._held, kept = [], names_in(self.folder / "checkpoints")
        with suppress(Exception):  # the copy is complete, and the next one removes them
            for name in {*self.remote.checkpoints()} - {*kept}:
                self.remote.fs.rm(f"{self.remote.root}/checkpoints/{name}", recursive=True)

    def _send(self, place: str, name: str) -> None:
        """Send the files that a manifest names, and then the manifest, unless it is there.

        Nothing is done without a manifest, as for a store that is in another folder.
        """
        name = f"{place}/{name}"
        if not (self.folder / name).is_file():
            return
        manifest = (self.folder / name).read_bytes()
        if self._sent.get(name) != manifest and (there := self.remote.read(name)) != manifest:
            if there is not None:  # its files are replaced
                self.remote.fs.rm_file(f"{self.remote.root}/{name}")
            sizes = {f"{place}/{k}": size for k, size in json.loads(manifest)["files"].items()}
            self.remote.send(self.folder, sizes)
            self.remote.write(name, manifest)
        self._sent[name] = manifest


def fetch(url: str, folder: Path) -> None:
    """Bring the run at a URL into its folder, unless there is none or the folder is as far.

    It brings the newest and the best checkpoint, and goes on where a killed fetch ended.
    """
    remote = RemoteFolder(url)
    mark = remote.mark()
    if mark is None:
        return
    if mark_of(folder).get("run") == mark["run"]:
        if (folder / CONFIG).is_file() and newest_of(folder) >= mark["newest"]:
            return
    elif any((folder / name).exists() for name in (CONFIG, "store", "checkpoints")):
        raise ConfigError(
            f"run.dir: {folder} holds something else than the run at {remote.url}; name another "
            "folder by --run.dir"
        )
    say(f"fetching {remote.url} into {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / MARK, {"run": mark["run"]})
    with remote.failing_as("cannot be fetched"):
        if remote.read(f"store/{META}") is not None:
            _bring(remote, folder, "store", META)
        _bring_checkpoints(remote, folder, mark["newest"])
        for name in (name for name in SMALL if name in mark["files"]):
            if (content := remote.read(name)) is None:
                raise CopyError(f"{remote.url} has no {name}, which its {MARK} names")
            with files.replacing(folder / name) as partial:
                partial.write_bytes(content)


def _bring_checkpoints(remote: RemoteFolder, folder: Path, newest: str) -> None:
    """Bring the newest checkpoint that is whole, and the best one."""

    def brings(name: str) -> bool:
        try:
            _bring(remote, folder, f"checkpoints/{_checked(name)}", MANIFEST)
        except Damaged as error:
            log.warning("%s", error)
            return False
        return True

    names = dict.fromkeys([newest, *remote.checkpoints()])
    found = next((name for name in names if brings(name)), None)
    if found is None:
        raise CopyError(f"{remote.url} has no checkpoint that is whole")
    best = Checkpoint.open(folder / "checkpoints" / found).progress.best_checkpoint
    if best not in (None, found):
        brings(best)


def _bring(remote: RemoteFolder, folder: Path, place: str, manifest: str) -> None:
    """Bring the files that a manifest names, and then the manifest, unless it is here."""
    content, target = remote.read(f"{place}/{manifest}") or b"", folder / place
    with suppress(OSError):
        if (target / manifest).read_bytes() == content:
            return
    target.parent.mkdir(exist_ok=True)
    made = folder / ".fetched"  # of a killed fetch too
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
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
    files.put_in_place(made, target)


def _checked(name: str) -> str:
    """Return a name; raise CopyError if it leaves its folder."""
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise CopyError(f"the copy names a file outside of the run: {name!r}")
    return name
