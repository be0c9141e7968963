"""Steps against all entities: every scorer's gradients, memory, dropout, precision."""

from __future__ import annotations

import math
import tracemalloc
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ranking_cases import make_known
from recorded_steps import CPU, ENTITIES, Recorder, objective_of
from scorer_cases import CASES, RELATIONS, SCORERS, identify
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import config_of, fit, largest_difference, tiny_store, without_checkpoints
from worlds import run_world

from kge_torchrec.config import TrainConfig
from kge_torchrec.data.batches import BatchPlan
from kge_torchrec.data.batches.queries import DistinctQueries, QueryBatches, TripleQueries
from kge_torchrec.data.prepare import prepare
from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.environment import free_memory
from kge_torchrec.kernels import comparisons
from kge_torchrec.models import over_all
from kge_torchrec.models.model import Objective
from kge_torchrec.models.over_all import SoftmaxOverAll
from kge_torchrec.training import full_candidates
from kge_torchrec.training.full_candidates import FullCandidates
from kge_torchrec.training.query_shards import GatheredRows, QueryShard
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.state import TrainState
from kge_torchrec.training.trainer import Trainer


def step_of(objective: Objective) -> FullCandidates:
    """Return a step on random rows, which records their gradients."""
    torch.manual_seed(1)
    engine = Recorder(objective, torch.randn(ENTITIES, objective.scorer.row_dim))
    return FullCandidates(engine, SoftmaxOverAll(ENTITIES, 0.1), TrainConfig(), CPU)


def gradients(
    objective: Objective, kept_bytes: int, block_bytes: int = 150
) -> dict[str, torch.Tensor]:
    """Return the gradients of a step with a few triples: of the rows and all parameters."""
    step = step_of(objective)
    step.kept_bytes, step.block_bytes = kept_bytes, block_bytes
    batches = QueryBatches(TripleQueries(TRIPLES, SIDES), BatchPlan(7)).epoch(0)
    results = {"loss": step.progress(batches), "entities": step.backend.grad}
    return results | {name: p.grad.clone() for name, p in objective.named_parameters()}


TRIPLES = np.random.default_rng(0).integers((ENTITIES, RELATIONS, ENTITIES), size=(7, 3))
SIDES = ("head", "tail")


def expected_gradients(objective: Objective) -> dict[str, torch.Tensor]:
    """Return the gradients by autograd through the scores of the whole table."""
    torch.manual_seed(1)
    rows = torch.randn(ENTITIES, objective.scorer.row_dim).requires_grad_()
    scorer, total = objective.scorer, 0
    head, relation, tail = torch.from_numpy(TRIPLES).T
    for side, anchor, answer in (("tail", head, tail), ("head", tail, head)):
        query = scorer.encode(rows[anchor][None], relation[None], side)
        scores = scorer.matrix(query, rows[None])[0]
        total = total + cross_entropy(scores, answer, reduction="sum", label_smoothing=0.1)
        penalties = objective.regularizers
        for part in (rows[anchor], rows[answer]):
            total = total + penalties.of_entities(scorer, part).sum()
        total = total + penalties.of_relations(scorer, relation, side).sum()
    loss = total / (2 * len(TRIPLES))
    names, parameters = zip(*objective.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, [rows, *parameters], allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g
              for g, x in zip(gradients, [rows, *parameters], strict=True)]  # fmt: skip
    return {"loss": loss.detach(), **dict(zip(("entities", *names), filled, strict=True))}


@pytest.mark.parametrize("case", CASES, ids=identify)
def test_gradients_of_every_scorer_equal_autograd(case):
    """Scores are kept for every other case, and computed twice for those between."""
    kept_bytes = (0, 1 << 20)[CASES.index(case) % 2]
    objective = objective_of(case, SCORERS[case[0]].needs_reciprocal)
    actual, expected = gradients(objective, kept_bytes), expected_gradients(objective)
    for name, value in expected.items():
        scale = 1 + value.abs().max()
        assert (actual[name] - value).abs().max() < 2e-5 * scale, name


