"""Graphs that are prepared on disk: the same store as in memory, and resuming after a kill."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kge_torchrec.cli import main
from kge_torchrec.data import labels as data_labels
from kge_torchrec.data import large
from kge_torchrec.data.large import Estimate, bound, index, labels, on_disk, rows, work
from kge_torchrec.data.large.work import NpyFile, WorkFolder
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers import delimited
from kge_torchrec.data.sort import pack
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store import contents as store_contents
from kge_torchrec.data.store import writing as store_writing
from kge_torchrec.data.store.filter_index import SideIndex, build_side
from kge_torchrec.data.streams import WORKERS
from kge_torchrec.errors import DataError, StoreError

ROW = st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 40), st.integers(1, 9))


@pytest.fixture
def tiny() -> Iterator[None]:
    """Take every graph for large, and cut it into many batches, groups, partitions and buckets."""
    with tiny_bounds(block=1500, free=16_000, chunk=64):
        yield


@contextmanager
def tiny_bounds(block: int, free: int, chunk: int) -> Iterator[None]:
    """Take every graph for large; bytes of a batch and of memory, rows of a chunk."""
    changes = [
        mock.patch.object(large, "IN_MEMORY", 1 << 60),
        mock.patch.object(delimited, "BLOCK_BYTES", block),
        mock.patch.object(on_disk, "OTHERS", 2 - free / 2**30),
        mock.patch.object(on_disk, "PER_ENTITY", 0),
        mock.patch.object(rows, "CHUNK", chunk),
        mock.patch.object(index, "CHUNK", chunk),
        mock.patch.object(index, "SAMPLES", 4),
        mock.patch.object(data_labels, "PIECE", 7),
        mock.patch.object(store_contents, "CHUNK", chunk),
        mock.patch.object(store_writing, "CHUNK", chunk),
    ]
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


NAMES = {
    "plain": lambda number: f"entity {number}",
    "numbers": lambda number: str(number) if number % 3 == 0 else f"entity {number}",
    "lookalikes": lambda number: ("e\u0301 " if number % 2 else "é ") + str(number // 2),
}


def write(path: Path, triples, weighted: bool = False, names: str = "plain") -> Path:
    name = NAMES[names]
    lines = (
        f"{name(h)}\trelation {r}\t{name(t)}" + (f"\t{w}" if weighted else "")
        for h, r, t, w in triples
    )
    path.write_text("".join(line + "\n" for line in lines), "utf-8")
    return path


def some_triples(count: int = 400, seed: int = 0, entities: int = 90) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    columns = (random.random((count, 4)) ** 2 * [entities, 5, entities, 9]).astype(int)
    return [(h, r, t, w + 1) for h, r, t, w in columns.tolist()]


def contents(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# The same store


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    splits=st.lists(st.lists(ROW, min_size=1, max_size=150), min_size=1, max_size=3),
    bounds=st.tuples(st.integers(60, 2000), st.integers(600, 20_000), st.integers(3, 64)),
    form=st.tuples(st.booleans(), st.sampled_from([*NAMES])),
    options=st.fixed_dictionaries({
        "seed": st.integers(0, 3), "ratio": st.sampled_from([(0.8, 0.1, 0.1), (0.2, 0.4, 0.4)]),
    }),
)  # fmt: skip
def test_stores_on_disk_are_those_of_memory(tmp_path_factory, splits, bounds, form, options):
    folder = tmp_path_factory.mktemp("same")
    if len(splits) == 1:
        sources = write(folder / "whole.tsv", splits[0], *form)
    else:
        options, sources = {}, folder / "data"
        sources.mkdir()
        for name, part in zip(("train", "test", "valid"), splits, strict=False):
            write(sources / f"{name}.tsv", part, *form)
    options |= {"weights": form[0], "allow_unseen_relations": True, "log_notes": False}
    with mock.patch.object(delimited, "BLOCK_BYTES", bounds[0]):
        prepare(sources, folder / "memory", **options)
    with tiny_bounds(*bounds):
        prepare(sources, folder / "disk", memory=2, progress=False, **options)
    assert contents(folder / "disk") == contents(folder / "memory")
    assert not (folder / ".disk.unfinished").exists()
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "names, ratio", [("plain", (0.9, 0.05, 0.05)), ("lookalikes", (0.1, 0.5, 0.4))]
)
def test_graphs_of_many_batches(tmp_path, names, ratio):
    """The same for graphs with repeats, weights, lookalikes, and few triples to hold out."""
    path = write(tmp_path / "x.tsv", some_triples(1500, entities=600), True, names)
    options = {"weights": True, "ratio": ratio, "progress": False, "log_notes": False}
    with mock.patch.object(delimited, "BLOCK_BYTES", 1500):
        prepare(path, tmp_path / "memory", **options)
    with tiny_bounds(block=1500, free=16_000, chunk=64):
        prepare(path, tmp_path / "disk", memory=2, **options)
    assert contents(tmp_path / "disk") == contents(tmp_path / "memory")


def test_compressed_files_and_parquet(tmp_path, tiny):
    triples = some_triples()
    plain = write(tmp_path / "x.tsv", triples)
    (tmp_path / "x.tsv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    heads, relations, tails, _ = (list(map(str, column)) for column in zip(*triples, strict=True))
    pq.write_table(pa.table({"h": heads, "r": relations, "t": tails}), tmp_path / "x.parquet")
    for name in ("x.tsv", "x.tsv.gz", "x.parquet"):
        store = prepare(tmp_path / name, tmp_path / f"{name}-store", memory=2, progress=False)
        total = sum(len(store.split(split)) for split in ("train", "valid", "test"))
        assert total == len({row[:3] for row in triples})
    assert (
        contents(tmp_path / "x.tsv-store").keys() == contents(tmp_path / "x.parquet-store").keys()
    )
    gz, tsv = (TripleStore.open(tmp_path / f"{name}-store") for name in ("x.tsv.gz", "x.tsv"))
    assert gz.fingerprint == tsv.fingerprint


@settings(deadline=None)
@given(total=st.integers(0, 300), seed=st.integers(0, 99), block=st.integers(1, 400))
def test_places_are_those_of_numpys_permutation(tmp_path_factory, total, seed, block):
    path = tmp_path_factory.mktemp("places") / "places.npy"
    with mock.patch.object(rows, "CHUNK", 7):
        if total:
            rows.write_places(path, total, seed, block)
            order = np.random.default_rng(seed).permutation(total)
            assert np.array_equal(np.load(path)[order], np.arange(total))


def test_many_draws_are_those_of_numpy(tmp_path):
    total = 200_003
    rows.write_places(tmp_path / "places.npy", total, 5, 30_000)
    order = np.random.default_rng(5).permutation(total)
    assert np.array_equal(np.load(tmp_path / "places.npy")[order], np.arange(total))


def test_keys_beyond_64_bits(tmp_path):
    """A partition drops repeats, and a bucket sorts, by fewer bits than the whole graph has."""
    random = np.random.default_rng(0)
    sizes = 1 << 30, 1 << 9
    triples = random.integers(0, (sizes[0], sizes[1], sizes[0]), (3000, 3)).astype(np.int32)
    triples = np.concatenate([triples, triples[::3]])
    assert pack([*triples.T], (*sizes, sizes[0])) is None
    np.save(tmp_path / "ids.npy", triples)
    folder, real = WorkFolder(tmp_path / "work", {}, False), rows.repeats

    def checked(columns, own_sizes):
        assert pack(columns, own_sizes) is not None
        assert all(column.max() < size for column, size in zip(columns, own_sizes, strict=True))
        return real(columns, own_sizes)

    with folder.locked(), mock.patch.object(rows, "repeats", checked):
        on_disk_triples = rows.Triples(NpyFile(tmp_path / "ids.npy"))
        assert (
            rows.drop_repeats(on_disk_triples, tmp_path / "train.npy", sizes, 100, folder) == 1000
        )
        assert np.array_equal(np.load(tmp_path / "train.npy"), triples[:3000])


def test_hubs_are_in_several_buckets(tmp_path):
    """An entity with more triples than memory holds is sorted in parts."""
    random = np.random.default_rng(0)
    hub = np.stack([np.full(3000, 7), random.integers(0, 2, 3000), np.arange(3000)], 1)
    others = random.integers(0, [50, 2, 3000], (500, 3))
    triples = np.unique(np.concatenate([hub, others]), axis=0).astype(np.int32)
    np.save(tmp_path / "train.npy", random.permutation(triples))
    folder, taken = WorkFolder(tmp_path / "work", {}, False), []
    real = index.sorted_rows

    def sort(columns, sizes):
        taken.append(len(columns[0]))
        return real(columns, sizes)

    with folder.locked(), mock.patch.object(index, "sorted_rows", sort):
        on_disk_rows = NpyFile(tmp_path / "train.npy")
        for side in ("tail", "head"):
            files = [tmp_path / f"{side}-{part}.npy" for part in SideIndex._fields]
            index.write_side(on_disk_rows, side, files, (3000, 2, 500), folder)
            for file, part in zip(files, build_side(side, triples, 3000, 2), strict=True):
                assert np.array_equal(np.load(file), part)
    assert max(taken) <= 500 and len(taken) < 24


# Starting again


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


@pytest.mark.parametrize("change", ["file", "seed", "memory", "state", "store"])
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
        options[change] += 1
        why = "split changed" if change == "seed" else "memory changed"
    caplog.clear()
    prepare(path, tmp_path / "store", progress=False, **options)
    assert [message for message in caplog.messages if message.startswith("starts over: ")] == [
        f"starts over: {why} changed since an earlier start" if change == "file"
        else f"starts over: {why} since an earlier start"
    ]  # fmt: skip
    prepare(path, tmp_path / "other", progress=False, **options)
    assert contents(tmp_path / "store") == contents(tmp_path / "other")


SLOW = """
import sys
sys.path[:0] = {path!r}
import time
import test_large
from kge_torchrec.data.large import {module}
from kge_torchrec.data.prepare import prepare
real = {module}.{name}
def slow(*args, **options):
    print("now", flush=True)
    time.sleep({sleep})
    return real(*args, **options)
{module}.{name} = slow
with test_large.tiny_bounds(1500, 16_000, 64):
    prepare({source!r}, {store!r}, memory=2)
