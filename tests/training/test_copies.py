"""Copies of runs at a URL: what is copied while a run trains, failures, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from unittest.mock import patch

import fsspec
import pytest
from copied_runs import (
    KEY,
    URL,
    checkpoints,
    copied_config,
    failing,
    files_of,
    keep_apart,
    mark,
    newest_copied,
    sending,
    warnings,
)
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from training_runs import tiny_store
from worlds import WorldError, run_world

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.training import checkpoints as checkpoints_module
from kge_torchrec.training import copier as copying
from kge_torchrec.training.remote_runs import CopyError, copy_problem


@pytest.fixture(scope="module")
def triples(tmp_path_factory) -> Path:
    """Files of triples, which a run turns into a store of its own."""
    return files_of(tmp_path_factory.mktemp("triples"), seed=0)


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    keep_apart(tmp_path, monkeypatch)


# What is copied


def test_copy_has_what_a_run_needs(triples, tmp_path):
    with patch.object(checkpoints_module, "SMALL", 0):  # a thread writes them
        run = api.train(copied_config(triples, tmp_path / "run"))
    fs, root = fsspec.url_to_fs(URL)
    for path in sorted(run.path.rglob("*")):
        name = str(path.relative_to(run.path))
        if path.is_file() and name not in (".lock", "copied.json"):
            assert fs.cat_file(f"{root}/{name}") == path.read_bytes(), name
    assert not fs.exists(f"{root}/.can-be-written")
    assert mark()["newest"] == checkpoints()[-1]
    assert checkpoints() == sorted(path.name for path in (run.path / "checkpoints").iterdir())


def test_store_of_its_own_place_is_not_copied(tmp_path):
    store = tiny_store(tmp_path / "store").path
    api.train(copied_config(store, tmp_path / "run", train__epochs=1)).close()
    assert not MemoryFileSystem().exists("/copies/run/store")
    assert api.open_run(URL).results["train"]["epochs"] == 1


def test_files_of_checkpoints_are_sent_once(triples, tmp_path):
    sent = []
    with sending(lambda name, file: sent.append(name)):
        api.train(copied_config(triples, tmp_path / "run", checkpoint__keep=1)).close()
        api.resume(tmp_path / "run", {"train.epochs": 5}).close()
    assert len(sent) == len(set(sent)) and any(name.startswith("store/") for name in sent)
    assert checkpoints() == ["step-000000000025"]  # those before are pruned there too


def test_files_under_another_manifest_are_replaced(triples, tmp_path):
    """A step that was trained again has another checkpoint of the same name."""
    run = api.train(copied_config(triples, tmp_path / "run", train__epochs=2))
    name = "checkpoints/step-000000000010/manifest.json"
    MemoryFileSystem().pipe_file(f"/copies/run/{name}", b"{}")
    sent = []
    with sending(lambda name, file: sent.append(name)):
        api.resume(run.path, {"train.epochs": 3}).close()
    assert "checkpoints/step-000000000010/rank-00000.safetensors" in sent
    assert MemoryFileSystem().cat_file(f"/copies/run/{name}") == (run.path / name).read_bytes()


def test_checkpoint_stays_while_it_is_copied(triples, tmp_path, caplog):
    """It would be pruned three times over before it is copied."""
    waits, goes_on = threading.Event(), threading.Event()

    def slow(name, file):
        if "step-000000000005" in name:
            waits.set()
            goes_on.wait(60)
            assert file.exists()

    def trains_on(kind, values):
        if kind == "epoch" and values["epoch"] == 2:
            waits.wait(60)  # the first checkpoint is on its way
        elif kind == "epoch" and values["epoch"] == 5:
            goes_on.set()

    config = copied_config(triples, tmp_path / "run", train__epochs=6, checkpoint__keep=1)
    with sending(slow), newest_copied() as newest:
        api.train(config, [trains_on]).close()
    assert not warnings(caplog)
    assert newest[0] == "step-000000000005" and newest[-1] == "step-000000000030"


# Failures


def test_failed_copy_is_tried_again(triples, tmp_path, caplog):
    with failing(2):
        run = api.train(copied_config(triples, tmp_path / "run", train__epochs=1))
    assert len([text for text in warnings(caplog) if "is tried again" in text]) == 2
    assert "the network is down" in caplog.text and "NOT complete" not in caplog.text
    assert copy_problem(run.path) == "" and mark()["newest"] == "step-000000000005"


def test_training_survives_a_copy_that_always_fails(triples, tmp_path, caplog, capsys):
    copied_config(triples, tmp_path / "run").save(tmp_path / "config.yaml")
    with failing(10**6):
        assert main(["train", str(tmp_path / "config.yaml")]) == 1
    assert "NOT complete: memory://copies/run cannot be written: ConnectionError" in caplog.text
    assert f"`train --resume {tmp_path}/run` copies the rest" in caplog.text
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["train"]["epochs"] == 3 and "copy of the run" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match="there is no run at memory://copies/run"):
        api.open_run(URL)
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert "copy of the run: memory://copies/run" in capsys.readouterr().out
    assert api.open_run(URL).results["test"] == results["test"]


def test_file_that_arrives_short_is_noticed(triples, tmp_path, caplog):
    left = [1]

    def short(name, file):
        if name.endswith(".safetensors") and left:
            left.clear()
            MemoryFileSystem().pipe_file(f"/copies/run/{name}", file.read_bytes()[:-3])
            return False
        return True

    with sending(short):
        api.train(copied_config(triples, tmp_path / "run", train__epochs=1)).close()
    assert any("arrived with" in text for text in warnings(caplog))
    assert api.open_run(URL).model.num_entities == 37


def rank_dies_copying(config) -> None:
    """Die by SIGKILL in the middle of a file of the second checkpoint."""
    put = LocalFileSystem.put_file

    def dies(self, here, there, **more):
        if "step-000000000010" in str(there) and here.endswith(".safetensors"):
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
    assert checkpoints(url) == ["step-000000000005", "step-000000000010"]  # one is cut short
    there = api.open_run(url)
    assert [path.name for path in (there.path / "checkpoints").iterdir()] == ["step-000000000005"]
    assert there.model.num_entities == 37
    run = api.resume(tmp_path / "run")
    assert checkpoints(url) == sorted(path.name for path in (run.path / "checkpoints").iterdir())
    assert api.open_run(url).results["test"] == run.results["test"]


def test_end_of_training_does_not_wait_for_an_older_checkpoint(triples, tmp_path, caplog):
    """A signal that a machine will vanish: the newest checkpoint is copied next."""
    waits, ends, finish = threading.Event(), threading.Event(), copying.Copier.finish

    def slow(name, file):
        if "step-000000000005" in name:
            waits.set()
            ends.wait(60)

    def finishing(self):
        self._ends.set()
        ends.set()
        finish(self)

    config = copied_config(triples, tmp_path / "run", checkpoint__keep=1)
    with (
        sending(slow),
        patch.object(copying.Copier, "finish", finishing),
        newest_copied() as newest,
    ):
        api.train(config, [lambda kind, v: (kind, v["epoch"]) != ("epoch", 2) or waits.wait(60)])
    assert not warnings(caplog)
    assert newest == ["step-000000000015"]


def test_second_writer_stops_the_first(triples, tmp_path, caplog):
    """A machine that was believed dead copies nothing any more."""

    def other(kind, values):
        if kind == "epoch" and values["epoch"] == 2:
            while "/copies/run/copy.json" not in MemoryFileSystem.store:
                time.sleep(0.01)
            MemoryFileSystem().pipe_file(
                "/copies/run/copy.json", json.dumps({**mark(), "state": "else"}).encode()
            )

    api.train(copied_config(triples, tmp_path / "run"), [other]).close()
    assert any("another process copies a run there" in text for text in warnings(caplog))
    assert mark()["newest"] == "step-000000000005" and copy_problem(tmp_path / "run")


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


def test_missing_package_of_a_file_system_is_named(triples, tmp_path):
    fsspec.register_implementation("vanished", "vanishedfs.core.FS", clobber=True)
    from fsspec.registry import known_implementations

    known_implementations["vanished"]["err"] = "Install vanishedfs"
    with pytest.raises(ConfigError, match=r"needs another package: Install vanishedfs$"):
        api.train(copied_config(triples, tmp_path / "run", "vanished://bucket/run"))
    assert not (tmp_path / "run" / "config.yaml").exists()
    with pytest.raises(ConfigError, match="nosuch"):
        api.open_run("nosuch://bucket/run")


def test_place_that_cannot_be_written_is_refused_before_training(triples, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CopyError, match=r"cannot be read .copy.json.: NotADirectoryError"):
        api.train(copied_config(triples, tmp_path / "run", f"file://{tmp_path}/file/run"))
    with (
        patch.object(MemoryFileSystem, "pipe_file", side_effect=PermissionError("read only")),
        pytest.raises(CopyError, match=f"cannot be written .{KEY} null trains without.*read only"),
    ):
        api.train(copied_config(triples, tmp_path / "run"))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_run_is_not_copied_into_itself(triples, tmp_path):
    run = tmp_path / "run"
    for place in (run, tmp_path, run / "copy"):
        with pytest.raises(ConfigError, match="is, holds or is in the folder of the run"):
            api.train(copied_config(triples, run, f"file://{place}"))


def test_failed_start_leaves_no_copy(triples, tmp_path):
    config = copied_config(triples, tmp_path / "run", train__lr=1e30)
    with pytest.raises(Exception, match=r"not finite|NaN|nan|inf"):
        api.train(config)
    assert "/copies/run/copy.json" not in MemoryFileSystem.store
    assert not (tmp_path / "run" / "copied.json").exists()
    api.train(copied_config(triples, tmp_path / "run", train__epochs=1)).close()
