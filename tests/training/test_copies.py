"""Copies of runs at a URL: what is there, failures, and other machines that resume them."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from training_runs import (
    config_of,
    largest_difference,
    longer_config,
    parameters,
    random_triples,
    tiny_store,
)
from worlds import WorldError, run_world

from kge_torchrec import api, extend
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.training import checkpoints as checkpoints_module
from kge_torchrec.training.checkpoint_files import Damaged
from kge_torchrec.training.copies import CopyError, fetch, mark_of, newest_of

KEY = "checkpoint.options.copy_to"
URL = "memory://copies/run"
FIRST, SECOND, THIRD = (f"step-{step:012d}" for step in (5, 10, 15))


@pytest.fixture(scope="module")
def triples(tmp_path_factory) -> Path:
    """Files of triples, which a run turns into a store of its own."""
    folder, lines = tmp_path_factory.mktemp("triples"), random_triples(37, 3, 150)
    for name, part in (("train", lines[:130]), ("valid", lines[130:140]), ("test", lines[140:])):
        (folder / f"{name}.tsv").write_text("".join("\t".join(t) + "\n" for t in part))
    return folder


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Each test has its own memory file system and working folder."""
    monkeypatch.chdir(tmp_path)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def copied_config(triples: Path, folder: Path | str, url: str = URL, **changes):
    options = {"checkpoint__options": {"copy_to": url}, "train__epochs": 3}
    return config_of(triples, folder, **{**options, **changes})


def one_epoch(triples: Path, folder: Path, **changes):
    """A copied run of one epoch, which ends with the checkpoint FIRST."""
    return api.train(copied_config(triples, folder, **{"train__epochs": 1, **changes}))


def again(triples: Path, folder: Path, **changes):
    """The same command with run.resume auto, such as on another machine."""
    return one_epoch(triples, folder, run__resume="auto", **changes)


def download(url: str, folder: Path) -> Path:
    """As docs/how-to/resume-and-checkpoints.md says."""
    fs, path = fsspec.url_to_fs(url)
    fs.get(path, str(folder), recursive=True)
    return folder


def mark(url: str = URL) -> dict:
    fs, root = fsspec.url_to_fs(url)
    return json.loads(fs.cat_file(f"{root}/copy.json"))


def checkpoints(url: str = URL) -> list[str]:
    fs, root = fsspec.url_to_fs(url)
    return sorted(path.rpartition("/")[2] for path in fs.ls(f"{root}/checkpoints", detail=False))


def problem(run: Path) -> str:
    return mark_of(run)["problem"]


def warnings(caplog) -> list[str]:
    """The warnings about the copy."""
    ours = [r for r in caplog.records if r.name.endswith("copies")]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def epochs_of(run) -> list[int]:
    return [line["epoch"] for line in run.history if line["kind"] == "epoch"]


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
    left = [times]

    def fails(name, here):
        if name.endswith(".safetensors") and left[0]:
            left[0] -= 1
            raise ConnectionError("the network is down")

    return sending(fails)


# What is copied


def test_copy_has_what_a_run_needs(triples, tmp_path, capsys):
    """A download of it is a run, which resumes and is copied to the same place."""
    with patch.object(checkpoints_module, "SMALL", 0):  # a thread writes them
        run = api.train(copied_config(triples, tmp_path / "run"))
    fs, root = fsspec.url_to_fs(URL)
    for path in sorted(run.path.rglob("*")):
        name = str(path.relative_to(run.path))
        if path.is_file() and name not in (".lock", "copy.json"):
            assert fs.cat_file(f"{root}/{name}") == path.read_bytes(), name
    assert not fs.exists(f"{root}/.can-be-written")
    assert mark()["newest"] == checkpoints()[-1]
    assert checkpoints() == sorted(path.name for path in (run.path / "checkpoints").iterdir())
    for words in (["predict", URL, "--head", "e1", "--relation", "r1"], ["train", URL]):
        assert main(words) == 1
        assert f"{URL} is no folder; download the run first" in capsys.readouterr().err
    there = download(URL, tmp_path / "there")
    assert api.open_run(there).evaluate("test") == run.results["test"]
    longer = api.resume(there, {"train.epochs": 4})
    assert epochs_of(longer) == [1, 2, 3, 4] and mark()["newest"] == "step-000000000020"


