"""The counted objective: bytes against real allocations, operations against arithmetic."""

from __future__ import annotations

import pytest
import torch
from planned_runs import plan_of

from kge_torchrec.config import SCORER_NAMES, ConfigError
from kge_torchrec.planning import cost as module
from kge_torchrec.planning.cost import Cost, Costs


def cost(devices: str = "1xH100", **keys) -> Cost:
    keys = {"train__batch_size": 64, "negatives__count": 32, "model__dim": 16, **keys}
    return plan_of(devices, **keys).cost


def of_all(rows: int, is_cuda: bool = True, free: int = 0, **keys) -> Cost:
    """The cost of 128 queries against all rows."""
    keys = {"loss__name": "bce", "train__batch_size": 64, "model__dim": 16, **keys}
    devices = "1xH100" if is_cuda else "1xCPU"
    plan = plan_of(devices, entities=rows, negatives__regime="1vsall", **keys)
    return plan.costs.of_all(rows, plan.queries, free)


@pytest.mark.parametrize(
    ("scorer", "flops"),
    [
        ("distmult", 3 * 2),  # scores, and two products backward
        ("transe_l1", 3 + 2 * 6),  # 3 operations a number forward, 6 for each of two gradients
    ],
)
def test_operations_of_two_sides_of_scores(scorer, flops):
    for devices in ("1xH100", "1xCPU"):
        assert cost(devices, model__scorer=scorer).flops == 2 * flops * 64 * 32 * 16


@pytest.mark.parametrize("scorer", ["transe_l1", "pairre"])
def test_a_gpu_has_no_difference_of_pairs_in_memory(scorer):
    """Kernels of training on CUDA write sums over pairs: one value, and two gradients.

    Twice the pairs take as many operations and keep twice the scores, whatever the dim.
    """
    small, large = (cost(model__scorer=scorer, negatives__count=count) for count in (32, 64))
    numbers = 2 * 64 * 32 * 16
    assert small.flops == pytest.approx((3 + 6 * 2) * numbers)
    assert large.flops == pytest.approx(2 * small.flops)
    assert large.operations == small.operations
    wide = {"model__dim": 64, "train__batch_size": 256, "negatives__count": 2048}
    assert cost(model__scorer=scorer, **wide).peak_bytes < 8 * 4 * 256 * 2048


def test_peak_of_a_step_matches_hand_computation():
    """The scores of both sides and what the loss keeps of them are alive before backward."""
    results = cost(model__scorer="distmult", train__batch_size=256, negatives__count=2048)
    scores = 256 * 2048 * 4
    assert 4 * scores < results.peak_bytes < 8 * scores


@pytest.mark.parametrize(
    ("scorer", "loss"),
    [("pairre", "softmax"), ("rotate", "bce"), ("transe_l1", "softmax"), ("transe_l2", "bce")],
)
def test_a_cpu_allocates_what_is_counted(scorer, loss):
    """The kernels of distances and losses are counted as they run, not as torch would."""
    keys = {"train__batch_size": 64, "negatives__count": 256, "model__dim": 16}
    plan = plan_of("1xCPU", model__scorer=scorer, loss__name=loss, negatives__filtered=True, **keys)
    real = Costs(plan.config, plan.sizes.relations, False, "cpu")
    found = real.of_batch(plan.batch.chunks, plan.batch.triples, plan.candidates)
    assert found == plan.cost and found.flops > 0


@pytest.mark.parametrize("scorer", SCORER_NAMES)
def test_every_scorer_can_be_counted(scorer):
    for reciprocal in (True, False):
        keys = {"model__scorer": scorer, "model__dim": 64, "model__reciprocal": reciprocal}
        try:
            sampled, full = cost(**keys), of_all(96, **keys)
        except ConfigError:  # this scorer wants the other
            continue
        assert sampled.peak_bytes > 64 * 32 * 4 and full.peak_bytes > 128 * 96 * 4
        assert sampled.flops + sampled.moved_bytes > 0
        return
    pytest.fail(f"{scorer} was never counted")


