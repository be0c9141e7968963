"""Exports of a run: the same rows on any number of ranks, whole or not at all."""

from __future__ import annotations

import json
import os
import resource
import signal
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_runs import parameters
from worlds import WorldError, run_world

from kge_torchrec import api, load_model
from kge_torchrec.cli import main
from kge_torchrec.config import ConfigError
from kge_torchrec.distributed.processes import ALONE, processes
from kge_torchrec.errors import ExportError
from kge_torchrec.export import FORMATS
from kge_torchrec.export import write as rows
from kge_torchrec.export.description import FORMAT, PARAMETERS, ExportFolder
from kge_torchrec.export.table_files import Safetensors, open_table
from kge_torchrec.export.write import dense_parameters
from kge_torchrec.models.scorers.bilinear import ComplEx
from kge_torchrec.training.checkpoints import CheckpointError, Checkpoints
from kge_torchrec.training.session import load_trained

N, R, D = 37, 3, 8


def same_bits(one, other) -> bool:
    return np.array_equal(np.asarray(one).view(np.int32), np.asarray(other).view(np.int32))


def export_in_every_format(run_path, output):
    rows.CHUNK_ROWS = 5
    with api.open_run(run_path) as run:
        return [str(run.export(f"{output}/{name}", name)) for name in FORMATS]


def table_of(path):
    return open_table(path / "entities.safetensors", N, D)