def test_store_of_its_own_place_is_not_copied(tmp_path):
    store = tiny_store(tmp_path / "store").path
    one_epoch(store, tmp_path / "run").close()
    assert not MemoryFileSystem().exists("/copies/run/store")
    assert again(store, tmp_path / "other").results["train"]["epochs"] == 1


def test_files_are_sent_once_and_replaced_under_another_manifest(triples, tmp_path):
    """A step that was trained again has another checkpoint of the same name."""
    sent = []
    with sending(lambda name, file: sent.append(name)):
        api.train(copied_config(triples, tmp_path / "run", checkpoint__keep=1)).close()
        run = api.resume(tmp_path / "run", {"train.epochs": 5})
    assert len(sent) == len(set(sent)) and any(name.startswith("store/") for name in sent)
    assert checkpoints() == ["step-000000000025"]  # those before are pruned there too
    name, fs = f"checkpoints/{checkpoints()[0]}/manifest.json", MemoryFileSystem()
    fs.pipe_file(f"/copies/run/{name}", b"{}")
    with sending(lambda name, file: sent.append(name)):
        api.resume(run.path, {"train.epochs": 5}).close()
    assert len(sent) == len(set(sent)) + 1  # its rows came again, before the manifest
    assert fs.cat_file(f"/copies/run/{name}") == (run.path / name).read_bytes()


def test_checkpoint_stays_while_it_is_copied(triples, tmp_path, caplog):
    """It would be pruned three times over before it is copied."""
    waits, goes_on, newest = threading.Event(), threading.Event(), []

    def slow(name, file):
        newest.append(name) if "checkpoints" in name else None
        if FIRST in name:
            waits.set()
            goes_on.wait(60)
            assert file.exists()

    def trains_on(kind, values):
        if kind == "epoch" and values["epoch"] == 2:
            waits.wait(60)  # the first checkpoint is on its way
        elif kind == "epoch" and values["epoch"] == 5:
            goes_on.set()

    config = copied_config(triples, tmp_path / "run", train__epochs=6, checkpoint__keep=1)
    with sending(slow):
        api.train(config, [trains_on]).close()
    assert not warnings(caplog)
    assert FIRST in newest[0] and "step-000000000030" in newest[-1]


# Failures


def arriving_short():
    """A file system that cuts the first file of a checkpoint, without an error."""
    left = [1]

    def short(name, file):
        if name.endswith(".safetensors") and left:
            left.clear()
            MemoryFileSystem().pipe_file(f"/copies/run/{name}", file.read_bytes()[:-3])
            return False
        return True

    return sending(short)


@pytest.mark.parametrize(
    ("fault", "words"),
    [(lambda: failing(1), "the network is down"), (arriving_short, "arrived with")],
)
def test_failed_copy_is_tried_again(triples, tmp_path, caplog, fault, words):
    with fault():
        run = one_epoch(triples, tmp_path / "run")
    assert len([text for text in warnings(caplog) if "is tried again" in text]) == 1
    assert words in caplog.text and "NOT complete" not in caplog.text
    assert problem(run.path) == "" and mark()["newest"] == FIRST
    assert api.open_run(download(URL, tmp_path / "there")).model.num_entities == 37


def test_training_survives_a_copy_that_always_fails(triples, tmp_path, caplog, capsys):
    copied_config(triples, tmp_path / "run").save(tmp_path / "config.yaml")
    with failing(10**6):
        assert main(["train", str(tmp_path / "config.yaml")]) == 1
    assert "NOT complete: memory://copies/run cannot be written: ConnectionError" in caplog.text
    assert f"`train --resume {tmp_path}/run` copies the rest" in caplog.text
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["train"]["epochs"] == 3 and "copy of the run" not in capsys.readouterr().out
    assert "/copies/run/copy.json" not in MemoryFileSystem.store
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert "copy of the run: memory://copies/run" in capsys.readouterr().out
    assert mark()["newest"] == THIRD


def rank_dies_copying(config) -> None:
    """Die by SIGKILL in the middle of a file of the second checkpoint."""
    put = LocalFileSystem.put_file

    def dies(self, here, there, **more):
        if SECOND in str(there) and here.endswith(".safetensors"):
            Path(there).write_bytes(Path(here).read_bytes()[:100])
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, here, there, **more)

    def wait(kind, values):
        if kind == "epoch" and values["epoch"] == 2:
            while not os.path.exists(f"{config.checkpoint.options.copy_to[7:]}/copy.json"):
                time.sleep(0.01)

    with patch.object(LocalFileSystem, "put_file", dies):
        api.train(config, [wait])


