"""The watched objective: bytes against real allocations, operations against arithmetic."""

from __future__ import annotations

import pytest
import torch
from planned_runs import workload

from kge_torchrec.config import ConfigError
from kge_torchrec.planning import cost as module
from kge_torchrec.planning.cost import objective_cost


def cost(is_cuda: bool = True, world_size: int = 1, **keys):
    keys = {"train__batch_size": 64, "negatives__count": 32, "model__dim": 16, **keys}
    work = workload(**keys)
    return objective_cost(work, work.batches(world_size)[0][0], is_cuda)


def test_matrix_products_of_a_dot_scorer():
    """Two sides of b x K scores from D numbers, forward and two products backward."""
    assert cost(model__scorer="distmult").flops == 2 * 3 * 2 * 64 * 32 * 16


def test_distances():
    """Two sides: 3 operations a number forward, 6 for each of two gradients backward."""
    assert cost(model__scorer="transe_l1").flops == 2 * (3 + 2 * 6) * 64 * 32 * 16


@pytest.mark.parametrize(("scorer", "sums"), [("transe_l1", 2), ("pairre", 3)])
def test_a_gpu_has_no_difference_of_pairs_in_memory(scorer, sums):
    """Kernels of training on CUDA write sums over pairs: one value, and a gradient of each input.

    Twice the pairs take as many operations and keep twice the scores, whatever the dim.
    """
    small, large = (cost(model__scorer=scorer, negatives__count=count) for count in (32, 64))
    numbers = 2 * 64 * 32 * 16
    assert small.flops == pytest.approx((3 + 6 * sums) * numbers)
    assert large.flops == pytest.approx(2 * small.flops)
    assert large.operations == small.operations
    wide = {"model__dim": 64, "train__batch_size": 256, "negatives__count": 2048}
    assert cost(model__scorer=scorer, **wide).largest_bytes == 4 * 256 * 2048


def test_peak_of_a_step_matches_hand_computation():
    """The scores of both sides and what the loss keeps of them are alive before backward."""
    results = cost(model__scorer="distmult", train__batch_size=256, negatives__count=2048)
    scores = 256 * 2048 * 4
    assert results.largest_bytes == scores
    assert 4 * scores < results.peak_bytes < 8 * scores


@pytest.mark.parametrize("scorer", ["complex", "rescal"])
def test_meta_and_cpu_agree_for_device_independent_scorers(scorer):
    """But for relations' rows, which a GPU looks up in another way."""
    on_gpu, on_cpu = (cost(is_cuda, model__scorer=scorer) for is_cuda in (True, False))
    for name in ("peak_bytes", "largest_bytes", "flops"):
        assert getattr(on_gpu, name) == getattr(on_cpu, name), name
    assert on_gpu.operations == on_cpu.operations + 2


@pytest.mark.parametrize(
    "scorer",
    ["complex", "transe_l2", "rotate", "rescal", "tucker", "conve", "house", "mure", "pairre",
     "operator", "keci"],
)  # fmt: skip
def test_every_scorer_can_be_measured(scorer):
    for reciprocal in (True, False):
        try:
            results = cost(model__scorer=scorer, model__dim=64, model__reciprocal=reciprocal)
        except ConfigError:  # this scorer wants the other
            continue
        assert results.peak_bytes > 64 * 32 * 4
        assert results.flops + results.moved_bytes > 0
        return
    pytest.fail(f"{scorer} was never watched")


@pytest.mark.parametrize(("scorer", "chunk_size"), [("transe_l2", 16), ("complex", 0)])
def test_large_batches_are_extended_from_smaller_ones(monkeypatch, scorer, chunk_size):
    keys = {"model__scorer": scorer, "negatives__chunk_size": chunk_size, "train__batch_size": 512}
    whole = cost(**keys)
    monkeypatch.setattr(module, "_LARGEST", 64)
    extended = cost(**keys)
    for name in vars(whole):
        assert getattr(extended, name) == pytest.approx(getattr(whole, name), rel=0.02), name


def test_rank_without_triples_has_zero_cost():
    work = workload(triples=2, train__batch_size=2)
    empty = next(b for (b,) in work.batches(4) if not b.positives)
    assert objective_cost(work, empty, True).peak_bytes == 0


def test_measuring_draws_no_random_numbers():
    before = torch.get_rng_state()
    cost(False, model__dropout__input=0.5)
    assert torch.equal(torch.get_rng_state(), before)
