"""Runs that are copied to a URL while they train, and that other machines resume and use."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from unittest.mock import patch

import fsspec
import pytest
from disk_runs import DISK
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from training_runs import (
    config_of,
    largest_difference,
    longer_config,
    parameters,
    random_triples,
    tiny_store,
)
from worlds import WorldError, run_world

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.training import copier as copying
from kge_torchrec.training.remote_runs import CopyError, cache_of, copy_problem, fetch, newest_of

KEY = "checkpoint.options.copy_to"
URL = "memory://copies/run"


@pytest.fixture(scope="module")
def triples(tmp_path_factory) -> Path:
    """Files of triples, which a run turns into a store of its own."""
    return files_of(tmp_path_factory.mktemp("triples"), seed=0)


def files_of(folder: Path, seed: int) -> Path:
    lines = random_triples(37, 3, 150, seed)
    for name, part in (("train", lines[:130]), ("valid", lines[130:140]), ("test", lines[140:])):
        (folder / f"{name}.tsv").write_text("".join("\t".join(t) + "\n" for t in part))
    return folder


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """A cache and a memory file system for each test, and no pauses."""
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


def rank_resumes(url: str, folder: str) -> dict:
    with api.resume(url, {"run.dir": folder}) as run:
        return parameters(run.model)


@pytest.mark.parametrize(
    "ranks, placement",
    [pytest.param(1, "memory", marks=pytest.mark.slow), (2, "memory"), (1, "disk")],
)
def test_resume_from_a_copy_is_bitwise(triples, tmp_path, ranks, placement):
    url, options = f"file://{tmp_path}/nas/run", DISK if placement == "disk" else {}
    whole = run_world(ranks, rank_trains, longer_config(triples, tmp_path / "whole", **options))
    options = {"checkpoint__options": {"copy_to": url}, **options}
    config = longer_config(triples, tmp_path / "run", **options)
    with pytest.raises(WorldError, match="died with exit code -9"):
        run_world(ranks, rank_dies, config, "step-000000000010", url)
    shutil.rmtree(tmp_path / "run")  # the machine and its disk are gone
    again = run_world(ranks, rank_resumes, url, str(tmp_path / "other"))
    assert largest_difference(whole[0], again[0]) == 0
    assert mark(url)["newest"] == newest_of(tmp_path / "other")  # it is copied to the same place
    assert json.loads(mark(url)["texts"]["results.json"])["train"]["epochs"] == 4
    assert copy_problem(tmp_path / "other") == ""


def test_resume_auto_takes_the_copy(triples, tmp_path):
    options = {"run__resume": "auto"}
    run = api.train(copied_config(triples, tmp_path / "run", train__epochs=2, **options))
    lines = run.history[:-1]
    shutil.rmtree(run.path)
    again = api.train(copied_config(triples, tmp_path / "run", train__epochs=2, **options))
    assert again.history[:-1] == lines  # it has trained nothing
    with pytest.raises(ConfigError, match="already holds another run; resume it with"):
        api.train(copied_config(triples, tmp_path / "new"))
    assert not (tmp_path / "new" / "config.yaml").exists()


def test_folder_behind_its_copy_is_brought_forward(triples, tmp_path):
    """A disk that comes back after another machine has trained further."""
    api.train(copied_config(triples, tmp_path / "run", train__epochs=1)).close()
    api.resume(URL, {"run.dir": str(tmp_path / "other"), "train.epochs": 2}).close()
    with pytest.raises(ConfigError, match=r"is further than .*run \(step-0*10 instead of step-0*5"):
        api.resume(tmp_path / "run")
    run = api.resume(URL, {"run.dir": str(tmp_path / "run"), "train.epochs": 3})
    assert [line["epoch"] for line in run.history if line["kind"] == "epoch"] == [1, 2, 3]
    assert run.config.run.dir == str(tmp_path / "run")
    run = api.resume(URL, {"run.dir": str(tmp_path / "run"), "train.epochs": 4})  # it is as far
    assert mark()["newest"] == "step-000000000020"


def test_folder_that_is_further_than_its_copy_stays(triples, tmp_path):
    run = api.train(copied_config(triples, tmp_path / "run", train__epochs=1))
    with failing(10**6):
        api.resume(run.path, {"train.epochs": 2})
    assert mark()["newest"] == "step-000000000005" and copy_problem(run.path)
    run = api.resume(URL, {"run.dir": str(run.path)})
    assert [line["epoch"] for line in run.history if line["kind"] == "epoch"] == [1, 2]
    assert mark()["newest"] == "step-000000000010" and not copy_problem(run.path)


def test_default_folder_of_a_resumed_copy(triples, tmp_path):
    api.train(copied_config(triples, tmp_path / "gone", train__epochs=1)).close()
    assert api.resume(f"{URL}/", {"train.epochs": 2}).path == Path("runs/run")
    fs = MemoryFileSystem()
    fs.copy("/copies/run", "/copies/moved", recursive=True)
    run = api.resume("memory://copies/moved", {"run.dir": "moved", "train.epochs": 3})
    assert run.config.checkpoint.saving.copy_to == "memory://copies/moved"
    assert mark("memory://copies/moved")["newest"] > mark()["newest"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match="holds something else than the run at"):
        api.resume(URL, {"run.dir": str(tmp_path / "mine")})


# What is copied


@pytest.mark.parametrize("background", ["none", "fork"])
def test_copy_has_what_a_run_needs(triples, tmp_path, background):
    options = {"checkpoint__options": {"copy_to": URL, "background": background}}
    run = api.train(copied_config(triples, tmp_path / "run", **options))
    fs, root = fsspec.url_to_fs(URL)
    for path in sorted(run.path.rglob("*")):
        name = str(path.relative_to(run.path))
        if path.is_file() and name not in (".lock", "copied.json"):
            assert fs.cat_file(f"{root}/{name}") == path.read_bytes(), name
    assert not fs.exists(f"{root}/.can-be-written")
    assert checkpoints() == sorted(mark()["checkpoints"])
    assert checkpoints() == sorted(path.name for path in (run.path / "checkpoints").iterdir())


def test_store_of_its_own_place_is_not_copied(tmp_path):
    store = tiny_store(tmp_path / "store").path
    api.train(copied_config(store, tmp_path / "run", train__epochs=1)).close()
    assert mark()["files"] == {}
    assert api.open_run(URL).results["train"]["epochs"] == 1


def test_files_of_checkpoints_are_sent_once(triples, tmp_path):
    sent, put = [], MemoryFileSystem.put_file

    def counted(self, here, there, **more):
        sent.append(there.removeprefix("/copies/run/"))
        put(self, here, there, **more)

    with patch.object(MemoryFileSystem, "put_file", counted):
        api.train(copied_config(triples, tmp_path / "run", checkpoint__keep=1)).close()
        api.resume(tmp_path / "run", {"train.epochs": 5}).close()
    assert len(sent) == len(set(sent)) and any(name.startswith("store/") for name in sent)
    assert checkpoints() == ["step-000000000025"]  # those before are pruned there too


def test_checkpoint_stays_while_it_is_copied(triples, tmp_path, caplog):
    """It would be pruned three times over before it is copied."""
    put, goes_on = MemoryFileSystem.put_file, threading.Event()
    marks = []

    def slow(self, here, there, **more):
        if "step-000000000005" in there:
            goes_on.wait(60)
            assert Path(here).exists()
        put(self, here, there, **more)

    def release(kind, values):
        if kind == "epoch" and values["epoch"] == 5:
            goes_on.set()

    write = copying.RemoteFolder.write

    def noted(self, name, content):
        if name == "copy.json":
            marks.append(json.loads(content)["newest"])
        write(self, name, content)

    def trains_on(kind, values):  # the first checkpoint is on its way
        release(kind, values)
        while kind == "epoch" and values["epoch"] == 2 and not waits.is_set():
            time.sleep(0.01)

    waits, wait = threading.Event(), goes_on.wait

    def waiting(seconds):
        waits.set()
        return wait(seconds)

    goes_on.wait = waiting
    config = copied_config(triples, tmp_path / "run", train__epochs=6, checkpoint__keep=1)
    with (
        patch.object(MemoryFileSystem, "put_file", slow),
        patch.object(copying.RemoteFolder, "write", noted),
    ):
        api.train(config, [trains_on]).close()
    assert not warnings(caplog)
    assert marks[0] == "step-000000000005" and marks[-1] == "step-000000000030"


# Failures


def failing(times: int, of: str = "checkpoints/"):
    """A file system whose network fails a few times in the middle of a checkpoint."""
    put, left, sent = MemoryFileSystem.put_file, [times], set()

    def fails(self, here, there, **more):
        if of in there and here.endswith(".bin") and left[0]:
            left[0] -= 1
            raise ConnectionError("the network is down")
        assert there not in sent or left[0] > 9, "it is sent again"
        sent.add(there)
        put(self, here, there, **more)

    return patch.object(MemoryFileSystem, "put_file", fails)


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
    put, left = MemoryFileSystem.put_file, [1]

    def short(self, here, there, **more):
        if here.endswith(".bin") and left[0]:
            left[0] -= 1
            self.pipe_file(there, Path(here).read_bytes()[:-3])
        else:
            put(self, here, there, **more)

    with patch.object(MemoryFileSystem, "put_file", short):
        api.train(copied_config(triples, tmp_path / "run", train__epochs=1)).close()
    assert any("arrived with" in text for text in warnings(caplog))
    assert api.open_run(URL).model.num_entities == 37


def rank_dies_copying(config) -> None:
    """Die by SIGKILL in the middle of a file of the second checkpoint."""
    put = LocalFileSystem.put_file

    def dies(self, here, there, **more):
        if "step-000000000010" in str(there) and here.endswith(".bin"):
            Path(there).write_bytes(Path(here).read_bytes()[:100])
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, here, there, **more)

    def wait(kind, values):
        if kind == "epoch" and values["epoch"] == 2:
            while not os.path.exists(f"{config.checkpoint.saving.copy_to[7:]}/copy.json"):
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
    put, waits, ends = MemoryFileSystem.put_file, threading.Event(), threading.Event()
    write, marks = copying.RemoteFolder.write, []

    def slow(self, here, there, **more):
        if "step-000000000005" in there:
            waits.set()
            ends.wait(60)
        return put(self, here, there, **more)

    def noted(self, name, content):
        if name == "copy.json":
            marks.append(json.loads(content)["newest"])
        write(self, name, content)

    finish = copying.Copier.finish

    def finishing(self):
        self._ends.set()
        ends.set()
        finish(self)

    with (
        patch.object(MemoryFileSystem, "put_file", slow),
        patch.object(copying.Copier, "finish", finishing),
        patch.object(copying.RemoteFolder, "write", noted),
    ):
        config = copied_config(triples, tmp_path / "run", checkpoint__keep=1)
        api.train(config, [lambda kind, v: (kind, v["epoch"]) != ("epoch", 2) or waits.wait(60)])
    assert not warnings(caplog)
    assert marks == ["step-000000000015"]


def test_second_writer_stops_the_first(triples, tmp_path, caplog):
    """A machine that was believed dead copies nothing any more."""

    def other(kind, values):
        if kind == "epoch" and values["epoch"] == 2:
            while "/copies/run/copy.json" not in MemoryFileSystem.store:
                time.sleep(0.01)
            MemoryFileSystem().pipe_file(
                "/copies/run/copy.json", json.dumps({**mark(), "writer": "else"}).encode()
            )

    api.train(copied_config(triples, tmp_path / "run"), [other]).close()
    assert any("another process copies a run there" in text for text in warnings(caplog))
    assert mark()["newest"] == "step-000000000005" and copy_problem(tmp_path / "run")


# Reading


def test_verbs_take_the_url_of_a_run(triples, tmp_path, capsys):
    config = copied_config(triples, tmp_path / "run", evaluation__every=1)
    here = api.train(config).evaluate("valid")
    query = ["--head", "e1", "--relation", "r1"]
    assert main(["predict", URL, *query]) == 0
    there = capsys.readouterr()
    assert f"fetching {URL} into {cache_of(URL)}" in there.err
    assert main(["predict", str(tmp_path / "run"), *query]) == 0
    assert capsys.readouterr().out == there.out
    for words in (["evaluate", URL, "--by", "relation"], ["export", URL, "-o", "exported"],
                  ["report", URL], ["export", str(tmp_path / "run"), "-o", "e2", "--changed-since",
                                    URL]):  # fmt: skip
        assert main(words) == 0
        assert "fetching" not in capsys.readouterr().err  # once is enough
    assert (cache_of(URL) / "evaluation-test-by-relation.json").is_file()  # it stays here
    assert (cache_of(URL) / "report.html").is_file()
    assert api.evaluate(URL, "valid") == here


def test_cache_follows_the_copy(triples, tmp_path):
    api.train(copied_config(triples, tmp_path / "run", checkpoint__keep=1)).close()
    assert api.open_run(URL).results["train"]["epochs"] == 3
    names = []
    for epochs in (4, 5, 6):
        api.resume(tmp_path / "run", {"train.epochs": epochs}).close()
        run = api.open_run(URL)
        assert run.results["train"]["epochs"] == epochs
        names.append(sorted(path.name[-2:] for path in (run.path / "checkpoints").iterdir()))
    # Those of the state before stay for processes that are reading them.
    assert names == [["15", "20"], ["20", "25"], ["25", "30"]]
    MemoryFileSystem.store.clear()
    with pytest.raises(ConfigError, match="there is no run at"):
        api.open_run(URL)
    (tmp_path / "others").mkdir()
    others = files_of(tmp_path / "others", seed=1)
    api.train(copied_config(others, tmp_path / "new", train__epochs=1)).close()
    run = api.open_run(URL)  # another run at the same place
    assert run.results["train"]["epochs"] == 1 and run.model.num_entities == 37
    assert [path.name[-2:] for path in (run.path / "checkpoints").iterdir()] == ["05"]


def test_fetch_that_is_killed_goes_on(triples, tmp_path):
    api.train(copied_config(triples, tmp_path / "run")).close()
    with (
        patch.object(MemoryFileSystem, "get_file", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        api.open_run(URL)
    assert not (cache_of(URL) / "config.yaml").exists()
    assert api.open_run(URL).model.num_entities == 37


@pytest.mark.parametrize("file", ["rank-00000.bin", "manifest.json"])
def test_damaged_checkpoint_of_a_copy_is_skipped(triples, tmp_path, caplog, file):
    api.train(copied_config(triples, tmp_path / "run")).close()
    MemoryFileSystem().pipe_file(f"/copies/run/checkpoints/step-000000000015/{file}", b"short")
    run = api.open_run(URL)
    assert run.model.num_entities == 37
    assert any("step-000000000015 at memory:" in text for text in warnings(caplog))
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-000000000010"]
    MemoryFileSystem().pipe_file(f"/copies/run/checkpoints/step-000000000010/{file}", b"short")
    shutil.rmtree(run.path)
    with pytest.raises(CopyError, match="has no checkpoint that is whole"):
        api.open_run(URL)


def test_damaged_store_of_a_copy_is_refused(triples, tmp_path):
    api.train(copied_config(triples, tmp_path / "run", train__epochs=1)).close()
    name = next(name for name in mark()["files"] if name.endswith(".npy"))
    content = bytearray(MemoryFileSystem().cat_file(f"/copies/run/{name}"))
    content[-1] ^= 1
    MemoryFileSystem().pipe_file(f"/copies/run/{name}", bytes(content))
    with pytest.raises(CopyError, match=f"{name} is damaged: its checksum does not match"):
        api.open_run(URL)


def test_copy_of_somebody_else_stays_in_its_folder(tmp_path):
    bad = {"format": 1, "texts": {"../x": "y"}, "files": {}, "checkpoints": {}}
    MemoryFileSystem().pipe_file("/copies/run/copy.json", json.dumps(bad).encode())
    with pytest.raises(CopyError, match="names a file outside of the run"):
        api.open_run(URL)
    MemoryFileSystem().pipe_file("/copies/run/copy.json", json.dumps({**bad, "format": 2}).encode())
    with pytest.raises(CopyError, match="is a copy of format 2; the latest known is 1"):
        api.open_run(URL)
    MemoryFileSystem().pipe_file("/copies/run/copy.json", b"{")
    with pytest.raises(CopyError, match=r"has a damaged copy.json"):
        fetch(URL, tmp_path / "here")


def test_extended_run_is_not_copied_over_the_old_one(triples, tmp_path):
    api.train(copied_config(triples, tmp_path / "run", train__epochs=1)).close()
    before = mark()
    new = {"train": [("e1", "r1", "new")]}
    made = api.extend(URL, new, tmp_path / "new", epochs=1)
    assert made.config.checkpoint.saving.copy_to is None and mark() == before
    where = {KEY: "memory://copies/new"}
    api.extend(URL, new, tmp_path / "copied", epochs=1, overrides=where).close()
    assert api.open_run("memory://copies/new").entity_labels.ids(["new"]).tolist() == [37]
    api.extend(URL, None, tmp_path / "less", delete=["e1"], overrides={KEY: "memory://copies/less"})
    assert len(api.open_run("memory://copies/less").entity_labels.array) == 36


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
    with pytest.raises(ConfigError, match=r"needs another package: pip install vanishedfs$"):
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