def test_kill_during_a_copy_leaves_the_one_before(triples, tmp_path):
    url = f"file://{tmp_path}/nas/run"
    with pytest.raises(WorldError, match="died with exit code -9"):
        run_world(1, rank_dies_copying, copied_config(triples, tmp_path / "run", url))
    assert checkpoints(url) == [FIRST, SECOND]  # one is cut short
    fetch(url, tmp_path / "there")
    assert [path.name for path in (tmp_path / "there/checkpoints").iterdir()] == [FIRST]
    assert api.open_run(tmp_path / "there").model.num_entities == 37
    run = api.resume(tmp_path / "run")
    assert checkpoints(url) == sorted(path.name for path in (run.path / "checkpoints").iterdir())


# What is refused


def test_passwords_are_refused_and_not_shown(triples, tmp_path, capsys):
    for url in ("ftp://me:secret@host/run", "s3://bucket/run?token=secret"):
        with pytest.raises(ConfigError, match="must have no password") as caught:
            copied_config(triples, tmp_path / "run", url)
        assert "secret" not in str(caught.value) and KEY in str(caught.value)
        assert main(["predict", url, "--head", "a", "--relation", "b"]) == 1
        assert main(["train", "demo", f"--{KEY}={url}"]) == 1
        shown = capsys.readouterr()
        assert "secret" not in shown.err + shown.out
    for url in ("/mnt/nas/run", "zip://x::s3://bucket/y", "s3://", "file://nas/x"):
        with pytest.raises(ConfigError, match="must be a URL such as"):
            copied_config(triples, tmp_path / "run", url)
    copied_config(triples, tmp_path / "run", "abfs://container@account/run")


def test_places_that_take_no_copy_are_refused_before_training(triples, tmp_path):
    fsspec.register_implementation("vanished", "vanishedfs.core.FS", clobber=True)
    known_implementations["vanished"]["err"] = "Install vanishedfs"
    run = tmp_path / "run"
    (tmp_path / "file").touch()
    for url, error, words in (
        ("vanished://bucket/run", ConfigError, r"needs another package: Install vanishedfs$"),
        ("nosuch://bucket/run", ConfigError, "nosuch"),
        (f"file://{tmp_path}/file/run", CopyError, r"cannot be read .copy.json.: NotADirectoryErr"),
        *((f"file://{place}", ConfigError, "is, holds or is in the folder of the run")
          for place in (run, tmp_path, run / "copy")),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            api.train(copied_config(triples, run, url))
    with (
        patch.object(MemoryFileSystem, "pipe_file", side_effect=PermissionError("read only")),
        pytest.raises(CopyError, match=f"cannot be written .{KEY} null trains without.*read only"),
    ):
        api.train(copied_config(triples, run))
    assert not (run / "config.yaml").exists()


# Resuming elsewhere


def rank_trains(config) -> dict:
    with api.train(config) as run:
        return parameters(run.model)


def rank_dies(config, newest: str, url: str) -> None:
    """Train, and die by SIGKILL when the copy has a checkpoint and training is further."""

    def die(kind, values):
        if kind == "epoch" and values["epoch"] == 3:
            deadline = time.monotonic() + 20
            while not os.path.exists(f"{url.removeprefix('file://')}/copy.json") or (
                mark(url)["newest"] < newest
            ):
                assert time.monotonic() < deadline, "there is no such copy"
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)

    api.train(config, [die])


def test_resume_from_a_copy_is_bitwise(triples, tmp_path):
    url = f"file://{tmp_path}/nas/run"
    whole = run_world(2, rank_trains, longer_config(triples, tmp_path / "whole"))
    keys = {"checkpoint__options": {"copy_to": url}, "run__resume": "auto"}
    with pytest.raises(WorldError, match="died with exit code -9"):
        run_world(2, rank_dies, longer_config(triples, tmp_path / "run", **keys), SECOND, url)
    shutil.rmtree(tmp_path / "run")  # the machine and its disk are gone
    resumed = run_world(2, rank_trains, longer_config(triples, tmp_path / "other", **keys))
    assert largest_difference(whole[0], resumed[0]) == 0
    assert mark(url)["newest"] == newest_of(tmp_path / "other")  # it is copied to the same place
    assert json.loads((tmp_path / "nas/run/results.json").read_text())["train"]["epochs"] == 4
    assert problem(tmp_path / "other") == ""


