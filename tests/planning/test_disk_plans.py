"""Plans of tables on disk: memory and files are those of a run."""

from __future__ import annotations

from planned_runs import stored
from training_runs import config_of, fit, tiny_store, without_checkpoints

from kge_torchrec.planning.report import report


def test_memory_and_files_are_those_of_a_run(tmp_path):
    store = tiny_store(tmp_path / "store", entities=40)
    keys = {"parts": 5, "buffer": 3}
    config = config_of(store.path, tmp_path / "run", model__dim=512, train__epochs=1,
                       entities__placement="disk", entities__placement_options=keys)  # fmt: skip
    plan, sizes = stored(config), []

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
    assert sum(sizes) == plan.disk_bytes
    assert "in 5 parts, 3 of them in memory" in report(plan)
    assert stored(config_of(store.path)).disk_bytes == 0
