"""Graphs that are prepared on disk: the same store as in memory, in bounded memory, and errors."""

from __future__ import annotations

import gzip
import os
import shutil
import tracemalloc
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from large_graphs import NAMES, contents, names, some_triples, tiny_bounds, write

from kge_torchrec.data import large
from kge_torchrec.data.large import Estimate, bound, index, labels, on_disk, rows, work
from kge_torchrec.data.large.work import NpyFile, WorkFolder
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers import delimited
from kge_torchrec.data.sort import pack
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import SideIndex, build_side
from kge_torchrec.data.streams import WORKERS
from kge_torchrec.errors import DataError, StoreError

ROW = st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 40), st.integers(1, 9))


@pytest.fixture
def tiny() -> Iterator[None]:
    """Take every graph for large, and cut it into many batches, groups, partitions and buckets."""
    with tiny_bounds():
        yield


# The same store


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    splits=st.lists(st.lists(ROW, min_size=1, max_size=150), min_size=1, max_size=3),
    bounds=st.tuples(st.integers(60, 2000), st.integers(600, 20_000), st.integers(3, 64)),
    form=st.tuples(st.booleans(), st.sampled_from([*NAMES])),
    options=st.fixed_dictionaries({
        "split.ratio": st.sampled_from([(0.8, 0.1, 0.1), (0.2, 0.4, 0.4)]),
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
    options |= {"weights": "loss" if form[0] else "ignore", "allow_unseen_relations": True}
    options = {"data": options, "log_notes": False}
    with mock.patch.object(delimited, "BLOCK_BYTES", bounds[0]):
        prepare(sources, folder / "memory", **options)
    with tiny_bounds(*bounds):
        prepare(sources, folder / "disk", memory=2, progress=False, **options)
    assert contents(folder / "disk") == contents(folder / "memory")
    assert not (folder / ".disk.unfinished").exists()
    shutil.rmtree(folder)


def test_graphs_of_many_batches(tmp_path):
    """The same for graphs with repeats, weights, accents, and few triples to hold out."""
    path = write(tmp_path / "x.tsv", some_triples(1500, entities=600), True, "accents")
    data = {"weights": "loss", "split.ratio": (0.1, 0.5, 0.4)}
    options = {"data": data, "progress": False, "log_notes": False}
    with mock.patch.object(delimited, "BLOCK_BYTES", 1500):
        prepare(path, tmp_path / "memory", **options)
    with tiny_bounds():
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
        ids, target = NpyFile(tmp_path / "ids.npy"), tmp_path / "train.npy"
        assert rows.drop_repeats(ids, target, sizes, 100, folder) == 1000
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


# Memory


@pytest.mark.slow
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


def test_errors_in_the_data_are_those_of_memory(tmp_path, tiny):
    data = tmp_path / "data"
    data.mkdir()
    write(data / "train.tsv", [(0, 0, 1, 1)] * 30)
    write(data / "test.tsv", [(0, 1, 1, 1)])
    with pytest.raises(DataError, match="relations without a training triple: 'relation 1'"):
        prepare(data, tmp_path / "store", memory=2, progress=False)
    options = {"memory": 2, "progress": False, "data": {"allow_unseen_relations": True}}
    store = prepare(data, tmp_path / "store", **options)
    assert store.report["duplicates"] == {"train": 29, "test": 0, "valid": 0}
    with pytest.raises(DataError, match="the training triples have no weights"):
        prepare(data / "train.tsv", tmp_path / "b", {"weights": "loss"}, memory=2, progress=False)
    (tmp_path / "x.nt").write_text('<a> <r> "b" .\n' * 9)
    with pytest.raises(DataError, match="no training triples: 9 have a literal as object"):
        prepare(tmp_path / "x.nt", tmp_path / "c", memory=2, progress=False)


def test_columns_of_types_need_memory(tmp_path, tiny):
    (tmp_path / "x.tsv").write_text(
        "head\thead_type\trelation\ttail\ttail_type\n" + "a\tx\tr\tb\ty\n" * 9
    )
    with (
        mock.patch.object(large, "IN_MEMORY", 1 << 30),
        pytest.raises(DataError, match=r"takes about 11 GiB; .* set memory 11"),
    ):
        prepare(tmp_path / "x.tsv", tmp_path / "store", memory=2, progress=False)
    with mock.patch.object(large, "IN_MEMORY", 1 << 30):
        prepare(tmp_path / "x.tsv", tmp_path / "store", memory=11, progress=False)


@pytest.mark.parametrize("option", ["split.by head", "types", "features"])
def test_what_needs_memory_is_said(tmp_path, tiny, caplog, option):
    path = write(tmp_path / "x.tsv", some_triples())
    for file in ("types", "features"):
        (tmp_path / file).write_text("".join(f"entity {i}\tx\n" for i in range(90)))
    options = {"split.by": "head"} if "head" in option else {option: str(tmp_path / option)}
    options = {"data": options}
    prepare(path, tmp_path / "store", memory=2, progress=False, **options)
    assert f"about 400 triples are prepared in memory, since {option} cannot" in caplog.messages[0]
    with mock.patch.object(large, "IN_MEMORY", 0):
        prepare(path, tmp_path / "memory", progress=False, **options)
    assert contents(tmp_path / "store") == contents(tmp_path / "memory")


def test_too_many_entities_for_the_bound(tmp_path, tiny):
    path = write(tmp_path / "x.tsv", some_triples())
    with (
        mock.patch.object(on_disk, "PER_ENTITY", 1 << 30),
        pytest.raises(DataError, match=r"entities take more memory; set memory \d+"),
    ):
        prepare(path, tmp_path / "store", memory=2, progress=False)


@pytest.mark.parametrize("memory", [1, 0, -1, float("nan")])
def test_bounds_that_are_too_small(tmp_path, memory):
    with pytest.raises(DataError, match="memory must be at least 2 GiB"):
        prepare(write(tmp_path / "x.tsv", some_triples()), tmp_path / "store", memory=memory)


def test_the_bound_acts_on_files(tmp_path, monkeypatch):
    monkeypatch.setattr(large, "host_memory", lambda: 64 << 30)
    assert bound(None) == 32 and bound(5) == 5
    monkeypatch.setattr(large, "host_memory", lambda: 1 << 30)
    assert bound(None) == 2


@pytest.mark.slow
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


def test_small_graphs_stay_in_memory(tmp_path):
    path = write(tmp_path / "x.tsv", some_triples())
    with mock.patch.object(on_disk, "OnDisk", side_effect=AssertionError):
        prepare(path, tmp_path / "store", memory=2, progress=False)
