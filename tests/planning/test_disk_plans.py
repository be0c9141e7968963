"""Plans of tables on disk: memory, files and reads are those of a run."""

from __future__ import annotations

from planned_runs import stored
from training_runs import config_of, fit, tiny_store, without_checkpoints

from kge_torchrec.data.parts import stages
from kge_torchrec.planning.report import report
from kge_torchrec.planning.step import Step
from kge_torchrec.training.disk_table import DiskTable

DISK = {
    "model__dim": 512,
    "entities__placement": "disk",
    "entities__placement_options": {"parts": 5, "buffer": 3},
    "train__epochs": 3,
}


def test_files_and_reads_are_those_of_a_run(tmp_path, monkeypatch):
    store = tiny_store(tmp_path / "store", entities=40)
    config, read, sizes = config_of(store.path, tmp_path / "run", **DISK), [], []
    plan = stored(config)
    before = DiskTable._read

    def counted(self, part) -> None:
        if self._reading is None or self._reading[0] != part:
            read.append(part)
        before(self, part)

    monkeypatch.setattr(DiskTable, "_read", counted)

    def look(loop) -> None:
        disk = loop.session.disk
        held = sum(tensor.nbytes for tensor in disk._memory.values())
        parts = plan.memory
        assert held == parts["weights"].main + parts["optimizer state"].main
        staged = (disk._incoming, disk._outgoing)
        on_their_way = sum(tensor.nbytes for rows in staged for tensor in rows.values())
        assert on_their_way == parts["parts on their way"].main
        without_checkpoints(loop)
        sizes.extend(file.stat().st_size for file in disk.folder.iterdir())

    fit(config, look)
    use = Step(plan).disk
    assert sum(sizes) == use["table_bytes"] == 5 * use["part_bytes"]
    assert use["exchanges"] == len(stages(5, 3)) - 1
    # The first buffer is read once; each epoch exchanges parts, there or back.
    assert len(read) == 3 + 3 * use["exchanges"]


def test_passes_multiply_exchanges(tmp_path):
    store = tiny_store(tmp_path / "store")
    one, three = (
        Step(stored(config_of(store.path, None, **{**DISK, "entities__placement_options":
                              {"parts": 5, "buffer": 3, "passes": passes}}))).disk
        for passes in (1, 3)
    )  # fmt: skip
    assert three["exchanges"] == 3 * one["exchanges"]
    assert three["epoch_bytes"] == 3 * one["epoch_bytes"]


def test_the_report_names_disk_and_exchanges(tmp_path):
    store = tiny_store(tmp_path / "store")
    text = report(stored(config_of(store.path, None, **DISK)))
    assert "disk of each rank:" in text and "in 5 parts of" in text
    assert "exchanges a part 4 times: each rank reads" in text
    in_memory = config_of(store.path, None, model__dim=512)
    assert Step(stored(in_memory)).disk is None