def test_gradients_do_not_depend_on_the_block_size():
    objective = objective_of(("complex", 6, {}), True)
    one_block = gradients(objective, 1 << 20, 1 << 20)
    for kept_bytes, block_bytes in ((1 << 20, 300), (1 << 20, 1), (0, 1 << 20)):
        assert largest_difference(one_block, gradients(objective, kept_bytes, block_bytes)) < 1e-6


GB = 10**9
KEPT = over_all.KEPT_BYTES


@pytest.mark.parametrize("free, rows, dim, kept", [
    (0, 1000, 8, KEPT), (GB, 1000, 8, KEPT), (80 * GB, 0, 8, 20 * GB),
    (80 * GB, 2_500_000, 200, 18 * GB), (80 * GB, 86_000_000, 100, KEPT),
])  # fmt: skip
def test_kept_scores_follow_the_free_memory(free, rows, dim, kept):
    assert over_all.kept_bytes(free, rows, dim) == kept


def test_free_memory_counts_what_torch_has_cached(monkeypatch):
    assert free_memory(CPU) == 0
    sizes = {"mem_get_info": (30, 80), "memory_reserved": 25, "memory_allocated": 5}
    for name, size in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    assert free_memory(torch.device("cuda")) == 50


def rank_chooses(gigabytes: list[int]) -> int:
    objective = objective_of(("complex", 6, {}), True)
    with processes("cpu") as ranks, pytest.MonkeyPatch.context() as patches:
        free = GB * gigabytes[ranks.rank]
        patches.setattr(full_candidates, "free_memory", lambda device: free)
        return step_of(objective).kept_bytes


def test_ranks_keep_what_fits_into_the_smallest_memory():
    for kept in run_world(2, rank_chooses, [80, 40]):
        assert 9.9 * GB < kept <= 10 * GB


def test_scores_are_computed_and_in_memory_once():
    """Also where backward goes through them: not as a copy, once they were overwritten."""
    blocks, products = set(), []

    class LargeOnes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            if isinstance(out, torch.Tensor) and out.numel() == 2 * len(TRIPLES) * ENTITIES:
                blocks.add(out.data_ptr())
                products.extend([function] * (function is torch.ops.aten.mm.default))
            return out

    objective = objective_of(("complex", 6, {}), True)
    with LargeOnes():
        gradients(objective, 1 << 20, 1 << 20)
    assert len(blocks) == len(products) == 1


@pytest.mark.parametrize("kept_bytes", [1 << 20, 0], ids=["kept", "twice"])
def test_aligned_scores_are_overwritten_too(monkeypatch, kept_bytes):
    objective = objective_of(("complex", 6, {}), True)
    expected = gradients(objective, kept_bytes, 1 << 20)
    objective.zero_grad()
    aligned = []
    function, apply = comparisons._AlignedProducts, comparisons._AlignedProducts.apply
    monkeypatch.setattr(comparisons, "_FEW_PAIRS", 1)
    monkeypatch.setattr(function, "apply", lambda *args: aligned.append(1) or apply(*args))
    assert largest_difference(expected, gradients(objective, kept_bytes, 1 << 20)) < 1e-6
    assert aligned


def test_scores_in_bfloat16_keep_their_dtype():
    kept_bytes = 1 << 20
    objective, types = objective_of(("complex", 64, {}), True), []
    expected = gradients(objective, kept_bytes)
    objective.precision, observe = torch.bfloat16, SoftmaxOverAll.partial_statistics

    def seen(loss, scores, answers):
        types.append(scores.dtype)
        return observe(loss, scores, answers)

    objective.zero_grad()
    with (
        patch.object(full_candidates, "rounds_as_it_multiplies", lambda: False),
        patch.object(SoftmaxOverAll, "partial_statistics", seen),
    ):
        actual = gradients(objective, kept_bytes)
    assert set(types) == {torch.bfloat16}
    for name, value in expected.items():
        assert 0 < (actual[name] - value).norm() < 0.03 * value.norm(), name