"""


@pytest.mark.parametrize(
    "module, name, calls",
    [("labels", "_write_batch", 5), ("rows", "write_places", 1), ("index", "_spread", 1)],
)
def test_sigkill(tmp_path, tiny, module, name, calls):
    """A process that is killed while it reads, splits or sorts leaves what the next one needs."""
    path = write(tmp_path / "x.tsv", some_triples())
    code = SLOW.format(
        path=[str(Path(__file__).parent), str(Path(large.__file__).parents[3])],
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


# Memory


def test_memory_does_not_grow_with_the_triples(tmp_path):
    """Neither numpy's nor Arrow's grows beyond what a few batches and one partition take."""
    peaks = []
    for count in (60_000, 480_000):
        path = write(tmp_path / f"{count}.tsv", some_triples(count, entities=3000))
        with tiny_bounds(block=400_000, free=2_000_000, chunk=4096):
            tracemalloc.start()
            prepare(path, tmp_path / f"{count}", memory=2, progress=False)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]  # not 8; how many batches are in flight depends on threads


def test_few_batches_are_read_ahead(tmp_path, tiny):
    threads, real = [], labels._write_batch

    def write_one(*args):
        threads.append(pa.cpu_count())
        real(*args)

    before = pa.cpu_count()
    try:
        pa.set_cpu_count(64)
        with mock.patch.object(labels, "_write_batch", write_one):
            prepare(write(tmp_path / "x.tsv", some_triples()), tmp_path / "store", memory=2)
        assert pa.cpu_count() == 64 and max(threads) == WORKERS <= 4
    finally:
        pa.set_cpu_count(before)


# Errors, and what is said


def test_bad_input_leaves_no_files(tmp_path, tiny):
    path = write(tmp_path / "x.tsv", some_triples())
    with path.open("a") as file:
        file.write("a\tb\n")
    with pytest.raises(DataError, match=r"x.tsv:401: expected 3"):
        prepare(path, tmp_path / "store", memory=2, progress=False)
    assert names(tmp_path) == ["x.tsv"]


def test_a_full_disk_is_reported_before_the_work(tmp_path, tiny, monkeypatch):
    path = write(tmp_path / "x.tsv", some_triples())
    usage = mock.Mock(return_value=mock.Mock(free=1000))
    monkeypatch.setattr(work.shutil, "disk_usage", usage)
    with pytest.raises(
        StoreError, match=r"preparing about 400 triples takes .* GB here, and 0.0 GB"
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


def test_errors_in_the_data_are_those_of_memory(tmp_path, tiny):
    data = tmp_path / "data"
    data.mkdir()
    write(data / "train.tsv", [(0, 0, 1, 1)] * 30)
    write(data / "test.tsv", [(0, 1, 1, 1)])
    with pytest.raises(DataError, match="relations without a training triple: 'relation 1'"):
        prepare(data, tmp_path / "store", memory=2, progress=False)
    options = {"memory": 2, "progress": False, "allow_unseen_relations": True}
    with mock.patch.object(labels, "_write_batch", side_effect=AssertionError):
        store = prepare(data, tmp_path / "store", **options)
    assert store.report["duplicates"] == {"train": 29, "test": 0, "valid": 0}
    with pytest.raises(DataError, match="the training triples have no weights"):
        prepare(data / "train.tsv", tmp_path / "b", memory=2, progress=False, weights=True,
                columns=None)  # fmt: skip
    (tmp_path / "x.nt").write_text('<a> <r> "b" .\n' * 9)
    with pytest.raises(DataError, match="no training triples: 9 have a literal as object"):
        prepare(tmp_path / "x.nt", tmp_path / "c", memory=2, progress=False)


def test_columns_of_types_need_memory(tmp_path, tiny):
    (tmp_path / "x.tsv").write_text(
        "head\thead_type\trelation\ttail\ttail_type\n" + "a\tx\tr\tb\ty\n" * 9
    )
    with pytest.raises(DataError, match="such a graph is prepared in memory"):
        prepare(tmp_path / "x.tsv", tmp_path / "store", memory=2, progress=False)


@pytest.mark.parametrize("option", ["split_by head", "types", "features"])
def test_what_needs_memory_is_said(tmp_path, tiny, caplog, option):
    path = write(tmp_path / "x.tsv", some_triples())
    for file in ("types", "features"):
        (tmp_path / file).write_text("".join(f"entity {i}\tx\n" for i in range(90)))
    options = {"split_by": "head"} if "head" in option else {option: str(tmp_path / option)}
    prepare(path, tmp_path / "store", memory=2, progress=False, **options)
    assert f"about 400 triples are prepared in memory, since {option} cannot" in caplog.messages[0]
    with mock.patch.object(large, "IN_MEMORY", 0):
        prepare(path, tmp_path / "memory", progress=False, **options)
    assert contents(tmp_path / "store") == contents(tmp_path / "memory")


def test_too_many_entities_for_the_bound(tmp_path, tiny):
    path = write(tmp_path / "x.tsv", some_triples())
    with (
        mock.patch.object(on_disk, "PER_ENTITY", 1 << 30),
        pytest.raises(DataError, match=r"entities take more memory; set memory=\d+"),
    ):
        prepare(path, tmp_path / "store", memory=2, progress=False)


@pytest.mark.parametrize("memory", [1, 0, -1, float("nan")])
def test_bounds_that_are_too_small(tmp_path, memory):
    with pytest.raises(DataError, match="memory must be at least 2 GiB"):
        prepare(write(tmp_path / "x.tsv", some_triples()), tmp_path / "store", memory=memory)


def test_the_bound_acts_on_files(tmp_path, monkeypatch):
    for sources in ("countries", {"train": [("a", "r", "b")]}):
        with pytest.raises(DataError, match="leave out memory"):
            prepare(sources, tmp_path / "store", memory=4)
    monkeypatch.setattr(large, "host_memory", lambda: 64 << 30)
    assert bound(None) == 32 and bound(5) == 5
    monkeypatch.setattr(large, "host_memory", lambda: 1 << 30)
    assert bound(None) == 2


def test_the_size_is_estimated_from_the_start_of_a_file(tmp_path):
    triples = some_triples(300_000)
    plain = write(tmp_path / "x.tsv", triples)
    (tmp_path / "x.tsv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    size = plain.stat().st_size
    for name, error in (("x.tsv", 0.02), ("x.tsv.gz", 0.15)):
        estimate = Estimate.of({"whole": [tmp_path / name]})
        assert estimate.triples == pytest.approx(len(triples), rel=error)
        assert estimate.text == pytest.approx(size, rel=error)
    os.mkfifo(tmp_path / "pipe.tsv")
    assert Estimate.of({"whole": [tmp_path / "pipe.tsv"]}) == Estimate()
    (tmp_path / "bad.tsv.gz").write_bytes(b"no gzip")
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    assert Estimate.of({"whole": [tmp_path / "bad.tsv.gz", tmp_path / "bad.parquet"]}) == Estimate()


def test_progress_without_a_terminal(tmp_path, tiny, capfd):
    path = write(tmp_path / "x.tsv", some_triples())
    assert main(["prepare", str(path), "-o", str(tmp_path / "store"), "--memory", "2"]) == 0
    lines = capfd.readouterr().err.splitlines()
    for stage in (
        "read",
        "number labels",
        "write ids",
        "repeats whole",
        "split",
        "index train head",
    ):
        assert any(line.startswith(f"{stage}: 100%") and "/s]" in line for line in lines), stage
    assert main(["prepare", str(path), "-o", str(tmp_path / "b"), "--memory", "2",
                 "--no-progress"]) == 0  # fmt: skip
    assert "100%" not in capfd.readouterr().err


def test_small_graphs_stay_in_memory(tmp_path):
    path = write(tmp_path / "x.tsv", some_triples())
    with mock.patch.object(on_disk, "OnDisk", side_effect=AssertionError):
        prepare(path, tmp_path / "store", memory=2, progress=False)
