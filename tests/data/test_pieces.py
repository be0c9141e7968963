"""Preparing in pieces: the same store for any sizes, an oracle in plain Python, and memory."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_rows import labelled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import csv

from kge_torchrec.cli import main
from kge_torchrec.data import SIDES, numbering, sort, split
from kge_torchrec.data import prepare as preparing
from kge_torchrec.data.prepare import extend_store, prepare, rows_within
from kge_torchrec.data.readers import text_rows
from kge_torchrec.data.sort import drop_repeats, pack
from kge_torchrec.data.store import TripleStore, filter_index, index_name, writing
from kge_torchrec.data.store.filter_index import SideIndex, build_side
from kge_torchrec.errors import DataError

ROW = st.tuples(st.integers(0, 12), st.integers(0, 2), st.integers(0, 12), st.integers(1, 9))
BOUNDS = st.fixed_dictionaries({
    "block": st.integers(60, 2000), "buckets": st.sampled_from([1, 2, 8, 64]),
    "most": st.integers(3, 400), "chunk": st.integers(3, 64),
})  # fmt: skip


@contextmanager
def bounds(block: int = 1500, buckets: int = 4, most: int = 60, chunk: int = 64) -> Iterator[None]:
    """Prepare small graphs in many pieces.

    Args:
        block: Bytes of a batch.
        buckets: Buckets of labels.
        most: Rows in memory.
        chunk: Rows at a time.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(text_rows, "BLOCK_BYTES", block))
        stack.enter_context(mock.patch.object(numbering, "BUCKETS", buckets))
        stack.enter_context(mock.patch.object(preparing, "rows_within", lambda memory: most))
        for module in (sort, split):
            stack.enter_context(mock.patch.object(module, "CHUNK", chunk))
        yield


NAMES = {
    "plain": lambda number: f"entity {number}",
    "numbers": lambda number: str(number) if number % 3 == 0 else f"entity {number}",
    "accents": lambda number: ("e\u0301 " if number % 2 else "é ") + str(number // 2),
    "types": lambda number: f"{'abc'[number % 3]}:{number}",
}


def write(path: Path, triples, weighted: bool = False, names: str = "plain", last="") -> Path:
    name = NAMES[names]
    lines = [
        "\t".join(
            [name(h), f"relation {r}", name(t), *[str(w)] * weighted, *[str(w % 4)] * bool(last)]
        )
        for h, r, t, w in triples
    ]
    path.write_text("".join(line + "\n" for line in lines), "utf-8")
    return path


def some_triples(count: int = 400, seed: int = 0, entities: int = 90) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    columns = (random.random((count, 4)) ** 2 * [entities, 5, entities, 9]).astype(int)
    return [(h, r, t, w + 1) for h, r, t, w in columns.tolist()]


def contents(store: Path) -> dict[str, bytes]:
    """Return the files of a store; in its meta file, without the names of sources."""
    return {path.name: path.read_bytes() for path in store.iterdir()}


def weighted_triples(store: TripleStore, name: str) -> list[tuple]:
    """Return the triples of a split, with weights if it has some."""
    rows, weights = labelled(store, name), store.weights(name)
    if weights is None:
        return rows
    return [(*row, weight) for row, weight in zip(rows, weights.tolist(), strict=True)]


# The same store


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    splits=st.lists(st.lists(ROW, min_size=1, max_size=150), min_size=1, max_size=3),
    sizes=BOUNDS,
    form=st.tuples(st.booleans(), st.sampled_from([*NAMES])),
    options=st.sampled_from([
        {"split.ratio": (0.8, 0.1, 0.1)}, {"split.ratio": (0.2, 0.4, 0.4)},
        {"split.by": "head", "split.ratio": (0.5, 0.2, 0.3)},
        {"split.by": "time", "split.ratio": (0.5, 0.2, 0.3)}, {"split.by": "last"},
    ]),
)  # fmt: skip
def test_pieces_change_no_byte(tmp_path_factory, splits, sizes, form, options):
    folder = tmp_path_factory.mktemp("same")
    last = "time" if options.get("split.by") in ("time", "last") else ""
    if len(splits) == 1:
        sources = write(folder / "whole.tsv", splits[0], *form, last=last)
    else:
        options, sources = {}, folder / "data"
        sources.mkdir()
        for name, part in zip(("train", "test", "valid"), splits, strict=False):
            write(sources / f"{name}.tsv", part, *form)
    data = options | {"weights": "loss" if form[0] else "ignore", "allow_unseen_relations": True}
    if form[1] == "types":
        data["types"] = "prefix"
    more = {"log_notes": False, "progress": False}
    try:
        prepare(sources, folder / "whole", data, **more)
    except DataError as error:  # other ends than in train
        assert "leads from" in str(error)
        return
    with bounds(**sizes):
        prepare(sources, folder / "pieces", data, **more)
    assert (own := contents(folder / "pieces")) == contents(folder / "whole")
    assert not any("time" in name or name == "work" for name in own)
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []
    shutil.rmtree(folder)


