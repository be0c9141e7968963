"""The first checkpoint of an extended or shrunk run: old rows by label, new ones as drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_runs import DISK
from grown_runs import (
    TABLES,
    base_config,
    base_run,
    check_rows,
    featured_run,
    new_triples,
)
from training_runs import fit
from worlds import run_world

from kge_torchrec import extend

DGL = {"train__optimizer": "adam", "entities__engine": "handrolled", "entities__preset": "dgl",
       "model__reciprocal": False}  # fmt: skip
TUCKER = {"train__optimizer": "adagrad", "model__scorer": "tucker", "model__dim": 4}
EMA, ROWWISE = {"train__averaging": "ema"}, {"train__optimizer": "rowwise_adagrad"}
ON_DISK = {key: value for key, value in DISK.items() if key != "entities__placement_options"}
ON_DISK |= {"entities__placement_options__parts": 5, "entities__placement_options__buffer": 3}
GONE = ["e3", "e11", "e36"]
# How the old run was made, the keys of the new one, and the ranks that extend it.
CASES = {
    "row steps": (lambda: base_run(**DGL), DGL, 1),
    "tucker": (lambda: base_run(**TUCKER), TUCKER, 2),
    "average": (lambda: base_run(**EMA), EMA, 1),
    "features": (lambda: featured_run(2, **ROWWISE), ROWWISE, 1),
    "features in a table of their own": (lambda: featured_run(3, True), TABLES, 1),
    "disk": (lambda: base_run(**ON_DISK), ON_DISK, 1),
}


def rank_extends(run: Path, output: Path, features: Path | None) -> None:
    extend(run, new_triples(), output, epochs=0, features=features, checkpoint="newest")


@pytest.mark.parametrize("case", CASES)
def test_extended_run_keeps_old_rows_and_draws_new_ones_like_a_new_run(tmp_path, case):
    """Whatever the pieces of the old checkpoint: some have rows of entities and of features."""
    make, keys, ranks = CASES[case]
    run, output, other = make(), tmp_path / "run", tmp_path / "fresh"
    features = run.parent / "new.tsv" if "features" in case else None
    run_world(ranks, rank_extends, run, output, features)
    fit(base_config(output / "store", other, **{**keys, "train__epochs": 0}))
    check_rows(run, output, other)


def rank_deletes(run: Path, output: Path, gone: list[str]) -> None:
    extend(run, None, output, delete=gone, checkpoint="newest")


@pytest.mark.parametrize("case", CASES)
def test_run_without_some_entities_keeps_the_rows_of_the_others(tmp_path, case):
    run = CASES[case][0]()
    gone = ["e30", "c1", "e4"] if "features" in case else GONE
    run_world(CASES[case][2], rank_deletes, run, tmp_path / "run", gone)
    check_rows(run, tmp_path / "run")
