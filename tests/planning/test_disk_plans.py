"""Plans of tables on disk: memory, files and reads are those of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from training_runs import config_of, fit, tiny_store

from kge_torchrec.config import Config
from kge_torchrec.data.parts import stages
from kge_torchrec.data.store import TripleStore
from kge_torchrec.planning.advice import advise
from kge_torchrec.planning.devices import parse_devices
from kge_torchrec.planning.layout import Layout
from kge_torchrec.planning.plan import TrainingPlan, plan_training
from kge_torchrec.planning.report import disk_use, report
from kge_torchrec.planning.workload import Workload
from kge_torchrec.training import part_files

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
    config, read, sizes = config_of(store.path, tmp_path / "run", **DISK), [], {}
    plan = plan_of(config, store)
    before = part_files.PartFiles.read

    def counted(self, part, into) -> None:
        read.append(part)
        before(self, part, into)

    monkeypatch.setattr(part_files.PartFiles, "read", counted)

    def look(loop) -> None:
        buffer = loop.session.buffer
        held = sum(tensor.nbytes for tensor in buffer._tensors.values())
        parts = plan.memory[0]
        assert held == parts["weights"].main + parts["optimizer state"].main
        staged = (buffer._incoming, buffer._outgoing)
        on_their_way = sum(tensor.nbytes for rows in staged for tensor in rows.values())
        assert on_their_way == parts["parts on their way"].main
        loop._save = lambda: sizes.update(
            (part, file.path.stat().st_size) for part, file in buffer.files.files.items()
        )

    fit(config, look)
    use = disk_use(plan)
    assert sum(sizes.values()) == use["table_bytes"] == 5 * use["part_bytes"]
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
    changes = [item.change for item in advise(big) if item.fits]
    assert ("entities.placement disk" in changes) == advised
