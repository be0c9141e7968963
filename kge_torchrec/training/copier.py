"""Copies a run to a URL in a thread of rank 0 while it trains; ``remote_runs`` has the form."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
import zlib
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kge_torchrec import files
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.errors import KGEError, first_line
from kge_torchrec.training.remote_runs import (
    FORMAT,
    KEY,
    MANIFEST,
    MARK,
    ORIGIN,
    CopyError,
    RemoteFolder,
    newest_of,
    origin_of,
    record_of,
)

if TYPE_CHECKING:
    from kge_torchrec.training.checkpoints import Checkpoints
    from kge_torchrec.training.run_folder import RunFolder

# The small files of a run.  Others stay: .lock, tensorboard/, parts/ and race/ while they are used.
TEXTS = ("config.yaml", "race.json", "plan.txt", "metrics.jsonl",
         "trackers.json", "results.json", "extended.json")  # fmt: skip
_TRIES, _PAUSE = 3, 2.0  # at the end of training, and seconds between them
log = logging.getLogger(__name__)


def copied(folder: RunFolder, config: Config, ranks: Processes, held: ExitStack) -> None:
    """Copy the run to checkpoint.options.copy_to until ``held`` closes.  Collective.

    Raises:
        ConfigError: Another run is there.
        CopyError: The URL cannot be read or written.
    """

    def begin() -> None:
        url = config.checkpoint.saving.copy_to
        if url is None:
            return
        folder.copier = Copier(folder.path, url)
        held.callback(folder.copier.finish)

    on_first_rank(ranks, begin)


class Copier:
    """Copies a run to a URL, in a thread of rank 0, whenever a checkpoint is complete.

    Args:
        folder: The folder of the run.
        url: The URL.

    Raises:
        ConfigError: Another run or a later state of this run is there.
        CopyError: The URL cannot be read or written.
    """

    def __init__(self, folder: Path, url: str):
        self.folder, self.remote, self.problem = folder, RemoteFolder(url), ""
        self._held = frozenset[str]()  # checkpoints that are being copied
        self._writer, self._version = uuid.uuid4().hex, 0
        self._due, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="copy of the run", daemon=True)
        self._sent: set[str] = set()  # files of checkpoints that this process has sent
        self._check_apart()
        mark, origin = self.remote.mark(), origin_of(folder)
        if mark is not None:
            self._check(mark, origin)
        self.remote.check_writable()
        self._before: dict[str, Any] = mark or {"texts": {}, "files": {}, "checkpoints": {}}
        known = origin.get("run") if origin.get("url") == self.remote.url else None
        self._id = mark["run"] if mark is not None else known or uuid.uuid4().hex

    def _check_apart(self) -> None:
        if not self.remote.is_local:
            return
        there, here, url = Path(self.remote.root).resolve(), self.folder.resolve(), self.remote.url
        if there == here or there in here.parents or here in there.parents:
            raise ConfigError(
                f"{KEY}: {url} is, holds or is in the folder of the run, {self.folder}; name "
                f"another place. A copy is resumed by `train --resume {url}`"
            )

    def _check(self, mark: dict[str, Any], origin: dict[str, Any]) -> None:
        url = self.remote.url
        if origin.get("run") != mark["run"]:
            raise ConfigError(
                f"{KEY}: {url} already holds another run; resume it with "
                f"`train --resume {url}`, or name another URL"
            )
        if mark["newest"] > newest_of(self.folder):
            raise ConfigError(
                f"{KEY}: {url} is further than {self.folder} ({mark['newest']} instead of "
                f"{newest_of(self.folder) or 'none'}): resume with `train --resume {url}`"
            )

    def follow(self, checkpoints: Checkpoints) -> None:
        """Start to copy, and copy again whenever a checkpoint is complete."""
        checkpoints.completed, checkpoints.held = self._due.set, lambda: self._held
        self._due.set()
        self._thread.start()

    def _run(self) -> None:
        while self._due.wait() and not self._ends.is_set():
            self._due.clear()
            self._attempt(when="with the next checkpoint")

    def finish(self) -> None:
        """Copy what is left, and say whether the copy is complete."""
        if self._thread.ident is None:  # the run could not be started
            return
        self._ends.set()  # the thread ends after the file that it sends
        self._due.set()
        try:
            self._thread.join()
            self._ends.clear()
            for left in range(_TRIES if newest_of(self.folder) else 0, 0, -1):
                if self._attempt(f"in {_PAUSE:g} s" if left > 1 else ""):
                    break
                time.sleep(_PAUSE if left > 1 else 0)
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

    def _attempt(self, when: str) -> bool:
        """Copy what is new; return whether it is there.  ``when``: the next attempt, in words."""
        try:
            self._copy()
            self.problem = ""
        except _Ending:
            pass
        except Exception as error:
            self.problem = first_line(error)
            if when:
                log.warning(
                    "the run could not be copied to %s: %s; the copy is tried again %s",
                    self.remote.url, self.problem, when,
                )  # fmt: skip
        return not self.problem

    def _copy(self) -> None:
        newest, best = self._hold()
        with self.remote.failing_as("cannot be written"):
            sizes = self._send_files()
            if not newest:
                return
            sums = {newest: self._send_checkpoint(newest)}
            if best is not None and self._checksum(best) is not None:
                sums[best] = self._send_checkpoint(best)
            for name, checksum in self._before["checkpoints"].items():
                if self._checksum(name) == checksum:  # neither pruned nor written again
                    sums.setdefault(name, checksum)
            self._complete({"newest": newest, "best": best}, sizes, sums)
            self._held = frozenset()
            with suppress(Exception):  # the copy is complete, and the next one removes them
                self.remote.remove_checkpoints(sums)

    def _hold(self) -> tuple[str, str | None]:
        """Return the newest and the best checkpoint, and keep them from being pruned."""
        while True:
            newest, best = record_of(self.folder)
            self._held = frozenset({newest, best or newest})
            if record_of(self.folder) == (newest, best):
                return newest, best

    def _checksum(self, name: str) -> int | None:
        """Return the checksum of the manifest of a checkpoint in the folder, or None."""
        try:
            return zlib.crc32((self.folder / "checkpoints" / name / MANIFEST).read_bytes())
        except OSError:
            return None

    def _send_files(self) -> dict[str, dict[str, int]]:
        """Send files that never change and are not there yet; return sizes and checksums."""
        names = ["frozen.npy"] if (self.folder / "frozen.npy").is_file() else []
        paths = sorted((self.folder / "store").rglob("[!.]*"))
        names += [str(path.relative_to(self.folder)) for path in paths if path.is_file()]
        there, new = self._before["files"], dict[str, dict[str, int]]()
        for name in names:
            size = (self.folder / name).stat().st_size
            if there.get(name, {}).get("size") != size:
                new[name] = {"size": size, "crc32": files.crc32_of(self.folder / name)}

        def note(name: str) -> None:
            there[name] = new[name]
            self._go_on(name)

        self.remote.send(self.folder, list(new), note)
        return {name: there[name] for name in names}

    def _send_checkpoint(self, name: str) -> int:
        """Send the files of a checkpoint, its manifest last; return the manifest's checksum."""
        place = f"checkpoints/{name}"
        manifest = (self.folder / place / MANIFEST).read_bytes()
        checksum = zlib.crc32(manifest)
        if self._before["checkpoints"].get(name) == checksum:
            return checksum
        own = [f"{place}/{file}" for file in json.loads(manifest)["files"]]

        def note(file: str) -> None:
            self._sent.add(f"{file} {checksum}")
            self._go_on(file)

        left = [file for file in own if f"{file} {checksum}" not in self._sent]
        self.remote.send(self.folder, left, note)
        self.remote.write(f"{place}/{MANIFEST}", manifest)
        return checksum

    def _go_on(self, file: str) -> None:
        if self._ends.is_set():
            raise _Ending(file)

    def _complete(
        self, record: dict[str, str | None], sizes: dict[str, Any], sums: dict[str, int]
    ) -> None:
        """Write the small files, and the mark that lists everything."""
        there = self.remote.mark()
        if there is not None and there["writer"] not in (self._writer, self._before.get("writer")):
            raise CopyError("another process copies a run there: end one of the two")
        texts = {}
        for name in TEXTS:
            with suppress(FileNotFoundError):
                texts[name] = (self.folder / name).read_text(encoding="utf-8")
        for name, text in texts.items():
            if self._before["texts"].get(name) != text:
                self.remote.write(name, text.encode())
        self._version += 1
        mark = {
            "format": FORMAT, "run": self._id, "writer": self._writer, "version": self._version,
            **record, "checkpoints": sums, "files": sizes, "texts": texts,
        }  # fmt: skip
        self._save_origin()  # before the mark, which is another run's without it
        self.remote.write(MARK, json.dumps(mark).encode())
        self._before = mark

    def _save_origin(self) -> None:
        origin = {"url": self.remote.url, "run": self._id, "problem": self.problem}
        files.write_json(self.folder / ORIGIN, origin)


class _Ending(KGEError):
    """Training ends: what is left is copied by the thread that trained."""