def test_every_format_is_the_same_on_any_number_of_ranks(run, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_ROWS", 5)
    paths = run_world(2, export_in_every_format, str(run.path), str(tmp_path))
    assert paths == [[str(tmp_path / name) for name in FORMATS]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FORMATS)
    assert same_bits(table_of(tmp_path / "safetensors"), run.table)
    dense, written = run.model.scorer.state_dict(), load_file(tmp_path / FORMATS[0] / PARAMETERS)
    assert written.keys() == dense.keys()
    assert all(torch.equal(written[key], dense[key]) for key in dense)
    for name in FORMATS:
        alone = run.export(tmp_path / "alone" / name, name)
        files = {file.relative_to(alone) for file in alone.rglob("*") if file.is_file()}
        for file in files - {Path("scores.pt2")}:  # an archive with the time
            assert (tmp_path / name / file).read_bytes() == (alone / file).read_bytes()


def gather_sharded_parameters(relations, wrapper):
    scorer = ComplEx(*relations.shape)
    with torch.no_grad():
        scorer.relations.copy_(relations)
    if wrapper == "fsdp":
        fully_shard(scorer, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    else:
        DistributedDataParallel(scorer)
    return dense_parameters(scorer)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_dense_parameters_are_gathered_from_all_ranks(wrapper):
    relations = torch.randn(R, D)
    first, other = run_world(2, gather_sharded_parameters, relations, wrapper)
    assert first.keys() == {"relations"} and torch.equal(first["relations"], relations)
    assert other == {}


def test_export_files_have_documented_contents(run, export):
    assert sorted(path.name for path in export.iterdir()) == [
        "README.md", "config.json", "entities.safetensors", "entities.txt", "relations.txt",
        "scorer.safetensors", "store",
    ]  # fmt: skip
    store = run.model.store
    for name in ("entities", "relations"):
        lines = (export / f"{name}.txt").read_text("utf-8").splitlines()
        assert lines == getattr(store, name).array.to_pylist()
    results = json.loads((export / "config.json").read_text("utf-8"))
    assert (results["num_entities"], results["num_relations"], results["dim"]) == (N, R, D)
    assert results["scorer"] == "complex" and results["reciprocal"] is True
    assert results["entities"]["row"] == "4 complex numbers, stored as re, im, re, im, ..."
    assert "D/2 complex" in results["entities"]["layout"]
    assert "Re(sum_k h_k r_k conj(t_k))" in results["parameters"]["score"]
    assert results["model"] == run.config.to_dict()["model"]
    assert results["results"] == run.results
    assert results["packages"]["torch"] == metadata.version("torch")
    sizes = {
        str(path.relative_to(export)): path.stat().st_size
        for path in export.rglob("*")
        if path.is_file() and path.name not in ("config.json", "README.md")
    }
    assert results["files"] == sizes
    for file in (export / "store").iterdir():
        assert file.read_bytes() == (store.path / file.name).read_bytes()


def test_any_checkpoint_can_be_exported(run, tmp_path):
    def exported(checkpoint):
        path = run.export(tmp_path / str(checkpoint), checkpoint=checkpoint)
        description = json.loads((path / "config.json").read_text())
        return description["checkpoint"]["name"], table_of(path), "results" in description

    checkpoints = Checkpoints(run.folder.checkpoints, ALONE)
    names = checkpoints.names()
    older, newest = names[0], names[-1]
    with processes("cpu") as ranks:
        model = load_trained(run.config, run.folder, ranks, older)[0]
        expected = model.entities
    name, table, with_results = exported(older)
    card = (tmp_path / older / "README.md").read_text("utf-8")
    assert "model-index" not in card and "Not measured for this checkpoint" in card
    assert f"Checkpoint {older}" in card
    assert name == older and same_bits(table, expected) and not with_results
    name, newest_table, _ = exported("newest")
    assert name == newest and not same_bits(newest_table, table)
    name, best, with_results = exported("best")
    assert name == checkpoints.open(newest).progress.best_checkpoint
    assert same_bits(best, run.table) and with_results
    assert same_bits(parameters(run.model)["entities"].numpy(), run.table)  # the best one again


def test_unknown_checkpoints_and_formats_are_rejected(run, tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint 'step-7'; it has step-0000"):
        run.export(tmp_path / "out", checkpoint="step-7")
    with pytest.raises(ConfigError, match="format must be one of safetensors, parquet, vectors"):
        run.export(tmp_path / "out", "csv")
    assert not list(tmp_path.iterdir())
    assert same_bits(parameters(run.model)["entities"].numpy(), run.table)


def test_run_without_checkpoints_is_rejected(run, tmp_path):
    (tmp_path / "config.yaml").write_bytes((run.path / "config.yaml").read_bytes())
    with api.open_run(tmp_path) as empty:
        for checkpoint in (None, "newest", "step-1"):
            with pytest.raises(CheckpointError, match="no checkpoint yet"):
                empty.export(tmp_path / "out", checkpoint=checkpoint)
        with pytest.raises(CheckpointError):  # nor does it answer with the untrained start
            empty.evaluate()
    assert not (tmp_path / "out").exists()


def test_an_export_is_overwritten_whole_and_a_symbolic_link_is_kept(run, tmp_path):
    """What is no export is refused, see tests/bad_inputs.tsv."""
    (tmp_path / "disk" / "export").mkdir(parents=True)  # an empty folder
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "export")
    for name in ("safetensors", "parquet"):
        run.export(tmp_path / "out", name, overwrite=True)
        assert (tmp_path / "out" / f"entities.{name}").exists()
        (tmp_path / "out" / "mine").write_text("")
    assert not (tmp_path / "out" / "entities.safetensors").exists()
    assert (tmp_path / "out").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["export"]


def export_to_a_full_disk(run_path, output, limit):
    """The message that each rank gets; files cannot grow beyond ``limit`` bytes."""
    rows.CHUNK_ROWS = 5
    with api.open_run(run_path) as run:
        _ = run.model
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            run.export(output, overwrite=True)
        except ExportError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_leaves_the_old_export_intact(run, tmp_path):
    task = export_to_a_full_disk, str(run.path), str(tmp_path / "out")
    messages = run_world(2, *task, 600)  # full at the third chunk
    assert all("could not be written" in m and "MiB free on that disk" in m for m in messages)
    assert not list(tmp_path.iterdir())
    run.export(tmp_path / "out")
    (message,) = run_world(1, *task, 0)
    assert "File too large" in message
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert same_bits(table_of(tmp_path / "out"), run.table)


def export_and_die(run_path, output):
    rows.CHUNK_ROWS = 5

    def die(table, first, chunk):
        os.kill(os.getpid(), signal.SIGKILL)

    Safetensors.append = die
    with api.open_run(run_path) as run:
        run.export(output)


def test_killed_export_leaves_no_complete_folder(run, tmp_path):
    with pytest.raises(WorldError, match="died with exit code -9"):
        run_world(1, export_and_die, str(run.path), str(tmp_path / "out"))
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.partial-")
    run.export(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out", left.name}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("at_the_same_time", [False, True])
def test_two_exports_to_one_folder_do_not_mix(tmp_path, monkeypatch, overwrite, at_the_same_time):
    """The later one is refused, or replaces the earlier one whole."""
    first, second = (ExportFolder(tmp_path / "out", overwrite) for _ in range(2))
    for folder in (first, second):
        folder.begin()
    for name, folder in (("first", first), ("second", second), ("both", first)):
        with (folder.partial / "entities.safetensors").open("a") as file:
            file.write(name)
    if at_the_same_time:  # the first one comes after the check of the second one, as it renames
        rename = Path.rename

        def late(path, target):
            monkeypatch.undo()
            first.finish({"format": FORMAT})
            return rename(path, target)

        monkeypatch.setattr(ExportFolder, "check", lambda folder: None)
        monkeypatch.setattr(Path, "rename", late)
    else:
        first.finish({"format": FORMAT})
    if overwrite:
        second.finish({"format": FORMAT})
    else:
        with pytest.raises((ExportError, FileExistsError), match="exists"):
            second.finish({})
        second.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    written = "second" if overwrite else "firstboth"
    assert (tmp_path / "out" / "entities.safetensors").read_text() == written


def test_interrupted_export_leaves_no_files(run, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ExportFolder, "finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.export(tmp_path / "out")
    assert not list(tmp_path.iterdir())


# The verb; what it refuses before it opens the run is in tests/bad_inputs.tsv


def test_verb_exports_a_checkpoint_and_overwrites(run, tmp_path, capsys):
    out, name = tmp_path / "out", Checkpoints(run.folder.checkpoints, ALONE).names()[0]
    command = ["export", str(run.path), "-o", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert all(str(file) in printed for file in out.iterdir())
    assert same_bits(load_model(out).entities, run.table)
    assert main([*command, "--checkpoint", name, "--overwrite"]) == 0
    assert load_model(out).description["checkpoint"]["name"] == name