@settings(max_examples=10)
@given(
    rows=st.lists(ROW, min_size=1, max_size=150), seed=st.integers(0, 9), sizes=BOUNDS,
    form=st.sampled_from(["tsv", "tsv.gz", "parquet"]),
)  # fmt: skip
def test_ids_and_splits_depend_on_the_set_of_labels(tmp_path_factory, rows, seed, sizes, form):
    """Neither the order of the triples nor the format of their file changes an id."""
    folder = tmp_path_factory.mktemp("order")
    one = prepare(write(folder / "a.tsv", rows), folder / "a", progress=False)
    shuffled = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
    plain, other = write(folder / "b.tsv", shuffled), folder / f"other.{form}"
    if form == "parquet":
        columns = zip(*(line.split("\t") for line in plain.read_text().splitlines()), strict=True)
        pq.write_table(pa.table(dict(zip("hrt", columns, strict=True))), other)
    else:
        zipped = gzip.compress if form.endswith("gz") else bytes
        other.write_bytes(zipped(plain.read_bytes()))
    with bounds(**sizes):
        other = prepare(other, folder / "b", progress=False)
    for kind in ("entities", "relations"):
        assert getattr(one, kind).array.equals(getattr(other, kind).array)
    relations = one.relations.array.to_pylist()
    assert relations == sorted(relations)
    shutil.rmtree(folder)


# The triples of an oracle


@settings(max_examples=20)
@given(
    splits=st.lists(st.lists(ROW, min_size=1, max_size=120), min_size=2, max_size=3),
    sizes=BOUNDS, weighted=st.booleans(), again=st.lists(ROW, max_size=60),
)  # fmt: skip
def test_labelled_triples_are_those_of_plain_python(
    tmp_path_factory, splits, sizes, weighted, again
):
    folder = tmp_path_factory.mktemp("oracle")
    (folder / "data").mkdir()
    expected: dict[str, dict[tuple, float]] = {}
    for name, rows in zip(("train", "test", "valid"), splits, strict=False):
        write(folder / "data" / f"{name}.tsv", rows, weighted)
        largest = expected.setdefault(name, {})
        for h, r, t, w in rows:
            triple = f"entity {h}", f"relation {r}", f"entity {t}"
            largest[triple] = max(w, largest.get(triple, 0))
    data = {"allow_unseen_relations": True, "weights": "loss" if weighted else "ignore"}
    with bounds(**sizes):
        store = prepare(folder / "data", folder / "store", data, progress=False)
        for name, own in expected.items():
            rows = [(*triple, w) if weighted else triple for triple, w in own.items()]
            assert weighted_triples(store, name) == rows  # in the order of the file
            dropped = len(splits[[*expected].index(name)]) - len(own)
            assert store.report["duplicates"][name] == dropped
        new = [(h, r, t, w) for h, r, t, w in again if (h + t) % 2]
        if not new:
            shutil.rmtree(folder)
            return
        before = dict(expected["train"])
        for h, r, t, w in new:
            triple = f"entity {h}", f"relation {r}", f"entity {t}"
            if triple not in before:
                own = expected["train"].get(triple, 0)
                expected["train"][triple] = max(w, own)
        if len(before) < len(expected["train"]):
            write(folder / "new.tsv", new, weighted)
            larger = extend_store(
                store, folder / "new.tsv", folder / "larger", data, progress=False
            )
            rows = [(*x, w) if weighted else x for x, w in expected["train"].items()]
            assert weighted_triples(larger, "train") == rows
            old = store.num_entities
            assert larger.entities.array[:old].equals(store.entities.array)
    shutil.rmtree(folder)


def test_frequent_entities_are_spread_over_the_ids(tmp_path):
    """Ids do not follow the order of appearance, in which frequent entities come early."""
    store = prepare(write(tmp_path / "x.tsv", some_triples(3000, entities=600)), tmp_path / "x")
    degrees = np.bincount(store.train[:, 0::2].ravel(), minlength=store.num_entities)
    shares = [part.sum() / degrees.sum() for part in np.array_split(degrees, 4)]
    assert max(shares) < 0.35


# Rows


def test_keys_beyond_64_bits(tmp_path):
    """A part drops repeats, and an index sorts, by fewer bits than the whole graph has."""
    random = np.random.default_rng(0)
    sizes = 1 << 30, 1 << 9
    triples = random.integers(0, (sizes[0], sizes[1], sizes[0]), (3000, 3)).astype(np.int32)
    triples = np.concatenate([triples, triples[::3]])
    assert pack([*triples.T], (*sizes, sizes[0])) is None
    real = sort.repeats

    def checked(columns, own_sizes):
        assert pack(columns, own_sizes) is not None
        assert all(column.max() < size for column, size in zip(columns, own_sizes, strict=True))
        return real(columns, own_sizes)

    with mock.patch.object(sort, "repeats", checked):
        is_repeat = drop_repeats(triples, sizes, 100, tmp_path)
    assert is_repeat.sum() == 1000 and not is_repeat[:3000].any()


