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
    seconds: int  # time limit, imports included
    place: str  # module.function in this package

    def run(self, report) -> None:
        module, name = self.place.split(".")
        getattr(import_module(f"{__name__}.{module}"), name)(report)


PARTS = {
    "machine": Part("package set, CUDA, capability, bandwidth, products", 45, "machine.machine"),
    "tables": Part(
        "FBGEMM's table against the dense oracle, 5 optimizers", 30, "tables.optimizers"
    ),
    "bags": Part("lookups of 131k ids in 1, 4,096 and 131k bags", 25, "tables.bags"),
    "large": Part("a table of more than 2^31 elements, bit for bit", 30, "tables.large"),
    "training": Part("50 steps of every training type, against a CPU", 70, "training.kinds"),
    "parallel": Part("DDP and FSDP over NCCL, both engines", 35, "training.parallel"),
    "checkpoints": Part(
        "save, resume here and on a CPU, shared memory", 35, "training.checkpoints"
    ),
    "ranking": Part("ranks, top-k, export against a CPU; ties; TF32", 35, "ranking.equality"),
    "tests": Part("pytest -m gpu", 75, "machine.gpu_tests"),
    "speed": Part("FB15k-237's size: triples/s, kernels, synchronizations", 35, "speed.fb15k237"),
    "compiled": Part("the same size with both modes of dense.compile", 50, "speed.compiled"),
    "scale-rowwise": Part("86M x 100 with row-wise Adagrad", 50, "scale.rowwise_adagrad"),
    "scale-adam": Part("86M x 100 with Adam", 50, "scale.adam"),
    "scale-ranking": Part("ranking at 86M x 100, a checkpoint of 1M rows", 30, "scale.ranking"),
}
