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
from kge_torchrec.comparison import summary, text, variants
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
    returned = kge_torchrec.compare(config, world_sizes=[1, 2], repeats=1, steps=3)
    results = report_of(folder)
    assert results == json.loads(json.dumps(returned))
    assert results["complete"] is True and results["failure"] is None
    assert results["engines"] == ["torchrec", "handrolled"]
    assert results["config"]["model"]["dim"] == 16 and results["machine"]["packages"]["torch"]
    store = TripleStore.open(folder / "store")
    steps = config.train.epochs * -(-len(store.train) // 512)
    assert results["data"]["train"] == len(store.train)
    for world_size in ("1", "2"):
        training = results["training"][world_size]
        assert training["complete"] and training["steps"] == steps
        assert {len(losses) for losses in training["losses"].values()} == {steps}
        measured = training["differences"]["handrolled"]
        assert measured[0] == {"step": 0, "entities": 0, "dense": 0}
        assert measured[-1]["step"] == steps and measured[-1]["entities"] < 1e-4 * 0.05
        assert training["metrics"]["torchrec"]["both"]["realistic"]["mrr"] > 0
        for name, (repeat,) in results["speed"][world_size].items():
            assert repeat["repeat"] == 0 and len(repeat["ranks"]) == int(world_size)
            assert len(repeat["triples_per_second"]) == 3 and min(repeat["triples_per_second"]) > 0
            for rank in repeat["ranks"]:
                assert set(rank["split"]) == set(PARTS) and min(rank["split"].values()) > 0
                assert 100 << 20 < rank["peak_memory_bytes"] < 10 << 30
                assert rank["threads"] == 1
            for sent in results["summary"][world_size][name]["traffic"].values():
                assert sent["ids_looked_up"] > 0
                for kind in ("rows_sent", "integers_sent", "bytes_sent"):
                    assert (sent[kind] == 0) == (world_size == "1")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["comparison.json", "comparison.txt", "store"]
    assert (folder / "comparison.txt").read_text() == text(results) + "\n"
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
    results, (out, err) = report_of(folder), capsys.readouterr()
    assert results["complete"] is False and not results["speed"]
    assert results["training"]["2"]["complete"] is True and results["training"]["2"]["metrics"]
    failure, written = results["failure"], (folder / "comparison.txt").read_text()
    assert failure["where"] == "2 ranks, speed of torchrec, repeat 1 of 1"
    assert "training, same start" in written and f"incomplete: {failure['where']}: " in written
    assert multiprocessing.active_children() == []
    if how == "killed":
        assert code == 1 and failure["rank"] in (0, 1)
        assert "was killed by SIGKILL" in failure["reason"] and failure["reason"] in out
    else:
        assert code == 130 and failure["reason"] == "it was interrupted"
        said = f"kge-torchrec: interrupted; the measurements so far are in {folder}"
        assert err.splitlines()[-1] == said


def test_rank_that_fails_in_training_keeps_earlier_losses(tmp_path, capsys):
    """A huge learning rate: the first loss is a number, a later one is not."""
    folder = tmp_path / "compared"
    changes = {"train__optimizer": "sgd", "train__lr": 1e12, "train__epochs": 4,
               "train__log_every": 1}  # fmt: skip
    assert main(arguments(folder, "--repeats", "0", **changes)) == 1
    results = report_of(folder)
    training = results["training"]["1"]
    assert results["complete"] is False and training["complete"] is False
    assert 0 < training["steps"] == len(training["losses"]["torchrec"])
    assert "NonFiniteLoss: torchrec: the loss is" in results["failure"]["reason"]
    assert "NonFiniteLoss" in capsys.readouterr().out


def test_presets_of_a_run_are_compared_by_initial_values_only(tmp_path, capsys):
    """``compare URL`` takes the run's config and triples, and leaves its folder as it is."""
    changes = {"model__dim": 16, "train__epochs": 1, "train__optimizer": "adam"}
    url = f"file://{tmp_path}/copy"
    changes |= {"checkpoint__options__copy_to": url}
    run = api.train(config_of("countries", tmp_path / "run", **changes))
    before = {file: file.stat().st_mtime_ns for file in run.path.rglob("*")}
    folder = tmp_path / "compared"
    words = ["--engines", "dicee", "dgl", "handrolled", "--repeats", "0", "--train.epochs", "0",
             "--threads", "1", "--run.dir", str(folder)]  # fmt: skip
    assert main(["compare", url, *words]) == 0
    assert {file: file.stat().st_mtime_ns for file in run.path.rglob("*")} == before
    results = report_of(folder)
    assert results["config"]["model"] == json.loads(json.dumps(run.config.to_dict()["model"]))
    assert results["data"]["train"] == len(TripleStore.open(run.path / "store").train)
    assert results["complete"] and results["speed"] == {}
    presets = [results["entities"][name]["preset"] for name in results["engines"]]
    assert presets == ["dicee", "dgl", "fbgemm"]
    training = results["training"]["1"]
    assert training["complete"] and training["steps"] == 0 and training["metrics"] == {}
    starts = [measured[0] for measured in training["differences"].values()]
    assert starts == 2 * [{"step": 0, "entities": 0, "dense": 0}]
    written = (folder / "comparison.txt").read_text()
    assert capsys.readouterr().out.endswith(f"{written}\nreport: {folder}\n")


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


def repeats(*medians: float) -> list[dict[str, Any]]:
    """A repeat for each median: of three blocks, the outer ones far off, and of two ranks."""
    sent = {"ids_looked_up": 100.0, "rows_sent": 90.0, "integers_sent": 50.0, "bytes_sent": 2048.0}
    rank = {
        "peak_memory_bytes": 300 << 20,
        "split": {part: float(i) for i, part in enumerate(PARTS, 1)},
        "traffic": {
            "deduplicated": {**sent, "collectives": {"all_to_all": 4.0}},
            "duplicated": {**sent, "bytes_sent": 8192.0, "collectives": {"all_to_all": 4.0}},
        },
    }
    other = {**rank, "traffic": {**rank["traffic"], "deduplicated": {**sent, "collectives": {}}}}
    return [
        {"repeat": i, "triples_per_second": [0.5 * rate, rate, 1.5 * rate], "ranks": [rank, other]}
        for i, rate in enumerate(medians)
    ]


def text_of(difference: float | None, failure: dict | None = None, **speed: list[dict]) -> str:
    """The text of two variants at world size 2 that differ after 20 steps."""
    metrics = {"both": {"realistic": {"mrr": 0.5, "hits@10": 0.75}}}
    training = {
        "steps": 20,
        "losses": {"torchrec": [2.0] * 20, "handrolled": [2.0] * 20},
        "differences": {"handrolled": [{"step": 20, "entities": difference, "dense": 0.0}]},
        "metrics": {"torchrec": metrics, "handrolled": metrics},
    }
    summed, config = summary({"2": speed} if speed else {}), config_of("countries").to_dict()
    content = {"config": config, "training": {"2": training}, "summary": summed}
    return text({**content, "failure": failure})


def test_spread_and_ratio():
    """With one repeat the spread is that of its blocks."""
    base = repeats(100, 104, 100)
    for ours, speed, ratio in (
        (repeats(200, 260, 220), (220, 200, 260), (2.2, 2.0, 2.5)),
        (repeats(200), (200, 100, 300), (2.0, 2.0, 2.0)),
    ):
        found = summary({"2": {"base": base, "ours": ours}})["2"]["ours"]
        assert tuple(found["triples_per_second"].values()) == speed
        assert tuple(found["ratio_to_first"].values()) == ratio


def test_variants_take_turns_there_and_back(tmp_path, monkeypatch):
    """So that a machine that slows down slows all of them."""
    seen, (repeat,) = [], repeats(100)

    def world(size, device, work, config, *_):
        if work is comparison.measure_speed:
            seen.append((size, config.entities.engine))
            return [rank | {"triples_per_second": [100]} for rank in repeat["ranks"]]

    monkeypatch.setattr(comparison, "run_world", world)
    kge_torchrec.compare(
        config_of("countries", tmp_path / "compared"), world_sizes=[1, 2], repeats=2
    )
    there = [(1, "torchrec"), (1, "handrolled")]
    assert seen[:4] == there + there[::-1] and [size for size, _ in seen] == [1] * 4 + [2] * 4


def test_tables():
    """Traffic is the mean of the ranks; what was not measured has no figure."""
    said = text_of(1e-6, torchrec=repeats(1e5, 1.1e5), handrolled=repeats(2e5, 2.2e5))
    lines = [" ".join(line.split()) for line in said.splitlines()]
    for line in (
        "2 handrolled 20 2 0.5000 0.7500 1.0e-06",
        "2 torchrec 105,000 100,000 110,000 1.00 300",
        "2 handrolled 210,000 200,000 220,000 2.00 300",
        "2 torchrec 1 2 3 4 5 15",
        "2 torchrec deduplicated 100 90 50 2.0 2 all_to_all",
    ):
        assert line in lines
    failure = {"where": "2 ranks, speed of dgl, repeat 1 of 3", "rank": 1,
               "reason": "was killed by SIGKILL"}  # fmt: skip
    for rank, reason, ending in (
        (1, "was killed by SIGKILL", "rank 1 was killed by SIGKILL"),
        (None, "it was interrupted", "it was interrupted"),
    ):
        said = text_of(None, failure | {"rank": rank, "reason": reason})
        assert "2 handrolled 20 2 0.5000 0.7500 -" in " ".join(said.split())
        assert "triples/s" not in said and said.endswith(
            f"incomplete: {failure['where']}: {ending}"
        )
