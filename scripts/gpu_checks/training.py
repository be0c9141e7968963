"""Compare training on this device with the same training on a CPU; check checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

from torch import Tensor

from gpu_checks.oracle import Result
from gpu_checks.report import Report
from gpu_checks.runs import Trained, config_of, parameters_of, trained, trained_by_two_ranks
from kge_torchrec import api
from kge_torchrec.config import ConfigError
from kge_torchrec.distributed.processes import processes
from kge_torchrec.models.loss_scaling import LossScale
from kge_torchrec.training import assembly
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.step import Step
from kge_torchrec.training.trainer import Trainer

OPTIMIZERS = ("adam", "rowwise_adam", "adagrad", "rowwise_adagrad", "sgd")
# Sums in a different order, over 50 steps with learning rate 0.05.
CLOSE = 2e-3
# Gradients of an L1 distance are signs, which feel the last bits of a sum: after 50 steps, rows
# differ by up to 0.08 even between two instruction sets of a CPU.  Only losses are compared.
TWICE, CLOSE_LOSSES = "1vsall, distances computed twice", 1e-3
CONVE = "ConvE"  # cuDNN adds gradients of filters in any order, and batch norm makes more of it
KINDS = {  # features of a CPU that a GPU has too
    "1vsall": {"negatives__regime": "1vsall"},
    TWICE: {"negatives__regime": "1vsall", "model__scorer": "transe_l1"},
    "kvsall": {"negatives__regime": "kvsall", "loss__name": "bce", "train__batch_size": 128},
    "kvssample": {"negatives__regime": "kvssample", "train__batch_size": 128},
    "1vsall, accumulation 2, clip_norm, clip_value": {
        "negatives__regime": "1vsall", "train__accumulation": 2, "train__clip__norm": 0.02,
        "train__clip__value": 1e-3},
    "filtered negatives": {"negatives__filtered": True},
    "own negatives of every triple": {"negatives__chunk_size": 1},
    "TransE, margin": {"model__scorer": "transe_l2", "model__reciprocal": False,
                       "loss__name": "margin"},
    "accumulation 3": {"train__accumulation": 3},
    "clip_norm": {"train__clip__norm": 0.02},
    "clip_value": {"train__clip__value": 1e-3},
    "accumulation, clip_norm, clip_value, Adam": {
        "train__optimizer": "adam", "train__accumulation": 2, "train__clip__norm": 0.02,
        "train__clip__value": 1e-3},
}  # fmt: skip
GRAPHS = {  # what a graph could freeze, or a capture could change
    "default": {},
    "Adam, schedule, clip_norm": {"train__optimizer": "adam", "train__schedule": "linear",
                                  "train__clip__norm": 0.02},
    "dropout": {"model__dropout__entity": 0.3},
    CONVE: {"model__scorer": "conve"},
    "bf16": {"train__precision": "bf16"},
    "filtered, n3, relation prediction": {"negatives__filtered": True, "loss__n3": 0.01,
                                          "loss__relation_weight": 0.1},
    "TransE, margin": {"model__scorer": "transe_l2", "model__reciprocal": False,
                       "loss__name": "margin"},
}  # fmt: skip
PLAIN = "plain"
RUNS = {PLAIN: {}, **{name: {"train__optimizer": name} for name in OPTIMIZERS}, **KINDS}


def computations(folder: Path) -> dict[str, Callable[[], Result]]:
    """Return the runs of a CPU by name."""

    def run(name: str, keys: dict) -> Result:
        return trained("cpu", folder / "cpu", _preparation(name), **keys).arrays()

    return {f"training, {name}": partial(run, name, keys) for name, keys in RUNS.items()}


def _on_a_cpu(report: Report, name: str) -> Trained:
    name = f"training, {name}"
    return Trained.of(report.oracle(name, computations(report.folder)[name]))


def kinds(report: Report) -> None:
    """Check optimizers, pipelines, training types, clipping and precisions."""
    for optimizer in OPTIMIZERS[::4] if report.small else OPTIMIZERS:
        with report.check(f"{optimizer}"):
            expected = _on_a_cpu(report, optimizer)
            falls = expected.losses[-1] < expected.losses[0]
            report.passes(f"{optimizer} learns on a CPU", falls, f"loss {expected.losses[-1]:.4f}")
            for pipeline in ("sparse_dist", "loop"):
                keys = {"train__optimizer": optimizer, "train__pipeline": pipeline}
                with report.check(f"{optimizer}, {pipeline}"):
                    result = trained(report.device.type, report.folder / pipeline, **keys)
                    report.at_most(f"{optimizer}, {pipeline}", result.off(expected), CLOSE)
    for name, keys in KINDS.items():
        with report.check(name):
            expected = _on_a_cpu(report, name)
            try:
                result = trained(
                    report.device.type, report.folder / "here", _preparation(name), **keys
                )
            except ConfigError as error:
                report.passes(name, False, f"refused here: {error}")
                continue
            if name == TWICE:
                report.at_most(f"{name}, losses", result.off_in_loss(expected), CLOSE_LOSSES)
            else:
                report.at_most(name, result.off(expected), CLOSE)
    _precisions(report)


def _preparation(name: str) -> Callable[[Trainer], None] | None:
    """Return what changes a run before it starts."""
    return _keep_no_scores if name == TWICE else None


def _keep_no_scores(loop: Trainer) -> None:
    loop.pipeline.kept_bytes = 0


def _precisions(report: Report) -> None:
    """Check that bf16 and fp16 learn as fp32 does, and that an overflow changes nothing."""
    expected = _on_a_cpu(report, PLAIN).losses[-1]
    for precision in ("bf16", "fp16"):
        with report.check(precision):
            result = trained(report.device.type, report.folder / precision,
                            train__precision=precision)  # fmt: skip
            off = abs(result.losses[-1] / expected - 1)
            report.at_most(f"{precision}, last loss against fp32", off, 0.03)
    for optimizer in ("adam", "rowwise_adagrad"):
        with report.check(f"an overflow, {optimizer}"):
            _overflow(report, optimizer)


def _overflow(report: Report, optimizer: str) -> None:
    keys = {"train__precision": "fp16", "train__optimizer": optimizer}
    config = config_of(report.device.type, report.folder / "overflow", **keys)
    with processes(report.device.type) as ranks:
        session = Session(config, RunFolder(config.run.dir), ranks)
        loop = Trainer(session, session.restore(), None)
        stream, scale = loop.batches.epoch(0), session.backend.unwrapped_model.scale
        assert isinstance(scale, LossScale)
        loop.pipeline.progress(stream)
        before, forward = _everything(session), scale.forward
        scale.forward = lambda loss: forward(loss) * math.inf
        loop.pipeline.progress(stream)
        scale.forward = forward
        after = _everything(session)
        same = all((after[name] == value).all() for name, value in before.items())
        said = f"{scale.skipped} step skipped"
        report.passes(f"an overflow, {optimizer}", same and scale.skipped == 1, said)
        loop.pipeline.progress(stream)
        moved = any((value != before[name]).any() for name, value in _everything(session).items())
        report.passes(f"the step after an overflow, {optimizer}", moved, "parameters move on")


def _everything(session: Session) -> dict[str, Tensor]:
    """Return parameters and optimizer state, as a checkpoint holds them."""
    return {rows.name: rows.local.cpu().clone() for rows in session.backend.state()}


def two_ranks(report: Report) -> None:
    """Check that two ranks on one device train as one does, in a group of gloo."""
    kind, results = report.device.type, {}
    for pipeline in ("loop", "sparse_dist"):  # first: CUDA must not have started here
        with report.check(f"two ranks, {pipeline}"):
            folder = report.folder / f"two-{pipeline}"
            results[pipeline] = trained_by_two_ranks(kind, folder, train__pipeline=pipeline)
    expected = trained(kind, report.folder / "one")
    for pipeline, result in results.items():
        report.at_most(f"two ranks, {pipeline}", result.off(expected), CLOSE)


def every_place_looked_up() -> AbstractContextManager[object]:
    """Return a context in which batches look every place up, as those of a graph do."""
    make = assembly._delivery
    return patch.object(assembly, "_delivery", lambda *of: replace(make(*of), deduplicate=False))


def graphs(report: Report) -> None:
    """Check that steps with a CUDA graph train as plain ones that look every place up."""
    kind = report.device.type
    for name, keys in GRAPHS.items():
        with report.check(f"graph, {name}"):
            with every_place_looked_up():
                plain = trained(kind, report.folder / "plain", train__pipeline="loop", **keys)
            steps: list[Step] = []
            keep = lambda loop, steps=steps: steps.append(loop.pipeline)  # noqa: E731
            graph = trained(kind, report.folder / "graph", keep, train__pipeline="graph", **keys)
            if name == CONVE:
                report.at_most(f"graph, {name}, losses", graph.off_in_loss(plain), CLOSE_LOSSES)
            else:
                report.at_most(f"graph, {name}", graph.off(plain), CLOSE)
            if kind == "cuda":
                captured = getattr(steps[0], "_graph", None) is not None
                report.passes(f"graph, {name}, captured", captured, str(captured))


def parallel(report: Report) -> None:
    """Check that every wrapper and engine trains the same, on one rank (NCCL with CUDA)."""
    kind = report.device.type
    expected = trained(kind, report.folder / "none", dense__wrapper="none")
    for name, keys in {
        "ddp": {"dense__wrapper": "ddp"},
        "fsdp": {"dense__wrapper": "fsdp"},
        "fsdp, grad_op": {"dense__wrapper": "fsdp", "dense__options__sharding": "grad_op"},
        "engine handrolled": {"entities__engine": "handrolled", "train__pipeline": "loop"},
        "engine handrolled, ddp": {"entities__engine": "handrolled", "dense__wrapper": "ddp"},
    }.items():
        with report.check(name):
            result = trained(kind, report.folder / "other", **keys)
            report.at_most(name, result.off(expected), CLOSE)
    with report.check("engine handrolled, Adam"):
        adam = {"train__optimizer": "adam"}
        one = trained(kind, report.folder / "one", **adam)
        other = trained(kind, report.folder / "two", entities__engine="handrolled", **adam)
        report.at_most("engine handrolled, Adam", other.off(one), CLOSE)


def checkpoints(report: Report) -> None:
    """Compare half a run resumed here and on a CPU with the whole; check shared memory."""
    kind = report.device.type
    for optimizer in ("adam", "rowwise_adagrad"):
        keys = {"train__optimizer": optimizer}
        with report.check(f"resume, {optimizer}"):
            whole = trained(kind, report.folder / f"whole-{optimizer}", **keys).parameters
            for where in dict.fromkeys((kind, "cpu")):
                folder = report.folder / f"{optimizer}-{where}"
                api.train(config_of(kind, folder, train__epochs=4, **keys)).close()
                api.resume(folder, {"train.epochs": 8, "device": where}).close()
                off = _off_of_run(folder, whole)
                report.at_most(f"resume on {where}, {optimizer}", off, CLOSE)
    for optimizer in ("adam", "rowwise_adam", "adagrad", "rowwise_adagrad", "sgd"):
        with report.check(f"shared memory, {optimizer}"):
            _shared_memory(report, optimizer)


def _off_of_run(folder: Path, expected: dict[str, Tensor]) -> float:
    with api.open_run(folder) as run:
        result = parameters_of(run.model)
    return max(float((result[k].double() - v.double()).abs().max()) for k, v in expected.items())


def _shared_memory(report: Report, optimizer: str) -> None:
    """Check that a checkpoint does not hold copies of the initial values."""
    config = config_of(report.device.type, report.folder / "shared", train__optimizer=optimizer)
    with processes(report.device.type) as ranks:
        session = Session(config, RunFolder(config.run.dir), ranks)
        used = {session.backend.shard().rows.data_ptr()}
        for own in session.backend.table.optimizers:
            used |= {state.data_ptr() for state in own.states.values() if state.numel() > 1}
        kept = {rows.local.data_ptr() for rows in session.backend.state()}
        said = f"{len(used & kept)} of {len(used)} tensors of the table are the kernel's own"
        report.passes(f"shared memory, {optimizer}", used <= kept, said)
