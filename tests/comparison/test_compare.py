"""Whole comparisons: what they report, what those leave that do not end, what is refused."""

from __future__ import annotations

import _thread
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from training_runs import QUIET, config_of

import kge_torchrec
from kge_torchrec import api, comparison
from kge_torchrec.cli import main, run_verb
from kge_torchrec.comparison import text, variants
from kge_torchrec.config import Config, ConfigError, TrainConfig
from kge_torchrec.config.entities import VARIANTS
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError
from kge_torchrec.training.step import PARTS


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


def report_of(folder: Path) -> dict:
    return json.loads((folder / "comparison.json").read_text())


def test_comparison_writes_all_results(tmp_path):
    folder = tmp_path / "compared"
    keys = {"model__dim": 16, "train__batch_size": 512, "train__log_every": 2}
    config = config_of("countries", folder, **keys)
    returned = kge_torchrec.compare(config, world_sizes=[2], repeats=1, steps=3)
    results = report_of(folder)
    assert results == json.loads(json.dumps(returned))
    assert results["config"]["model"]["dim"] == 16 and results["machine"]["packages"]["torch"]
    store, training = TripleStore.open(folder / "store"), results["training"]["2"]
    steps = config.train.epochs * -(-len(store.train) // 512)
    assert training["steps"] == steps
    assert {len(losses) for losses in training["losses"].values()} == {steps}
    measured = training["differences"]["handrolled"]
    assert measured[0] == {"step": 0, "entities": 0, "dense": 0}
    assert measured[-1]["step"] == steps and measured[-1]["entities"] < 1e-4 * 0.05
    assert training["metrics"]["torchrec"]["both"]["realistic"]["mrr"] > 0
    assert list(results["speed"]["2"]) == ["torchrec", "handrolled"]
    for (ranks,) in results["speed"]["2"].values():
        assert len(ranks) == 2
        for rank in ranks:
            assert len(rank["triples_per_second"]) == 3 and min(rank["triples_per_second"]) > 0
            assert set(rank["split"]) == set(PARTS) and min(rank["split"].values()) > 0
            assert 100 << 20 < rank["peak_memory_bytes"] < 10 << 30
            assert rank["traffic"]["rows_looked_up"] > 0 and all(rank["traffic"]["sent"].values())
    assert sorted(path.name for path in folder.iterdir()) == ["comparison.json", "store"]
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("how", ["killed", pytest.param("interrupted", marks=pytest.mark.slow)])
def test_comparison_that_ends_early_keeps_results(tmp_path, capsys, how):
    """While both ranks of the first world of speed measure."""
    folder = tmp_path / "compared"

    def watch() -> None:
        until = time.monotonic() + 240
        while time.monotonic() < until:
            file = folder / "comparison.json"
            trained = file.exists() and report_of(folder)["training"]
            if trained and len(multiprocessing.active_children()) == 2:
                time.sleep(1.5)
                if how == "killed":
                    return os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
                break
            time.sleep(0.05)
        _thread.interrupt_main()  # or the comparison would run for ever

    watcher = threading.Thread(target=watch)
    watcher.start()
    options = ("--world-sizes", "2", "--repeats", "1", "--steps", "1000000")
    code = main(arguments(folder, *options))
    watcher.join()
    results, err = report_of(folder), capsys.readouterr().err
    assert results["training"]["2"]["metrics"]
    assert results["speed"]["2"] == {"torchrec": [], "handrolled": []}
    assert multiprocessing.active_children() == []
    assert code == (1 if how == "killed" else 130)
    assert ("was killed by SIGKILL" if how == "killed" else "interrupted") in err.splitlines()[-1]


def test_rank_that_fails_in_training_is_named(tmp_path, capsys):
    """A huge learning rate: the first loss is a number, a later one is not."""
    changes = {"train__optimizer": "sgd", "train__lr": 1e12, "train__epochs": 4}
    assert main(arguments(tmp_path / "compared", "--repeats", "0", **changes)) == 1
    said = capsys.readouterr().err
    assert "rank 0 raised NonFiniteLoss: torchrec: the loss is" in said.splitlines()[-1]


def test_presets_of_a_run_are_compared_by_initial_values_only(tmp_path, capsys):
    """``compare RUN`` takes the run's config and triples, and leaves its folder as it is."""
    changes = {"model__dim": 16, "train__epochs": 1, "train__optimizer": "adam"}
    run = api.train(config_of("countries", tmp_path / "run", **changes))
    before = {file: file.stat().st_mtime_ns for file in run.path.rglob("*")}
    folder = tmp_path / "compared"
    words = ["--engines", "dicee", "dgl", "handrolled", "--repeats", "0", "--train.epochs", "0",
             "--threads", "1", "--run.dir", str(folder)]  # fmt: skip
    assert main(["compare", str(run.path), *words]) == 0
    assert {file: file.stat().st_mtime_ns for file in run.path.rglob("*")} == before
    results = report_of(folder)
    assert results["config"]["model"] == json.loads(json.dumps(run.config.to_dict()["model"]))
    one, other = (TripleStore.open(path / "store") for path in (folder, run.path))
    assert one.fingerprint == other.fingerprint
    presets = [entities["preset"] for entities in results["entities"].values()]
    assert presets == ["dicee", "dgl", "fbgemm"]
    assert not any(results["speed"]["1"].values())
    training = results["training"]["1"]
    assert training["steps"] == 0 and training["metrics"] == {}
    starts = [measured[0] for measured in training["differences"].values()]
    assert starts == 2 * [{"step": 0, "entities": 0, "dense": 0}]
    assert capsys.readouterr().out == f"{text(results)}\n\nreport: {folder}\n"


# what is refused before anything starts


def test_contenders_differ_only_in_engine_and_preset():
    config = config_of("countries", train__optimizer="adam", entities__engine="handrolled")
    results = variants(config, list(VARIANTS))
    assert list(results) == list(VARIANTS)
    for name, (engine, preset) in VARIANTS.items():
        assert (results[name].entities.engine, results[name].entities.preset) == (engine, preset)
        values, base = results[name].to_dict(), config.to_dict()
        assert {**values, "entities": 0} == {**base, "entities": 0}
    assert set(variants(Config(train=TrainConfig(schedule="cosine")), ["torchrec", "dgl"]))


REFUSED = {  # beside those of bad_inputs.tsv
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
    "a world size twice": (["--world-sizes", "2", "2"], "--world-sizes must be different"),
    "bad data": (["--data.path", "/nowhere"], "/nowhere"),
    "torchrun": ([], "without torchrun"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_is_refused_and_leaves_no_folder(name, tmp_path, monkeypatch):
    words, said = REFUSED[name]
    folder = tmp_path / "compared"
    if name == "torchrun":
        monkeypatch.setenv("RANK", "0")
    with pytest.raises((ConfigError, DataError)) as caught:
        run_verb("compare", ["demo", *words, "--run.dir", str(folder)])
    assert said in str(caught.value) and not folder.exists()


# figures and tables of made-up comparisons


def repeats(*medians: float) -> list[list[dict[str, Any]]]:
    """A repeat for each median: of two ranks, with three blocks, the outer ones far off."""
    sent = {"ids": 1024.0, "rows": 2048.0, "gradients": 3072.0, "dense": 0.0}
    rank = {
        "peak_memory_bytes": 300 << 20,
        "split": {part: float(i) for i, part in enumerate(PARTS, 1)},
        "traffic": {"rows_looked_up": 100.0, "sent": sent, "collectives": {"all_to_all": 4.0}},
    }
    other = {**rank, "traffic": {**rank["traffic"], "rows_looked_up": 120.0}}
    return [
        [{**one, "triples_per_second": [0.5 * rate, rate, 1.5 * rate]} for one in (rank, other)]
        for rate in medians
    ]


def lines_of(difference: float | None, **speed: list) -> list[str]:
    """The lines of the tables of two variants at world size 2 that differ after 20 steps."""
    metrics = {"both": {"realistic": {"mrr": 0.5, "hits@10": 0.75}}}
    training = {
        "steps": 20,
        "losses": {"torchrec": [2.0] * 20, "handrolled": [2.0] * 20},
        "differences": {"handrolled": [{"step": 20, "entities": difference, "dense": 0.0}]},
        "metrics": {"torchrec": metrics, "handrolled": metrics},
    }
    config = config_of("countries").to_dict()
    content = {"config": config, "training": {"2": training}, "speed": {"2": speed}}
    return [" ".join(line.split()) for line in text(content).splitlines()]


def test_variants_take_turns_there_and_back(tmp_path, monkeypatch):
    """So that a machine that slows down slows all of them."""
    seen, (repeat,) = [], repeats(100)

    def world(size, device, work, config, *_):
        if work is comparison.measure_speed:
            seen.append((size, config.entities.engine))
        return repeat

    monkeypatch.setattr(comparison, "run_world", world)
    kge_torchrec.compare(
        config_of("countries", tmp_path / "compared"), world_sizes=[1, 2], repeats=2
    )
    there = [(1, "torchrec"), (1, "handrolled")]
    assert seen[:4] == there + there[::-1] and [size for size, _ in seen] == [1] * 4 + [2] * 4


def test_tables():
    """Medians of repeats and their spread; traffic is the mean of the ranks."""
    lines = lines_of(1e-6, torchrec=repeats(1e5, 1.1e5), handrolled=repeats(2e5, 2.6e5, 2.2e5))
    for line in (
        "2 handrolled 20 2 0.5000 0.7500 1.0e-06",
        "2 torchrec 105,000 100,000 110,000 1.00 300",
        "2 handrolled 220,000 200,000 260,000 2.10 300",
        "2 torchrec 1 2 3 4 5 15",
        "2 torchrec 110 1.0 2.0 3.0 0.0 4 all_to_all",
    ):
        assert line in lines


def test_tables_of_one_repeat_and_of_none():
    """With one repeat the spread is that of its blocks; what was not measured has no line."""
    assert "2 torchrec 200 100 300 1.00 300" in lines_of(0.0, torchrec=repeats(200))
    lines = lines_of(None, torchrec=[], handrolled=[])
    assert "2 handrolled 20 2 0.5000 0.7500 -" in lines and "triples/s" not in "".join(lines)
