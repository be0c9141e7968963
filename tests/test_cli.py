"""The command line: what it prints, what it writes, and how it refuses bad input."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor as Pool
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pyarrow
import pytest
import torch
from training_runs import QUIET

import kge_torchrec
from kge_torchrec import commands, environment
from kge_torchrec.cli import VERBS, VerbParser, main
from kge_torchrec.commands.predict import predict
from kge_torchrec.commands.show import show
from kge_torchrec.config import all_keys
from kge_torchrec.config.parser import load_config
from kge_torchrec.data import streams
from kge_torchrec.models.loss_scaling import ScaleTooSmall
from kge_torchrec.training.checkpoints import CheckpointError
from kge_torchrec.training.trainer import NonFiniteLoss

QUICK = {**QUIET, "model.dim": 16, "train.batch_size": 256, "train.epochs": 3,
         "evaluation.every": 2}  # fmt: skip


def flags(**changes) -> list[str]:
    """QUICK with changes, as arguments."""
    values = QUICK | {key.replace("__", "."): value for key, value in changes.items()}
    return [f"--{key}={str(value).lower()}" if isinstance(value, bool) else f"--{key}={value}"
            for key, value in values.items()]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", *flags(run__dir=folder)]) == 0
    return folder


def refused(capsys, arguments: list[str], *expected: str) -> None:
    """Exit code not zero, and one message on stderr."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code != 0 and out == ""
    assert err.startswith("kge-torchrec: ") and "Traceback" not in err
    assert err.count("kge-torchrec: ") == 1
    for words in expected:
        assert words in err


