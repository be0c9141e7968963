"""Plans of tables on disk: memory, files and reads are those of a run."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from planned_runs import workload
from training_runs import config_of, fit, tiny_store, without_checkpoints

from kge_torchrec.config import Config
from kge_torchrec.data.parts import stages
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.planning.advice import advise
from kge_torchrec.planning.devices import parse_devices
from kge_torchrec.planning.layout import Layout
from kge_torchrec.planning.plan import TrainingPlan, disk_use, plan_setup, plan_training
from kge_torchrec.planning.report import report
from kge_torchrec.planning.workload import Workload
from kge_torchrec.training.disk_table import DiskTable

DISK = {
    "model__dim": 512,
    "entities__placement": "disk",
    "entities__placement_options": {"parts": 5, "buffer": 3},
    "train__epochs": 3,
}


def plan_of(config: Config, store: TripleStore, devices: str = "1xCPU") -> TrainingPlan:
    return plan_training(Workload.of_store(config, store), parse_devices(devices), Layout())


def test_files_and_reads_are_those_of_a_run(tmp_path, monkeypatch):
    store = tiny_store(tmp_path / "store", entities=40)
    config, read, sizes = config_of(store.path, tmp_path / "run", **DISK), [], []
    plan = plan_of(config, store)
    before = DiskTable._read

    def counted(self, part) -> None:
        if self._reading is None or self._reading[0] != part:
            read.append(part)
        before(self, part)

    monkeypatch.setattr(DiskTable, "_read", counted)

    def look(loop) -> None:
        disk = loop.session.disk
        held = sum(tensor.nbytes for tensor in disk._memory.values())
        parts = plan.memory[0]
        assert held == parts["weights"].main + parts["optimizer state"].main
        staged = (disk._incoming, disk._outgoing)
        on_their_way = sum(tensor.nbytes for rows in staged for tensor in rows.values())
        assert on_their_way == parts["parts on their way"].main
        without_checkpoints(loop)
        sizes.extend(file.stat().st_size for file in disk.folder.iterdir())

    fit(config, look)
    use = disk_use(plan)
    assert sum(sizes) == use["table_bytes"] == 5 * use["part_bytes"]
    assert use["exchanges"] == len(stages(5, 3)) - 1
    # The first buffer is read once; each epoch exchanges parts, there or back.
    assert len(read) == 3 + 3 * use["exchanges"]


def test_passes_multiply_exchanges(tmp_path):
    store = tiny_store(tmp_path / "store")
    one, three = (
        disk_use(plan_of(config_of(store.path, None, **{**DISK, "entities__placement_options":
                                   {"parts": 5, "buffer": 3, "passes": passes}}), store))
        for passes in (1, 3)
    )  # fmt: skip
    for name in ("exchanges", "least_exchanges", "epoch_bytes"):
        assert three[name] == 3 * one[name]
    assert three["stage_seconds"] < one["stage_seconds"]


def test_the_report_names_disk_and_exchanges(tmp_path):
    store = tiny_store(tmp_path / "store")
    text = report(plan_of(config_of(store.path, None, **DISK), store))
    assert "disk of each rank:" in text and "in 5 parts of" in text
    assert "exchanges a part 4 times (at least 4 are needed)" in text
    in_memory = config_of(store.path, None, model__dim=512)
    assert disk_use(plan_of(in_memory, store)) is None


@pytest.mark.parametrize(("regime", "advised"), [("sampled", True), ("1vsall", False)])
def test_the_disk_is_advised_where_it_goes_with_the_run(tmp_path, regime, advised):
    store = tiny_store(tmp_path / "store")
    config = config_of(store.path, None, model__dim=64, negatives__regime=regime)
    workload = replace(Workload.of_store(config, store), num_entities=60_000_000)
    big = plan_training(workload, parse_devices("1xCPU-16GB"), Layout())
    disk = [item for item in advise(big) if item.change.startswith("entities.placement disk")]
    assert [item.fits for item in disk] == [True] * advised


def advised_disk(work: Workload, devices: str = "1xCPU-16GB") -> TrainingPlan:
    """The plan with the disk as it is advised; the advice says that it fits."""
    plan = plan_training(work, parse_devices(devices), Layout())
    assert not plan.fits
    (disk,) = [item for item in advise(plan) if item.change.startswith("entities.placement disk")]
    assert disk.fits
    parts, buffer = (int(re.search(rf"{key} (\d+)", disk.change)[1]) for key in ("parts", "buffer"))
    return on_disk(plan, parts, buffer)


def on_disk(plan: TrainingPlan, parts: int, buffer: int) -> TrainingPlan:
    own = plan.workload.config.entities.placement_options
    options = {"entities.placement_options": replace(own, parts=parts, buffer=buffer)}
    return plan_setup(plan.changed({**options, "entities.placement": "disk"}))


def test_the_largest_buffer_that_fits_is_advised_with_the_parts_that_read_least():
    plan = advised_disk(workload(60_000_000, model__dim=64))
    cut = plan.workload.config.entities.placement_options
    assert plan.fits and not on_disk(plan, cut.parts, cut.buffer + 1).fits
    for parts in (8, 32):
        cuts = [on_disk(plan, parts, buffer) for buffer in range(2, parts + 1)]
        largest = [other for other in cuts if other.fits][-1]
        assert disk_use(largest)["epoch_bytes"] > disk_use(plan)["epoch_bytes"]


def test_the_disk_is_not_called_too_small_where_more_parts_fit():
    """With 4 of 16 parts, as by default, it does not fit."""
    work = workload(30_000_000, 1000, 100_000_000, model__dim=402)
    plan = plan_training(work, parse_devices("2xCPU-8GB"), Layout())
    assert not on_disk(plan, 16, 4).fits
    assert advised_disk(plan.workload, "2xCPU-8GB").fits


def test_a_run_on_disk_that_does_not_fit_is_advised_other_parts():
    keys = {"entities__placement": "disk", "entities__placement_options": {"passes": 2}}
    plan = advised_disk(workload(60_000_000, model__dim=128, **keys), "1xCPU-8GB")
    assert plan.fits and plan.workload.config.entities.placement_options.passes == 2


def test_the_disk_is_not_advised_to_entities_with_features(tmp_path):
    (tmp_path / "f.tsv").write_text("e1\tred\n")
    triples = {"train": [("e1", "r", "e2"), ("e2", "r", "e3")]}
    store = prepare(triples, tmp_path / "s", {"features": tmp_path / "f.tsv"}, log_notes=False)
    plan = plan_of(config_of(store.path, None, model__dim=64), store, "1xCPU-0.1GB")
    assert not any("placement disk" in item.change for item in advise(plan))
