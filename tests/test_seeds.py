"""Several seeds of one config: a folder of runs, mean and deviation, and a paired test."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_runs import QUIET
from worlds import run_world

from kge_torchrec import SeedRuns, train_seeds
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.distributed.processes import on_first_rank, processes
from kge_torchrec.seeds import list_spread, paired_test, parse_seeds, spread, two_sided_p
from kge_torchrec.training.stop_signal import TrainingStopped

QUICK = {**QUIET, "train.batch_size": 256}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Three seeds of two scorers."""
    home = tmp_path_factory.mktemp("seeds")
    for scorer in ("distmult", "complex"):
        train_seeds({**QUICK, "model.scorer": scorer, "run.dir": str(home / scorer)}, 3)
    return {scorer: home / scorer for scorer in ("distmult", "complex")}


def ranks(value: float) -> dict:
    return {"both": {"realistic": {"mrr": value}}}


@pytest.mark.parametrize(
    "seeds, expected", [("3", [0, 1, 2]), (2, [0, 1]), ("4,1", [4, 1]), ("7,", [7]), ([5], [5])]
)
def test_seeds_are_a_number_or_a_list(seeds, expected):
    assert parse_seeds(seeds) == expected


@pytest.mark.parametrize("seeds", ["", "0", "-1", "a", "1,1", "1,,2", "1.5", [], [-1]])
def test_wrong_seeds_are_refused(seeds):
    with pytest.raises(ConfigError, match="--seeds must be a number of seeds, such as 5"):
        parse_seeds(seeds)


def test_each_seed_is_a_run_and_runs_differ_in_the_seed_alone(folders):
    runs = SeedRuns(folders["distmult"])
    assert runs.seeds == [0, 1, 2] and runs.missing == []
    configs = [runs.folder(seed).load_config().to_dict() for seed in runs.seeds]
    assert [config.pop("seed") for config in configs] == [0, 1, 2]
    for config in configs:
        del config["run"]["dir"]
    assert configs[0] == configs[1] == configs[2]
    assert len({x["test"]["both"]["realistic"]["mrr"] for x in runs.results().values()}) == 3


def test_mean_and_sample_deviation():
    stats = spread({0: ranks(0.2), 1: ranks(0.4)})["both"]["mrr"]
    assert stats == (pytest.approx(0.3), pytest.approx(0.02**0.5))
    assert spread({0: ranks(0.2)})["both"]["mrr"] == (0.2, None)
    several = {seed: {**ranks(0.2), "baselines": {"most frequent": ranks(0.1)}} for seed in (0, 1)}
    assert spread(several)["most frequent"]["mrr"] == (0.1, 0.0)


def test_spread_of_lists_has_the_baselines():
    def lists(recall):
        own = {"recall@5": recall, "ndcg@5": 0.3, "auc": 0.9}
        others = {"most popular": {**own, "recall@5": 0.1}, "item-kNN": None}
        return {"recommendation": own, "recommendation_baselines": others}

    stats = list_spread({0: lists(0.2), 1: lists(0.4)})
    assert stats["model"]["recall@5"] == (pytest.approx(0.3), pytest.approx(0.02**0.5))
    assert stats["most popular"] == {"recall@5": (0.1, 0.0), "ndcg@5": (0.3, 0.0)}
    assert list(stats) == ["model", "most popular"] and list_spread({0: ranks(0.1)}) == {}


# Critical values of Student's t, two-sided, from the usual tables.
@pytest.mark.parametrize(
    "freedom, t, p", [(1, 12.706, 0.05), (2, 4.303, 0.05), (4, 2.776, 0.05), (9, 3.250, 0.01)]
)
def test_p_is_that_of_the_tables(freedom, t, p):
    assert two_sided_p(t, freedom) == pytest.approx(p, rel=1e-3)
    assert two_sided_p(-t, freedom) == two_sided_p(t, freedom)
    assert two_sided_p(0, freedom) == 1


