"""bf16 and fp16: scores round, parameters do not; scaling is exact; an overflow skips a step."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from scorer_cases import EVERY, SCORERS
from training_runs import (
    config_of,
    fit,
    kernels_of_cuda,
    largest_difference,
    parameters,
    rank,
    small_store,
    without_checkpoints,
)
from worlds import run_world

from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.dense import local_part
from kge_torchrec.distributed.processes import processes
from kge_torchrec.kernels.side_rows import SideRows
from kge_torchrec.models.losses import SoftmaxLoss
from kge_torchrec.models.model import TripleObjective
from kge_torchrec.training import assembly
from kge_torchrec.training.full_candidates import FullCandidates
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer

WAYS = {
    "torchrec": {},
    "fsdp": {"dense__wrapper": "fsdp", "train__accumulation": 2},
    "1vsall": {"negatives__regime": "1vsall", "entities__engine": "handrolled",
               "dense__wrapper": "fsdp", "train__accumulation": 2},
}  # fmt: skip


def rank_trains(store: Path, folder: Path, changes: dict) -> dict:
    """Return results by precision; "scaled" is fp32 with loss scaling."""
    results = {}
    for precision in ("fp32", "bf16", "fp16", "scaled"):
        name = "fp16" if precision == "scaled" else precision
        config = config_of(store, folder / precision, train__precision=name, train__lr=0.02,
                           train__optimizer="adam", train__optimizer_options__eps=1e-3,
                           train__clip__norm=0.5, **changes)  # fmt: skip
        kind = torch.float32 if precision == "scaled" else torch.float16
        with patch.dict(assembly._DTYPES, fp16=kind):
            session = fit(config, without_checkpoints)
        results[precision] = session.parameters, session.loss_scale
    return results


@pytest.mark.parametrize("way", WAYS)
def test_lower_precision_ends_near_full_precision_and_scaling_changes_no_bit(tmp_path, way):
    world = 2 if "dense__wrapper" in WAYS[way] else 1
    ranks = run_world(world, rank_trains, small_store(), tmp_path, WAYS[way])
    full, none = ranks[0]["fp32"]
    scaled, scale = ranks[0]["scaled"]
    assert largest_difference(full, scaled) == 0
    assert none == {} and scale == {"value": 65536.0, "good_steps": 10, "skipped": 0}
    for precision in ("bf16", "fp16"):
        first, *others = (rank[precision][0] for rank in ranks)
        assert all(value.dtype == torch.float32 for value in first.values())
        assert 0 < largest_difference(first, full) < 0.02
        assert all(largest_difference(first, other) == 0 for other in others)


def snapshot(session: Session) -> list[torch.Tensor]:
    """Copies of all this rank holds: parameters, optimizer state and step counters."""
    engine = session.backend
    return [rows.local.clone() for rows in engine.state()] + [torch.tensor(engine.table.steps)]


def spoil(loop: Trainer, where: str) -> None:
    """Make gradients of one step infinite on this rank: all, those of the relations, or a row's."""
    engine, step = loop.session.backend, loop.pipeline
    of_all_entities = isinstance(step, FullCandidates)
    if where == "loss" and not of_all_entities:
        loss = engine.unwrapped_model.scale.forward
        engine.unwrapped_model.scale.forward = lambda value: loss(value) * math.inf
        return
    unscale, (relations, *_) = step.unscaled, engine.dense.parameters()

    def spoilt(scale) -> bool:
        if of_all_entities:
            step._row_gradients[0][0, 0] = math.inf
        elif relations.grad is not None:
            local_part(relations.grad).fill_(math.inf)
        return unscale(scale)

    step.unscaled = spoilt


def mend(loop: Trainer) -> None:
    vars(loop.session.backend.unwrapped_model.scale).pop("forward", None)
    vars(loop.pipeline).pop("unscaled", None)


