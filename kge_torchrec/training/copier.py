"""Copies a run to a URL in a thread of rank 0 while it trains; ``remote_runs`` has the form."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from kge_torchrec import files
from kge_torchrec.config import ConfigError
from kge_torchrec.data.store import META
from kge_torchrec.errors import first_line
from kge_torchrec.training.checkpoint_files import MANIFEST
from kge_torchrec.training.checkpoints import Checkpoints, names_in
from kge_torchrec.training.remote_runs import (
    FORMAT,
    KEY,
    MARK,
    ORIGIN,
    SMALL,
    RemoteFolder,
    needed_of,
    newest_of,
    origin_of,
)

_PAUSE = 2.0  # seconds between the attempts at the end of training
log = logging.getLogger(__name__)


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
        mark, origin = self.remote.mark() or {}, origin_of(folder)
        self._check(mark, origin)
        with self.remote.failing_as(f"cannot be written ({KEY} null trains without a copy)"):
            self.remote.write(".can-be-written", b"yes")
            with suppress(Exception):  # some may write and not remove
                self.remote.fs.rm_file(f"{self.remote.root}/.can-be-written")
        known = origin.get("run") if origin.get("url") == self.remote.url else None
        self._id = mark.get("run") or known or uuid.uuid4().hex

    def _check(self, mark: dict[str, Any], origin: dict[str, Any]) -> None:
        url, folder, newest = self.remote.url, self.folder, newest_of(self.folder)
        there, here = Path(self.remote.root).resolve(), folder.resolve()
        if self.remote.is_local and (
            there == here or there in here.parents or here in there.parents
        ):
            raise ConfigError(
                f"{KEY}: {url} is, holds or is in the folder of the run, {folder}; name another "
                f"place. A copy is resumed by `train --resume {url}`"
            )
        if mark and origin.get("run") != mark["run"]:
            raise ConfigError(
                f"{KEY}: {url} already holds another run; resume it with "
                f"`train --resume {url}`, or name another URL"
            )
        if mark and mark["newest"] > newest:
            raise ConfigError(
                f"{KEY}: {url} is further than {folder} ({mark['newest']} instead of "
                f"{newest or 'none'}): resume with `train --resume {url}`"
            )

    def follow(self, checkpoints: Checkpoints) -> None:
        """Start to copy, and copy again whenever a checkpoint is complete."""
        checkpoints.completed, checkpoints.held = self._due.set, lambda: self._held
        self._due.set()
        self._thread.start()

    def _run(self) -> None:
        while self._due.wait() and not self._ends:
            self._due.clear()
            self._attempt("with the next checkpoint")

    def finish(self) -> None:
        """Copy what is left, and say whether the copy is complete."""
        if self._thread.ident is None:  # the run could not be started
            return
        self._ends = True  # the thread ends after the state of the run that it copies
        self._due.set()
        try:
            self._thread.join()
            for left in (2, 1, 0) if newest_of(self.folder) else ():
                if self._attempt(f"in {_PAUSE:g} s" if left else ""):
                    break
                time.sleep(_PAUSE if left else 0)
        except BaseException:
            self.problem = "interrupted"
            raise
        finally:
            if newest_of(self.folder):
                self._report()

    def _report(self) -> None:
        with suppress(OSError):  # a full disk must not end a training that is complete
            self._save_origin()
        url, folder = self.remote.url, self.folder
        if self.problem:
            log.warning(
                "the copy of the run at %s is NOT complete: %s. The whole run is in %s, and `train "
                "--resume %s` copies the rest", url, self.problem, folder, folder,
            )  # fmt: skip
        else:
            log.info("the run is copied to %s", url)

    def _save_origin(self) -> None:
        origin = {"url": self.remote.url, "run": self._id, "problem": self.problem}
        files.write_json(self.folder / ORIGIN, origin)

    def _attempt(self, when: str) -> bool:
        """Copy what is new; return whether it is there.  ``when``: the next attempt, in words."""
        try:
            with self.remote.failing_as("cannot be written"):
                self._copy()
            self.problem = ""
        except Exception as error:
            self.problem = first_line(error)
            if when:
                log.warning(
                    "the run could not be copied to %s: %s; the copy is tried again %s",
                    self.remote.url, self.problem, when,
                )  # fmt: skip
        return not self.problem

    def _copy(self) -> None:
        """Send what is new, then copy.json, and remove the checkpoints that the run has removed."""
        self._send("store", META)
        self._held = needed_of(self.folder)
        while self._held != (now := needed_of(self.folder)):  # some were pruned just before
            self._held = now
        if not self._held:
            return
        for name in self._held:
            self._send(f"checkpoints/{name}", MANIFEST)
        names = [name for name in SMALL if (self.folder / name).is_file()]
        for name in names:
            self.remote.write(name, (self.folder / name).read_bytes())
        self._save_origin()  # before copy.json, which is another run's without it
        mark = {
            "format": FORMAT, "run": self._id, "state": uuid.uuid4().hex, "newest": self._held[0],
            "files": names,
        }  # fmt: skip
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