def test_paired_test_uses_common_seeds():
    first = {0: ranks(0.1), 1: ranks(0.3), 2: ranks(0.2), 9: ranks(9)}
    second = {0: ranks(0.2), 1: ranks(0.5), 2: ranks(0.5), 8: ranks(0)}
    test = paired_test(first, second)["mrr"]  # differences .1, .2, .3
    assert test["difference"] == pytest.approx(0.2) and test["t"] == pytest.approx(12**0.5)
    assert test["p"] == pytest.approx(0.0742, abs=1e-4)
    assert paired_test(first, first)["mrr"] == {"difference": 0, "t": None, "p": None}
    with pytest.raises(ConfigError, match="two seeds or more"):
        paired_test(first, {0: ranks(1)})


def test_evaluate_shows_mean_deviation_and_paired_test(folders, capsys):
    names = [str(folder) for folder in folders.values()]
    assert main(["evaluate", *names]) == 0
    table, test = capsys.readouterr().out.split("\n\n")
    assert table.count("±") == 2 * 4 * 5  # a baseline beside the sides
    assert test.startswith(f"paired t-test of {names[1]} against {names[0]}")
    assert test.splitlines()[1].split() == ["metric", "difference", "t", "p"]
    assert 0 < float(test.splitlines()[3].split()[3]) < 1

    assert main(["evaluate", *names, "--format", "json"]) == 0
    content = json.loads(capsys.readouterr().out)
    stats = content["runs"][names[0]]
    assert set(stats["seeds"]) == {"0", "1", "2"}
    values = [x["both"]["realistic"]["mrr"] for x in stats["seeds"].values()]
    assert stats["mean"]["both"]["mrr"] == pytest.approx(sum(values) / 3)
    assert content["paired"]["with"][names[1]]["mrr"]["p"] > 0

    assert main(["evaluate", *names, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["side"] for row in rows] == ["head", "tail", "both", "most frequent"] * 2
    assert float(rows[2]["mrr"]) == pytest.approx(stats["mean"]["both"]["mrr"])
    assert float(rows[2]["mrr_std"]) == pytest.approx(stats["std"]["both"]["mrr"])

    assert main(["evaluate", names[0], "--seeds", "0,2", "--format", "latex"]) == 0
    assert capsys.readouterr().out.count(r"$\pm$") == 4 * 5


def test_other_splits_are_ranked(folders, capsys):
    folder = folders["distmult"]
    assert main(["evaluate", str(folder), "--split", "valid", "--format", "json"]) == 0
    stats = json.loads(capsys.readouterr().out)["runs"][str(folder)]["seeds"]
    assert main(["evaluate", str(folder / "seed-1"), "--split", "valid", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == stats["1"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["evaluate", "A", "--seeds", "0,7"], "seed 7 has no results in"),
        (["evaluate", "A/seed-0", "--seeds", "2"], "is no folder of train --seeds"),
        (["evaluate", "A", "A/seed-0"], "evaluate compares folders of train --seeds, and"),
        (["evaluate", "A", "--by", "relation"], "evaluate one run, such as FOLDER/seed-0"),
        (["predict", "A", "--relation", "borders"], "name one of its runs"),
        (["train", "A", "--run.dir", "A/new"], "is a folder of seeds; name one of its runs"),
        (["tune", "A", "--study", "A/new"], "is a folder of seeds; name one of its runs"),
        (["compare", "A", "--run.dir", "A/new"], "is a folder of seeds; name one of its runs"),
        (["train", "--seeds", "2", "--run.dir", "A", "--model.dim", "4"], "seeds of another conf"),
        (["train", "--seeds", "2", "--run.dir", "A/seed-0"], "already holds a run"),
        (["train", "--resume", "A", "--train.epochs", "9"], "seeds of another config"),
        (["train", "--resume", "A", "--seeds", "2"], "leave one of them out"),
        (["train", "--seeds", "2", "--seed", "3"], "--seeds names the seeds"),
    ],
)
def test_what_does_not_go_together_is_refused(folders, capsys, words, said):
    folder = str(folders["distmult"])
    assert main([folder + word[1:] if word[:1] == "A" else word for word in words]) == 1
    assert said in capsys.readouterr().err


def test_more_seeds_join_a_folder(tmp_path):
    config = {**QUICK, "train.epochs": 1, "run.dir": str(tmp_path / "runs")}
    before = train_seeds(config, [3]).folder(3).results.stat().st_mtime_ns
    runs = train_seeds(config, [5])
    assert runs.seeds == [3, 5] and runs.folder(3).results.stat().st_mtime_ns == before


def rank_trains_seeds(path: str) -> tuple[str, list[int]]:
    """Fail to write seeds.json, which is a folder; then train without it."""
    config = {**QUICK, "train.epochs": 1, "run.dir": path}
    (Path(path) / "seeds.json").mkdir(parents=True, exist_ok=True)
    with pytest.raises(Exception) as caught:
        train_seeds(config, 2)
    with processes("cpu") as ranks:
        on_first_rank(ranks, lambda: (Path(path) / "seeds.json").rmdir())
    return f"{type(caught.value).__name__}", train_seeds(config, 2).missing


def test_ranks_train_seeds_and_all_hear_of_a_failure_of_the_first(tmp_path):
    path = tmp_path / "runs"
    first, second = run_world(2, rank_trains_seeds, str(path))
    assert first == second == ("IsADirectoryError", [])
    results = SeedRuns(path).results()
    assert [x["train"]["world_size"] for x in results.values()] == [2, 2]


def test_second_start_in_a_folder_is_refused_while_the_first_one_trains(tmp_path):
    config = {**QUICK, "train.epochs": 1, "run.dir": str(tmp_path / "runs")}

    def start_another(kind, values):
        with pytest.raises(ConfigError, match="runs is being trained by process"):
            train_seeds(config, [5])

    runs = train_seeds(config, [3], [start_another])
    assert runs.seeds == [3] and runs.missing == []


def test_signal_says_how_to_resume_all_seeds(tmp_path, capsys):
    path = tmp_path / "runs"
    config = {**QUICK, "run.dir": str(path)}

    def stop(kind, values):
        signal.raise_signal(signal.SIGTERM)

    said = rf"stopped in the run of seed 0; resume with `train --resume {path}`"
    with pytest.raises(TrainingStopped, match=said):
        train_seeds(config, 2, [stop])
    assert SeedRuns(path).missing == [0, 1]
    assert main(["train", "--resume", str(path)]) == 0 and SeedRuns(path).missing == []


def command(folder: Path, seeds: str) -> list[str]:
    """A process that trains seeds of 30 epochs."""
    config = {key: value for key, value in QUICK.items() if not key.startswith("evaluation.")}
    config |= {"evaluation.every": 5, "train.epochs": 30, "run.dir": str(folder)}
    words = [f"--{key}={value}" for key, value in config.items()]
    return [sys.executable, "-m", "kge_torchrec", "train", *words, "--seeds", seeds]


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}


@pytest.mark.slow
def test_second_start_after_a_kill_trains_only_what_is_missing(tmp_path, capsys):
    killed = tmp_path / "killed"
    started = subprocess.Popen(command(killed, "3"), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    while not any(killed.glob("seed-1/checkpoints/step-*/manifest.json")):
        assert started.poll() is None
        time.sleep(0.01)
    started.send_signal(signal.SIGKILL)
    started.wait()
    runs = SeedRuns(killed)
    assert runs.missing == [1, 2]
    before = runs.folder(0).results.stat().st_mtime_ns

    assert main(["train", "--resume", str(killed)]) == 0
    said = capsys.readouterr().err
    assert "seed 1, run 1 of 2" in said and "training goes on from checkpoint" in said
    assert runs.missing == [] and runs.folder(0).results.stat().st_mtime_ns == before

    assert main(command(tmp_path / "whole", "3")[3:]) == 0
    whole = SeedRuns(tmp_path / "whole").results()
    assert {s: x["test"] for s, x in whole.items()} == {
        s: x["test"] for s, x in runs.results().items()
    }
