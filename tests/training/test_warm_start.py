"""Vectors from elsewhere and warm starts, at 1 and 2 ranks, against numpy."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from training_runs import config_of, fit, small_store, without_checkpoints
from worlds import run_world

from kge_torchrec import api, extend
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import KGEError

LABELS = [*(f"e{i}" for i in range(30, 4, -1)), "elsewhere", "e two\\words"]  # no e0 to e4


def some_vectors(width: int = 8) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((len(LABELS), width)).astype(np.float32)


def write(folder: Path, table: np.ndarray, labels=LABELS, kind="float32") -> Path:
    file, rows = folder / "vectors.parquet", pa.array(list(table), pa.list_(getattr(pa, kind)()))
    pq.write_table(pa.table({"label": labels, "vector": rows}), file)
    return file


def start(changes: dict) -> dict:
    """The parameters that a run of these keys starts from.  Collective."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(small_store(), folder, **changes, train__epochs=0)
        return fit(config, without_checkpoints).parameters


def places(labels=LABELS) -> tuple[list[int], list[int]]:
    """Ids of the labels that are in the graph, and their places among the labels."""
    all_labels = TripleStore.open(small_store()).entities.array.to_pylist()
    known = [place for place, label in enumerate(labels) if label in all_labels]
    return [all_labels.index(labels[place]) for place in known], known


def rank_starts(cases: list[dict]) -> list[dict]:
    return [start(case) for case in cases]


@pytest.mark.parametrize("ranks", [1, 2])
def test_vectors_are_the_rows_of_their_labels(tmp_path, ranks):
    case = {"model__init_from": str(write(tmp_path, some_vectors(), kind="float64"))}
    cases = [case, {**case, "model__biases": True, "model__dim": 10}]
    results, drawn = run_world(ranks, rank_starts, cases)[-1], start({})
    ids, known = places()
    assert len(ids) == 26
    expected = drawn["entities"].clone()
    expected[ids] = torch.from_numpy(some_vectors()[known])
    plain, with_biases = results
    assert torch.equal(plain["entities"], expected)
    assert torch.equal(plain["relations"], drawn["relations"])
    rows = with_biases["entities"][ids]
    assert torch.equal(rows[:, :8], expected[ids]) and not rows[:, 8:].any()


def rows_of(run) -> torch.Tensor:
    rows = run._load("newest").shard.rows.clone()
    run.close()
    return rows


def test_warm_start_matches_labels(tmp_path):
    model = {"model__scorer": "conve", "model__dim": 12, "model__reciprocal": True}
    old = config_of(small_store(), tmp_path / "old", train__epochs=1, **model)
    run = api.train(old, rank_test=False)
    before = TripleStore.open(small_store())
    (tmp_path / "new.tsv").write_text("e3\tr2\te1\ne1\tr0\tx\nx\tnew\te3\n")
    inputs = {"data__path": str(tmp_path / "new.tsv"), "data__split__ratio": (1, 0, 0), **model}
    changes = {"model__init_from": str(run.path)}
    warm, drawn = (start({**inputs, **more}) for more in (changes, {}))
    after = prepare(tmp_path / "new.tsv", tmp_path / "after", {"split.ratio": (1, 0, 0)})
    (new,), kept = after.entities.ids(["x"]), after.entities.ids(["e3", "e1"])
    entity_ids = before.entities.ids(["e3", "e1"])
    assert torch.equal(warm["entities"][kept], rows_of(run)[entity_ids])
    assert torch.equal(warm["entities"][new], drawn["entities"][new])
    trained = dict(run.model.scorer.named_parameters())
    relation_ids = before.relations.ids(["r2", "r0"])
    for name, parameter in trained.items():
        if name == "relations":
            rows, own = (x.view(2, 3, -1) for x in (parameter, warm[name]))
            assert torch.equal(own[:, after.relations.ids(["r2", "r0"])], rows[:, relation_ids])
            (place,) = after.relations.ids(["new"])
            assert torch.equal(own[:, place], drawn[name].view(2, 3, -1)[:, place])
        else:
            assert torch.equal(warm[name], parameter)
    inputs["model__scorer"] = "distmult"
    other, drawn = (start({**inputs, **more}) for more in (changes, {}))
    assert torch.equal(other["entities"][kept], warm["entities"][kept])
    assert torch.equal(other["relations"], drawn["relations"])


