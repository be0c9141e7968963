"""Plans of tables on disk: memory, files and reads are those of a run."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from training_runs import config_of, fit, tiny_store

from kge_torchrec.commands.plan import plan as plan_verb
from kge_torchrec.config import Config
from kge_torchrec.data.parts import stages
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.planning.advice import advise
from kge_torchrec.planning.devices import parse_devices
from kge_torchrec.planning.layout import Layout, Setup
from kge_torchrec.planning.placement import choose_placement
from kge_torchrec.planning.plan import TrainingPlan, plan_setup, plan_training
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


def auto_setup(folder, devices: str = "1xCPU-16GB", **changes) -> Setup:
    """A run with 60M entities and entities.placement auto."""
    keys = {"model__dim": 64, "entities__placement": "auto", **changes}
    config, store = config_of(folder / "store", None, **keys), tiny_store(folder / "store")
    workload = replace(Workload.of_store(config, store), num_entities=60_000_000)
    return Setup(workload, parse_devices(devices), Layout())


def test_auto_takes_memory_where_the_plan_fits(tmp_path):
    choice = choose_placement(auto_setup(tmp_path, "1xCPU-64GB"))
    assert choice.settings == {"entities.placement": "memory", "entities.placement_options": {}}
    assert choice.reason.startswith("memory, where main memory of host 0 holds")


@pytest.mark.parametrize("own", [{}, {"parts": 48, "passes": 2}, {"buffer": 20}])
@pytest.mark.first_tier("own1", "own2")
def test_auto_takes_the_largest_buffer_that_fits(tmp_path, own):
    setup = auto_setup(tmp_path, entities__placement_options=own)
    settings = choose_placement(setup).settings
    options = settings["entities.placement_options"]
    assert settings["entities.placement"] == "disk" and options.items() >= own.items()
    assert plan_setup(setup.changed(settings)).fits
    if "buffer" not in own:
        options["buffer"] += 1
        larger = {"entities.placement_options": options, "entities.placement": "disk"}
        assert not plan_setup(setup.changed(larger)).fits


def test_auto_takes_the_parts_that_read_least(tmp_path):
    setup = auto_setup(tmp_path)
    chosen = plan_setup(setup.changed(choose_placement(setup).settings))
    for parts in (8, 32):
        cut = replace(setup.workload.config.entities, placement_options={"parts": parts})
        config = replace(setup.workload.config, entities=cut)
        other = Setup(replace(setup.workload, config=config), setup.cluster, setup.layout)
        settings = choose_placement(other).settings
        assert settings["entities.placement_options"]["parts"] == parts
        read = disk_use(plan_setup(setup.changed(settings)))["epoch_bytes"]
        assert read > disk_use(chosen)["epoch_bytes"]


@pytest.mark.parametrize(
    ("changes", "free", "why"),
    [({"negatives__regime": "1vsall"}, None, "negatives.regime: .*use sampled"),
     ({}, 50 * 10**9, "it has 46.57 GiB free for a rank, which needs 57.2"),
     ({"entities__placement_options": {"parts": 8, "buffer": 8}}, None, "smallest buffer")],
)  # fmt: skip
@pytest.mark.first_tier(
    "changes0-None-negatives.regime: .*use sampled",
    "changes1-50000000000-it has 46.57 GiB free for a rank, which needs 57.2",
    "changes2-None-smallest buffer",
)
def test_auto_says_why_it_cannot_take_the_disk(tmp_path, changes, free, why):
    choice = choose_placement(auto_setup(tmp_path, **changes), free)
    assert choice.settings["entities.placement"] == "memory"
    assert re.search(f"memory, because the disk cannot be used .*{why}", choice.reason)
    assert "although main memory of host 0 would need" in choice.reason


def test_auto_leaves_features_in_memory(tmp_path):
    features = tmp_path / "features.tsv"
    features.write_text("e1\tred\n")
    triples = {"train": [("e1", "r", "e2"), ("e2", "r", "e3")]}
    store = prepare(triples, tmp_path / "store", features=features, log_notes=False)
    config = config_of(store.path, None, model__dim=64, entities__placement="auto")
    setup = Setup(Workload.of_store(config, store), parse_devices("1xCPU-0.1GB"), Layout())
    assert "entities have features" in choose_placement(setup).reason


@pytest.mark.parametrize(
    ("placement", "memory", "chosen", "planned"),
    [("auto", 16, "disk", True), ("auto", 64, "memory", False), ("memory", 16, "disk", False),
     ("disk", 64, "memory", True), ("memory", 64, None, False)],
)  # fmt: skip
@pytest.mark.first_tier(
    "auto-16-disk-True",
    "memory-64-None-False",
    "disk-64-memory-True",
    "auto-64-memory-False",
)
def test_a_plan_says_what_auto_chooses(placement, memory, chosen, planned):
    keys = {"model.dim": 64, "entities.placement": placement}
    content = plan_verb(keys, devices=f"1xCPU-{memory}GB", entities=60_000_000, relations=10,
                        triples=1_000_000)  # fmt: skip
    assert (content["disk"] is not None) == planned
    if chosen is None:
        assert "placement" not in content
    else:
        assert content["placement"]["settings"]["entities.placement"] == chosen
