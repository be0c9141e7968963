"""Graphs that are prepared on disk: what a later start finds, and what it does again."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import large_graphs
import pytest
from large_graphs import contents, names, some_triples, tiny_bounds, write

from kge_torchrec.data import large
from kge_torchrec.data.large import labels, rows, work
from kge_torchrec.data.large.work import WorkFolder
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers import delimited
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError, StoreError


@pytest.fixture
def tiny() -> Iterator[None]:
    """Take every graph for large, and cut it into many batches, groups, partitions and buckets."""
    with tiny_bounds():
        yield


class Killed(BaseException):
    """Stands for the end of the process."""


def stages_of(tmp_path: Path) -> list[str]:
    """Prepare a graph, and return its stages in order."""
    done: list[str] = []
    real = WorkFolder.once

    def noted(self, stage, make, *obsolete):
        result = real(self, stage, make, *obsolete)
        done.append(stage)
        return result

    with mock.patch.object(WorkFolder, "once", noted):
        prepare(tmp_path / "x.tsv", tmp_path / "whole", memory=2, progress=False)
    return done


@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
def test_killed_at_each_stage(tmp_path, tiny, before):
    """A later start does no finished stage again, and its store is the same to the byte."""
    write(tmp_path / "x.tsv", some_triples())
    stages = stages_of(tmp_path)
    assert len(stages) > 12 and any("group 1" in stage for stage in stages)
    made: list[str] = []
    real = WorkFolder.once
    for stop in stages:

        def stopping(self, stage, make, *obsolete, stop=stop):
            def counted():
                made.append(stage)
                return make()

            if before and stage == stop:
                make()  # its files are written, and it is not noted
                raise Killed
            result = real(self, stage, counted, *obsolete)
            if stage == stop:
                raise Killed
            return result

        with mock.patch.object(WorkFolder, "once", stopping), pytest.raises(Killed):
            prepare(tmp_path / "x.tsv", tmp_path / "store", memory=2, progress=False)
        assert names(tmp_path) == [".store.unfinished", "whole", "x.tsv"]
        finished = len(made)
        with mock.patch.object(WorkFolder, "once", lambda self, stage, make, *obsolete: real(
            self, stage, lambda: made.append(stage) or make(), *obsolete
        )):  # fmt: skip
            prepare(tmp_path / "x.tsv", tmp_path / "store", memory=2, progress=False)
        assert not set(made[:finished]) & set(made[finished:]) - {"number"}
        assert contents(tmp_path / "store") == contents(tmp_path / "whole")
        assert names(tmp_path) == ["store", "whole", "x.tsv"]
        shutil.rmtree(tmp_path / "store")
        made.clear()


def fails_after(count: int):
    """Return a function that writes batches, and is killed when it should write one more."""
    real, written = labels._write_batch, []

    def write_some(path, split, batch):
        if len(written) == count:
            raise Killed
        written.append(path.name)
        real(path, split, batch)

    return write_some


def test_batches_that_are_there_are_not_written_again(tmp_path, tiny, caplog):
    write(tmp_path / "x.tsv", some_triples())
    whole = prepare(tmp_path / "x.tsv", tmp_path / "whole", memory=2, progress=False)
    with mock.patch.object(labels, "_write_batch", fails_after(3)), pytest.raises(Killed):
        prepare(tmp_path / "x.tsv", tmp_path / "store", memory=2, progress=False)
    again = mock.Mock(side_effect=labels._write_batch)
    with mock.patch.object(labels, "_write_batch", again):
        prepare(tmp_path / "x.tsv", tmp_path / "store", memory=2, progress=False)
    assert "batch-000000.arrays" not in {call.args[0].name for call in again.call_args_list}
    assert contents(tmp_path / "store") == contents(whole.path)
    assert sum("keeps what is finished" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("change", ["file", "seed", "state", "store"])
def test_other_files_and_options_start_over(tmp_path, tiny, caplog, change):
    path, options = write(tmp_path / "x.tsv", some_triples()), {"memory": 2.0, "seed": 0}
    with mock.patch.object(rows, "write_places", side_effect=Killed), pytest.raises(Killed):
        prepare(path, tmp_path / "store", progress=False, **options)
    unfinished = tmp_path / ".store.unfinished"
    why = change
    if change == "file":
        write(path, some_triples(seed=1))
        why = "sources"
    elif change == "state":
        (unfinished / work.STATE).write_text("{")
        why = "state.json is damaged"
    elif change == "store":  # as after a kill between the last two steps
        shutil.rmtree(unfinished / work.STORE)
        why = "the store was finished"
    else:
        options["seed"] += 1
        why = "seed changed"
    caplog.clear()
    prepare(path, tmp_path / "store", progress=False, **options)
    assert [message for message in caplog.messages if message.startswith("starts over: ")] == [
        f"starts over: {why} changed since an earlier start" if change == "file"
        else f"starts over: {why} since an earlier start"
    ]  # fmt: skip
    prepare(path, tmp_path / "other", progress=False, **options)
    assert contents(tmp_path / "store") == contents(tmp_path / "other")


SLOW = """
import os
import sys
sys.path[:0] = {path!r}
import time
from large_graphs import tiny_bounds
from kge_torchrec.data.large import {module}
from kge_torchrec.data.prepare import prepare
real = {module}.{name}
def slow(*args, **options):
    os.write(1, b"now\\n")  # whole, by any thread
    time.sleep({sleep})
    return real(*args, **options)
{module}.{name} = slow
with tiny_bounds():
    prepare({source!r}, {store!r}, memory=2)
