"""Decisions and errors of one rank reach all ranks, so that none hangs in a collective."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import patch

import pytest
from training_runs import (
    config_of,
    fit,
    largest_difference,
    longer_config,
    rank,
)
from worlds import run_world

from kge_torchrec import api, files
from kge_torchrec.data import prepare as preparing
from kge_torchrec.data.prepare import prepare
from kge_torchrec.distributed.processes import (
    OtherRankFailed,
    on_all_ranks,
    on_first_rank,
    processes,
)
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trackers import MetricsLog


def rank_0_comes_late(folder: Path) -> tuple[int, int]:
    """Numbers of entities and of stores prepared here, when rank 0 looks after the other."""
    with processes("cpu") as ranks, patch.object(preparing, "prepare", wraps=prepare) as prepared:
        time.sleep(0.5 * ranks.is_first)
        config = config_of(folder / "data", folder / "run", evaluation__every=0)
        session = Session(config, RunFolder(config.run.dir), ranks)
        return session.store.num_entities, prepared.call_count


def test_rank_0_prepares_the_store_for_all(tmp_path):
    (tmp_path / "data").mkdir()
    lines = (f"a{i}\tr\tb{i % 7}\n" for i in range(30))
    (tmp_path / "data" / "train.tsv").write_text("".join(lines))
    assert run_world(2, rank_0_comes_late, tmp_path) == [(37, 1), (37, 0)]


def rank_sees_an_old_listing(store: Path, run: Path) -> tuple[int, dict]:
    """Simulate a network disk, where the listing of another host may lag behind."""
    glob = Path.glob

    def stale(self: Path, pattern: str):
        listing = sorted(glob(self, pattern))
        hides = rank() == 1 and pattern.startswith("step-")
        return iter(listing[:-1] if hides else listing)

    Path.glob = stale
    try:
        config = longer_config(store, run)
        with processes("cpu") as ranks:
            epoch = Session(config, RunFolder(run), ranks).restore().epoch
        with api.open_run(run) as opened:
            return epoch, opened.evaluate()
    finally:
        Path.glob = glob


def test_all_ranks_load_the_checkpoint_that_rank_0_sees(store, tmp_path):
    run = api.train(longer_config(store, tmp_path / "run"))
    expected = run.evaluate()
    run.close()
    for epoch, results in run_world(2, rank_sees_an_old_listing, store, run.path):
        assert epoch == 4
        for side in ("head", "tail", "both"):
            mrr = expected[side]["realistic"]["mrr"]
            assert results[side]["realistic"]["mrr"] == pytest.approx(mrr, abs=1e-5)


def rank_meets_a_full_disk(store: Path, run: Path, where: str) -> str:
    """An OSError in what only rank 0 writes, or in a callback of rank 1."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    places = {"metrics": (MetricsLog, "write"), "results": (files, "write_json")}
    callbacks = [full] if (where, rank()) == ("callback", 1) else []
    with pytest.MonkeyPatch.context() as patched:
        if where in places and rank() == 0:
            patched.setattr(*places[where], full)
        try:
            api.train(config_of(store, run, train__epochs=1), callbacks).close()
        except (OSError, OtherRankFailed) as error:
            return str(error)
    return "trained"


@pytest.mark.parametrize("where", ["metrics", "results", "callback"])
def test_error_of_one_rank_ends_all(store, tmp_path, where):
    texts = run_world(2, rank_meets_a_full_disk, store, tmp_path / "run", where, timeout=60)
    assert all("No space left on device" in text for text in texts)
    if where == "callback":
        assert texts[0].startswith("rank 1: ") and "rank" not in texts[1]


def test_undeletable_old_checkpoint_stays(store, tmp_path, monkeypatch, caplog):
    def refuse(path, *_: object, **__: object) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    uninterrupted = fit(longer_config(store, tmp_path / "a")).parameters
    monkeypatch.setattr("kge_torchrec.training.checkpoints.shutil.rmtree", refuse)
    result = fit(longer_config(store, tmp_path / "b")).parameters
    assert largest_difference(uninterrupted, result) == 0
    assert "could not be removed" in caplog.text and "Device or resource busy" in caplog.text
    assert len(list((tmp_path / "b" / "checkpoints").iterdir())) == 4


class Unsendable(Exception):
    def __init__(self, one: int, two: int):
        super().__init__(f"{one} and {two}")


def rank_raises(where: int, of_all: bool) -> str:
    def work() -> int:
        if rank() == where:
            raise Unsendable(1, 2)
        return rank()

    with processes("cpu") as ranks:
        try:
            return str((on_all_ranks if of_all else on_first_rank)(ranks, work))
        except Exception as error:
            assert error.on_every_rank
            return f"{type(error).__name__}: {error}"


def test_errors_that_cannot_be_sent_reach_every_rank():
    assert run_world(2, rank_raises, 0, False) == [
        "Unsendable: 1 and 2",
        "RuntimeError: Unsendable: 1 and 2",
    ]
    assert run_world(2, rank_raises, 1, True) == [
        "OtherRankFailed: rank 1: 1 and 2",
        "Unsendable: 1 and 2",
    ]
    assert run_world(2, rank_raises, 9, True) == ["0", "1"]
    assert run_world(2, rank_raises, 9, False) == ["0", "0"]
