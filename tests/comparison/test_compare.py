"""Whole comparisons on the embedded graph, and what those leave that do not reach their end."""

from __future__ import annotations

import _thread
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tqdm import tqdm
from training_runs import QUIET, config_of

import kge_torchrec
from kge_torchrec.cli import main
from kge_torchrec.comparison import compare
from kge_torchrec.comparison.compare import in_turn
from kge_torchrec.comparison.report import describe
from kge_torchrec.config import ConfigError
from kge_torchrec.data.store import TripleStore


def arguments(folder: Path, *options: str, **changes) -> list[str]:
    """A quick comparison on the countries graph."""
    keys = {**QUIET, "model.dim": 16, "train.batch_size": 512, "train.epochs": 2}
    keys |= {"train.log_every": 2, "evaluation.every": 2, "run.dir": folder}
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    if keys.get("train.optimizer") == "sgd":
        del keys["train.optimizer_options.eps"]
    flags = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}"
             for key, value in keys.items()]  # fmt: skip
    return ["compare", "demo", *options, *flags]


@pytest.mark.slow
def test_comparison_works_from_python(tmp_path):
    config = config_of("countries", tmp_path / "compared", model__dim=16, train__epochs=1)
    results = kge_torchrec.compare(config, world_sizes=[2], repeats=0)
    assert results["complete"] and results["engines"] == ["torchrec", "handrolled"]
    written = (tmp_path / "compared" / "comparison.json").read_text()
    assert json.loads(json.dumps(results)) == json.loads(written)
    assert results["training"]["2"]["differences"]["handrolled"][-1]["entities"] < 1e-4
    with pytest.raises(ConfigError, match="none of"):
        kge_torchrec.compare(config, engines=["torchrec", "other"])