def test_results_have_the_promised_shape(run):
    results = json.loads((run / "results.json").read_text())
    assert (run / "checkpoints" / results["checkpoint"]["name"]).is_dir()
    assert set(results) == {"checkpoint", "test", "valid", "train", "notes"}
    baseline = results["test"].pop("baselines")["most frequent"]
    assert set(results["test"]) == set(baseline) == {"head", "tail", "both"}
    for kinds in [*results["test"].values(), *baseline.values()]:
        assert set(kinds) == {"optimistic", "realistic", "pessimistic"}
        for values in kinds.values():
            assert set(values) == {"mrr", "mr", "hits@1", "hits@3", "hits@10"}
            assert all(isinstance(value, float) for value in values.values())
    train = results["train"]
    assert set(train) >= {"triples_per_second", "seconds", "peak_memory_bytes"}
    assert min(train["triples_per_second"], train["seconds"], train["peak_memory_bytes"]) > 0


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["at the end", "while it prints"])
def test_a_reader_that_has_gone_is_no_error(run, monkeypatch, unbuffered):
    """As in ``show RUN | head``, whether the pipe breaks in a print or in the last flush."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kge_torchrec", "show", str(run)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_evaluate_reproduces_the_results(run, capsys):
    assert main(["evaluate", str(run), "--format", "json"]) == 0
    expected = json.loads((run / "results.json").read_text())["test"]
    assert json.loads(capsys.readouterr().out) == expected
    assert main(["evaluate", str(run), "--split", "valid"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[2:6]] == ["head", "tail", "both", "most"]
    assert re.fullmatch(r"checkpoint of epoch \d, selected by valid mrr 0\.\d{4}", out[-1])
    assert main(["evaluate", str(run), "--ties"]) == 0
    assert capsys.readouterr().out.count("pessimistic") == 4


def test_settings_stand_before_or_after_the_config(tmp_path, capsys):
    for name, words in {"a": [*flags(), "demo"], "b": ["demo", *flags()]}.items():
        words = [w for word in words for w in word.split("=", 1)]  # --key value
        assert main(["train", *words, "--run.dir", str(tmp_path / name), "--force"]) == 1
    assert capsys.readouterr().err.count("--force resumes a run without checkpoints") == 2
    with pytest.raises(SystemExit) as ended:
        main(["train", "--train.epochs", "1", "demo", "more"])
    assert ended.value.code == 2 and "unexpected argument 'more'" in capsys.readouterr().err


def test_train_takes_the_config_of_a_run(run, tmp_path):
    assert main(["train", str(run), "--seed", "1", "--run.dir", str(tmp_path / "new")]) == 0
    before, after = (load_config(folder).to_dict() for folder in (run, tmp_path / "new"))
    assert before.pop("seed") == 0 and after.pop("seed") == 1
    assert before.pop("run") and after.pop("run") and before == after


def test_verb_on_a_run_finds_no_module_of_the_working_directory(run, tmp_path, monkeypatch):
    (tmp_path / "lurking.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    query = ["predict", str(run), "--head", "lurking:Class", "--relation", "borders"]
    assert main(query) == 1
    assert str(tmp_path) not in sys.path
    with pytest.raises(SystemExit, match="imported"):
        main([*query, "--allow-import", "lurking"])


def test_threads_of_a_verb_hold_for_runs_and_exports(run, tmp_path, monkeypatch):
    before, seen = torch.get_num_threads(), []
    query = ["--head", "Germany", "--relation", "borders", "--threads", "2"]
    assert main(["export", str(run), "-o", str(tmp_path / "export"), "--threads", "1"]) == 0
    write = commands.predict.write_records
    monkeypatch.setattr(
        commands.predict,
        "write_records",
        lambda *args: seen.append(torch.get_num_threads()) or write(*args),
    )
    try:
        for folder in (run, tmp_path / "export"):
            torch.set_num_threads(1)
            assert main(["predict", str(folder), *query]) == 0
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 2]


def test_threads_of_prepare_are_those_that_read(tmp_path, monkeypatch):
    before, seen = pyarrow.cpu_count(), set()
    (tmp_path / "g.tsv").write_text("a\tr\tb\nb\tr\tc\nc\tr\ta\n" * 3)
    monkeypatch.setattr(streams, "ThreadPoolExecutor", lambda n: seen.add(n) or Pool(n))
    try:
        for number, words in ((1, ["prepare", "-o", str(tmp_path / "s")]), (2, ["data", "check"])):
            assert main([*words, str(tmp_path / "g.tsv"), "--threads", str(number)]) == 0
            assert pyarrow.cpu_count() == number and seen == {number}
            seen.clear()
    finally:
        pyarrow.set_cpu_count(before)


def test_finished_run_resumes(run, capsys):
    before = json.loads((run / "results.json").read_text())
    assert main(["train", "--resume", str(run)]) == 0
    assert json.loads((run / "results.json").read_text())["test"] == before["test"]
    out = capsys.readouterr().out
    assert "test, filtered ranks among all entities\n" in out and f"run folder: {run}" in out


@pytest.mark.parametrize("placement", ["memory", "disk"])
def test_run_without_epochs_keeps_its_initial_values(tmp_path, capsys, placement):
    run = tmp_path / "run"
    changes = flags(run__dir=run, train__epochs=0, entities__placement=placement)
    assert main(["train", *changes]) == 0
    expected = json.loads((run / "results.json").read_text())["test"]
    capsys.readouterr()
    assert main(["evaluate", str(run), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert main(["train", "--resume", str(run), "--train.epochs", "1"]) == 0
    assert json.loads((run / "results.json").read_text())["train"]["epochs"] == 1


def test_prepared_store_can_be_trained(tmp_path, capsys):
    (tmp_path / "graph.tsv").write_text("".join(f"a{i}\tr\ta{i * 7 % 50}\n" for i in range(50)) * 2)
    store, run = tmp_path / "store", tmp_path / "run"
    assert main(["prepare", str(tmp_path / "graph.tsv"), "-o", str(store), "--no-progress"]) == 0
    assert "50 duplicate triples were dropped" in capsys.readouterr().out
    assert main(["train", *flags(data__path=store, run__dir=run)]) == 0
    assert not (run / "store").exists()
    assert "50 duplicate triples were dropped" in capsys.readouterr().err


def test_help_of_train_has_examples_and_list_has_every_key_and_config(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and max(map(len, text.splitlines())) <= 100
    for words in ("usage: kge-torchrec train [CONFIG] ", "train --resume runs/mine",
                  "--resume RUN  ", "Examples:\n  kge-torchrec train demo"):  # fmt: skip
        assert words in text
    assert main(["train"]) == 2
    assert capsys.readouterr().err.startswith("usage: kge-torchrec train [CONFIG] ")
    assert main(["list", "keys"]) == main(["list", "configs"]) == 0
    text = capsys.readouterr().out
    assert [key for key in all_keys() if f"  --{key} " not in text] == [] and "\ndemo\n" in text
    assert main(["list", "keys", "data.split"]) == 0
    assert len(re.findall("^  --", capsys.readouterr().out, re.MULTILINE)) == 3


LISTED = {
    "Train": ["prepare", "train", "extend", "tune"],
    "Look": ["data", "list", "plan", "evaluate", "compare", "show"],
    "Use": ["predict", "recommend", "nearest", "calibrate"],
    "Share": ["export", "serve"],
}


def test_help_lists_sixteen_verbs_in_groups(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for group, verbs in LISTED.items():
        lines = text.partition(f"\n{group}:\n")[2].partition("\n\n")[0].splitlines()
        assert [re.match(r"  (\w+) +\w+ .*\w$", line)[1] for line in lines] == verbs
        assert max(map(len, lines)) < 80
    assert sum(map(len, LISTED.values())) <= 16
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == text


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_own_help_that_says_what_each_argument_means(capsys, verb):
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and text.startswith(f"usage: kge-torchrec {verb}")
    assert all(action.help for action in VerbParser(verb)._actions)
    if not VERBS[verb].group:
        assert f"The verb {verb} " in (predict.__doc__ + show.__doc__)


def test_version_is_printed_and_help_works_without_packages(capsys, monkeypatch):
    assert main(["--version"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"kge-torchrec {kge_torchrec.__version__} (")
    for package in ("torch", "torchrec"):
        assert f"{package} {metadata.version(package)}" in text
    assert re.search(r"fbgemm-gpu\S* \d", text)
    there = {"torch": "2.13.0", "torchrec": "1.8.0"}
    monkeypatch.setattr(
        environment, "installed", lambda names: {n: there[n] for n in names if n in there}
    )
    for words in (["train", "--help"], ["--help"], ["--version"]):
        with contextlib.suppress(SystemExit):
            main(words)
        out, err = capsys.readouterr()
        assert out and not err
    assert "fbgemm-gpu missing" in out
    for words in (["list", "scorer"], ["train", "x"], ["predict", "x", "--relation", "y"]):
        refused(capsys, words, "fbgemm-gpu-cpu (CPU)", "not installed")


def modules_after(code: str) -> set[str]:
    """The packages among those that matter which are loaded after this code, in a new process."""
    matter = ("torch", "torch._dynamo", "torch.distributed.checkpoint", "numba", "torchrec",
              "fbgemm_gpu", "pyarrow.parquet")  # fmt: skip
    ending = f"import sys; print(*(name for name in {matter} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{ending}"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_missing_runs_are_reported_and_stores_prepared_before_torch_is_imported(tmp_path):
    code = f"""
