"""scripts/check_gpu.py, where there is no GPU: its parts run, and notice what is wrong."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from training_runs import kernels_of_cuda

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "check_gpu.py"
sys.path.append(str(ROOT / "scripts"))

import check_gpu  # noqa: E402
from gpu_checks import (  # noqa: E402
    PARTS,
    Part,
    decisions,
    oracle,
    ranking,
    runs,
    speed,
    training,
)
from gpu_checks.oracle import Oracle, write_oracle  # noqa: E402
from gpu_checks.report import Report  # noqa: E402

CHEAP = ("bags", "large", "graph", "parallel", "cached", "ranking", "scale-ranking")


def run(*arguments: str) -> subprocess.CompletedProcess:
    """The command, with every GPU hidden."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def lines_of(
    name: str, folder: Path, oracle: Oracle | None = None, traces: Path | None = None
) -> list[dict]:
    """Return the results of a part, in this process and on the CPU."""
    torch.set_num_threads(1)
    with (folder / "lines").open("w") as lines:
        PARTS[name].run(Report(name, "cpu", folder, lines, oracle, traces))
    return [json.loads(line) for line in (folder / "lines").read_text().splitlines()]


def failed(lines: list[dict]) -> list[str]:
    return [line["name"] for line in lines if line["verdict"] == "FAIL"]


def test_missing_gpu_is_reported(tmp_path):
    result = run("tables", "--json", str(tmp_path / "found.json"))
    assert result.returncode == 2
    assert "finds no CUDA device: nothing was checked" in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "found.json").exists()


def test_list_names_every_part_within_ten_minutes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--list"])
    assert check_gpu.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PARTS)
    assert sum(part.seconds for part in PARTS.values()) <= 570
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "nothing"])
    with pytest.raises(SystemExit):
        check_gpu.main()
    assert "no part nothing; there are machine" in capsys.readouterr().err


def test_docs_list_every_part_with_its_limit():
    page = (ROOT / "docs" / "how-to" / "run-on-a-gpu.md").read_text(encoding="utf-8")
    for name, part in PARTS.items():
        assert f"| `{name}` | {part.seconds} |" in page, name


@pytest.mark.parametrize(
    "name", [CHEAP[0], *(pytest.param(name, marks=pytest.mark.slow) for name in CHEAP[1:])]
)
def test_part_passes_on_a_cpu(name, tmp_path):
    lines = lines_of(name, tmp_path)
    assert any(line["verdict"] == "PASS" for line in lines)
    assert not failed(lines)


@pytest.mark.slow
def test_speed_is_measured_on_a_cpu(tmp_path):
    """Which builds a config and a graph by itself, and breaks where either has grown."""
    lines = lines_of("speed", tmp_path)
    assert not failed(lines)
    assert len([line for line in lines if line["name"].endswith(", speed")]) == 4


@pytest.mark.slow
def test_wrong_table_step_fails(tmp_path, monkeypatch):
    from gpu_checks import tables

    step = tables.DenseTable.step
    monkeypatch.setattr(tables, "NAMES", ("adagrad", "sgd"))
    assert not failed(lines_of("tables", tmp_path))
    monkeypatch.setattr(tables.DenseTable, "step", lambda self, ids, g: step(self, ids, 1.001 * g))
    assert set(failed(lines_of("tables", tmp_path))) >= {
        "adagrad, 1 bags, momentum1", "sgd, 1 bags, rows", "sgd, 64 bags, rows",
    }  # fmt: skip


@pytest.mark.slow
def test_steps_that_fbgemm_does_not_count_pass(tmp_path, monkeypatch):
    """Checks the table of FBGEMM, which counts the same on a CPU and on a GPU."""
    from gpu_checks import tables

    monkeypatch.setattr(tables, "NAMES", ("adagrad", "sgd", "rowwise_adagrad"))
    with kernels_of_cuda(True):
        lines = lines_of("tables", tmp_path)
    assert not failed(lines)
    counted = [line["name"] for line in lines if line["name"].endswith(", steps")]
    assert counted == ["rowwise_adagrad, 1 bags, steps", "rowwise_adagrad, 64 bags, steps"]


