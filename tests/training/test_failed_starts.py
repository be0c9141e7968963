"""A new run that fails before its first checkpoint leaves nothing in the way of a second start."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from training_runs import config_of, random_triples

from kge_torchrec import Loss, api
from kge_torchrec.training.run_folder import RunFolder

HERE = __name__


class Fails(Loss):
    """Fails in the third step."""

    steps = 0

    def forward(self, positive, query, negative, mask):
        if positive.requires_grad:
            type(self).steps += 1
        if type(self).steps > 4:  # two sides per step
            type(self).steps = 0
            raise RuntimeError("a mistake in the loss")
        return torch.nn.functional.softplus((negative * mask).mean(-1) - positive)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_second_start_repeats_the_first_error(tmp_path):
    """The folder is gone, with config, prepared store, plan and trackers."""
    lines = ["\t".join(triple) for triple in random_triples(37, 3, 130)]
    (tmp_path / "train.tsv").write_text("\n".join(lines))
    config = config_of(
        tmp_path / "train.tsv",
        tmp_path / "run",
        loss__name=f"{HERE}:Fails",
        run__trackers__tensorboard=True,
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a mistake in the loss"):
            api.train(config)
        assert not (tmp_path / "run").exists()


def test_files_from_before_stay(store, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("notes.txt", "plan.txt", "metrics.jsonl"):
        (run / name).write_text('{"my": "own"}')
    with pytest.raises(RuntimeError, match="a mistake"):
        api.train(config_of(store, run, loss__name=f"{HERE}:Fails"))
    assert names(run) == {"notes.txt", "plan.txt", "metrics.jsonl"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(RuntimeError, match="a mistake"):
        api.train(config_of(store, tmp_path / "empty", loss__name=f"{HERE}:Fails"))
    assert names(tmp_path / "empty") == set()


def test_run_that_fails_after_a_checkpoint_stays(store, tmp_path):
    def fail(kind, values):
        if values.get("epoch") == 2:
            raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late"):
        api.train(config_of(store, tmp_path / "run", checkpoint__every__epochs=1), [fail])
    assert {"config.yaml", "metrics.jsonl"} <= names(tmp_path / "run")


def test_resumed_run_without_a_checkpoint_stays(store, tmp_path):
    """It was there before: for example, the first start was killed."""
    config = config_of(store, tmp_path / "run", run__resume="auto", loss__name=f"{HERE}:Fails")
    RunFolder(tmp_path / "run").create(config)
    with pytest.raises(RuntimeError, match="a mistake"):
        api.train(config)
    assert {"config.yaml", "metrics.jsonl"} <= names(tmp_path / "run")


def test_error_of_the_run_is_raised_if_its_files_cannot_be_removed(store, tmp_path):
    """The next start in the folder removes them."""
    config = config_of(store, tmp_path / "run", loss__name=f"{HERE}:Fails")
    with (
        patch.object(RunFolder, "remove", side_effect=OSError("read-only")),
        pytest.raises(RuntimeError, match="a mistake"),
    ):
        api.train(config)
    assert "config.yaml" in names(tmp_path / "run")
    api.train(config_of(store, tmp_path / "run")).close()
