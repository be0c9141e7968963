"""Shards cut into pieces: the same numbers, in any number of ranks and engine."""

from __future__ import annotations

from pathlib import Path

from training_runs import config_of, fit, largest_difference, tiny_store
from worlds import run_world

from kge_torchrec.training import checkpoint_files
from kge_torchrec.training.checkpoint_files import Checkpoint

ROW_BYTES = 8 * 4


def trains(store: Path, run: Path, changes: dict, chunk_bytes: int) -> dict:
    checkpoint_files.PIECE_BYTES = chunk_bytes
    return fit(config_of(store, run, **changes)).parameters


def test_chunk_size_does_not_change_a_resume(tmp_path):
    store = tiny_store(tmp_path / "store").path
    changes = {"train__optimizer": "rowwise_adam"}
    all_epochs = changes | {"train__epochs": 4}
    whole = run_world(1, trains, store, tmp_path / "whole", all_epochs, 1 << 20)[0]
    for ranks, epochs, rows in ((2, 1, 3), (1, 2, 1), (2, 4, 1000)):
        more = changes | {"train__epochs": epochs}
        results = run_world(ranks, trains, store, tmp_path / "run", more, rows * ROW_BYTES)[0]
    assert largest_difference(results, whole) < 1e-5


def test_no_chunk_exceeds_the_limit(tmp_path):
    store = tiny_store(tmp_path / "store").path
    run_world(2, trains, store, tmp_path / "run", {"train__optimizer": "adam"}, 3 * ROW_BYTES + 1)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    tensors = Checkpoint.open(newest).tensors.items()
    tables = [pieces for name, pieces in tensors if "entities.embeddings" in name]
    assert len(tables) == 3  # rows and two moments
    for pieces in tables:
        assert max(count for _, _, count, _ in pieces) == 3
        assert sum(count for _, _, count, _ in pieces) == 37