@pytest.mark.parametrize("case", [("complex", 6, {}), ("conex", 8, {"channels": 2})], ids=identify)
def test_recomputed_scores_have_the_same_dropout(case):
    objective = objective_of(case, True, input_dropout=0.3, hidden_dropout=0.3)
    objective.entity_dropout.p = 0.3
    kept, twice = gradients(objective, 1 << 20), gradients(objective, 0)
    assert largest_difference(kept, twice) < 1e-5
    objective.eval()
    assert largest_difference(kept, gradients(objective, 1 << 20)) > 1e-3


@pytest.mark.parametrize("has_rows", [True, False])
def test_ranks_reduce_normalizers_in_whole_precision(monkeypatch, has_rows):
    """One of 3,000, in float32, has steps of 2e-4."""
    other = torch.tensor([[3000.0001], [0.0], [0.0]], dtype=torch.float64)
    own = full_candidates.QueryPass.__new__(full_candidates.QueryPass)
    own.world, own.block_statistics = 2, [other.clone()] if has_rows else []
    own.queries, own.shard = 1, SimpleNamespace(rows=torch.zeros(1, 2))
    own.step = SimpleNamespace(loss=SoftmaxOverAll(4))

    def all_gather(every, sent):
        every[0].copy_(sent)
        every[1].copy_(other.to(sent.dtype))

    monkeypatch.setattr(full_candidates.dist, "all_gather", all_gather)
    own._reduce()
    expected = 3000.0001 + (math.log(2) if has_rows else 0)
    assert abs(own.statistics[0].item() - expected) < 1e-9


def test_adam_moves_the_rows_of_a_large_table_by_bce(tmp_path):
    """Gradients of bce must not vanish beside Adam's epsilon because entities are many."""
    triples = [(f"e{i}", "r", f"e{7919 * i % 5000}") for i in range(5000)]
    store = prepare({"train": triples}, tmp_path / "store").path
    keys = {"loss__name": "bce", "model__init_scale": 1e-3, "train__optimizer": "adam",
            "negatives__regime": "kvsall", "train__optimizer_options__eps": 1e-8}  # fmt: skip
    config = config_of(store, tmp_path, **keys)
    with processes("cpu") as ranks:
        session = Session(config, RunFolder(tmp_path), ranks)
        loop, rows = Trainer(session, TrainState(), None), session.backend.shard().rows
        start, batches = rows.clone(), loop.batches.epoch(0)
        for _ in range(3):
            loop.train_step(batches)
        moved = (rows - start).abs() / (3 * config.train.lr)  # Adam's steps are of the rate
    assert moved.median() > 0.3


DROPPING = {
    "queries and told relations": {"model__dropout__input": 0.4, "loss__relation_weight": 3.0},
    "rows of all entities and of relations": {
        "model__dropout__entity": 0.4,
        "model__dropout__relation": 0.4,
        "loss__relation_weight": 3.0,
    },
}


def rank_trains_in_small_cells(configs) -> list[dict]:
    full_candidates.CELL = 8  # ranks begin and end in the middle of one
    return [fit(config, without_checkpoints).parameters for config in configs]


def test_dropped_elements_do_not_depend_on_the_ranks(tmp_path):
    store = tiny_store(tmp_path / "store", train=70).path
    shared = {"train__optimizer": "sgd", "train__lr": 0.5, "train__epochs": 1}
    configs = [
        config_of(store, tmp_path / name, **{"negatives__regime": "1vsall", **shared, **case})
        for name, case in DROPPING.items()
    ]
    (one,) = run_world(1, rank_trains_in_small_cells, configs)
    for result in run_world(2, rank_trains_in_small_cells, configs):
        for name, single, together in zip(DROPPING, one, result, strict=True):
            assert largest_difference(single, together) < 1e-5, name


