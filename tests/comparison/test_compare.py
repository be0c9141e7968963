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
from training_runs import QUIET, config_of

import kge_torchrec
from kge_torchrec import api, comparison
from kge_torchrec.cli import main, run_verb
from kge_torchrec.comparison import variants
from kge_torchrec.config import Config, ConfigError, TrainConfig
from kge_torchrec.config.entities import VARIANTS
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError


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


def test_comparison_writes_all_results(tmp_path, capsys):
    folder = tmp_path / "compared"
    options = ["--engines", "torchrec", "handrolled", "--world-sizes", "1", "2"]
    options += ["--repeats", "1", "--steps", "3"]
    assert main(arguments(folder, *options)) == 0
    results = json.loads((folder / "comparison.json").read_text())
    out, _ = capsys.readouterr()

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
    assert "training, same start" in text and f"incomplete: {results['failure']['where']}: " in text
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
    assert failure["where"] == "2 ranks, speed of torchrec, repeat 1 of 1"
    assert failure["rank"] in (0, 1)
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
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"kge-torchrec: interrupted; the measurements so far are in {folder}"


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


def test_config_of_a_run_is_compared(tmp_path, monkeypatch):
    """The run keeps its folder."""
    run = api.train(config_of("countries", tmp_path / "run", model__dim=16, train__epochs=1))
    seen = []

    def stop(size, device, work, configs, *_):
        seen.append(configs)
        raise comparison.RankFailed(0, "stopped")

    monkeypatch.setattr(comparison, "run_world", stop)
    words = ["--repeats", "0", "--run.dir", str(tmp_path / "compared"), "--threads", "1"]
    assert main(["compare", str(run.path), *words]) == 1
    assert seen[0]["torchrec"].model == run.config.model


def test_schedules_that_need_no_validation_are_compared():
    assert set(variants(Config(train=TrainConfig(schedule="cosine")), ["torchrec", "dgl"]))


# what is refused before anything starts


def test_contenders_differ_only_in_engine_and_preset():
    config = config_of("countries", train__optimizer="adam", entities__engine="handrolled")
    results = variants(config, list(VARIANTS))
    assert list(results) == list(VARIANTS)
    for name, (engine, preset) in VARIANTS.items():
        assert (results[name].entities.engine, results[name].entities.preset) == (engine, preset)
        values, base = results[name].to_dict(), config.to_dict()
        assert {**values, "entities": 0} == {**base, "entities": 0}


REFUSED = {
    "an unknown name": (["--engines", "torchrec", "dglke"], "--engines: 'dglke' is none of torch"),
    "a name twice": (["--engines", "dgl", "dgl"], "--engines names dgl twice"),
    "a single name": (["--engines", "torchrec"], "--engines needs at least two"),
    "dicee has adam only": (
        ["--engines", "torchrec", "dicee", "--train.optimizer", "adagrad"],
        "dicee: entities.preset: dicee has adam only, not adagrad",
    ),
    "presets without weight decay": (
        ["--engines", "handrolled", "dgl", "--train.optimizer", "adam",
         "--train.optimizer_options.weight_decay", "0.1"],
        "dgl: train.optimizer_options.weight_decay",
    ),
    "variants share a folder": (
        ["--entities.placement", "disk"],
        "overwrite each other's parts; set entities.placement to memory",
    ),
    "TorchRec's pipeline": (
        ["--engines", "torchrec", "handrolled", "--train.pipeline", "sparse_dist"],
        "train.pipeline sparse_dist",
    ),
    "an engine besides the names": (["--entities.engine", "dgl"], "entities.engine: --engines"),
    "a preset besides the names": (["--entities.preset=dgl"], "entities.preset: --engines"),
    "a schedule that needs validation": (["--train.schedule", "plateau"], "train.schedule plateau"),
    "an unknown key": (["--train.learning_rate", "1"], "unknown key train.learning_rate"),
    "no ranks": (["--world-sizes", "0", "1"], "--world-sizes must be different integers >= 1"),
    "a world size twice": (["--world-sizes", "2", "2"], "--world-sizes must be different"),
    "negative repeats": (["--repeats", "-1"], "--repeats must be an integer >= 0"),
    "no steps": (["--steps", "0"], "--steps must be an integer >= 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_contenders_are_rejected(name, tmp_path):
    arguments, words = REFUSED[name]
    folder = tmp_path / "compared"
    with pytest.raises(ConfigError) as caught:
        run_verb("compare", ["demo", *arguments, "--run.dir", str(folder)])
    assert words in str(caught.value)
    assert not folder.exists()


def test_nonempty_folder_is_rejected(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"run.dir: .* is not empty"):
        run_verb("compare", ["demo", "--run.dir", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_bad_data_leaves_no_folder(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        run_verb(
            "compare",
            ["demo", "--run.dir", str(tmp_path / "run"), "--data.path", str(tmp_path / "nowhere")],
        )
    assert list(tmp_path.iterdir()) == []


def test_torchrun_is_rejected(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="without torchrun"):
        run_verb("compare", ["demo"])
