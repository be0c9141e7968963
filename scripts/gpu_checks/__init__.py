"""The parts of ``scripts/check_gpu.py``: content, function and time limit of each.

A part is a function of a ``Report``. On a GPU it uses realistic sizes. On a CPU it uses small
sizes, which only shows that the part itself runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple


class Part(NamedTuple):
    """Content, function and time limit of a part."""

    what: str
    seconds: int  # time limit on a GPU
    place: str  # module.function in this package

    @property
    def module(self) -> str:
        return f"{__name__}.{self.place.split('.')[0]}"

    def run(self, report) -> None:
        getattr(import_module(self.module), self.place.split(".")[1])(report)


PARTS = {  # what a card decides first; the rest may be cut off
    "machine": Part("package set, CUDA, capability, bandwidth, products", 25, "machine.machine"),
    "tables": Part(
        "FBGEMM's table against the dense oracle, 5 optimizers", 20, "tables.optimizers"
    ),
    "bags": Part("lookups of 131k ids in 1, 4,096 and 131k bags", 20, "tables.bags"),
    "scale-rowwise": Part("86M x 100 with row-wise Adagrad", 45, "scale.rowwise_adagrad"),
    "speed": Part("FB15k-237's size: triples/s, kernels, synchronizations", 25, "speed.fb15k237"),
    "trace": Part("kernels of a step; with --trace FOLDER in files", 15, "speed.trace"),
    "large": Part("a table of more than 2^31 elements, bit for bit", 20, "tables.large"),
    "training": Part("50 steps of every training type, against a CPU", 55, "training.kinds"),
    "graph": Part("steps with a CUDA graph against plain ones", 20, "training.graphs"),
    "parallel": Part("DDP and FSDP over NCCL, both engines", 20, "training.parallel"),
    "ranks": Part("two ranks on one card, over gloo", 25, "training.two_ranks"),
    "checkpoints": Part(
        "save, resume here and on a CPU, shared memory", 25, "training.checkpoints"
    ),
    "cached": Part("rows in main memory with a cache on the GPU", 20, "caches.equality"),
    "ranking": Part("ranks, top-k, export against a CPU; ties; TF32", 30, "ranking.equality"),
    "tests": Part("pytest -m gpu", 50, "machine.gpu_tests"),
    "compiled": Part("the same size with dense.compile", 35, "speed.compiled"),
    "scale-adam": Part("86M x 100 with Adam", 35, "scale.adam"),
    "decisions": Part("both sides of every open choice, timed", 45, "decisions.decisions"),
    "scale-ranking": Part("ranking at 86M x 100, a checkpoint of 1M rows", 25, "scale.ranking"),
    "scale-cached": Part("10M x 100 with Adam, with and without a cache", 15, "caches.speed"),
}
