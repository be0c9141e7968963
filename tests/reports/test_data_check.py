"""Results of `data check`, compared with sets of triples."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kge_torchrec
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.data import report as data_report
from kge_torchrec.data.prepare import prepare
from kge_torchrec.reports.data_check import check_data


def graph(seed: int, relations: int = 6) -> dict[str, list]:
    """Relation 1 is nearly relation 0, 2 nearly its inverse, 3 nearly symmetric; loops in all."""
    random = np.random.default_rng(seed)
    triples = {(int(h), 0, int(t)) for h, t in random.integers(12, size=(45, 2))}
    for h, _, t in sorted(triples):
        if random.random() < 0.9:
            triples.add((h, 1, t))
        if random.random() < 0.9:
            triples.add((t, 2, h))
    for h, t in random.integers(12, size=(30, 2)).tolist():
        triples |= {(h, 3, t)} | ({(t, 3, h)} if random.random() < 0.9 else set())
    for relation in range(4, relations):
        triples |= {(int(h), relation, int(t)) for h, t in random.integers(12, size=(40, 2))}
    triples |= {(n, relation, n) for n in range(3) for relation in range(relations)}
    rows = [triples_ for triples_ in sorted(triples)]
    random.shuffle(rows)
    named = [(f"e{h}", f"r{r}", f"e{t}") for h, r, t in rows]
    held = len(named) // 8
    return {"test": named[:held], "valid": named[held : 2 * held], "train": named[2 * held :]}


def oracle(splits: dict[str, list], threshold: float) -> tuple[dict, dict]:
    """Overlaps as sets of names, and leaks of test, by the definition."""
    pairs: dict[str, set] = {}
    for h, r, t in splits["train"]:
        pairs.setdefault(r, set()).add((h, t))
    turned = {r: {(t, h) for h, t in of if h != t} for r, of in pairs.items()}
    results: dict[str, set] = {"duplicates": set(), "inverses": set(), "symmetric": set()}
    for r, of in pairs.items():
        straight = {(h, t) for h, t in of if h != t}
        if straight and len(straight & turned[r]) >= threshold * len(straight):
            results["symmetric"].add(frozenset([r]))
        for s, rest in pairs.items():
            enough = threshold * max(len(of), len(rest))
            if s != r and len(of & rest) >= enough:
                results["duplicates"].add(frozenset([r, s]))
            if s != r and len(of & turned[s]) >= enough:
                results["inverses"].add(frozenset([r, s]))
    leaks = {"redundant": 0, "linked": 0, "linked_reversed": 0}
    for h, r, t in splits["test"]:
        same = {s for s, of in pairs.items() if (h, t) in of}
        other = {s for s, of in turned.items() if (h, t) in of}
        redundant = any(frozenset([r, s]) in results["duplicates"] for s in same)
        redundant |= any(
            frozenset([r, s]) in results["inverses"] | results["symmetric"] for s in other
        )
        leaks["redundant"] += redundant
        leaks["linked"] += bool(same)
        leaks["linked_reversed"] += bool(other)
    return results, leaks


@pytest.mark.parametrize(("threshold", "seed"), [(0.3, 0), (0.5, 1), (0.8, 2)])
def test_overlaps_and_leaks_match_the_oracle(tmp_path, monkeypatch, threshold, seed):
    monkeypatch.setattr("kge_torchrec.data.sort.CHUNK", 32)
    splits = graph(seed)
    prepare(splits, tmp_path / "store")
    results = check_data(tmp_path / "store", threshold=threshold)
    overlaps, leaks = oracle(splits, threshold)
    for kind, expected in overlaps.items():
        named = [frozenset([one["first"], one["second"]]) for one in results["overlaps"][kind]]
        assert len(named) == len(set(named)) and set(named) == expected
    if threshold == 0.5:
        assert all(overlaps.values()) and leaks["redundant"]
    assert {name: results["leaks"]["test"][name] for name in leaks} == leaks
    assert results["leaks"]["test"]["linked_share"] == leaks["linked"] / len(splits["test"])


def test_check_returns_and_prints_the_report_of_the_store(tmp_path, capsys):
    (tmp_path / "train.tsv").write_text("a\tr\tb\na\tr\tb\nb\tr\tc\na\ts\tc\nc\ts\tc\n")
    (tmp_path / "valid.tsv").write_text("a\tr\tb\n")
    (tmp_path / "test.tsv").write_text("a\tr\tx\nb\tnew\ta\n")
    before = {path.name for path in tmp_path.iterdir()}
    results = kge_torchrec.check_data(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before  # nothing is written unasked
    assert results["triples"] == {"train": 4, "valid": 1, "test": 2}
    assert results["duplicates"] == {"train": 1, "valid": 0, "test": 0}
    assert results["shared"] == {"train-valid": 1}
    assert results["unseen_relations"] == {"test": {"new": 1}}
    assert results["unseen_entities"]["test"]["examples"] == ["x"]
    report = prepare(tmp_path, tmp_path / "out" / "store", {"allow_unseen_relations": True}).report
    assert {key: results[key] for key in report} == report

    output = tmp_path / "out"
    assert main(["data", "check", str(tmp_path), "-o", str(output)]) == 0
    text = capsys.readouterr().out
    for words in (
        "4 entities", "train 4, valid 1, test 2", "train: 1 duplicate triples",
        "train-valid: 1 triples occur in both", "such as 'x'; their 1 triples stay in",
        "test: relations without a training triple: new",
    ):  # fmt: skip
        assert words in text
    assert json.loads((output / "data-check.json").read_text()) == results
    assert main(["data", "check", str(tmp_path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == results


def test_training_reports_the_same_leaks(tmp_path, monkeypatch):
    pairs = [(f"e{i}", "knows", f"e{i + 1}") for i in range(40)]
    turned = [(t, r, h) for h, r, t in pairs]
    splits = {"train": pairs + turned[5:], "valid": turned[:2], "test": turned[2:5] + pairs[:1]}
    store = prepare(splits, tmp_path / "store")
    results = check_data(store.path)["leaks"]
    parts = [
        f"{leak['redundant']:,} of {len(store.split(split)):,} {split} triples "
        f"({leak['redundant_share']:.1%})"
        for split, leak in results.items()
    ]
    assert all(leak["redundant"] for leak in results.values())
    (said,) = data_report.leak_notes(store)
    assert said.startswith(f"{parts[0]} and {parts[1]} follow from train by a relation")
    monkeypatch.setattr(data_report, "LARGEST", len(store.train) - 1)
    (said,) = data_report.leak_notes(store)
    assert "nobody has looked for" in said and "`kge-torchrec data check` does" in said
    single = prepare({"train": pairs}, tmp_path / "alone")
    assert data_report.leak_notes(single) == []


def test_data_check_reads_files_like_prepare(tmp_path, capsys):
    file, other = tmp_path / "train.csv", tmp_path / "test.csv"
    file.write_text("who,since,how,whom\na,1999,r,b\nb,2000,r,c\n")
    other.write_text("who,since,how,whom\nb,1,r,a\n")
    command = [
        "data",
        "check",
        str(file),
        str(other),
        "--columns",
        "head=who,relation=how,tail=whom",
    ]
    assert main([*command, "--format", "json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["triples"] == {"train": 2, "valid": 0, "test": 1}
    assert results == check_data([file, other], data={"columns": "head=who,relation=how,tail=whom"})
    (tmp_path / "x.csv").write_text("head_id,rel,tail_id\na,r,b\nb,r,c\n")
    ratio = ["--split.ratio", "[.5, 0, .5]"]
    for options, triples in ([], 2), (["--has_header", "false"], 3), (ratio, 2):
        assert main(["data", "check", str(tmp_path / "x.csv"), "--format", "json", *options]) == 0
        results = json.loads(capsys.readouterr().out)
        assert sum(results["triples"].values()) == triples
    assert main(["data", "check", str(tmp_path / "x.csv")]) == 0
    said = capsys.readouterr().out
    assert "x.csv:1: this line is read as a header: head 'head_id', relation 'rel'" in said
    assert "; data.has_header false reads it as a row" in said


def test_reading_options_are_rejected_for_a_store(tmp_path, capsys):
    store = prepare({"train": graph(0)["train"]}, tmp_path / "store")
    assert main(["data", "check", str(store.path), "--columns", "head=a"]) == 1
    assert "data.columns head=a has no effect here" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"data.literals keep has no effect here: it acts only"):
        check_data(store.path, data={"literals": "keep"})


def test_bad_input_of_data_check_is_reported(tmp_path, capsys):
    assert main(["data", "check", str(tmp_path / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="threshold must be in"):
        check_data("countries", threshold=0.0)