"""


@pytest.mark.parametrize(
    "module, name, calls", [("labels", "_write_batch", 5), ("rows", "write_places", 1)]
)
def test_sigkill(tmp_path, tiny, module, name, calls):
    """A process that is killed while it reads, splits or sorts leaves what the next one needs."""
    path = write(tmp_path / "x.tsv", some_triples())
    code = SLOW.format(
        path=[str(Path(large_graphs.__file__).parent), str(Path(large.__file__).parents[3])],
        module=module, name=name, source=str(path), store=str(tmp_path / "store"),
        sleep=60 if calls == 1 else 0.05,
    )  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(calls):
        assert process.stdout.readline() == "now\n"
    with pytest.raises(StoreError, match="another process prepares this store"):
        prepare(path, tmp_path / "store", memory=2, progress=False)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert names(tmp_path) == [".store.unfinished", "x.tsv"]
    prepare(path, tmp_path / "store", memory=2, progress=False)
    prepare(path, tmp_path / "whole", memory=2, progress=False)
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")
    assert names(tmp_path) == ["store", "whole", "x.tsv"]


def test_a_later_start_knows_the_literals(tmp_path, tiny):
    lines = (f'<a{i % 9}> <r> <b{i % 7}> .\n<a{i % 9}> <s> "x" .\n' for i in range(200))
    (tmp_path / "x.nt").write_text("".join(lines))
    with mock.patch.object(rows, "write_places", side_effect=Killed), pytest.raises(Killed):
        prepare(tmp_path / "x.nt", tmp_path / "store", memory=2, progress=False)
    store = prepare(tmp_path / "x.nt", tmp_path / "store", memory=2, progress=False)
    assert store.report["literals"] == {"whole": 200}


def test_other_batches_than_before_are_noticed(tmp_path, tiny):
    path = write(tmp_path / "x.tsv", some_triples())
    with mock.patch.object(labels, "_write_batch", fails_after(3)), pytest.raises(Killed):
        prepare(path, tmp_path / "store", memory=2, progress=False)
    with (
        mock.patch.object(delimited, "BLOCK_BYTES", 1000),
        pytest.raises(DataError, match="batch 0 of the files is not that of an earlier"),
    ):
        prepare(path, tmp_path / "store", memory=2, progress=False)
    assert names(tmp_path) == ["x.tsv"]


def test_a_full_disk_loses_no_finished_stage(tmp_path, tiny, monkeypatch):
    path = write(tmp_path / "x.tsv", some_triples())
    with (
        mock.patch.object(rows, "write_places", side_effect=OSError(28, "No space left on device")),
        pytest.raises(OSError, match="No space"),
    ):
        prepare(path, tmp_path / "store", memory=2, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(work.shutil, "disk_usage", mock.Mock(return_value=mock.Mock(free=0)))
        with pytest.raises(StoreError, match="GB are free"):
            prepare(path, tmp_path / "store", memory=2, progress=False)
    state = json.loads((tmp_path / ".store.unfinished" / work.STATE).read_text())
    assert "repeats whole" in state["done"]
    with mock.patch.object(labels, "_write_batch", side_effect=AssertionError):
        prepare(path, tmp_path / "store", memory=2, progress=False)


def test_an_old_store_stays_until_the_new_one_is_finished(tmp_path, tiny):
    path = write(tmp_path / "x.tsv", some_triples())
    old = prepare(path, tmp_path / "store", memory=2, progress=False)
    with pytest.raises(StoreError, match="a store exists here"):
        prepare(path, old.path, memory=2, progress=False)
    with mock.patch.object(rows, "write_places", side_effect=Killed), pytest.raises(Killed):
        prepare(path, old.path, memory=2, progress=False, overwrite=True, seed=1)
    assert TripleStore.open(old.path).fingerprint == old.fingerprint
    new = prepare(path, old.path, memory=2, progress=False, overwrite=True, seed=1)
    assert new.fingerprint != old.fingerprint