@pytest.mark.parametrize(
    ("devices", "scorer", "chunk_size", "sizes"),
    [
        ("1xH100", "transe_l2", 16, {"_LARGEST": 64}),
        ("1xH100", "complex", 0, {"_LARGEST": 64}),
        ("1xCPU", "house", 0, {"_SMALL": 16}),  # in pieces: a small batch shows that
    ],
)
def test_large_batches_are_extended_from_smaller_ones(
    monkeypatch, devices, scorer, chunk_size, sizes
):
    keys = {"model__scorer": scorer, "negatives__chunk_size": chunk_size}
    keys |= {"train__batch_size": 128 if scorer == "house" else 512, "model__reciprocal": False}
    results = []
    for values in ({"_SMALL": 1024}, sizes):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
        results.append(cost(devices, **keys))
    whole, extended = results
    for name in vars(whole):
        assert getattr(extended, name) == pytest.approx(getattr(whole, name), rel=0.02), name


def test_what_works_in_pieces_is_counted_on_small_batches():
    """A plan of HousE took 11 seconds."""
    keys = {"model__scorer": "house", "model__reciprocal": False, "train__batch_size": 512}
    plan = plan_of("1xCPU", negatives__count=256, model__dim=64, **keys)
    assert plan.cost and {triples for _, triples, *_ in plan.costs._counted} == {32, 64}


def test_many_queries_are_extended_from_fewer_on_a_cpu(monkeypatch):
    keys = {"model__scorer": "complex", "train__batch_size": 400, "model__dim": 32}
    monkeypatch.setattr(module, "_QUERIES", 800)
    whole = of_all(15_000, False, **keys)
    monkeypatch.setattr(module, "_QUERIES", 256)
    extended = of_all(15_000, False, **keys)
    for name in ("peak_bytes", "flops", "moved_bytes"):
        assert getattr(extended, name) == pytest.approx(getattr(whole, name), rel=0.1), name


@pytest.mark.parametrize("loss", ["bce", "softmax"])
@pytest.mark.parametrize("is_cuda", [False, True])
def test_a_step_against_all_has_three_products(loss, is_cuda):
    """Scores, and the gradients of queries and of rows."""
    keys = {"model__scorer": "distmult", "loss__name": loss}
    assert of_all(400, is_cuda, **keys).flops == 3 * 2 * 128 * 400 * 16


def test_large_tables_are_scored_in_blocks_and_by_softmax_twice_unless_memory_is_free():
    """5 GB of scores and .6 GB of gradients of rows fit into a quarter of 24 GB, not of 20 GB."""
    rows, keys = 10_000_000, {"model__scorer": "distmult", "loss__name": "softmax"}
    once = of_all(rows, model__scorer="distmult")
    twice, kept = (of_all(rows, True, free * 10**9, **keys) for free in (20, 24))
    assert once.flops == kept.flops == pytest.approx(3 * 2 * 128 * rows * 16, rel=0.01)
    assert twice.flops == pytest.approx(once.flops * 4 / 3, rel=0.01)
    # 256 MiB of scores and of what comes of as many rows, not 5 GiB
    assert 2**28 < once.peak_bytes < 2**30
    assert kept.peak_bytes > 4 * rows * (128 + 16) > 2 * twice.peak_bytes
    keys |= {"negatives__regime": "1vsall", "train__batch_size": 64, "model__dim": 16}
    flops = [plan_of(f"1x{name}", rows, **keys).cost.flops for name in ("L4", "H100", "CPU")]
    assert flops == pytest.approx([twice.flops, kept.flops, twice.flops], rel=0.01)


def test_counting_draws_no_random_numbers():
    before = torch.get_rng_state()
    cost("1xCPU", model__dropout__input=0.5)
    of_all(50, False, model__dropout__input=0.5)
    assert torch.equal(torch.get_rng_state(), before)