def with_nan() -> np.ndarray:
    table = some_vectors()
    table[3, 2] = np.nan
    return table


INVALID = [
    (with_nan(), LABELS, "vector of 'e27' .number 4. holds NaN"),
    (some_vectors(), [None, *LABELS[1:]], "1 vectors have no label"),
    (some_vectors(), [*LABELS[:4], "e30", *LABELS[5:]], "'e30' .number 1. is there again .number"),
    (some_vectors(), [f"q{i}" for i in range(28)], "none of its 28 labels"),
    ([*some_vectors()[:-1].tolist(), [1.5]], LABELS, "has not 8 numbers as the first"),
    ([[]] * 28, LABELS, "has no vectors"),
    (some_vectors(), [1.5] * 28, "wants one column of labels .* has 0 and 1 among label, vector"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "labels", "words"), INVALID, ids=lambda x: str(x)[-30:])
def test_invalid_vectors_are_rejected(tmp_path, table, labels, words):
    inputs = {"model__init_from": str(write(tmp_path, table, labels))}
    with pytest.raises(KGEError, match=words):
        api.train(config_of(small_store(), tmp_path / "run", **inputs))
    assert not (tmp_path / "run").exists()


def test_export_can_initialize_a_run(tmp_path):
    config = config_of(small_store(), tmp_path / "old", train__epochs=1)
    run = api.train(config, rank_test=False)
    results = start({"model__init_from": str(run.export(tmp_path / "export", "parquet"))})
    assert torch.equal(results["entities"], rows_of(run))


def test_each_rank_freezes_its_own_rows(tmp_path):
    file = write(tmp_path, some_vectors())
    assert run_world(2, rank_trains, str(file), tmp_path / "run") == [0, 0]


def rank_trains(file: str, folder: Path) -> int:
    """Count the frozen rows that have changed."""
    inputs = {"model__init_from": file, "model__init_options__frozen": True, "train__epochs": 1}
    rows = fit(config_of(small_store(), folder, **inputs)).parameters["entities"]
    ids, known = places()
    return int((rows[ids].numpy() != some_vectors()[known]).sum())


def test_frozen_vectors_stay_in_resumed_and_extended_runs(tmp_path):
    file = write(tmp_path, some_vectors())
    inputs = {"model__init_from": str(file), "model__init_options__frozen": True}
    config = config_of(small_store(), tmp_path / "run", train__epochs=1, **inputs)
    run = api.train(config, rank_test=False)
    file.unlink()  # it is read only at the start
    run = api.resume(run.path, {"train.epochs": 2})
    made = extend(run.path, {"train": [("new", "r0", "e1")]}, tmp_path / "later", epochs=2)
    again = extend(made.path, {"train": [("newer", "r0", "new")]}, tmp_path / "again", epochs=1)
    ids, known = places()
    rest = sorted(set(range(37)) - set(ids))
    before, rows, last = (rows_of(one) for one in (run, made, again))
    assert torch.equal(before[ids], torch.from_numpy(some_vectors()[known]))
    assert torch.equal(rows[ids], before[ids]) and torch.equal(last[ids], before[ids])
    assert len(rows) == len(before) + 1 and rows[-1].all()
    for now, then in ((before, start({})["entities"]), (rows, before), (last, rows)):
        assert not (now[rest] == then[rest]).all(1).any()
    assert not torch.equal(last[37], rows[37])  # new at the time, and trained
