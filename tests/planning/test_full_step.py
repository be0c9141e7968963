"""Plans of training against all entities: against arithmetic, and against real worlds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planned_runs import planned, workload
from sent_bytes import WatchCollectives
from training_runs import config_of, random_triples
from worlds import run_world

from kge_torchrec.config import SCORER_NAMES, ConfigError
from kge_torchrec.data.features import Features
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.planning import cost as module
from kge_torchrec.planning.advice import advise
from kge_torchrec.planning.cost import full_cost
from kge_torchrec.planning.devices import parse_devices
from kge_torchrec.planning.layout import Layout
from kge_torchrec.planning.plan import alternatives, plan_training
from kge_torchrec.planning.report import report
from kge_torchrec.planning.workload import Workload

STEPS = 5


def against_all(entities: int = 1000, regime: str = "1vsall", **keys) -> Workload:
    keys = {"loss__name": "bce", "train__batch_size": 64, "model__dim": 16, **keys}
    return workload(entities, negatives__regime=regime, **keys)


def test_queries_of_a_step():
    assert against_all().queries == 128
    assert against_all(negatives__sides="tail", model__reciprocal=False).queries == 64
    assert against_all(regime="kvsall").queries == 64
    assert against_all(train__batch_size=10**6).queries == 2 * 5000  # all triples


@pytest.mark.parametrize("loss", ["bce", "softmax"])
@pytest.mark.parametrize("is_cuda", [False, True])
def test_step_has_three_products(loss, is_cuda):
    """Scores, and the gradients of queries and of rows."""
    work = against_all(model__scorer="distmult", loss__name=loss)
    assert full_cost(work, 400, is_cuda).flops == 3 * 2 * 128 * 400 * 16


def test_many_queries_are_extended_from_fewer_on_a_cpu(monkeypatch):
    keys = {"model__scorer": "complex", "train__batch_size": 400, "model__dim": 32}
    monkeypatch.setattr(module, "_QUERIES", 800)
    whole = full_cost(against_all(**keys), 15_000, False)
    monkeypatch.setattr(module, "_QUERIES", 256)
    extended = full_cost(against_all(**keys), 15_000, False)
    for name in ("peak_bytes", "flops", "moved_bytes"):
        assert getattr(extended, name) == pytest.approx(getattr(whole, name), rel=0.1), name


def test_large_tables_are_scored_in_blocks_and_by_softmax_twice():
    rows, keys = 10_000_000, {"model__scorer": "distmult", "entities": 10_000_000}
    once = full_cost(against_all(**keys), rows, True)
    twice = full_cost(against_all(**keys, loss__name="softmax"), rows, True)
    assert once.flops == pytest.approx(3 * 2 * 128 * rows * 16, rel=0.01)
    assert twice.flops == pytest.approx(once.flops * 4 / 3, rel=0.01)
    # 256 MiB of scores and of what comes of as many rows, not 5 GiB
    assert 2**28 < once.peak_bytes < 2**30


def test_free_memory_of_a_gpu_keeps_scores_that_are_computed_once():
    """5 GB of scores and .6 GB of gradients of rows fit into a quarter of 24 GB, not of 20 GB."""
    keys = {"model__scorer": "distmult", "entities": 10_000_000, "loss__name": "softmax"}
    work, rows = against_all(**keys), 10_000_000
    twice, kept = (full_cost(work, rows, True, free * 10**9) for free in (20, 24))
    assert twice.flops == pytest.approx(kept.flops * 4 / 3, rel=0.01)
    assert kept.peak_bytes > 4 * rows * (128 + 16) > 2 * twice.peak_bytes
    flops = [planned(work, f"1x{gpu}").cost.flops for gpu in ("L4", "H100")]
    assert flops == pytest.approx([twice.flops, kept.flops], rel=0.01)
    assert planned(work, "1xCPU").cost.flops == pytest.approx(twice.flops, rel=0.01)


@pytest.mark.parametrize("scorer", SCORER_NAMES)
def test_every_scorer_can_be_measured(scorer):
    for reciprocal in (True, False):
        try:
            keys = {"model__scorer": scorer, "model__dim": 64, "model__reciprocal": reciprocal}
            results = full_cost(against_all(**keys), 96, True)
        except ConfigError:  # this scorer wants the other
            continue
        assert results.peak_bytes > 128 * 96 * 4
        return
    pytest.fail(f"{scorer} was never watched")


def test_epochs_of_queries():
    assert against_all().steps_per_epoch == 5000 / 64
    assert against_all(regime="kvsall").steps_per_epoch == 2 * 5000 / 64
    assert against_all(regime="allvsall").steps_per_epoch == 2 * 1000 * 7 / 64
    plan = planned(against_all(regime="kvsall"), "2xH100")
    assert any("at most 10,000 queries" in note for note in plan.notes)


def test_other_layouts_are_rejected_and_not_suggested():
    with pytest.raises(ConfigError, match="only row_wise"):
        planned(against_all(), "4xH100", sharding="column_wise")
    plans = alternatives(against_all(), parse_devices("4xH100"), Layout())
    assert {plan.layout.sharding for plan in plans} == {"row_wise"}


def test_plan_that_does_not_fit_gets_advice():
    work = against_all(86_000_000, model__dim=400, train__optimizer="adam")
    plan = planned(work, "1xH200")
    assert not plan.fits
    more = next(item for item in advise(plan) if "smallest number" in item.result)
    count = int(more.change.split()[0])
    assert planned(work, f"{count}xH200").fits
    assert not planned(work, f"{count - 1}xH200").fits
    text = report(plan)
    assert "nothing is looked up" in text
    assert "de-duplication" not in text


def test_biases_are_two_elements_of_a_row():
    plain, biased = against_all(), against_all(model__biases=True, model__dim=18)
    assert biased.dense_parameters == plain.dense_parameters
    rows = [planned(work, "4xCPU").memory[0]["weights"].main for work in (plain, biased)]
    assert rows[1] == pytest.approx(rows[0] * 18 / 16)


def test_answers_are_fetched_where_triples_are_penalised():
    queries = against_all(loss__regularizers={"l2": 0.1}).fetched
    assert against_all(loss__regularizers={"dura": 0.1}).fetched == 2 * queries
    assert against_all(loss__relation_weight=0.1).fetched == 2 * queries


def test_more_ranks_than_entities():
    plan = planned(against_all(3), "4xCPU")
    assert plan.memory[3]["weights"].main == 0
    assert plan.memory[3]["activations"].main == 0


def sent(config) -> float:
    """On a rank: bytes that it sends in a step."""
    from kge_torchrec.distributed.processes import processes
    from kge_torchrec.training.assembly import build_backend, build_batches, build_pipeline

    with processes("cpu") as ranks:
        store = TripleStore.open(config.data.path)
        parts = config, build_backend(config, store, ranks), ranks, Features.of(store)
        pipeline = build_pipeline(*parts)
        stream = build_batches(config, store, ranks).epoch(0)
        with WatchCollectives() as watch:
            for _ in range(STEPS):
                pipeline.progress(stream)
    return sum(watch.sent.values()) / STEPS


def test_accumulation_stores_another_sum_of_the_gradients_of_own_rows():
    for devices, place in (("4xH100", "device"), ("4xCPU", "main")):
        plain = planned(against_all(), devices).memory[0]
        held = planned(against_all(train__accumulation=2), devices).memory[0]
        assert getattr(plain["gradients"], place) == 0
        assert getattr(held["gradients"], place) == 4 * 250 * 16


def test_micro_batches_need_less_memory_and_as_many_products():
    whole, parts = (
        planned(against_all(train__accumulation=number, entities=10**5), "2xH100")
        for number in (1, 4)
    )
    assert parts.cost.flops == pytest.approx(whole.cost.flops / 4)
    for part in ("activations", "rows and ids"):
        of_whole, of_parts = (plan.memory[0][part].device for plan in (whole, parts))
        assert of_parts < 0.5 * of_whole
    assert parts.times["scoring"] == pytest.approx(whole.times["scoring"], rel=0.3)
    assert parts.traffic.total() == pytest.approx(whole.traffic.total())


def test_sharded_dense_parameters_are_whole_in_a_step():
    """Kept: values, gradients and Adagrad's sums.  Whole: values, gradients, those under way."""
    keys = {"model__scorer": "rescal", "model__dim": 64}
    numbers = against_all(**keys).dense_parameters
    results = planned(against_all(**keys, dense__wrapper="fsdp"), "4xH100").memory[0]
    assert results["dense parameters"].device == pytest.approx(4 * (numbers * 3 / 4 + 3 * numbers))


