"""Rows in main memory that a GPU caches, against rows of the GPU: results, speed and memory.

On a CPU the cache is imitated, which only shows that the parts themselves run.
"""

from __future__ import annotations

import gc
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from random_graph import RandomGraph
from safetensors.torch import load_file

from gpu_checks.report import Report
from gpu_checks.runs import Trained, config_of, parameters_of, trained
from gpu_checks.scale import DIM, RELATIONS, against_plan
from gpu_checks.speed import config_of as config_of_size
from gpu_checks.speed import measure, rows_drawn_on_the_device
from gpu_checks.timing import synchronize
from gpu_checks.training import CLOSE
from kge_torchrec import api
from kge_torchrec.config import Config
from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.torchrec import collection
from kge_torchrec.training.assembly import build_backend, build_pipeline
from kge_torchrec.training.trainer import Trainer

CLOSE_MRR = 0.01  # sums by atomics have any order
SMALL_CACHE = 0.1  # of 271 entities: 32 places, fewer than a batch looks up
KINDS: dict[str, dict[str, Any]] = {  # validations in between write the cache back
    "Adam": {"train__optimizer": "adam", "evaluation__every": 3},
    "Adam, loop": {"train__optimizer": "adam", "train__pipeline": "loop"},
    "row-wise Adagrad": {"train__optimizer": "rowwise_adagrad", "evaluation__every": 2},
    "Adam, accumulation 2, clip_norm": {
        "train__optimizer": "adam", "train__accumulation": 2, "train__clip__norm": 0.02},
    "fp16": {"train__precision": "fp16", "train__optimizer": "rowwise_adagrad"},
    "kvssample": {"negatives__regime": "kvssample", "train__batch_size": 128},
}  # fmt: skip
OF_A_CPU = {"adam": "adagrad"}  # FBGEMM has no Adam there


def placed(ratio: float) -> dict[str, Any]:
    """Return the keys of a cache that holds this share of the rows."""
    options = {"cache_ratio": ratio}
    return {"entities__placement": "managed_caching", "entities__placement_options": options}


def _tables(report: Report) -> AbstractContextManager[object]:
    """Return a context in which runs have a cache, on a CPU an imitated one."""
    if not report.small:
        return nullcontext()
    from cached_tables import tables_with_a_cache

    return tables_with_a_cache()


def _of_device(report: Report, keys: dict[str, Any]) -> dict[str, Any]:
    name = keys.get("train__optimizer")
    return (
        {**keys, "train__optimizer": OF_A_CPU[name]} if report.small and name in OF_A_CPU else keys
    )


def equality(report: Report) -> None:
    """Check that training with a cache is that without, and what reads the rows afterwards."""
    with _tables(report):
        for name, keys in KINDS.items():
            with report.check(name):
                keys = _of_device(report, keys)
                usual, ranked, _ = _watched(report, "gpu", keys)
                cached, also_ranked, places = _watched(report, "main", keys | placed(SMALL_CACHE))
                report.at_most(f"{name}, against rows of the GPU", cached.off(usual), CLOSE)
                if ranked:
                    off = max(abs(x - y) for x, y in zip(ranked, also_ranked, strict=True))
                    report.at_most(f"{name}, MRR of validations, off by", off, CLOSE_MRR)
                if not report.small:
                    said = f"{places} of 271 rows"
                    report.passes(f"{name}, places of the cache", 0 < places < 271, said)
        with report.check("a run"):
            _run(report, _of_device(report, KINDS["Adam, loop"]))


def _watched(report: Report, name: str, keys: dict) -> tuple[Trained, list[float], int]:
    """Train; return the result, the MRR of each validation, and the places of the cache."""
    ranked: list[float] = []
    places = 0

    def remember(kind: str, values: dict) -> None:
        if kind == "valid":
            ranked.append(values["both"]["realistic"]["mrr"])

    def watch(loop: Trainer) -> None:
        nonlocal places
        kernel = collection.kernel_of(loop.session.backend.model)
        places = len(kernel.emb_module.lxu_cache_weights)
        loop.callbacks.append(remember)

    result = trained(report.device.type, report.folder / name, watch, **keys)
    return result, ranked, places


def _run(report: Report, keys: dict[str, Any]) -> None:
    """Check checkpoint, resume, ranking and export of a run with a cache."""
    kind, folder, results = report.device.type, report.folder, {}
    with api.train(config_of(kind, folder / "whole", **keys)) as run:
        expected, results["gpu"] = parameters_of(run.model), run.evaluate("test")
    config = config_of(kind, folder / "half", **{**keys, "train__epochs": 4}, **placed(SMALL_CACHE))
    api.train(config).close()
    with api.resume(folder / "half", {"train.epochs": 8}) as run:
        rows, results["cache"] = parameters_of(run.model), run.evaluate("test")
        run.export(folder / "export")
    off = max(float((rows[name] - value).abs().max()) for name, value in expected.items())
    report.at_most("a resumed run, against rows of the GPU", off, CLOSE)
    mrr = [result["both"]["realistic"]["mrr"] for result in results.values()]
    report.at_most("a resumed run, test MRR, off by", abs(mrr[0] - mrr[1]), CLOSE_MRR)
    written = load_file(folder / "export" / "entities.safetensors")["entities"]
    report.passes("rows of an export", torch.equal(written, rows["entities"]), "bit for bit")


def speed(report: Report) -> None:
    """Measure steps with rows of the GPU, and with caches of two sizes."""
    entities, batch = (5000, 256) if report.small else (10_000_000, 8192)
    store = RandomGraph(entities, RELATIONS, 20_000 if report.small else 2_000_000)
    places = {"rows of the GPU": {}, "cache of .5": placed(0.5), "cache of .1": placed(0.1)}
    keys = _of_device(report, {"train__optimizer": "adam"}) | {"train__batch_size": batch}
    allocated = 0.0
    with _tables(report), rows_drawn_on_the_device():
        for name, place in places.items():
            config = config_of_size(report, model__dim=DIM, **keys, **place)
            with report.check(name):
                allocated = _steps(report, name, config, store)
        with report.check("the plan"):
            against_plan(report, config, store, (batch,), allocated)


def _steps(report: Report, name: str, config: Config, store: RandomGraph) -> float:
    """Measure steps; return the bytes that torch allocated on the GPU at most."""
    device, on_cuda = report.device, not report.small
    gc.collect()  # tables of before
    synchronize(device)  # starts CUDA, without which its statistics raise
    before = torch.cuda.memory_allocated(device) if on_cuda else 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    with processes(device.type) as ranks:
        start = time.perf_counter()
        engine = build_backend(config, store, ranks)
        synchronize(device)
        report.note(f"{name}, making the table", time.perf_counter() - start, "s")
        pipeline = build_pipeline(config, engine, ranks)
        measure(report, name, config, store, ranks, pipeline, 60 if on_cuda else 5)
        start = time.perf_counter()
        engine.shard()
        synchronize(device)
        seconds = time.perf_counter() - start
        report.note(f"{name}, writing the cache back", 1e3 * seconds, "ms")
    return torch.cuda.max_memory_allocated(device) - before if on_cuda else 0.0
