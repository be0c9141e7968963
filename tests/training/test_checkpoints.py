"""Checkpoints: whole or not at all, which are kept, and what happens to damaged ones."""

from __future__ import annotations

import logging
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_runs import config_of, fit, largest_difference, longer_config, rank, tiny_store
from worlds import run_world

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.distributed.processes import processes
from kge_torchrec.errors import StoreError
from kge_torchrec.training.checkpoints import BEST, NEWEST, CheckpointError
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import NonFiniteParameters, Trainer

FOUR = [f"step-{step:012d}" for step in (5, 10, 15, 20)]


def names(run: Path) -> list[str]:
    """All that lies in the checkpoints folder, hidden files too."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def truncate(run: Path, name: str) -> None:
    """Cuts the largest file of a checkpoint in half."""
    file = max((run / "checkpoints" / name).iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_last_checkpoints_are_kept(store, tmp_path):
    fit(longer_config(store, tmp_path, checkpoint__keep=2))
    assert names(tmp_path) == FOUR[-2:]


def test_best_checkpoint_is_kept(store, tmp_path):
    def make_the_first_best(loop: Trainer) -> None:
        mrr = iter([0.9, 0.5, 0.6, 0.7])
        loop.session.validate = lambda: {"both": {"realistic": {"mrr": next(mrr)}}}

    config = longer_config(store, tmp_path, checkpoint__keep=1, evaluation__every=1)
    session = fit(config, make_the_first_best)
    assert names(tmp_path) == [FOUR[0], FOUR[-1]]
    with processes("cpu"):
        assert session.restore_parameters().epoch == 1
        assert session.restore().epoch == 4
        results = session.checkpoints.order
        assert [results(which)[0] for which in (BEST, NEWEST)] == [FOUR[0], FOUR[-1]]
        shutil.rmtree(tmp_path / "checkpoints" / FOUR[0])
        assert results(BEST)[0] == FOUR[-1]
        with pytest.raises(CheckpointError, match=f"no checkpoint '{FOUR[0]}'; it has {FOUR[-1]}"):
            results(FOUR[0])


def test_only_last_checkpoint_without_interval(store, tmp_path):
    fit(longer_config(store, tmp_path, checkpoint__every__epochs=0))
    assert names(tmp_path) == FOUR[-1:]


def test_checkpoints_within_an_epoch(store, tmp_path):
    fit(longer_config(store, tmp_path, checkpoint__every__steps=2, checkpoint__keep=5))
    steps = [int(name.split("-")[1]) for name in names(tmp_path)]
    assert steps == [14, 15, 17, 19, 20]


def test_parameters_are_checked_before_they_are_saved(store, tmp_path):
    def spoil(loop: Trainer) -> None:
        validate = loop._validate

        def validate_and_spoil() -> bool:
            loop.session.backend.shard().rows[0, 0] = torch.nan
            return validate()

        loop._validate = validate_and_spoil

    with pytest.raises(NonFiniteParameters):
        fit(longer_config(store, tmp_path, evaluation__every=1), spoil)


def test_leftovers_of_a_killed_write_are_removed(store, tmp_path):
    leftover = tmp_path / "checkpoints" / ".partial-step-000000000003"
    leftover.mkdir(parents=True)
    (leftover / "__0_0.distcp").write_bytes(b"half")
    fit(longer_config(store, tmp_path, checkpoint__keep=9))
    assert names(tmp_path) == FOUR


def test_damaged_newest_checkpoint_is_skipped_with_a_warning(store, tmp_path, caplog):
    uninterrupted = fit(longer_config(store, tmp_path / "a", checkpoint__keep=1))
    config = longer_config(store, tmp_path / "b", train__schedule="linear", checkpoint__keep=9)
    uninterrupted = fit(config)
    truncate(tmp_path / "b", FOUR[-1])
    with caplog.at_level(logging.WARNING):
        again = fit(config)
    assert f"{FOUR[-1]}" in caplog.text and "bytes instead of" in caplog.text
    assert largest_difference(uninterrupted.parameters, again.parameters) == 0
    assert names(tmp_path / "b") == FOUR


def test_damaged_checkpoints_do_not_replace_good_ones(store, tmp_path):
    """The one written after falling back is older by name than the damaged one."""
    config = longer_config(store, tmp_path, checkpoint__keep=2)
    fit(config)
    truncate(tmp_path, FOUR[-1])
    shorter = longer_config(store, tmp_path, checkpoint__keep=1, checkpoint__every__steps=3)
    stats = []
    look = lambda kind, values: stats.append(names(tmp_path)) if kind == "checkpoint" else None  # noqa: E731
    fit(shorter, lambda loop: loop.callbacks.append(look))
    assert stats == [["step-000000000018"], [FOUR[-1]]]


def test_all_damaged_checkpoints_are_reported(store, tmp_path):
    config = longer_config(store, tmp_path)
    fit(config)
    for name in FOUR[-2:]:
        truncate(tmp_path, name)
    with pytest.raises(CheckpointError, match=r"(?s)no readable checkpoint.*000020.*000015"):
        fit(config)


def test_missing_file_and_unknown_format_are_named(store, tmp_path):
    config = longer_config(store, tmp_path, checkpoint__keep=1)
    fit(config)
    folder = tmp_path / "checkpoints" / FOUR[-1]
    (folder / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"{FOUR[-1]} .*rank-00000.safetensors is missing"):
        fit(config)
    (folder / "manifest.json").write_text('{"format": 99, "files": {}, "crc32": {}}')
    with pytest.raises(CheckpointError, match=r"format 99; the only known is 2"):
        fit(config)


def select_the_second(loop: Trainer) -> None:
    mrr = iter([0.5, 0.9, 0.6, 0.7])
    loop.session.validate = lambda: {"both": {"realistic": {"mrr": next(mrr)}}}


def test_damaged_best_checkpoint_falls_back_to_newest(store, tmp_path, caplog):
    """At the end of a resumed run, and for evaluation, prediction and export."""
    options = {"evaluation__every": 1, "checkpoint__keep": 1}
    fit(longer_config(store, tmp_path, **options), select_the_second)
    assert names(tmp_path) == [FOUR[1], FOUR[3]]
    truncate(tmp_path, FOUR[1])
    longer_config(store, tmp_path, **options).save(tmp_path / "config.yaml")
    run = api.resume(tmp_path)
    assert run.results["checkpoint"] == {"name": FOUR[3], "epoch": 4}
    assert caplog.text.count(f"{FOUR[1]} in") == 1 and "trying another one" in caplog.text
    assert run.evaluate() == run.results["test"]
    run.export(tmp_path / "export")
    with pytest.raises(CheckpointError, match=rf"{FOUR[1]} .*bytes instead of"):
        run.export(tmp_path / "other", checkpoint=FOUR[1])


def test_missing_newest_checkpoint_is_reported(store, tmp_path, caplog):
    """The newest checkpoint was the best, so that no other one knows of it."""
    gone, left = FOUR[3], FOUR[2]
    made = longer_config(store, tmp_path / "run", evaluation__every=1)
    values = iter([{"both": {"realistic": {"mrr": value}}} for value in (0.1, 0.2, 0.3, 0.4)])
    fit(made, lambda loop: setattr(loop.session, "validate", lambda: next(values)))
    made.save(tmp_path / "run" / "config.yaml")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / gone)
    with api.open_run(tmp_path / "run") as run:
        run.evaluate()
    assert (
        f"the newest checkpoint of {tmp_path / 'run'}, {gone}, is missing; using {left}"
        in caplog.text
    )


def test_run_without_checkpoints_restarts_only_with_force(store, tmp_path, caplog):
    run = api.train(config_of(store, tmp_path / "run"))
    expected = run.results["test"]
    newest = names(run.path)[-1]
    shutil.rmtree(run.path / "checkpoints" / newest)
    with processes("cpu") as ranks:
        session = Session(run.config, RunFolder(run.path), ranks)
        assert session.restore().epoch == 1
    assert f"the newest checkpoint of {run.path}, {newest}, is missing" in caplog.text
    shutil.rmtree(run.path / "checkpoints")
    auto = replace(run.config, run=replace(run.config.run, resume="auto"))
    for again in (lambda: api.resume(run.path), lambda: api.train(auto)):
        with pytest.raises(CheckpointError, match=f"the newest was {newest}. .*--force"):
            again()
    assert main(["train", "--resume", str(run.path)]) == 1
    assert main(["train", "--resume", str(run.path), "--force"]) == 0
    assert api.open_run(run.path).results["test"] == expected


def rank_fills_the_disk(store: Path, run: Path) -> tuple[str, bool]:
    """No file may grow beyond 512 bytes after the second checkpoint, on rank 1 only."""

    def limit(kind: str, values: dict) -> None:
        if kind == "epoch" and values["epoch"] == 3 and rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))

    try:
        fit(longer_config(store, run), lambda loop: loop.callbacks.append(limit))
    except CheckpointError as error:
        return str(error), getattr(error, "on_every_rank", False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    raise AssertionError("the checkpoint was written")


def rank_restores(store: Path, run: Path) -> int:
    with processes("cpu") as ranks:
        session = Session(longer_config(store, run), RunFolder(run), ranks)
        return session.restore().epoch


def test_full_disk_ends_every_rank_and_keeps_earlier_checkpoints(store, tmp_path):
    for message, on_every_rank in run_world(2, rank_fills_the_disk, store, tmp_path):
        assert FOUR[2] in message and "rank 1: " in message and "File too large" in message
        assert f"earlier checkpoints are intact: {FOUR[0]}, {FOUR[1]}" in message
        assert on_every_rank
    assert names(tmp_path) == FOUR[:2]
    assert run_world(2, rank_restores, store, tmp_path) == [2, 2]


def test_uncreatable_folder_is_reported(store, tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"(?s)could not be written.*intact: none"):
        fit(longer_config(store, tmp_path))


def test_changed_store_is_rejected(tmp_path):
    path = tmp_path / "store"
    run = api.train(config_of(tiny_store(path).path, tmp_path / "run", train__epochs=1))
    run.evaluate()
    run.close()
    path.rename(tmp_path / "old")
    tiny_store(path, train=131)
    with pytest.raises(StoreError, match=r"not the ones that .*run was trained on"):
        api.resume(run.path)
    with pytest.raises(StoreError, match=r"not the ones"):
        run.evaluate()


def test_saving_does_not_change_training(store, tmp_path):
    """TorchRec makes optimizer state by a step, which must not count; nor is state lost."""
    options = {"train__optimizer": "adam", "train__optimizer_options__weight_decay": 0.1}
    for engine in ("torchrec", "handrolled"):
        options["entities__engine"] = engine
        folder = tmp_path / engine
        often = fit(longer_config(store, folder / "a", checkpoint__every__steps=1, **options),
                    lambda loop: loop.session.backend.state())  # fmt: skip
        once = fit(longer_config(store, folder / "b", checkpoint__every__epochs=0, **options))
        assert largest_difference(often.parameters, once.parameters) == 0
