"""Measure steps on random triples of a graph's size: speed, launches and synchronizations."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import torch
from random_graph import RandomGraph

from gpu_checks.report import NOTE, Report
from gpu_checks.timing import Waited, counted, kernels, profiled, step_seconds
from kge_torchrec.config import Config
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.distributed.processes import Processes, processes
from kge_torchrec.embeddings import backend as engine_module
from kge_torchrec.training.assembly import build_backend, build_batches, build_pipeline
from kge_torchrec.training.speed import split_of_a_step
from kge_torchrec.training.step import SampledStep, Step

PLAIN = "not compiled"  # today's default of dense.compile
COMPILED = {
    PLAIN: {},
    "compiled": {"dense__compile": True},
}


ADAM = {"model__dim": 256, "train__optimizer": "adam", "train__lr": 1e-3}
ALIKE = 0.97  # of the highest speed: less of a difference decides nothing
BUSIEST = 8  # kernels with a line of their own


@contextmanager
def rows_drawn_on_the_device():
    """Initialize the table faster than training does, with different values."""
    before = engine_module.fill_rows
    engine_module.fill_rows = lambda shard, seed, init, ids: shard.rows.normal_(0, init.scale)
    try:
        yield
    finally:
        engine_module.fill_rows = before


def config_of(report: Report, **keys) -> Config:
    """Return a config: ComplEx, 512 shared negatives for both sides."""
    settings = {"device": report.device.type, "threads": 0, "model.init": "normal",
                "model.init_scale": 0.1, "loss.n3": 0.0, "loss.relation_weight": 0.0,
                "negatives.count": 512, "train.epochs": 1, "train.batch_size": 1024,
                "train.lr": 1e-3}  # fmt: skip
    settings |= {key.replace("__", "."): value for key, value in keys.items()}
    return config_from_dict(settings)


def fb15k237(report: Report) -> None:
    """Measure 14,541 x 256 with Adam, without a CUDA graph, with clip_norm (a late step)."""
    batches = (64, 256) if report.small else (1024, 8192)
    for batch in batches:
        _train(report, f"batch {batch:,}", batch)
    _train(report, f"batch {batches[-1]:,}, loop", batches[-1], train__pipeline="loop")
    _train(report, f"batch {batches[-1]:,}, clip_norm", batches[-1], train__clip__norm=1.0)


def compiled(report: Report) -> None:
    """Measure the same with scorer and loss compiled; losses must agree."""
    if report.small:
        report.skip("dense.compile", "takes a minute of a CPU")
        return
    results = {name: _train(report, name, 8192, **keys) for name, keys in COMPILED.items()}
    done = {name: result for name, result in results.items() if result}
    decide(report, "dense.compile", {name: rate for name, (_, rate) in done.items()}, PLAIN)
    for name, (loss, _) in done.items():
        if name != PLAIN and PLAIN in done:
            off = abs(loss / done[PLAIN][0] - 1)
            report.at_most(f"{name}, loss after the same steps, off by", off, 1e-3)


def trace(report: Report) -> None:
    """Report the kernels that take longest; write their table and the trace of some steps."""
    batch, steps, device = 256 if report.small else 8192, 5, report.device
    config, store = config_of(report, **ADAM, train__batch_size=batch), _graph(report)
    with processes(device.type) as ranks, report.check("trace"):
        pipeline = build_pipeline(config, build_backend(config, store, ranks), ranks)
        stream = endless(config, store, ranks)
        for _ in range(3):
            pipeline.progress(stream)
        watched = profiled(lambda: pipeline.progress(stream), device, steps)
        times = kernels(watched, device, steps)
        for name, milliseconds in list(times.items())[:BUSIEST]:
            report.note(name[:100], milliseconds, f"ms of {sum(times.values()):.3g} ms per step")
        if report.traces is None:
            return report.skip("files", "--trace FOLDER writes a kernel table and a trace")
        report.traces.mkdir(parents=True, exist_ok=True)
        rows = [f"{milliseconds:10.4f}  {name}\n" for name, milliseconds in times.items()]
        (report.traces / f"kernels-{device.type}.txt").write_text(
            f"ms per step, ComplEx, batch {batch:,}, {config.model.dim} elements per row\n"
            + "".join(rows), encoding="utf-8",
        )  # fmt: skip
        watched.export_chrome_trace(str(report.traces / f"step-{device.type}.json.gz"))
        return report.passes("files", True, f"in {report.traces}")


def _graph(report: Report) -> RandomGraph:
    """Return a graph of FB15k-237's size, in whole batches.

    A smaller last batch would compile again while a step is timed.
    """
    return RandomGraph(*((500, 7, 5000) if report.small else (14_541, 237, 33 * 8192)))


def decide(report: Report, key: str, rates: Mapping[Any, float], default: object) -> None:
    """Print the side with the most triples/s, today's default, and all rates."""
    if not rates:
        return report.skip(key, "needs a GPU")
    most = max(rates.values())
    best = " or ".join(f"{side}" for side, rate in rates.items() if rate >= ALIKE * most)
    said = ", ".join(f"{side} {rate:,.0f}" for side, rate in rates.items())
    said = f"fastest {best}, today's default {default} ({said} triples/s)"
    return report.line(NOTE, key, said, most, "triples/s")


