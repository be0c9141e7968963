"""Time the sides of open choices, and print the fastest beside today's default.

The steps are those of one random graph, 2.5M entities of dim 200 on a GPU. A choice may also change
results, which these figures do not show.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from random_graph import RandomGraph

from gpu_checks.ranking import scorer_of, triples_of
from gpu_checks.report import Report
from gpu_checks.speed import config_of, decide, endless, rows_drawn_on_the_device
from gpu_checks.timing import step_seconds, synchronize
from kge_torchrec.config import Config
from kge_torchrec.config.keys import all_values
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.config.sizing import GraphSize
from kge_torchrec.distributed.processes import Processes, processes
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.ranking.ranks import rank_triples
from kge_torchrec.training.assembly import build_backend, build_pipeline

ROUNDS = 2  # of all sides in turn; the first side of the first one loads kernels


class Choice(NamedTuple):
    """A config key and the values to time, on a CPU smaller ones."""

    key: str
    values: tuple
    small: tuple
    batch_size: int = 8192
    small_batch_size: int = 64

    def of_check(self, small: bool) -> tuple[str, tuple, int]:
        """Return the name, the values to time and the batch size of the check.

        The name is the key, with the batch size if it is not the usual one.
        """
        values, size = self.values, self.batch_size
        if small:
            values, size = self.small, self.small_batch_size
        name = self.key if size in (8192, 64) else f"{self.key} at batch {size:,}"
        return name, values, size


_PIPELINES = "loop", "graph"
CHOICES = (
    Choice("train.pipeline", (*_PIPELINES, "sparse_dist"), (*_PIPELINES, "sparse_dist")),
    Choice("train.pipeline", _PIPELINES, _PIPELINES, 65_536, 128),
    Choice("train.pipeline", _PIPELINES, _PIPELINES, 262_144, 256),
    Choice("train.batches", ("cpu", "device"), ("cpu", "device")),
    Choice("train.precision", ("fp32", "tf32", "bf16"), ("fp32", "bf16")),
    Choice("train.batch_size", (8192, 65_536, 262_144), (64, 256)),
    Choice("negatives.count", (512, 8000), (16, 64)),
)
WORKLOADS = {  # without another side
    "transe_l1": {"model.scorer": "transe_l1", "model.reciprocal": False, "loss.name": "margin"},
    "rotate": {"model.scorer": "rotate", "loss.name": "self_adversarial"},
    "1vsall": {"negatives.regime": "1vsall", "negatives.count": None, "train.batch_size": 512},
}


def decisions(report: Report) -> None:
    """Time every choice, then other workloads and the ranking of distances."""
    graph = RandomGraph(*((5000, 20, 50_000) if report.small else (2_500_000, 500, 10_000_000)))
    defaults = _defaults(graph, report.device)
    with processes(report.device.type) as ranks, rows_drawn_on_the_device():
        for choice in CHOICES:
            key, (name, sides, size) = choice.key, choice.of_check(report.small)
            with report.check(name):
                keys = {"train.batch_size": size}
                rounds = [
                    {side: _rate(report, graph, ranks, {**keys, key: side}) for side in sides}
                    for _ in range(ROUNDS)
                ]
                rates = {side: max(rates[side] for rates in rounds) for side in sides}
                decide(report, name, rates, all_values(defaults)[key])
        for name, keys in WORKLOADS.items():
            with report.check(name):
                report.note(name, _rate(report, graph, ranks, keys), "triples/s")
    with report.check("ranking of transe_l1"):
        _ranking(report, graph)


def _defaults(graph: RandomGraph, device: torch.device) -> Config:
    """Return the config that training of the graph would have without any key."""
    size = GraphSize(graph.num_entities, graph.num_relations, graph.num_triples)
    return config_from_dict({}).settled(size, device.type == "cuda")


def _rate(report: Report, graph: RandomGraph, ranks: Processes, keys: dict) -> float:
    """Return triples/s of training with the keys."""
    settings = {"model.dim": 200, "train.optimizer": "rowwise_adagrad", "train.lr": 0.1,
                "train.batch_size": 8192, **keys}  # fmt: skip
    if report.small:
        small = {"model.dim": 16, "train.batch_size": 64, "negatives.count": 16}
        settings |= {key: value for key, value in small.items() if key not in keys}
    config = config_of(report, **settings)
    pipeline = build_pipeline(config, build_backend(config, graph, ranks), ranks)
    stream = endless(config, graph, ranks)
    for _ in range(3):
        pipeline.progress(stream)
    steps = 3 if report.small or config.negatives.is_full else 30
    whole, _ = step_seconds(lambda: pipeline.progress(stream), ranks.device, steps)
    stream.close()
    return config.train.batch_size / whole


def _ranking(report: Report, graph: RandomGraph) -> None:
    """Rank 256 triples by distances, both sides."""
    entities, count, device = graph.num_entities, 16 if report.small else 256, report.device
    scorer = scorer_of("transe_l1", 200, graph.num_relations).to(device)
    shard = EntityShard(torch.randn(entities, 200, device=device), 0, entities)
    triples = triples_of(count, entities, graph.num_relations)
    rank_triples(scorer, shard, triples[:8], None)
    synchronize(device)
    start = time.perf_counter()
    rank_triples(scorer, shard, triples, None)
    synchronize(device)
    rate = 2 * count * entities / (time.perf_counter() - start)
    report.note("ranking of transe_l1", rate, "scores/s")