def test_comparison_writes_all_results(tmp_path, capsys, monkeypatch):
    bars = []

    class Bar(tqdm):
        def update(self, n=1):
            bars.append((n, self.total))

    monkeypatch.setattr(compare, "tqdm", Bar)
    folder = tmp_path / "compared"
    options = ["--engines", "torchrec", "handrolled", "--world-sizes", "1", "2"]
    options += ["--repeats", "1", "--steps", "3"]
    assert main(arguments(folder, *options)) == 0
    results = json.loads((folder / "comparison.json").read_text())
    out, _ = capsys.readouterr()

    assert {sum(steps for steps, _ in bars)} == {total for _, total in bars}  # reaches its end
    assert results["complete"] is True and results["failure"] is None
    assert results["engines"] == ["torchrec", "handrolled"]
    assert results["config"]["model"]["dim"] == 16 and results["machine"]["packages"]["torch"]
    store = TripleStore.open(folder / "store")
    steps = 2 * -(-len(store.train) // 512)
    assert results["data"]["train"] == len(store.train)
    for world_size in ("1", "2"):
        training = results["training"][world_size]
        assert training["complete"] and training["steps"] == steps
        assert {len(losses) for losses in training["losses"].values()} == {steps}
        measured = training["differences"]["handrolled"]
        assert measured[0] == {"step": 0, "entities": 0, "dense": 0}
        assert measured[-1]["step"] == steps and measured[-1]["entities"] < 1e-4 * 0.05
        assert training["metrics"]["torchrec"]["both"]["realistic"]["mrr"] > 0
        for name, measurements in results["speed"][world_size].items():
            assert [one["repeat"] for one in measurements] == [0]
            for one in measurements:
                assert len(one["triples_per_second"]) == 3 and min(one["triples_per_second"]) > 0
                assert len(one["ranks"]) == int(world_size)
                for rank in one["ranks"]:
                    assert set(rank["split"]) == {"data", "lookup", "score", "backward", "update"}
                    assert all(ms > 0 for ms in rank["split"].values())
                    assert 100 << 20 < rank["peak_memory_bytes"] < 10 << 30
                    assert rank["threads"] == 1
            sent = results["summary"][world_size][name]["traffic"]["deduplicated"]["rows_sent"]
            assert sent == 0 if world_size == "1" else sent > 0

    assert sorted(path.name for path in folder.iterdir()) == [
        "comparison.json", "comparison.txt", "store",
    ]  # fmt: skip
    text = (folder / "comparison.txt").read_text()
    assert text.strip() in out and f"report: {folder}" in out
    assert multiprocessing.active_children() == []


def test_variants_alternate():
    assert [in_turn(["a", "b", "c"], repeat) for repeat in range(3)] == [
        ["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"],
    ]  # fmt: skip


def when_speed_is_measured(folder: Path, act: Callable[[], object]) -> threading.Thread:
    """Calls ``act`` in a thread, some time after both ranks of the first speed world started."""

    def watch() -> None:
        file = folder / "comparison.json"
        until = time.monotonic() + 240
        while time.monotonic() < until:
            trained = file.exists() and json.loads(file.read_text())["training"]
            if trained and len(multiprocessing.active_children()) == 2:
                time.sleep(1.5)
                act()
                return
            time.sleep(0.05)
        _thread.interrupt_main()  # or the comparison would run for ever

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


ENDLESS = ("--world-sizes", "2", "--repeats", "1", "--steps", "1000000")


def check_partial_report(folder: Path) -> dict:
    results = json.loads((folder / "comparison.json").read_text())
    assert results["complete"] is False
    assert results["training"]["2"]["complete"] is True and results["training"]["2"]["metrics"]
    assert not any(results["speed"].get("2", {}).values())
    text = (folder / "comparison.txt").read_text()
    assert "training, same start" in text and f"incomplete: {describe(results['failure'])}" in text
    assert multiprocessing.active_children() == []
    return results


@pytest.mark.usefixtures("ctrl_c")
def test_killed_rank_ends_the_comparison_and_keeps_results(tmp_path, capsys):
    folder = tmp_path / "compared"

    def kill_one() -> None:
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    watcher = when_speed_is_measured(folder, kill_one)
    assert main(arguments(folder, *ENDLESS)) == 1
    watcher.join()
    failure = check_partial_report(folder)["failure"]
    assert failure["contender"] == "torchrec" and failure["phase"] == "speed (repeat 1)"
    assert (failure["world_size"], failure["repeat"]) == (2, 0) and failure["rank"] in (0, 1)
    assert "was killed by SIGKILL" in failure["reason"]
    assert "was killed by SIGKILL" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_interrupted_comparison_keeps_results(tmp_path, capsys):
    folder = tmp_path / "compared"
    watcher = when_speed_is_measured(folder, _thread.interrupt_main)
    assert main(arguments(folder, *ENDLESS)) == 130
    watcher.join()
    assert check_partial_report(folder)["failure"]["reason"] == "it was interrupted"
    assert "interrupted" in capsys.readouterr().err


def test_rank_that_fails_in_training_keeps_earlier_losses(tmp_path, capsys):
    """A huge learning rate: the first loss is a number, a later one is not."""
    folder = tmp_path / "compared"
    changes = {"train__optimizer": "sgd", "train__lr": 1e12, "train__epochs": 4,
               "train__log_every": 1}  # fmt: skip
    assert main(arguments(folder, "--repeats", "0", **changes)) == 1
    results = json.loads((folder / "comparison.json").read_text())
    training = results["training"]["1"]
    assert results["complete"] is False and training["complete"] is False
    assert 0 < training["steps"] == len(training["losses"]["torchrec"])
    assert "NonFiniteLoss: torchrec: the loss is" in results["failure"]["reason"]
    assert "NonFiniteLoss" in capsys.readouterr().out


def test_presets_are_compared_by_initial_values_only(tmp_path):
    folder = tmp_path / "compared"
    options = ["--engines", "dicee", "dgl", "handrolled", "--repeats", "0"]
    changes = {"train__optimizer": "adam", "train__epochs": 0}
    assert main(arguments(folder, *options, **changes)) == 0
    results = json.loads((folder / "comparison.json").read_text())
    assert results["complete"] and results["speed"] == {}
    presets = [results["entities"][name]["preset"] for name in results["engines"]]
    assert presets == ["dicee", "dgl", "fbgemm"]
    starts = [measured[0] for measured in results["training"]["1"]["differences"].values()]
    assert starts == 2 * [{"step": 0, "entities": 0, "dense": 0}]


def test_rejection_is_one_sentence(tmp_path, capsys):
    options = ["--engines", "torchrec", "dicee"]
    assert main(arguments(tmp_path / "compared", *options)) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(
        "kge-torchrec: dicee: entities.preset: dicee has adam only, not adagrad"
    )
    assert err.count("\n") == 1 and not (tmp_path / "compared").exists()
