"""Splits by head, by time and by the last triples of each head: what leaks, counts, columns."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from file_rows import labelled, read
from hypothesis import example, given
from hypothesis import strategies as st
from training_runs import config_of

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.config.data import DataConfig, SplitOptions
from kge_torchrec.data import SPLITS
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers import Reader
from kge_torchrec.data.reading import open_sources
from kge_torchrec.data.report import notes
from kge_torchrec.data.split import Split
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError

IDS, TIME = st.integers(0, 4), st.integers(0, 9)
ROWS = st.dictionaries(st.tuples(IDS, IDS, IDS), TIME, min_size=1, max_size=60)  # their times
RATIO = st.sampled_from([(0.8, 0.1, 0.1), (0.5, 0.25, 0.25), (0.6, 0.4, 0.0), (0.1, 0.0, 0.9)])
MOST = st.sampled_from([7, 1000])  # rows in memory


def applied(folder, times: dict, seed: int = 0, most: int = 1000, **options) -> list[set]:
    """Return the triples of train, valid and test, the same in another order of the rows."""
    split, results = Split(SplitOptions(**options), seed), []
    for turned in (False, True)[: 1 + (split.times or False)]:
        rows = [*times][:: -1 if turned else 1]
        own = np.array([times[row] for row in rows])
        ids = np.array(rows, np.int32)
        split_of = split.apply(ids, own, (ids.max() + 1, 5), most, folder)
        results.append([{row for row, at in zip(rows, split_of, strict=True) if at == place}
                        for place in range(3)])  # fmt: skip
    assert results[0] == results[-1] and set().union(*results[0]) == times.keys()
    return results[0]


def split(folder, rows: Any, seed: int = 0, columns: Any = None, **options) -> TripleStore:
    """Return the store of rows in memory, or of a file, with options of data.split."""
    sources = {"whole": rows} if isinstance(rows, list) and isinstance(rows[0], tuple) else rows
    return prepare(
        sources, folder / "store",
        {"split": options, "columns": columns, "allow_unseen_relations": True}, seed=seed,
        overwrite=True, progress=False, log_notes=False,
    )  # fmt: skip


def parts_of(store: TripleStore) -> list[set[tuple[str, str, str]]]:
    """Return the triples of train, valid and test."""
    return [{*labelled(store, name)} for name in SPLITS]


# What leaks


@given(times=ROWS, ratio=RATIO, most=MOST)
def test_no_training_triple_is_as_late_as_a_test_triple(tmp_path_factory, times, ratio, most):
    parts = applied(tmp_path_factory.getbasetemp(), times, most=most, by="time", ratio=ratio)
    spans = [[times[triple] for triple in part] for part in parts]
    filled = [span for span in spans if span]
    assert spans[0] and all(max(one) < min(other) for one, other in pairwise(filled))
    # A split ends with the last triple of its share, and with those of the same time.
    ordered, total = sorted(times.values()), len(times)
    held_out = [round(total * share) for share in ratio[1:]]
    ends = [ordered[max(total - sum(held_out), 1) - 1], ordered[max(total - held_out[1], 1) - 1]]
    assert len(parts[0]) == sum(time <= ends[0] for time in ordered)
    assert len(parts[1]) == sum(ends[0] < time <= ends[1] for time in ordered)


@given(times=ROWS, count=st.integers(1, 3), seed=st.integers(0, 3), most=MOST)
def test_last_triples_of_a_head_are_test(tmp_path_factory, times, count, seed, most):
    folder = tmp_path_factory.getbasetemp()
    parts = applied(folder, times, seed, most, by="last", count=count)
    for head in {head for head, *_ in times}:
        spans = [[times[row] for row in part if row[0] == head] for part in parts]
        total = sum(map(len, spans))
        test = min(count, total - 1)
        assert [*map(len, spans)][1:] == [min(count, total - 1 - test), test]
        filled = [span for span in spans if span]
        assert all(max(one) <= min(other) for one, other in pairwise(filled))


def test_equal_times_are_ordered_by_the_seed(tmp_path):
    """Not by name: every tail is a test triple with some seed."""
    rows = {(0, 0, tail): 5 for tail in range(5)}
    parts = [applied(tmp_path, rows, seed, by="last") for seed in range(40)]
    assert {tail for part in parts for _, _, tail in part[2]} == {*range(5)}


def test_repeated_triple_has_its_first_time_and_weight(tmp_path):
    rows = [
        ("a", "r", "x", 9.0, 7), ("a", "r", "x", 2.0, 1), ("a", "r", "x", 3.0, 1),
        ("a", "r", "y", 5.0, 2), ("a", "r", "y", 8.0, 3), ("a", "r", "z", 4.0, 4),
    ]  # fmt: skip
    for order in (rows, rows[::-1]):
        store = split(tmp_path, order, by="last")
        assert parts_of(store) == [{("a", "r", "x")}, {("a", "r", "y")}, {("a", "r", "z")}]
        assert [store.weights(name).tolist() for name in SPLITS] == [[3.0], [5.0], [4.0]]
        assert store.report["duplicates"] == {"whole": 3}
        assert store.report["split"] == {"by": "last", "count": 1, "seed": 0}


def test_entities_after_the_cut_stay_in_test_and_are_counted(tmp_path):
    rows = [("a", "r", "x", 1), ("b", "r", "y", 2), ("c", "r", "x", 3), ("a", "r", "z", 4)]
    store = split(tmp_path, rows, by="time", ratio=(0.5, 0, 0.5))
    assert parts_of(store)[2] == {("c", "r", "x"), ("a", "r", "z")}
    until = {"train": 2, "test": 4}
    assert store.report["split"] == {"by": "time", "ratio": [0.5, 0, 0.5], "until": until}
    assert store.report["unseen_entities"]["test"]["entities"] == 2
    assert any("2 entities never occur in train" in note for note in notes(store))
    late = [*rows[:3], ("a", "s", "x", 4)]
    with pytest.raises(DataError, match="relations without a training triple: 's'"):
        prepare(
            {"whole": late}, tmp_path / "late", {"split.by": "time", "split.ratio": (0.5, 0, 0.5)}
        )


# At random within each head


HALVES = {(h, 0, t): 0 for h, n in ((2, 5), (3, 1), (0, 4)) for t in range(n)}


@given(times=ROWS, ratio=RATIO, seed=st.integers(0, 3), most=MOST)
@example(times=HALVES, ratio=(0.5, 0.25, 0.25), seed=0, most=7)
def test_each_head_has_its_shares(tmp_path_factory, times, ratio, seed, most):
    folder = tmp_path_factory.getbasetemp()
    parts = applied(folder, times, seed, most, by="head", ratio=ratio)
    for head in {head for head, *_ in times}:
        train, valid, test = (sum(row[0] == head for row in part) for part in parts)
        assert train >= 1
        for own, share in ((valid, ratio[1]), (test, ratio[2])):
            wanted = (train + valid + test) * share
            assert own <= np.floor(wanted + 1) and (train == 1 or own >= np.floor(wanted))


def test_shares_of_heads_sum_to_those_of_the_whole(tmp_path):
    rows = {(i % 37, 0, i // 37): 0 for i in range(37 * 9)}
    options = {"by": "head", "ratio": (0.8, 0.15, 0.05)}
    parts = applied(tmp_path, rows, **options)
    assert [*map(len, parts)] == [266, 50, 17]
    assert applied(tmp_path, rows, 1, **options) != parts


# Columns


ISO = [f"2024-0{1 + i % 9}-1{i // 9}T0{i % 7}:00:00" for i in range(30)]
KINDS: dict[str, tuple[list[str], list[Any]]] = {  # texts, and the same as a typed column
    "integers": ([str(i * 10**17 + i) for i in range(30)], [i * 10**17 + i for i in range(30)]),
    "floats": ([str(i / 8) for i in range(30)], [i / 8 for i in range(30)]),
    "dates": ([text[:10] for text in ISO], [dt.date.fromisoformat(text[:10]) for text in ISO]),
    "times": (ISO, [dt.datetime.fromisoformat(text) for text in ISO]),
    "zones": (
        [f"{text}Z" for text in ISO],
        [dt.datetime.fromisoformat(f"{text}+00:00") for text in ISO],
    ),
}
NAMES = ["head", "relation", "tail", "timestamp"]


def write(path, rows: Sequence[Sequence[Any]], delimiter: str = "\t"):
    path.write_text("".join(delimiter.join(map(str, row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_times_are_read_from_every_source(tmp_path, kind):
    texts, values = KINDS[kind]
    labels = [[f"h{i % 5}" for i in range(30)], ["r"] * 30, [f"t{i * 7 % 30}" for i in range(30)]]
    rows = [*zip(*labels, texts, strict=True)]
    typed = pa.table([*map(pa.array, labels), pa.array(values)], NAMES)
    pq.write_table(typed, tmp_path / "typed.parquet")
    pq.write_table(pa.table([*map(pa.array, [*labels, texts])], NAMES), tmp_path / "text.parquet")
    sources = [
        {"whole": typed},
        write(tmp_path / "named.tsv", [NAMES, *rows]), write(tmp_path / "plain.csv", rows, ","),
        tmp_path / "typed.parquet", tmp_path / "text.parquet",
        {"whole": [*zip(*labels, values, strict=True)]},
        {"whole": rows},
    ]  # fmt: skip
    found = [read_times(source) for source in sources]
    assert [row[:3] for row in found[0]] == [row[:3] for row in rows]
    times = [row[3] for row in found[0]]
    assert np.argsort(times).tolist() == np.argsort(values).tolist()
    assert all(other == found[0] for other in found[1:])


def read_times(sources) -> list[tuple]:
    """Return the rows of sources, with times."""
    batches = open_sources(sources, DataConfig(), True, False).batches()
    return [tuple(row.values()) for _, batch in batches for row in batch.to_pylist()]


def test_columns_of_times_are_found_by_words_and_by_name(tmp_path):
    names = ["since", "head", "weight", "relation", "Date", "tail"]
    rows = [[9 - i, f"h{i % 2}", i + 1, "r", i, f"t{i}"] for i in range(6)]
    path = write(tmp_path / "x.csv", [names, *rows], ",")
    last = split(tmp_path, path, by="last")
    assert parts_of(last)[2] == {("h0", "r", "t4"), ("h1", "r", "t5")}
    first = split(tmp_path, path, by="last", columns="time=since")
    assert parts_of(first)[2] == {("h0", "r", "t0"), ("h1", "r", "t1")}
    assert first.weights("test").tolist() == [1, 2]
    without = write(tmp_path / "y.csv", [names[1:], *(row[1:] for row in rows)], ",")
    timed = split(tmp_path, without, by="last")
    assert parts_of(timed) == parts_of(last)
    assert "time 'Date'" in notes(timed)[0]
    dated = split(tmp_path, without, by="head", columns="head=Date")
    assert "0" in dated.entities.labels(dated.train[:, 0])
    plain = split(tmp_path, without, by="head", ratio=(0.5, 0, 0.5))
    assert "left out: 'Date'" in notes(plain)[0] and "splits by it" in notes(plain)[1]


def test_edges_of_several_files_have_times(tmp_path):
    write(tmp_path / "visits.csv", [("user", "place", "time"), *((1, i, i) for i in range(5))], ",")
    write(tmp_path / "rates.csv", [(1, i, 0.5, i + 0.5) for i in range(5)], ",")
    graph = tmp_path / "graph.yaml"
    graph.write_text(
        "edges:\n"
        "  - {file: visits.csv, head: user, relation: visits, tail: place}\n"
        "  - {file: rates.csv, head: user, relation: rates, tail: film}\n"
    )
    with pytest.raises(
        DataError, match=r"rates.csv:1: .* 4 columns: .*; expected 2 columns \(head, tail\)"
    ):
        split(tmp_path, graph, by="last", count=2)
    write(tmp_path / "rates.csv", [(1, i, i + 0.5) for i in range(5)], ",")
    store = split(tmp_path, graph, by="last", count=2)
    assert parts_of(store)[2] == {("user:1", "visits", "place:4"), ("user:1", "rates", "film:4")}
    assert parts_of(store)[1] == {("user:1", "visits", "place:3"), ("user:1", "rates", "film:3")}


class Visits(Reader):
    """Reads lines user, place, time."""

    def read(self, path):
        users, places, times = zip(*map(str.split, path.read_text().splitlines()), strict=True)
        columns = {"head": users, "relation": ["visits"] * len(users), "tail": places}
        yield pa.record_batch({**columns, "time": times})


def test_reader_of_another_package_gives_times(tmp_path, monkeypatch):
    path = write(tmp_path / "x.visits", [("a", "x", 3), ("a", "y", 2), ("a", "z", 1)], " ")
    monkeypatch.setattr("kge_torchrec.data.reading.make_reader", lambda *_: Visits())
    store = split(tmp_path, path, by="last")
    assert parts_of(store)[2] == {("a", "visits", "x")}
    write(path, [("a", "x", "late")], " ")
    with pytest.raises(
        DataError, match="its reader: triple 0: the time is 'late'; a time is a number"
    ):
        split(tmp_path, path, by="last")
    assert len(split(tmp_path, path).train) == 1


def test_time_zones_of_a_table_count(tmp_path):
    for zone, said in ((None, "2024-01-01T09:00"), ("America/New_York", "2024-01-01T14:00")):
        times = pa.array([dt.datetime(2024, 1, 1, 9), dt.datetime(2024, 1, 1, 8)])
        times = pc.assume_timezone(times, zone) if zone else times
        columns = {"head": ["a", "a"], "relation": ["r", "r"], "tail": ["x", "y"], "time": times}
        store = split(tmp_path, {"whole": pa.table(columns)}, by="time", ratio=(0.5, 0, 0.5))
        assert store.report["split"]["until"]["test"] == said


TIMES = st.one_of(
    st.lists(st.integers(-(2**53), 2**53), min_size=1),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1),
    st.lists(st.datetimes(), min_size=1),
    st.lists(st.datetimes(timezones=st.just(dt.timezone.utc)), min_size=1),
)


@given(times=TIMES, data=st.data())
def test_any_time_survives_as_text(times, data):
    texts = [time.isoformat() if isinstance(time, dt.datetime) else str(time) for time in times]

    def read() -> list[Any]:
        columns = zip("h" * len(texts), "r" * len(texts), "t" * len(texts), texts, strict=True)
        return [row[3] for row in read_times({"whole": [*columns]})]

    in_utc = [t.replace(tzinfo=None) if isinstance(t, dt.datetime) else t for t in times]
    assert read() == in_utc
    texts[data.draw(st.integers(0, len(times) - 1), "place")] = "soon"
    row = texts.index("soon") if texts[0] != "soon" else "[0-9]+"
    with pytest.raises(DataError, match=f"whole: triple {row}: the time is "):
        read()


BAD = ["", "x", "nan", "inf", "2024/01/02", "2024-13-01", "1,5"]


@pytest.mark.parametrize("bad", BAD)
def test_invalid_time_is_named_by_its_line(tmp_path, bad):
    line = 700 if bad == "inf" else 2
    rows: list[list[Any]] = [["a", "r", "b", i] for i in range(1000)]
    rows[line - 2][3] = bad
    path, said = write(tmp_path / "x.tsv", [NAMES, *rows]), f"the time is {bad!r}"
    with pytest.raises(DataError, match=f":{line}: .*{said}"):
        read(path, times=True)
    columns = dict(zip(NAMES, zip(*rows, strict=True), strict=True))
    columns["timestamp"] = [str(time) for time in columns["timestamp"]]
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=f"row {line - 1}: the time is "):
        read(tmp_path / "x.parquet", times=True)
    with pytest.raises(DataError, match=f"whole: triple {line - 2}: the time is"):
        split(tmp_path, {"whole": pa.table(columns)}, by="last")


def test_kinds_of_times_must_not_be_mixed(tmp_path):
    mixed = [("a", "r", "b", 1), ("a", "r", "c", 2.5), ("a", "r", "d", "2024-01-01")]
    path = write(tmp_path / "x.tsv", [NAMES, *mixed])
    with pytest.raises(DataError, match=r"x.tsv:4: .* the same kind in every row"):
        split(tmp_path, path, by="last")
    files = [write(tmp_path / f"{i}.tsv", [NAMES, row]) for i, row in enumerate(mixed)]
    assert parts_of(split(tmp_path, files[:2], by="time", ratio=(0.5, 0, 0.5)))[2] == {
        ("a", "r", "c")
    }
    with pytest.raises(DataError, match="some of its times are numbers and others dates"):
        split(tmp_path, files, by="last")


def test_missing_times_are_a_question(tmp_path, capsys):
    rows = [("a", "r", "b", 1), ("a", "r", "c", 2)]
    three = [row[:3] for row in rows]
    (tmp_path / "x.nt").write_text("<a> <r> <b> .\n")
    pq.write_table(pa.table(dict(zip(NAMES, zip(*three, strict=True), strict=False))),
                   tmp_path / "x.parquet")  # fmt: skip
    needs = "a split by time needs a time for each triple; add a column named time, timestamp, "
    for sources in (tmp_path / "x.nt", tmp_path / "x.parquet",
                    write(tmp_path / "three.tsv", [NAMES[:3], *three]),
                    {"whole": pa.table(dict(zip(NAMES, zip(*three, strict=True), strict=False)))},
                    three,
                    ):  # fmt: skip
        with pytest.raises(DataError, match=needs):
            split(tmp_path, sources, by="last")
    pairs = [("user", "item", "time"), *((f"u{i}", f"i{i}", i) for i in range(3))]
    pairs = write(tmp_path / "pairs.csv", pairs, ",")
    with pytest.raises(DataError, match=r"pairs.csv:1: .* data.relation NAME gives"):
        split(tmp_path, pairs, by="last")
    named = write(tmp_path / "named.tsv", [[*NAMES[:3], "when"], *rows])
    with pytest.raises(DataError, match=r"named.tsv: a split by time .* data.columns time=COLUMN"):
        split(tmp_path, named, by="last")
    with pytest.raises(
        DataError, match=r"named.tsv:1: .* time=then: no column of this name; did you mean when"
    ):
        split(tmp_path, named, by="last", columns="time=then")
    words = ["prepare", str(named), "-o", str(tmp_path / "s"), "--split.by", "last"]
    assert main(words) == 1 and "data.columns time=COLUMN" in capsys.readouterr().err
    assert main([*words, "--data.columns", "time=when"]) == 0
    said = capsys.readouterr().out
    assert "note: split by last (count 1): the last triples of each head by time are test" in said


# Options


def test_options_without_effect_are_rejected(tmp_path):
    rows = [("a", "r", "b", 1), ("a", "r", "c", 2)]
    for options, said in (
        ({"by": "last", "ratio": (0.8, 0.1, 0.1)}, "only with data.split.by random or head or t"),
        ({"by": "time", "count": 2}, "it acts only with data.split.by last"),
        ({"by": "week"}, "split.by must be one of random, head, time, last, got 'week'"),
        ({"by": "last", "count": 0}, "data.split.count must be an integer >= 1, got 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            split(tmp_path, rows, **options)
    with pytest.raises(DataError, match=r"data.split: these triples come in splits; leave it out"):
        prepare({"train": rows}, tmp_path / "s", {"split.by": "time"})
    with pytest.raises(DataError, match="or whole"):
        prepare({"train": rows, "whole": rows}, tmp_path / "s")


def test_runs_split_by_their_config(tmp_path):
    rows = [(f"h{i % 9}", "r", f"t{i * 7 % 31}", i) for i in range(90)]
    path = write(tmp_path / "x.tsv", [[*NAMES[:3], "when"], *rows])
    options = {"by": "last", "count": 2}
    keys = {f"data__split__{name}": value for name, value in options.items()}
    keys["data__columns"] = "time=when"
    expected = parts_of(split(tmp_path, path, by="last", count=2, columns="time=when"))
    with api.train(config_of(path, tmp_path / "run", train__epochs=0, **keys)) as run:
        store = TripleStore.open(run.folder.store)
        assert parts_of(store) == expected and run.config.data.split == SplitOptions(**options)
        assert store.report["split"] == {**options, "seed": run.config.seed}