from kge_torchrec.cli import main
query = ["--head", "a", "--relation", "b"]
for verb in (["evaluate"], ["predict", *query], ["export", "-o", "out"], ["train", "--resume"]):
    assert main([*verb, {str(tmp_path)!r}]) == 1
assert main(["compare", "demo", "--engines", "torchrec", "dglke"]) == 1
assert main(["--version"]) == 0
from kge_torchrec.config.parser import load_config
load_config()"""
    assert modules_after(code) == set()
    store = str(tmp_path / "store")
    code = f"{code}; assert main(['prepare', 'countries', '-o', {store!r}]) == 0"
    assert "torch" not in modules_after(code)


@pytest.mark.slow
def test_predict_imports_only_torch_once_reads_the_config_once_and_keeps_its_objects(run):
    query = ["predict", str(run), "--relation", "borders", "--head", "Germany", "--format", "json"]
    code = f"""
import gc
from kge_torchrec.cli import main
from kge_torchrec.config import parser
looks, reads, settings = [], [], parser.Settings
gc.callbacks.append(lambda phase, info: looks.append(info["generation"]))
parser.Settings = lambda *given: reads.append(1) or settings(*given)
assert main({query!r}) == 0 and gc.isenabled()
assert len(reads) == 1 and gc.get_freeze_count() > 100_000
assert len(looks) < 400  # 844 otherwise"""
    assert modules_after(code) == {"torch"}


def test_store_of_the_user_in_the_run_folder_is_neither_used_nor_removed(tmp_path, capsys):
    store = tmp_path / "store"
    store.mkdir()
    (store / "mine").write_text("kept")
    refused(capsys, ["train", *flags(run__dir=tmp_path)], "already exists", "another folder")
    refused(capsys, ["train", *flags(run__dir=tmp_path, data__path=store)], "already exists")
    assert {path.name for path in tmp_path.rglob("*")} == {".lock", "store", "mine"}
    assert (store / "mine").read_text() == "kept"


@pytest.mark.parametrize(
    "verb",
    [["report", "RUN"], ["serve", "RUN"], ["prepare", "x.tsv", "-o", "y"], ["data", "check", "x"]],
)
def test_settings_that_ranks_cannot_share_are_rejected_before_reading(capsys, monkeypatch, verb):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(capsys, verb, f"{verb[0]} runs in one process, not 2 ranks: run it without torchrun")


NO_MEMORY = "kge-torchrec: not enough memory"


@pytest.mark.parametrize(
    "error, said",
    [
        *((error, f"kge-torchrec: {error}") for error in (
            CheckpointError("disk full"), NonFiniteLoss("nan"), ScaleTooSmall("2^-15"), OSError(28),
            BrokenPipeError("of another pipe than stdout"),
        )),
        (MemoryError(), NO_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), NO_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 4 bytes"), NO_MEMORY),
        (RuntimeError("a mistake"), None),
    ],
)  # fmt: skip
def test_failures_have_messages_and_mistakes_of_the_program_a_traceback(
    monkeypatch, capsys, error, said
):
    monkeypatch.setattr("kge_torchrec.cli._run", Mock(side_effect=error))
    if said is None:
        with pytest.raises(RuntimeError, match="a mistake"):
            main(["train"])
    else:
        refused(capsys, ["train"], said)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["evaluate", "nowhere"], ["evaluate", "--split", "dev", "x"]])
def test_torchrun_ends_with_its_own_code_and_prints_that_of_a_rank(words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=1", "-m", "kge_torchrec", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    own = 1 if words[1] == "nowhere" else 2
    assert done.returncode == 1 and f"exitcode  : {own} " in done.stderr