def test_a_hub_is_a_part_of_its_own(tmp_path, monkeypatch):
    """Others are sorted in parts of about the rows that memory holds."""
    random = np.random.default_rng(0)
    hub = np.stack([np.full(3000, 7), random.integers(0, 2, 3000), np.arange(3000)], 1)
    others = random.integers(0, [50, 2, 3000], (500, 3))
    triples = np.unique(np.concatenate([hub, others]), axis=0).astype(np.int32)
    triples = random.permutation(triples)
    taken, real = [], filter_index.sorted_rows

    def sort_rows(columns, own_sizes):
        taken.append(len(columns[0]))
        return real(columns, own_sizes)

    monkeypatch.setattr(filter_index, "sorted_rows", sort_rows)
    writing.write_indices(tmp_path, {"train": triples}, 3000, most=500)
    hubs = [count for count in taken if count > 510]
    assert len(hubs) == 1 and hubs[0] < 3500 and len(taken) > 8
    for side in SIDES:
        for name, part in zip(SideIndex._fields, build_side(side, triples), strict=True):
            assert np.array_equal(np.load(tmp_path / index_name("train", side, name)), part)


# Memory, and what stays behind


def test_the_bound_is_half_of_the_memory(tmp_path, monkeypatch):
    for memory in (1, 0, -1, float("nan")):
        with pytest.raises(DataError, match="memory must be at least 2 GiB"):
            prepare({"train": [("a", "r", "b")]}, tmp_path / "store", memory=memory)
    monkeypatch.setattr(preparing, "host_memory", lambda: 64 << 30)
    assert rows_within(None) == rows_within(32) > 4 * rows_within(5)
    monkeypatch.setattr(preparing, "host_memory", lambda: 1 << 30)
    assert rows_within(None) == rows_within(2)


LIMITED = """
import resource, sys
from unittest import mock
from kge_torchrec.data import numbering, prepare as preparing
from kge_torchrec.data.readers import text_rows
import numpy, pyarrow, kge_torchrec.data.shuffle
text_rows.BLOCK_BYTES = 1 << 20
preparing.rows_within = lambda memory: int(sys.argv[4])
pyarrow.set_cpu_count(1)
used = int([l for l in open("/proc/self/status") if l.startswith("VmData")][0].split()[1]) << 10
limit = used + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
preparing.prepare(sys.argv[1], sys.argv[2], progress=False)
"""


@pytest.mark.slow
def test_anonymous_memory_is_bounded(tmp_path):
    """Mapped files do not count, but nothing has room for an array of all triples in memory."""
    random = np.random.default_rng(0)
    ids = random.integers(0, [200_000, 50, 200_000], (4_000_000, 3))
    table = pa.table([pa.array(ids[:, i]) for i in range(3)], ["h", "r", "t"])
    source, script = tmp_path / "x.tsv", tmp_path / "limited.py"
    csv.write_csv(table, source, csv.WriteOptions(include_header=False, delimiter="\t"))
    script.write_text(LIMITED)
    for rows, passes in ((50_000, True), (1 << 40, False)):
        words = [sys.executable, script, source, tmp_path / str(rows), 320 << 20, rows]
        # Arrow's own allocator reserves address space, which counts.
        plain = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
        done = subprocess.run(
            [*map(str, words)], capture_output=True, text=True, env=plain, timeout=300
        )
        assert (done.returncode == 0) == passes, done.stderr
    assert TripleStore.open(tmp_path / "50000").report["triples"]["train"] > 3_000_000


def test_what_a_killed_preparation_left_is_removed(tmp_path):
    """Folders of killed processes go; that of a running one stays."""
    path = write(tmp_path / "x.tsv", some_triples())
    code = (
        "import sys, time\nfrom kge_torchrec.data import prepare as preparing\n"
        "preparing.number = lambda *_: (print('here', flush=True), time.sleep(600))\n"
        "preparing.prepare(sys.argv[1], sys.argv[2])\n"
    )
    words = [sys.executable, "-c", code, str(path), str(tmp_path / "store")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"here\n"
    (left,) = tmp_path.glob(".store.partial-*")
    other = tmp_path / ".store2.partial-0"
    other.mkdir()
    prepare(path, tmp_path / "store", progress=False)
    assert left.exists()
    process.kill()
    process.wait()
    prepare(path, tmp_path / "store", progress=False, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == [".store2.partial-0", "store", "x.tsv"]


def test_a_full_disk_is_an_error_in_words(tmp_path, monkeypatch, capsys):
    """A write to a mapped file on a full disk would end the process, so space is reserved."""
    path = write(tmp_path / "x.tsv", some_triples())
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert main(["prepare", str(path), "-o", str(tmp_path / "store"), "--no-progress"]) == 1
    assert "no space is left on the disk" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["x.tsv"]


def test_importing_prepare_loads_no_torch():
    code = "import sys, kge_torchrec.data.prepare; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"False\n"