@pytest.fixture
def copies(monkeypatch):
    """Record for each copy from the host to the meta device whether it was pinned and waited for.

    The meta device stands for a GPU; tests/gpu waits for nothing on a real one.
    """
    pinned, copied = set(), []

    def pin(tensor):
        pinned.add(id(tensor))
        return tensor

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
                copied.append((id(args[0]) in pinned, kwargs.get("non_blocking", False)))
            return function(*args, **kwargs or {})

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    with Copies():
        yield copied


def test_gpu_does_not_wait_for_copies_of_ids(copies):
    rows = torch.empty(50, 8, device="meta")
    shard, block = EntityShard(rows, 0, 50), range(10, 40)
    triples = np.stack([np.arange(20) % 9, np.arange(20) % 2, np.arange(20)], 1)
    (query_batch,) = TripleQueries(triples, ("tail",)).ask(np.arange(20)[None])
    direction, fetched = QueryShard(query_batch, shard), GatheredRows([query_batch], shard, True)
    direction.penalized(block, direction.answers(block))
    fetched.add_gradients(torch.empty_like(fetched.rows), [rows[:10], rows[10:]])
    assert len(copies) == 9 and set(copies) == {(True, True)}


def test_no_rank_holds_the_answers_of_others():
    """A rank reads only the answers in its own rows, block by block."""
    entities, rows = 1_000_000, 64
    all_ids = np.arange(entities)
    known = make_known(np.stack([all_ids * 0, all_ids * 0, all_ids], 1)[::2])
    queries = DistinctQueries(known, ("tail",))
    shard = EntityShard(torch.zeros(rows, 1), entities // 2, entities)
    QueryShard(queries.ask(np.array([[0]]))[0], shard).answers(range(rows))  # compiles
    tracemalloc.start()
    (queries_batch,) = queries.ask(np.array([[0]]))
    query, column, share, counts = QueryShard(queries_batch, shard).answers(range(10, rows))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert column.tolist() == list(range(0, rows - 10, 2)) and not query.any()
    assert share.tolist() == pytest.approx([2 / entities] * len(column))
    assert counts.tolist() == [entities // 2]
    assert peak < 1 << 20


def rank_trains_in(store, folder, regime: str, rounds: bool) -> tuple[list[dict], list[str]]:
    """Parameters after training in fp32 and in bf16, and how factors are rounded after each.

    rounds: as on a CPU that rounds them best as it multiplies.
    """
    results, roundings = [], []
    with patch.object(full_candidates, "rounds_as_it_multiplies", lambda: rounds):
        for precision in ("fp32", "bf16"):
            config = config_of(store, folder / precision, negatives__regime=regime, model__dim=64,
                               train__precision=precision, train__optimizer="adam",
                               model__scorer="complex")  # fmt: skip
            results.append(fit(config).parameters)
            roundings.append(torch.get_float32_matmul_precision())
    return results, roundings


@pytest.mark.skipif(
    not getattr(torch.cpu, "_is_avx512_bf16_supported", bool)(), reason="no such products here"
)
@pytest.mark.parametrize("regime, world_size, rounds", [("1vsall", 1, True), ("kvsall", 2, False)])
def test_products_in_bfloat16(tmp_path, regime, world_size, rounds):
    if rounds and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU leaves the factors of small products as they are")
    store = tiny_store(tmp_path / "store").path
    ranks = run_world(world_size, rank_trains_in, store, tmp_path, regime, rounds)
    for (full, lower), roundings in ranks:
        assert roundings == ["highest", "highest"]  # ranking rounds nothing
        assert all(value.dtype == torch.float32 for value in lower.values())
        assert 0 < largest_difference(full, lower) < 0.1
        assert largest_difference(ranks[0][0][1], lower) == 0