def _train(report: Report, name: str, batch: int, **keys) -> tuple[float, float] | None:
    """Measure and count; return the last step's loss and the triples/s, or None if it failed."""
    result = None
    with processes(report.device.type) as ranks, report.check(name):
        keys = {**ADAM, "train__batch_size": batch, **keys}
        store, config = _graph(report), config_of(report, **keys)
        engine = build_backend(config, store, ranks)
        pipeline = build_pipeline(config, engine, ranks)
        start = time.perf_counter()
        float(pipeline.progress(endless(config, store, ranks)))
        report.note(f"{name}, the first step", time.perf_counter() - start, "s")
        rate = measure(report, name, config, store, ranks, pipeline, 5 if report.small else 100)
        result = float(pipeline.progress(endless(config, store, ranks))), rate
        _counts(report, name, config, store, ranks, pipeline)
    return result


def measure(
    report: Report, name: str, config: Config, store, ranks: Processes, pipeline: Step,
    steps: int,
) -> float:  # fmt: skip
    """Report speed and waiting times; return triples/s."""
    stream = Waited(endless(config, store, ranks))
    for _ in range(max(3, steps // 10)):
        pipeline.progress(stream)
    stream.seconds = 0.0
    whole, issued = step_seconds(lambda: pipeline.progress(stream), ranks.device, steps)
    rate = config.train.batch_size / whole
    report.note(f"{name}, speed", rate, "triples/s")
    report.note(f"{name}, a step", 1e3 * whole, "ms")
    report.note(f"{name}, of it the host, batches included", 1e3 * issued, "ms")
    report.note(f"{name}, of it waiting for batches", 1e3 * stream.seconds / steps, "ms")
    return rate


def _counts(report: Report, name: str, config: Config, store, ranks, pipeline: Step) -> None:
    stream = endless(config, store, ranks)
    steps = 2 if report.small else 10
    counts = counted(lambda: pipeline.progress(stream), ranks.device, steps)
    for what, count in counts.items():
        report.note(f"{name}, {what} a step", count, "")
    # TorchRec's own: two read splits, one sends an order.
    if "synchronisations" in counts and not config.train.clips:
        report.at_most(f"{name}, few synchronisations", counts["synchronisations"], 3.2, "a step")


def endless(config: Config, store, ranks: Processes):
    """Yield the batches of one epoch after another."""
    batches, epoch = build_batches(config, store, ranks), 0
    while True:
        yield from batches.epoch(epoch)
        epoch += 1


def train_at_scale(
    report: Report, config: Config, store, batches: tuple[int, ...], enough: float
) -> float:
    """Report the parts of a step, the loader's speed, and the speed with each batch size.

    ``enough`` is the required triples/s of the largest batch on a GPU. Returns the peak of
    allocated bytes.
    """
    device = report.device
    with processes(device.type) as ranks, rows_drawn_on_the_device():
        start = time.perf_counter()
        engine = build_backend(config, store, ranks)
        report.note("making the table, rows drawn on the device", time.perf_counter() - start, "s")
        for batch in batches:
            sized = config_of_batch(config, batch)
            with report.check(f"batch {batch:,}, split of a step"):
                stream = endless(sized, store, ranks)
                step = SampledStep(engine, sized.train, device)
                times = split_of_a_step(step, stream, 3 if report.small else 20)
                for part, milliseconds in times.items():
                    report.note(f"batch {batch:,}, {part}", milliseconds, "ms")
            with report.check(f"batch {batch:,}, loader"):
                _loader(report, sized, store, ranks)
        for batch in batches:  # last, as a pipeline may replace the lookup
            name, steps = f"batch {batch:,}", 5 if report.small else 100
            sized = config_of_batch(config, batch)
            pipeline = build_pipeline(sized, engine, ranks)  # a graph has one size of batches
            with report.check(name):
                rate = measure(report, name, sized, store, ranks, pipeline, steps)
                _counts(report, name, sized, store, ranks, pipeline)
                if batch == max(batches):
                    report.speed(f"{name}, enough triples/s", rate, enough, "triples/s")
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0.0


def config_of_batch(config: Config, batch: int) -> Config:
    """Return the same config with another batch size."""
    values = config.to_dict()
    values["train"]["batch_size"] = batch
    return config_from_dict(values)


def _loader(report: Report, config: Config, store, ranks: Processes) -> None:
    """Measure only the batches, as training makes them."""
    batches = build_batches(config, store, ranks)
    stream, count = batches.epoch(0), 5 if report.small else 60
    next(stream)
    start = time.perf_counter()
    for _ in range(count):
        next(stream)
    rate = count * config.train.batch_size / (time.perf_counter() - start)
    report.note(f"batch {config.train.batch_size:,}, loader only", rate, "triples/s")
    stream.close()