@pytest.mark.parametrize(
    "world_size, keys",
    [
        (1, {"negatives__regime": "kvsall"}),
        (2, {"loss__relation_weight": 0.1}),
        (2, {"negatives__regime": "kvsall"}),
        (4, {"model__scorer": "rescal", "dense__wrapper": "fsdp", "train__accumulation": 2}),
    ],
    ids=["kvsall", "relation prediction", "kvsall on two", "fsdp"],
)
def test_collective_sizes_match_hand_computation(tmp_path, world_size, keys):
    triples = random_triples(700, 5, 2000)
    prepare({"train": triples[:1900], "valid": triples[1900:], "test": []}, tmp_path / "s")
    check_sizes(tmp_path, world_size, keys)


def featured(folder: Path) -> None:
    """Prepare a store with 200 features."""
    (folder / "f.tsv").write_text("".join(f"e{i}\tkind {i % 200}\n" for i in range(700)))
    splits = {"train": random_triples(700, 5, 2000), "test": []}
    prepare(splits, folder / "s", {"features": folder / "f.tsv"}, log_notes=False)


def test_rows_of_features_are_exchanged_as_planned(tmp_path):
    featured(tmp_path)
    check_sizes(tmp_path, 2, {"negatives__regime": "kvsall"})


def test_vectors_of_entities_with_features_take_memory(tmp_path):
    featured(tmp_path)
    store = TripleStore.open(tmp_path / "s")
    config = config_of(store.path, negatives__regime="allvsall", loss__name="bce")
    work = Workload.of_store(config, store)
    assert work.examples == 2 * 700 * 5
    parts, without = (
        plan_training(x, parse_devices("2xH100"), Layout()).memory[0]
        for x in (work, replace(work, frequency=replace(work.frequency, features=None)))
    )
    rows, features = 4 * 450 * 8, 4 * 200 * 8
    assert parts["gradients"].device == rows and without["gradients"].device == 0
    more = parts["rows and ids"].device - without["rows and ids"].device
    assert more == rows + 2 * features


def check_sizes(tmp_path: Path, world_size: int, keys: dict) -> None:
    keys = {"negatives__regime": "1vsall", "loss__name": "softmax", **keys}
    config = config_of(tmp_path / "s", train__batch_size=64, **keys)
    store = TripleStore.open(tmp_path / "s")
    work = Workload.of_store(config, store)
    plan = plan_training(work, parse_devices(f"{world_size}xCPU"), Layout())
    measured = sum(run_world(world_size, sent, config))
    assert sum(plan.traffic.total()) == pytest.approx(measured, rel=0.05)


def test_measuring_draws_no_random_numbers():
    before = torch.get_rng_state()
    full_cost(against_all(model__dropout__input=0.5), 50, False)
    assert torch.equal(torch.get_rng_state(), before)