def test_resume_auto_takes_the_further_one_of_folder_and_copy(triples, tmp_path):
    lines = one_epoch(triples, tmp_path / "run").history[:-1]
    other = again(triples, tmp_path / "other")
    assert other.history[:-1] == lines and other.config.run.dir == str(tmp_path / "other")
    api.resume(other.path, {"train.epochs": 2}).close()
    with pytest.raises(ConfigError, match=r"is further than .*run \(step-0*10 instead of step-0*5"):
        api.resume(tmp_path / "run")  # a disk that comes back
    run = again(triples, tmp_path / "run", train__epochs=2)
    assert epochs_of(run) == [1, 2]
    with failing(10**6):
        api.resume(run.path, {"train.epochs": 3})
    assert mark()["newest"] == SECOND and problem(run.path)
    run = again(triples, tmp_path / "run", train__epochs=3)  # which is further than the copy
    assert epochs_of(run) == [1, 2, 3] and mark()["newest"] == THIRD and not problem(run.path)


def test_other_runs_stay(triples, tmp_path):
    one_epoch(triples, tmp_path / "run").close()
    before = mark()
    with pytest.raises(ConfigError, match="already holds another run; name another URL"):
        api.train(copied_config(triples, tmp_path / "new"))
    assert not (tmp_path / "new" / "config.yaml").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match="holds something else than the run at"):
        again(triples, tmp_path / "mine")
    made = extend(tmp_path / "run", {"train": [("e1", "r1", "new")]}, tmp_path / "new", epochs=1)
    assert made.config.checkpoint.options.copy_to is None and mark() == before
    where = {KEY: "memory://copies/less"}
    extend(made.path, None, tmp_path / "less", delete=["e1"], overrides=where).close()
    assert mark("memory://copies/less")["newest"] == "step-000000000000"


def test_fetch_that_is_killed_goes_on(triples, tmp_path):
    one_epoch(triples, tmp_path / "run").close()
    with (
        patch.object(MemoryFileSystem, "get_file", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        fetch(URL, tmp_path)
    assert not (tmp_path / "config.yaml").exists()
    fetch(URL, tmp_path)
    assert api.open_run(tmp_path).model.num_entities == 37
    assert not (tmp_path / ".fetched").exists()


def test_damaged_checkpoint_of_a_copy_is_skipped(triples, tmp_path, caplog):
    api.train(copied_config(triples, tmp_path / "run")).close()
    fs = MemoryFileSystem()
    fs.pipe_file(f"/copies/run/checkpoints/{THIRD}/rank-00000.safetensors", b"short")
    fetch(URL, tmp_path / "one")
    assert api.open_run(tmp_path / "one").model.num_entities == 37
    assert any(f"{THIRD} is damaged" in text for text in warnings(caplog))
    assert [path.name for path in (tmp_path / "one/checkpoints").iterdir()] == [SECOND]
    fs.pipe_file(f"/copies/run/checkpoints/{SECOND}/manifest.json", b"short")
    with pytest.raises(CopyError, match="has no checkpoint that is whole"):
        fetch(URL, tmp_path / "two")
    content = bytearray(fs.cat_file("/copies/run/store/train.npy"))
    content[-1] ^= 1
    fs.pipe_file("/copies/run/store/train.npy", bytes(content))
    with pytest.raises(Damaged, match=f"{URL}/store is damaged: the checksum of train.npy does"):
        fetch(URL, tmp_path / "three")
    assert not (tmp_path / "three/store").exists()


def test_copy_of_somebody_else_stays_in_its_folder(triples, tmp_path):
    one_epoch(triples, tmp_path / "run").close()
    there = mark()

    def raises(message, name="copy.json", **values):
        MemoryFileSystem().pipe_file("/copies/run/copy.json", json.dumps(there).encode())
        MemoryFileSystem().pipe_file(f"/copies/run/{name}", json.dumps(there | values).encode())
        with pytest.raises(CopyError, match=message):
            fetch(URL, tmp_path / "here")

    raises("names a file outside of the run: '../x'", newest="../x")
    raises("names a file outside of the run: '/x'", "store/meta.json", files={"/x": 1})
    for damaged in (b"{", b'{"run": 2}'):
        MemoryFileSystem().pipe_file("/copies/run/copy.json", damaged)
        with pytest.raises(CopyError, match=r"has a damaged copy.json"):
            fetch(URL, tmp_path / "here")
