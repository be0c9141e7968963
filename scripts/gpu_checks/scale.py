"""Train and rank a graph of Freebase's size on one card: 86M entities, dim 100.

A smaller card gets fewer rows; the first line says how many.
"""

from __future__ import annotations

import time

import torch
from random_graph import RandomGraph

from gpu_checks.machine import preset_of
from gpu_checks.ranking import scorer_of, triples_of
from gpu_checks.report import Report
from gpu_checks.speed import config_of, rows_drawn_on_the_device, train_at_scale
from gpu_checks.timing import synchronize
from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.planning.devices import PRESETS, Cluster
from kge_torchrec.planning.plan import Plan
from kge_torchrec.planning.sizes import Sizes
from kge_torchrec.ranking.ranks import rank_triples
from kge_torchrec.training.assembly import build_backend
from kge_torchrec.training.checkpoints import Checkpoints
from kge_torchrec.training.state import TrainState

ENTITIES, RELATIONS, DIM = 86_000_000, 14_824, 100
ENOUGH_TRIPLES = 3e6  # triples per second, with batches of 65,536
ENOUGH_SCORES = 2.3e10  # scores per second: BESS-KGE's exact ranking on four IPUs


def rowwise_adagrad(report: Report) -> None:
    _train(report, "rowwise_adagrad", bytes_of_row=4 * DIM + 4)


def adam(report: Report) -> None:
    _train(report, "adam", bytes_of_row=12 * DIM)


def _train(report: Report, optimizer: str, bytes_of_row: int) -> None:
    entities = _entities(report, bytes_of_row)
    store = RandomGraph(entities, RELATIONS, 20_000 if report.small else 15_000_000)
    batches = (256, 1024) if report.small else (8192, 65_536)
    keys = {"model__dim": DIM, "train__optimizer": optimizer, "train__batch_size": max(batches)}
    config = config_of(report, train__lr=0.1 if "adagrad" in optimizer else 1e-3, **keys)
    allocated = train_at_scale(report, config, store, batches, ENOUGH_TRIPLES)
    with report.check("the plan"):
        against_plan(report, config, store, batches, allocated)


def against_plan(report: Report, config, store, batches: tuple[int, ...], allocated: float):
    """Compare planned memory, which must agree, and modeled steps with measured ones."""
    device = preset_of(report.device) or PRESETS["H200-141GB"]
    sizes = Sizes.of_counts(store.num_entities, RELATIONS, len(store.train), skew=0.0)
    base = Plan.of(config, sizes, Cluster(device, 1))
    for batch in batches:
        plan = base.changed({"train.batch_size": batch})
        name = f"batch {batch:,}, a step as planned for {device.name}"
        report.note(name, 1e3 * plan.step_seconds, "ms")
    # For the largest batch.
    planned = plan.total.device - plan.memory["process"].device
    report.note("memory that was planned, without the process", planned / 2**30, "GiB")
    if allocated:
        report.note("memory that torch had allocated at most", allocated / 2**30, "GiB")
        report.at_most("memory against the plan, off by", abs(allocated / planned - 1), 0.1)


def _entities(report: Report, bytes_of_row: int) -> int:
    """Return the number of entities that fit, at most Freebase's."""
    if report.small:
        return 5000
    free = torch.cuda.mem_get_info(report.device)[0]
    entities = min(ENTITIES, int(0.85 * free / bytes_of_row))
    report.note("entities", entities, f"of {ENTITIES:,}")
    return entities


def ranking(report: Report) -> None:
    """Rank 1,024 triples exactly, both sides; then write a checkpoint of a smaller table."""
    entities = _entities(report, 4 * DIM)
    device, count = report.device, 64 if report.small else 1024
    with report.check("ranking"):
        rows = torch.empty(entities, DIM, device=device).normal_()
        shard, triples = EntityShard(rows, 0, entities), triples_of(count, entities, RELATIONS)
        for name in ("complex", "transe_l1"):  # products, and a kernel of ours
            scorer = scorer_of(name, DIM, RELATIONS).to(device)
            rank_triples(scorer, shard, triples[:64], None)
            synchronize(device)
            start = time.perf_counter()
            rank_triples(scorer, shard, triples, None)
            synchronize(device)
            rate = 2 * count / (time.perf_counter() - start)
            report.note(f"ranking, {name}", rate, "queries/s")
            if name == "complex":
                report.speed("ranking, scores", rate * entities, ENOUGH_SCORES, "scores/s")
            else:
                report.note(f"ranking, {name}, scores", rate * entities, "scores/s")
        del rows, shard
    with report.check("checkpoint"):
        _checkpoint(report, 2000 if report.small else 1_000_000)


def _checkpoint(report: Report, entities: int) -> None:
    config = config_of(report, model__dim=DIM, train__optimizer="adam")
    with processes(report.device.type) as ranks, rows_drawn_on_the_device():
        engine = build_backend(config, RandomGraph(entities, RELATIONS, 1000), ranks)
        kept = Checkpoints(report.folder / "checkpoints", ranks)
        start = time.perf_counter()
        kept.save(engine.state(), TrainState())
        seconds = time.perf_counter() - start
        files = (report.folder / "checkpoints").rglob("*")
        size = sum(file.stat().st_size for file in files if file.is_file())
        report.note(f"checkpoint of {entities:,} rows with Adam", size / 2**30, "GiB")
        report.note("writing a checkpoint", size / seconds / 1e9, "GB/s")
        before = engine.shard().rows.clone()
        engine.shard().rows.zero_()
        state = engine.state()
        start = time.perf_counter()
        kept.load(kept.names(), lambda checkpoint: state)
        synchronize(report.device)
        report.note("reading a checkpoint", size / (time.perf_counter() - start) / 1e9, "GB/s")
        same = torch.equal(engine.shard().rows, before)
        report.passes("rows of a checkpoint", same, "bit for bit")