def rank_overflows(store: Path, folder: Path, where: str) -> dict:
    """Gradients of the last rank are infinite at the 8th step, some or all of them."""
    results = {}
    for way, changes in WAYS.items():

        def inject(loop: Trainer, way=way) -> None:
            progress = loop.pipeline.progress

            def watched(batches):
                if loop.progress.global_step != 7:
                    return progress(batches)
                before = snapshot(loop.session)
                if rank() == dist.get_world_size() - 1:
                    spoil(loop, where)
                out = progress(batches)
                mend(loop)
                after = snapshot(loop.session)
                results[way, "tensors"] = len(after)
                results[way, "same"] = all(map(torch.equal, before, after))
                return out

            loop.pipeline.progress = watched
            without_checkpoints(loop)

        config = config_of(store, folder / f"{way}-{where}", train__precision="fp16",
                           train__optimizer="adam", train__lr=0.02, **changes)  # fmt: skip
        session = fit(config, inject)
        results[way, "end"], results[way, "scale"] = session.parameters, session.loss_scale
        results[way, "steps"] = session.backend.table.steps
    return results


@pytest.mark.parametrize("where, world_size", [("loss", 1), ("relations", 2)])
def test_overflow_skips_the_step_on_all_ranks(tmp_path, world_size, where):
    first, *others = run_world(world_size, rank_overflows, small_store(), tmp_path, where)
    for way in WAYS:
        assert first[way, "same"] and first[way, "tensors"] > 6
        assert first[way, "scale"] == {"value": 32768.0, "good_steps": 2, "skipped": 1}
        assert first[way, "steps"] == 9
        assert all(value.isfinite().all() for value in first[way, "end"].values())
        for other in others:
            assert largest_difference(first[way, "end"], other[way, "end"]) == 0


def rank_resumes(store: Path, folder: Path, epochs: int) -> tuple[dict, dict]:
    def overflow(loop: Trainer) -> None:
        progress, scale = loop.pipeline.progress, loop.session.backend.unwrapped_model.scale
        forward = scale.forward

        def watched(batches):
            if loop.progress.global_step == 3:
                scale.forward = lambda loss: forward(loss) * math.nan
            out = progress(batches)
            scale.forward = forward
            return out

        loop.pipeline.progress = watched

    config = config_of(store, folder, train__precision="fp16", train__epochs=epochs)
    session = fit(config, overflow)
    return session.parameters, session.loss_scale


def test_checkpoint_contains_the_scale(tmp_path):
    uninterrupted, scale = rank_resumes(small_store(), tmp_path / "whole", 3)
    rank_resumes(small_store(), tmp_path / "run", 1)
    again, resumed = rank_resumes(small_store(), tmp_path / "run", 3)
    assert largest_difference(uninterrupted, again) == 0
    assert resumed == scale == {"value": 32768.0, "good_steps": 11, "skipped": 1}


@pytest.mark.parametrize("case", EVERY)
def test_every_scorer_has_finite_gradients_near_those_of_float32(case):
    name, dim, options = case
    random = torch.Generator().manual_seed(0)
    scorer = SCORERS[name](3, dim - 2 * SCORERS[name].has_biases, True, **options)
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    sizes = ((2, 4), (2, 4), (2, 5))
    rows = [torch.randn(*size, dim, generator=random) * 0.3 for size in sizes]
    relation = torch.randint(0, 3, (2, 4), generator=random)
    counted, weight = torch.ones(2, 4, 5, dtype=torch.bool), torch.full((2, 4), 0.125)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [part.clone().requires_grad_() for part in rows]
        anchor, target, candidates = leaves
        objective = TripleObjective(scorer, SoftmaxLoss(), precision=dtype, relation_weight=0.1)
        scorer.zero_grad()
        side = SideRows(anchor, target, candidates)
        loss = objective._loss_of_side("tail", side, relation, weight, counted)
        loss.backward()
        grads = [leaf.grad for leaf in (*leaves, *scorer.parameters())]
        assert loss.dtype == torch.float32 and all(g.dtype == torch.float32 for g in grads)
        results.append([loss.detach(), *grads])
    for full, lower in zip(*results, strict=True):
        assert lower.isfinite().all()
        assert float((full - lower).abs().max()) <= 0.05 * float(full.abs().max()) + 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_overflow_on_cuda_does_not_change_the_table_of_fbgemm(tmp_path, optimizer):
    """FBGEMM's kernel steps in backward; the rows' gradients are held back from it."""
    config = config_of(small_store(), tmp_path, device="cuda", train__precision="fp16",
                       train__optimizer=optimizer)  # fmt: skip
    with processes("cuda") as ranks:
        session = Session(config, RunFolder(tmp_path), ranks)
        loop = Trainer(session, session.restore(), None)
        stream, scale = loop.batches.epoch(0), session.backend.unwrapped_model.scale
        loop.pipeline.progress(stream)
        before, forward = snapshot(session), scale.forward
        scale.forward = lambda loss: forward(loss) * math.inf
        loop.pipeline.progress(stream)
        scale.forward = forward
        assert all(torch.equal(a, b) for a, b in zip(before, snapshot(session), strict=True))
        loop.pipeline.progress(stream)
        assert all(value.isfinite().all() for value in parameters(session).values())
        assert scale.skipped == 1


