"""Rows in main memory that a GPU caches (entities.placement managed_caching), imitated on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cached_tables import CACHED, tables_with_a_cache
from training_runs import config_of, fit, kernels_of_cuda, largest_difference
from worlds import run_world

from kge_torchrec import open_run, train
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.data import ENTITY
from kge_torchrec.distributed.processes import Rows
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.embeddings.torchrec.collection import as_feature
from kge_torchrec.training import disk_table
from kge_torchrec.training.checkpoint_files import Checkpoint, write_manifest, write_rows
from kge_torchrec.training.state import TrainState

USUAL = {
    "train__optimizer": "rowwise_adagrad",
    "train__epochs": 2,
    "evaluation__every": 1,
    "checkpoint__every__steps": 2,
}
VARIANTS = {
    "plain": {},
    "pipeline": {"train__pipeline": "sparse_dist", "train__optimizer": "adagrad"},
    "sums": {"train__clip__norm": 0.05, "train__accumulation": 2},
    "kvssample": {"negatives__regime": "kvssample"},
    "fp16": {"train__precision": "fp16", "train__clip__norm": 0.05},
    "scaled": {"train__precision": "fp16", "train__optimizer": "sgd"},
}


def trained(config: Config) -> dict[str, torch.Tensor]:
    """Train; return the parameters and the count of steps, which Adam's formula reads."""
    session = fit(config)
    in_main_memory = session.backend.shard().in_main_memory
    assert in_main_memory == (config.entities.placement == "managed_caching")
    return {**session.parameters, "steps": torch.tensor(session.backend.table.steps)}


def rank_trains_by_both(store: Path, folder: Path, names: list[str]) -> dict[str, tuple]:
    results = {}
    for name in names:
        changes = {**USUAL, **VARIANTS[name]}
        with kernels_of_cuda(True):
            usual = trained(config_of(store, folder / f"{name}-memory", **changes))
        with tables_with_a_cache() as tables:
            cached = trained(config_of(store, folder / f"{name}-cache", **CACHED, **changes))
            (table,) = tables
        results[name] = usual, cached, table.settings["cache_load_factor"]
    return results


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (1, ["plain", "kvssample", "scaled"]),
        (2, ["fp16", "sums", "pipeline"]),
    ],
)
def test_training_is_that_of_rows_in_memory(store, tmp_path, world_size, names):
    for rank in run_world(world_size, rank_trains_by_both, store, tmp_path, names):
        for name, (usual, cached, ratio) in rank.items():
            assert largest_difference(usual, cached) == 0, name
            assert ratio == 0.25


def test_a_run_resumes_and_moves_between_places(store, tmp_path):
    def trains(name: str, epochs: int, **place) -> dict:
        return fit(
            config_of(store, tmp_path / name, **{**USUAL, "train__epochs": epochs, **place})
        ).parameters

    with tables_with_a_cache():
        whole = trains("whole", 3, **CACHED)
        trains("resumed", 1, **CACHED)
        resumed = trains("resumed", 3, **CACHED)
        trains("moved", 1, **CACHED)
    with kernels_of_cuda(True):
        moved = trains("moved", 3)
    assert largest_difference(whole, resumed) == largest_difference(whole, moved) == 0


def test_rows_that_are_written_between_steps_are_looked_up(store, tmp_path):
    with tables_with_a_cache():
        config = config_of(store, tmp_path, **CACHED, train__optimizer="sgd", train__epochs=1)
        backend = fit(config, lambda loop: setattr(loop, "_save", lambda **_: None)).backend
        backend.shard().rows.fill_(0.5)
        rows = backend.unwrapped_model.entities(as_feature(torch.tensor([1, 4])))[ENTITY].values()
    assert torch.equal(rows, torch.full((2, 8), 0.5))


def test_the_table_of_a_finished_run_stays_in_its_files(store, tmp_path, monkeypatch):
    """The memory of a GPU may not hold it."""
    mapped, mapped_or_read = [], disk_table.mapped_or_read

    def watched(*arguments):
        mapped.append(mapped_or_read(*arguments))
        return mapped[-1]

    with tables_with_a_cache():
        changes = {**CACHED, "train__optimizer": "adagrad"}
        rows = fit(config_of(store, tmp_path / "one", **changes)).parameters["entities"]
        train(config_of(store, tmp_path / "run", **changes)).close()
    monkeypatch.setattr(disk_table, "mapped_or_read", watched)
    with open_run(tmp_path / "run") as run:
        assert torch.equal(run.model.shard.rows, rows)
        assert len(run.predict("e1", "r0", k=3)) == 3
    assert len(mapped) == 1


@pytest.mark.parametrize("maps", [True, False])
def test_rows_of_a_checkpoint_are_mapped_only_if_they_follow_each_other(tmp_path, maps):
    """A table of two types has pieces of other rows between its own."""
    table, others = torch.randn(9, 4), torch.randn(3, 4)
    pieces = [Rows("table", table[:5], 0), Rows("other", others, 0), Rows("table", table[5:], 5)]
    tensors = write_rows(tmp_path / "rows", pieces[::2] + pieces[1:2] if maps else pieces)
    write_manifest(tmp_path, TrainState(), tensors)
    rows = disk_table.mapped_or_read(Checkpoint.open(tmp_path), "table", range(2, 9), 4)
    assert torch.equal(rows, table[2:])
    maps_of = Path("/proc/self/maps").read_text()
    assert (str(tmp_path / "rows") in maps_of) == maps


def test_scoring_reads_each_row_over_the_link_once():
    shard = EntityShard(torch.randn(8, 4), 0, 8, in_main_memory=True)
    block = shard.own(slice(2, 5))
    assert torch.equal(block, shard.rows[2:5]) and block.data_ptr() != shard.rows[2:].data_ptr()
    here = EntityShard(shard.rows, 0, 8).own(slice(2, 5))
    assert here.data_ptr() == shard.rows[2:].data_ptr()  # rows of the device are not copied


def test_steps_do_not_write_the_cache_back(store, tmp_path):
    flushes = []
    for epochs in (1, 3):
        changes = {"train__epochs": epochs, "train__clip__norm": 0.05,
                   "train__optimizer": "sgd"}  # fmt: skip
        with tables_with_a_cache() as tables:
            fit(
                config_of(store, tmp_path / f"{epochs}", **CACHED, **changes),
                lambda loop: setattr(loop, "_save", lambda **_: None),
            )
        flushes.append(tables[0].calls["flushes"])
        assert tables[0].calls["lookups"] >= 2 * 5 * epochs  # of a batch, and of a step
    assert flushes[0] == flushes[1]


def test_a_cpu_has_no_cache_of_rows(store, tmp_path):
    with pytest.raises(ConfigError, match=r"managed_caching: a GPU caches the rows, and here is a"):
        train(config_of(store, tmp_path / "run", **CACHED))
    config_of(store, **CACHED).check_device(True)


def test_a_race_is_not_run_with_a_cache():
    assert Config().decided_by is None
    placed = config_from_dict({"entities.placement": "managed_caching"})
    assert placed.decided_by == "entities.placement is managed_caching"