@pytest.mark.slow
def test_broken_ties_fail(tmp_path, monkeypatch):
    from gpu_checks import ranking

    monkeypatch.setattr(ranking, "SCORERS", ("distmult",))
    count = ranking.rank_triples

    def broken(scorer, shard, *rest, **options):
        rows = shard.rows.clone()
        rows[len(rows) // 2 :] *= 1 + 1e-6  # the inverses, by a last bit
        return count(scorer, type(shard)(rows, 0, shard.num_entities), *rest, **options)

    monkeypatch.setattr(ranking, "rank_triples", broken)
    assert "distmult, ties, whole" in failed(lines_of("ranking", tmp_path))


@pytest.mark.slow
def test_copied_states_fail(tmp_path, monkeypatch):
    from gpu_checks import training

    monkeypatch.setattr(training, "local", lambda tensor: tensor.clone())
    with (tmp_path / "lines").open("w") as lines:
        training._shared_memory(Report("checkpoints", "cpu", tmp_path, lines), "adam")
    (line,) = [json.loads(x) for x in (tmp_path / "lines").read_text().splitlines()]
    assert line["verdict"] == "FAIL" and "0 of 3" in line["said"]


def dies(report: Report) -> None:
    report.note("reached", 1.0, "")
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(report: Report) -> None:
    """Start a process that outlives the part unless the whole session is killed."""
    child = subprocess.Popen(["sleep", "600"])
    report.note("child", child.pid, "")
    time.sleep(600)


def leaves_a_thread(report: Report) -> None:
    report.note("complete", 1.0, "")
    threading.Thread(target=time.sleep, args=(600,)).start()


def result_of(monkeypatch, work, seconds: float = 60.0) -> dict:
    """Run a function as a part of its own, in a forked process."""
    options = argparse.Namespace(device="cpu", patience=1.0, oracle=None, trace=None)
    monkeypatch.setitem(PARTS, "made up", Part("", seconds, "nowhere.nothing"))
    monkeypatch.setattr(Part, "run", lambda self, report: work(report))
    return check_gpu._run_part("made up", options)


def test_part_that_crashes_fails_alone(monkeypatch, capfd):
    lines = result_of(monkeypatch, dies)["lines"]
    assert [line["said"] for line in lines[1:]] == [f"ended with code {-signal.SIGKILL}"]
    assert lines[0]["name"] == "reached"  # its lines are kept
    assert "FAIL  made up" in capfd.readouterr().out
    assert not failed(result_of(monkeypatch, leaves_a_thread)["lines"])


@pytest.mark.slow
def test_part_ends_at_its_limit_with_its_children(monkeypatch, capfd):
    child, line = result_of(monkeypatch, hangs, 1.0)["lines"]
    assert line["said"] == "not done after 1 s" and line["verdict"] == "FAIL"
    status = Path(f"/proc/{int(child['value'])}/stat")
    deadline = time.monotonic() + 10  # a killed process may run on for a moment
    while runs_on(status) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs_on(status)


def runs_on(status: Path) -> bool:
    """Return whether the process of /proc/PID/stat is there and is no zombie."""
    try:
        return status.read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_part_ends_once_its_lines_are_complete(monkeypatch):
    started = time.monotonic()
    assert not failed(result_of(monkeypatch, leaves_a_thread, 20.0)["lines"])
    assert time.monotonic() - started < 15


@pytest.mark.slow
def test_part_starts_anew_where_cuda_was_started_before_the_fork(monkeypatch, capfd):
    """A process that was forked after that can never use CUDA."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    options = argparse.Namespace(device="cpu", patience=4.0, oracle=None, trace=None)
    monkeypatch.setattr(Part, "run", lambda *_: os._exit(7))  # the forked process would run it
    assert not failed(check_gpu._run_part("large", options)["lines"])


@pytest.mark.slow
def test_imports_leave_cuda_to_the_parts():
    """The import of FBGEMM looks for CUDA, which must not start it."""
    code = """
import os, sys, check_gpu, torch
check_gpu._prepare()
check_gpu._import_parts()
print(torch.cuda.is_initialized(), os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"])
print("gpu_checks.scale" in sys.modules)
"""
    path = os.pathsep.join([str(SCRIPT.parent), str(ROOT), str(ROOT / "tests")])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path},
                          capture_output=True, text=True)  # fmt: skip
    assert done.stdout.split() == ["False", "1", "True"], done.stderr


@pytest.mark.slow
def test_oracle_of_a_file_is_not_computed_again(tmp_path):
    path = tmp_path / "oracle"
    write_oracle(path, {"a run": lambda: {"x.y": np.arange(3), "losses": np.array([0.5])}})
    result = Oracle(path)("a run", None)
    assert list(result) == ["x.y", "losses"] and result["x.y"].tolist() == [0, 1, 2]
    assert Oracle(path)("another run", lambda: {"z": 1}) == {"z": 1}
    assert Oracle()("a run", lambda: {"z": 1}) == {"z": 1}


def test_oracle_of_other_code_is_refused(tmp_path, monkeypatch, capsys):
    """A run of other code would differ, as if the GPU computed wrongly."""
    path, foreign = tmp_path / "oracle", tmp_path / "foreign"
    write_oracle(path, {"a run": lambda: {"x": np.arange(3)}})
    foreign.write_text("{}")
    for arguments, wrong in (
        ([foreign], "is no file of --write-oracle"),
        ([tmp_path / "none"], "is no file of --write-oracle"),
        ([path], "other code wrote this file; write it by --write-oracle FILE"),
    ):
        monkeypatch.setattr(oracle, "digest_of_code", lambda: "other")
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "large", "--device", "cpu", "--oracle",
                                          *map(str, arguments)])  # fmt: skip
        with pytest.raises(SystemExit) as end:
            check_gpu.main()
        assert end.value.code == 2
        assert wrong in capsys.readouterr().err


@pytest.mark.slow
def test_parts_compare_with_the_oracle(tmp_path, monkeypatch):
    """And what they compute for a file is what they compute for themselves."""
    monkeypatch.setattr(ranking, "SCORERS", ("distmult",))
    monkeypatch.setattr(training, "OPTIMIZERS", ("sgd",))
    monkeypatch.setattr(training, "KINDS", {})
    monkeypatch.setattr(training, "_precisions", lambda report: None)
    path, asked = tmp_path / "oracle", []
    results = ranking.computations(small=True)
    runs = training.computations(tmp_path)
    write_oracle(path, results | {name: runs[name] for name in ("training, sgd",)})
    known = Oracle(path)

    def ask(name, compute):
        asked.append(name)
        return known(name, lambda: pytest.fail(f"{name} was computed"))

    for part in ("training", "ranking"):
        assert not failed(lines_of(part, tmp_path, ask))
    assert asked == ["training, sgd", "ranking, distmult, 2000 entities"]

    def wrong(name, compute):
        return {key: array + array.dtype.type(1) for key, array in known(name, compute).items()}

    assert failed(lines_of("training", tmp_path, wrong)) == ["sgd, sparse_dist", "sgd, loop"]
    assert len(failed(lines_of("ranking", tmp_path, wrong))) >= 3


@pytest.mark.slow
def test_two_ranks_of_one_device_train_as_one(tmp_path):
    """In a process of its own: the ranks are forked, which is too late after a backward here."""
    result = run("ranks", "--device", "cpu", "--json", str(tmp_path / "results.json"))
    assert result.returncode == 0, result.stdout + result.stderr
    (part,) = json.loads((tmp_path / "results.json").read_text())["parts"]
    names = [line["name"] for line in part["lines"]]
    assert names == ["two ranks, loop", "two ranks, sparse_dist"]


def lines_by(work, folder: Path, small: bool = True) -> list[dict]:
    """Return the results of a function of a report."""
    with (folder / "lines").open("w") as lines:
        report = Report("x", "cpu", folder, lines)
        report.small = small
        work(report)
    return [json.loads(line) for line in (folder / "lines").read_text().splitlines()]


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({"loop": 10.0, "sparse_dist": 20.0}, "fastest sparse_dist, today's default auto"),
        ({True: 2000.0, False: 1990.0}, "fastest True or False, today's default auto"),
        ({512: 3.0, 8000: 1.0}, "fastest 512, today's default auto (512 3, 8000 1 triples/s)"),
    ],
)
def test_decision_names_the_fastest_side_beside_the_default(rates, said, tmp_path):
    (line,) = lines_by(lambda report: speed.decide(report, "key", rates, "auto"), tmp_path)
    assert line["verdict"] == "NOTE" and line["said"].startswith(said)
    assert line["value"] == max(rates.values())


@pytest.mark.slow
def test_decisions_time_the_sides_that_they_name(tmp_path, monkeypatch):
    """Each with its value of the key, and with the default of a graph of this size."""
    trained, build = [], decisions.build_pipeline

    def remember(config, backend, ranks):
        trained.append((config.train.batches, config.train.batch_size))
        return build(config, backend, ranks)

    monkeypatch.setattr(decisions, "build_pipeline", remember)
    monkeypatch.setattr(decisions, "WORKLOADS", {})
    monkeypatch.setattr(decisions, "CHOICES", [
        c for c in decisions.CHOICES
        if c.key in ("train.batches", "train.batch_size")
    ])  # fmt: skip
    lines = lines_of("decisions", tmp_path)
    assert not failed(lines)
    said = {line["name"]: line["said"] for line in lines}
    assert "today's default auto (" in said["train.batches"]
    assert "today's default 128 (64 " in said["train.batch_size"]
    one_round = [("cpu", 64), ("device", 64)]
    assert trained[:4] == 2 * one_round and trained[4:] == 2 * [("auto", 64), ("auto", 256)]
    assert lines[-1]["name"] == "ranking of transe_l1" and lines[-1]["value"] > 0


def test_a_choice_has_its_own_sizes_on_a_cpu():
    choice = decisions.Choice("train.pipeline", ("loop", "graph"), ("loop",), 65_536, 128)
    named = "train.pipeline at batch "
    assert choice.of_check(small=False) == (f"{named}65,536", ("loop", "graph"), 65_536)
    assert choice.of_check(small=True) == (f"{named}128", ("loop",), 128)
    usual = decisions.Choice("train.pipeline", ("loop", "graph"), ("loop",))
    assert [usual.of_check(small)[0] for small in (False, True)] == 2 * ["train.pipeline"]


def test_choices_and_workloads_are_settings():
    """Settings that only a GPU trains are read too."""
    report = argparse.Namespace(device=torch.device("cuda"))
    for choice in decisions.CHOICES:
        assert len(choice.values) > 1
        for value in choice.values:
            speed.config_of(report, **{choice.key: value})
    for keys in [*decisions.WORKLOADS.values(), *speed.COMPILED.values()]:
        speed.config_of(report, **keys)
    for keys in training.RUNS.values():
        runs.config_of("cuda", ROOT, **keys)


@pytest.mark.slow
def test_compiled_steps_must_have_the_loss_of_plain_ones(tmp_path, monkeypatch):
    results = {"not compiled": (2.0, 10.0), "compiled": (2.1, 30.0)}
    monkeypatch.setattr(speed, "_train", lambda report, name, batch, **keys: results[name])
    lines = lines_by(speed.compiled, tmp_path, small=False)
    assert lines[0]["said"].startswith("fastest compiled, today's default not compiled")
    assert failed(lines) == ["compiled, loss after the same steps, off by"]
    results["not compiled"] = None  # failed, and said so
    assert [line["name"] for line in lines_by(speed.compiled, tmp_path, False)] == ["dense.compile"]


@pytest.mark.slow
def test_trace_of_a_step_is_written(tmp_path):
    assert lines_of("trace", tmp_path)[-1]["verdict"] == "SKIP"
    lines = lines_of("trace", tmp_path, None, tmp_path / "made" / "traces")
    assert not failed(lines)
    title, *rows = (tmp_path / "made/traces/kernels-cpu.txt").read_text().splitlines()
    assert "ms per step, ComplEx, batch 256" in title
    times = {name: float(time) for time, name in (row.split(maxsplit=1) for row in rows)}
    assert list(times.values()) == sorted(times.values(), reverse=True)
    assert [line["name"] for line in lines[:3]] == list(times)[:3]
    with gzip.open(tmp_path / "made/traces/step-cpu.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::mm") % 5 == 0 < names.count("aten::mm")  # of five steps


def test_verdict_follows_from_the_results(tmp_path):
    with (tmp_path / "lines").open("w") as lines:
        report = Report("x", "cpu", tmp_path, lines)
        report.at_most("small", 1.0, 2.0)
        report.at_most("large", 3.0, 2.0)
        report.at_most("nan", float("nan"), 2.0)
        with report.check("raises"):
            raise ValueError("what was wrong\nand more")
        report.small = False
        report.speed("slow", 1.0, 2.0, "GB/s")
        report.speed("fast", 3.0, 2.0, "GB/s")
    results = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    verdicts = [line["verdict"] for line in results]
    assert verdicts == ["PASS", "FAIL", "FAIL", "FAIL", "FAIL", "PASS"]
    assert results[3]["said"] == "ValueError: what was wrong"


@pytest.mark.slow
def test_every_part_passes_on_a_cpu(tmp_path):
    result = run("--device", "cpu", "--json", str(tmp_path / "found.json"))
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads((tmp_path / "found.json").read_text())
    assert [part["part"] for part in content["parts"]] == list(PARTS)
    assert content["counts"]["FAIL"] == 0
    assert content["counts"]["PASS"] > 100
