"""Runs at a URL: other machines resume them from there and use them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from copied_runs import (
    KEY,
    URL,
    copied_config,
    failing,
    files_of,
    keep_apart,
    mark,
    warnings,
)
from disk_runs import DISK
from fsspec.implementations.memory import MemoryFileSystem
from training_runs import evaluate, largest_difference, longer_config, parameters
from worlds import WorldError, run_world

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.training.checkpoint_files import Damaged
from kge_torchrec.training.remote_runs import CopyError, cache_of, copy_problem, fetch, newest_of


@pytest.fixture(scope="module")
def triples(tmp_path_factory) -> Path:
    """Files of triples, which a run turns into a store of its own."""
    return files_of(tmp_path_factory.mktemp("triples"), seed=0)


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    keep_apart(tmp_path, monkeypatch)


# Resuming elsewhere


def rank_trains(config) -> dict:
    with api.train(config) as run:
        return parameters(run.model)


def rank_dies(config, newest: str, url: str) -> None:
    """Train, and die by SIGKILL when the copy has a checkpoint and training is further."""

    def die(kind, values):
        if kind == "epoch" and values["epoch"] == 3:
            deadline = time.monotonic() + 20
            while not os.path.exists(f"{url.removeprefix('file://')}/copy.json") or (
                mark(url)["newest"] < newest
            ):
                assert time.monotonic() < deadline, "there is no such copy"
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)

    api.train(config, [die])


def rank_resumes(url: str, folder: str) -> dict:
    with api.resume(url, {"run.dir": folder}) as run:
        return parameters(run.model)


@pytest.mark.parametrize("ranks, placement", [(2, "memory"), (1, "disk")])
def test_resume_from_a_copy_is_bitwise(triples, tmp_path, ranks, placement):
    url, options = f"file://{tmp_path}/nas/run", DISK if placement == "disk" else {}
    whole = run_world(ranks, rank_trains, longer_config(triples, tmp_path / "whole", **options))
    options = {"checkpoint__options": {"copy_to": url}, **options}
    config = longer_config(triples, tmp_path / "run", **options)
    with pytest.raises(WorldError, match="died with exit code -9"):
        run_world(ranks, rank_dies, config, "step-000000000010", url)
    shutil.rmtree(tmp_path / "run")  # the machine and its disk are gone
    again = run_world(ranks, rank_resumes, url, str(tmp_path / "other"))
    assert largest_difference(whole[0], again[0]) == 0
    assert mark(url)["newest"] == newest_of(tmp_path / "other")  # it is copied to the same place
    assert json.loads((tmp_path / "nas/run/results.json").read_text())["train"]["epochs"] == 4
    assert copy_problem(tmp_path / "other") == ""


def test_resume_auto_takes_the_copy(triples, tmp_path):
    options = {"run__resume": "auto"}
    run = api.train(copied_config(triples, tmp_path / "run", train__epochs=2, **options))
    lines = run.history[:-1]
    shutil.rmtree(run.path)
    again = api.train(copied_config(triples, tmp_path / "run", train__epochs=2, **options))
    assert again.history[:-1] == lines  # it has trained nothing
    with pytest.raises(ConfigError, match="already holds another run; resume it with"):
        api.train(copied_config(triples, tmp_path / "new"))
    assert not (tmp_path / "new" / "config.yaml").exists()


def test_folder_behind_its_copy_is_brought_forward(triples, tmp_path):
    """A disk that comes back after another machine has trained further."""
    api.train(copied_config(triples, tmp_path / "run", train__epochs=1)).close()
    api.resume(URL, {"run.dir": str(tmp_path / "other"), "train.epochs": 2}).close()
    with pytest.raises(ConfigError, match=r"is further than .*run \(step-0*10 instead of step-0*5"):
        api.resume(tmp_path / "run")
    run = api.resume(URL, {"run.dir": str(tmp_path / "run"), "train.epochs": 3})
    assert [line["epoch"] for line in run.history if line["kind"] == "epoch"] == [1, 2, 3]
    assert run.config.run.dir == str(tmp_path / "run")
    run = api.resume(URL, {"run.dir": str(tmp_path / "run"), "train.epochs": 4})  # it is as far
    assert mark()["newest"] == "step-000000000020"


def test_folder_that_is_further_than_its_copy_stays(triples, tmp_path):
    run = api.train(copied_config(triples, tmp_path / "run", train__epochs=1))
    with failing(10**6):
        api.resume(run.path, {"train.epochs": 2})
    assert mark()["newest"] == "step-000000000005" and copy_problem(run.path)
    run = api.resume(URL, {"run.dir": str(run.path)})
    assert [line["epoch"] for line in run.history if line["kind"] == "epoch"] == [1, 2]
    assert mark()["newest"] == "step-000000000010" and not copy_problem(run.path)


def test_default_folder_of_a_resumed_copy(triples, tmp_path):
    api.train(copied_config(triples, tmp_path / "gone", train__epochs=1)).close()
    assert api.resume(f"{URL}/", {"train.epochs": 2}).path == Path("runs/run")
    fs = MemoryFileSystem()
    fs.copy("/copies/run", "/copies/moved", recursive=True)
    run = api.resume("memory://copies/moved", {"run.dir": "moved", "train.epochs": 3})
    assert run.config.checkpoint.options.copy_to == "memory://copies/moved"
    assert mark("memory://copies/moved")["newest"] > mark()["newest"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match="holds something else than the run at"):
        api.resume(URL, {"run.dir": str(tmp_path / "mine")})


# Reading


def test_verbs_take_the_url_of_a_run(triples, tmp_path, capsys):
    config = copied_config(triples, tmp_path / "run", evaluation__every=1)
    here = api.train(config).evaluate("valid")
    query = ["--head", "e1", "--relation", "r1"]
    assert main(["predict", URL, *query]) == 0
    there = capsys.readouterr()
    assert f"fetching {URL} into {cache_of(URL)}" in there.err
    assert main(["predict", str(tmp_path / "run"), *query]) == 0
    assert capsys.readouterr().out == there.out
    for words in (["evaluate", URL, "--by", "relation"], ["export", URL, "-o", "exported"],
                  ["report", URL]):  # fmt: skip
        assert main(words) == 0
        assert "fetching" not in capsys.readouterr().err  # once is enough
    assert (cache_of(URL) / "evaluation-test-by-relation.json").is_file()  # it stays here
    assert (cache_of(URL) / "report.html").is_file()
    assert evaluate(URL, "valid") == here


def test_new_run_starts_from_the_rows_of_a_copy(triples, tmp_path):
    with api.train(copied_config(triples, tmp_path / "run", train__epochs=1)) as run:
        before = parameters(run.model)
    config = longer_config(triples, tmp_path / "new", model__init_from=URL, train__epochs=0)
    with api.train(config) as run:
        assert largest_difference(before, parameters(run.model)) == 0


def test_cache_follows_the_copy(triples, tmp_path):
    api.train(copied_config(triples, tmp_path / "run", checkpoint__keep=1)).close()
    assert api.open_run(URL).results["train"]["epochs"] == 3
    names = []
    for epochs in (4, 5, 6):
        api.resume(tmp_path / "run", {"train.epochs": epochs}).close()
        run = api.open_run(URL)
        assert run.results["train"]["epochs"] == epochs
        names.append(sorted(path.name[-2:] for path in (run.path / "checkpoints").iterdir()))
    # Those of the state before stay for processes that are reading them.
    assert names == [["15", "20"], ["20", "25"], ["25", "30"]]
    MemoryFileSystem.store.clear()
    with pytest.raises(ConfigError, match="there is no run at"):
        api.open_run(URL)
    (tmp_path / "others").mkdir()
    others = files_of(tmp_path / "others", seed=1)
    api.train(copied_config(others, tmp_path / "new", train__epochs=1)).close()
    run = api.open_run(URL)  # another run at the same place
    assert run.results["train"]["epochs"] == 1 and run.model.num_entities == 37
    assert [path.name[-2:] for path in (run.path / "checkpoints").iterdir()] == ["05"]


def test_run_that_was_fetched_is_used_without_the_network(triples, tmp_path, caplog):
    api.train(copied_config(triples, tmp_path / "run", train__epochs=1)).close()
    expected = api.open_run(URL).evaluate("valid")
    with patch.object(MemoryFileSystem, "cat_file", side_effect=ConnectionError("no network")):
        assert api.open_run(URL).evaluate("valid") == expected
        assert any("no network; using what was fetched before" in x for x in warnings(caplog))
        with pytest.raises(CopyError, match="no network"):  # the copy may be further
            api.resume(URL, {"run.dir": str(tmp_path / "other")})
        shutil.rmtree(cache_of(URL))
        with pytest.raises(CopyError, match="no network"):
            api.open_run(URL)


def test_fetch_that_is_killed_goes_on(triples, tmp_path):
    api.train(copied_config(triples, tmp_path / "run")).close()
    with (
        patch.object(MemoryFileSystem, "get_file", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        api.open_run(URL)
    assert not (cache_of(URL) / "config.yaml").exists()
    assert api.open_run(URL).model.num_entities == 37


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "manifest.json"])
def test_damaged_checkpoint_of_a_copy_is_skipped(triples, tmp_path, caplog, file):
    api.train(copied_config(triples, tmp_path / "run")).close()
    MemoryFileSystem().pipe_file(f"/copies/run/checkpoints/step-000000000015/{file}", b"short")
    run = api.open_run(URL)
    assert run.model.num_entities == 37
    assert any("step-000000000015 is damaged" in text for text in warnings(caplog))
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-000000000010"]
    MemoryFileSystem().pipe_file(f"/copies/run/checkpoints/step-000000000010/{file}", b"short")
    shutil.rmtree(run.path)
    with pytest.raises(CopyError, match="has no checkpoint that is whole"):
        api.open_run(URL)


def test_damaged_store_of_a_copy_is_refused(triples, tmp_path):
    api.train(copied_config(triples, tmp_path / "run", train__epochs=1)).close()
    content = bytearray(MemoryFileSystem().cat_file("/copies/run/store/train.npy"))
    content[-1] ^= 1
    MemoryFileSystem().pipe_file("/copies/run/store/train.npy", bytes(content))
    with pytest.raises(Damaged, match=f"{URL}/store is damaged: the checksum of train.npy does"):
        api.open_run(URL)
    assert not cache_of(URL).joinpath("store").exists()


def test_copy_of_somebody_else_stays_in_its_folder(triples, tmp_path):
    api.train(copied_config(triples, tmp_path / "run", train__epochs=1)).close()
    there = mark()

    def raises(message, name="copy.json", **values):
        MemoryFileSystem().pipe_file("/copies/run/copy.json", json.dumps(there).encode())
        MemoryFileSystem().pipe_file(f"/copies/run/{name}", json.dumps(there | values).encode())
        with pytest.raises(CopyError, match=message):
            fetch(URL, tmp_path / "here")

    raises("names a file outside of the run: '../x'", newest="../x")
    raises("is a copy of format 1; the only known is 2", format=1)
    raises("names a file outside of the run: '/x'", "store/meta.json", files={"/x": 1})
    for damaged in (b"{", b'{"format": 2}'):
        MemoryFileSystem().pipe_file("/copies/run/copy.json", damaged)
        with pytest.raises(CopyError, match=r"has a damaged copy.json"):
            fetch(URL, tmp_path / "here")


def test_extended_run_is_not_copied_over_the_old_one(triples, tmp_path):
    api.train(copied_config(triples, tmp_path / "run", train__epochs=1)).close()
    before = mark()
    new = {"train": [("e1", "r1", "new")]}
    made = api.extend(URL, new, tmp_path / "new", epochs=1)
    assert made.config.checkpoint.options.copy_to is None and mark() == before
    where = {KEY: "memory://copies/new"}
    api.extend(URL, new, tmp_path / "copied", epochs=1, overrides=where).close()
    assert api.open_run("memory://copies/new").entity_labels.ids(["new"]).tolist() == [37]
    api.extend(URL, None, tmp_path / "less", delete=["e1"], overrides={KEY: "memory://copies/less"})
    assert len(api.open_run("memory://copies/less").entity_labels.array) == 36
