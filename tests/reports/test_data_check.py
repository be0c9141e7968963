"""Results of `data check`, compared with sets of triples."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kge_torchrec
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.data import leaks as leaking
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
    rows = sorted(triples)
    random.shuffle(rows)
    named = [(f"e{h}", f"r{r}", f"e{t}") for h, r, t in rows]
    held = len(named) // 8
    return {"test": named[:held], "valid": named[held : 2 * held], "train": named[2 * held :]}


def oracle(splits: dict[str, list], threshold: float) -> tuple[set, int]:
    """Kinds and relations of overlaps, and the leaks of test, by the definition."""
    pairs: dict[str, set] = {}
    for h, r, t in splits["train"]:
        pairs.setdefault(r, set()).add((h, t))
    turned = {r: {(t, h) for h, t in of if h != t} for r, of in pairs.items()}
    found = set()
    for r, of in pairs.items():
        straight = {(h, t) for h, t in of if h != t}
        if straight and len(straight & turned[r]) >= threshold * len(straight):
            found.add(("symmetric", frozenset([r])))
        for s in pairs.keys() - {r}:
            enough = threshold * max(len(of), len(pairs[s]))
            for kind, other in (("duplicates", pairs[s]), ("inverses", turned[s])):
                if len(of & other) >= enough:
                    found.add((kind, frozenset([r, s])))
    leaks = 0
    for h, r, t in splits["test"]:
        same = {("duplicates", frozenset([r, s])) for s, of in pairs.items() if (h, t) in of}
        other = {
            (kind, frozenset([r, s]))
            for s, of in turned.items()
            for kind in ("inverses", "symmetric")
            if (h, t) in of
        }
        leaks += bool((same | other) & found)
    return found, leaks


@pytest.mark.parametrize(("threshold", "seed"), [(0.3, 0), (0.5, 1), (0.8, 2)])
def test_overlaps_and_leaks_match_the_oracle(tmp_path, monkeypatch, threshold, seed):
    monkeypatch.setattr("kge_torchrec.data.sort.CHUNK", 32)
    monkeypatch.setattr(leaking, "THRESHOLD", threshold)
    splits = graph(seed)
    prepare(splits, tmp_path / "store")
    results = check_data(tmp_path / "store")
    expected, leaks = oracle(splits, threshold)
    found = [(x["kind"], frozenset([x["first"], x["second"]])) for x in results["overlaps"]]
    assert len(found) == len(expected) and {*found} == expected
    assert results["leaks"]["test"] == leaks
    assert threshold != 0.5 or (leaks and len({kind for kind, _ in expected}) == 3)


def test_check_returns_and_prints_the_report_of_the_store(tmp_path, capsys):
    (tmp_path / "train.tsv").write_text("a\tr\tb\na\tr\tb\nb\tr\tc\na\ts\tc\nc\ts\ta\n")
    (tmp_path / "valid.tsv").write_text("a\tr\tb\n")
    (tmp_path / "test.tsv").write_text("a\tr\tx\nb\tnew\ta\n")
    before = {path.name for path in tmp_path.iterdir()}
    results = kge_torchrec.check_data(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before
    report = prepare(tmp_path, tmp_path / "out" / "store", {"allow_unseen_relations": True}).report
    assert {key: results[key] for key in report} == report
    assert main(["data", "check", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for words in (
        "4 entities", "train 4, valid 1, test 2", "train: 1 duplicate triples",
        "train-valid: 1 triples occur in both", "such as 'x'; their 1 triples stay in",
        "test: relations without a training triple: new", "0 of 2 test triples (0.0%) follow from",
        "symmetric  s      s            2          100.0%",
    ):  # fmt: skip
        assert words in text
    assert main(["data", "check", str(tmp_path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == results


def test_training_reports_the_same_leaks(tmp_path, monkeypatch):
    pairs = [(f"e{i}", "knows", f"e{i + 1}") for i in range(40)]
    turned = [(t, r, h) for h, r, t in pairs]
    splits = {"train": pairs + turned[5:], "valid": turned[:2], "test": turned[2:5] + pairs[:1]}
    store = prepare(splits, tmp_path / "store")
    assert check_data(store.path)["leaks"] == {"valid": 2, "test": 3}
    (said,) = data_report.leak_notes(store)
    assert said.startswith(
        "2 of 2 valid triples (100.0%) and 3 of 4 test triples (75.0%) follow from train by"
    )
    monkeypatch.setattr(data_report, "LARGEST", len(store.train) - 1)
    (said,) = data_report.leak_notes(store)
    assert "nobody has looked for" in said and "`kge-torchrec data check` does" in said
    single = prepare({"train": pairs}, tmp_path / "alone")
    assert data_report.leak_notes(single) == []


def test_data_check_reads_files_like_prepare(tmp_path, capsys):
    file, other = tmp_path / "train.csv", tmp_path / "test.csv"
    file.write_text("who,since,how,whom\na,1999,r,b\nb,2000,r,c\n")
    other.write_text("who,since,how,whom\nb,1,r,a\n")
    columns = "head=who,relation=how,tail=whom"
    command = ["data", "check", str(file), str(other), "--format", "json", "--columns", columns]
    assert main(command) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["triples"] == {"train": 2, "valid": 0, "test": 1}
    assert results == check_data([file, other], {"columns": columns})


def test_reading_options_are_rejected_for_a_store(tmp_path):
    store = prepare({"train": graph(0)["train"]}, tmp_path / "store")
    with pytest.raises(ConfigError, match=r"data.literals keep has no effect here: it acts only"):
        check_data(store.path, {"literals": "keep"})