@pytest.mark.parametrize("optimizer, counted", [("rowwise_adagrad", 1), ("sgd", 0)])
def test_counters_of_fbgemm_are_restored_after_a_skipped_step(tmp_path, optimizer, counted):
    """Checks the table of FBGEMM, as on CUDA; it counts no steps of sgd."""
    config = config_of(small_store(), tmp_path, train__optimizer=optimizer)
    with kernels_of_cuda(True), processes("cpu") as ranks:
        session = Session(config, RunFolder(tmp_path), ranks)
        loop = Trainer(session, session.restore(), None)
        loop.pipeline.progress(loop.batches.epoch(0))
        assert session.backend.table.steps == counted
        session.backend.skip_step()
        assert session.backend.table.steps == 0


@pytest.mark.parametrize(
    "has, changes, takes",
    [(True, {}, True), (False, {}, False), (True, {"train__precision": "fp32"}, False),
     (True, {"negatives__regime": "sampled"}, False), (True, {"model__scorer": "transe_l2"}, False),
     (True, {"model__scorer": "distmult", "model__biases": True}, True)],
)  # fmt: skip
@pytest.mark.parametrize("is_large", [False, True])
def test_auto_takes_bf16_for_products_with_many_entities(
    monkeypatch, caplog, has, changes, takes, is_large
):
    """The line that says so names the key that changes it."""
    store = TripleStore.open(small_store())
    monkeypatch.setattr(assembly, "_ROWS_FOR_BF16", store.num_rows + (not is_large))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    caplog.set_level("INFO", "kge_torchrec")
    keys = {"train__precision": "auto", "negatives__regime": "1vsall", **changes}
    with processes("cpu") as ranks:
        backend = assembly.build_backend(config_of(store.path, **keys), store, ranks)
    is_bf16 = backend.unwrapped_model.objective.precision == torch.bfloat16
    assert is_bf16 == ("train.precision fp32 computes" in caplog.text) == (takes and is_large)


def rank_chooses(store: Path) -> bool:
    """Whether this rank takes bf16 where only the CPU of rank 0 has it."""
    with processes("cpu") as ranks, ExitStack() as held:
        has = ranks.is_first
        for name, value in (("_is_avx512_bf16_supported", has), ("_is_amx_tile_supported", False)):
            held.enter_context(patch.object(torch.cpu, name, lambda v=value: v, create=True))
        held.enter_context(patch.object(assembly, "_ROWS_FOR_BF16", 1))
        config = config_of(store, train__precision="auto", negatives__regime="1vsall")
        backend = assembly.build_backend(config, TripleStore.open(store), ranks)
    return backend.unwrapped_model.objective.precision == torch.bfloat16


def test_ranks_take_bf16_only_if_every_cpu_has_it():
    assert run_world(2, rank_chooses, small_store()) == [False, False]


@pytest.mark.skipif(
    getattr(torch.cpu, "_is_avx512_bf16_supported", bool)(), reason="this CPU rounds"
)
def test_bfloat16_against_all_entities_is_float32_without_such_products(tmp_path):
    """The warning says so."""
    results = [
        fit(config_of(small_store(), tmp_path / precision, negatives__regime="1vsall",
                      train__precision=precision)).parameters
        for precision in ("fp32", "bf16")
    ]  # fmt: skip
    assert largest_difference(*results) == 0
