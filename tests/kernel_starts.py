"""Outputs of kernels and of short trainings, to the last bit, by a process of its own.

    python tests/kernel_starts.py NAME ...    prints a line of JSON: name -> hash

``test_starts.py`` runs it twice, with an empty cache and with the one that the first run filled.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from kge_torchrec.kernels.library import Action, Compared, Mapped

COMPARISONS, MAPPED = get_args(Compared), get_args(Mapped)
TRAINED = {
    "transe_l1": {"loss.name": "self_adversarial"},
    "pairre": {"loss.name": "self_adversarial"},
    "complex": {},
    "rotate": {"loss.name": "margin", "train.optimizer": "adam"},
    "transh": {"train.optimizer": "rowwise_adam"},
    "mure": {"train.optimizer": "sgd"},
    "house": {"model.dim": 12},
    "rescal": {"model.dropout.relation": 0.2},
    "distmult": {"negatives.regime": "1vsall", "model.dropout.entity": 0.2},
}
SOME = ["training transe_l1", "training complex"]
ALL = [
    *(f"pairs {kind}" for kind in COMPARISONS + MAPPED),
    *(f"triples {kind}" for kind in get_args(Action)),
    *(f"losses {kind}" for kind in ("softmax", "logistic")),
    *(f"updates {kind}" for kind in ("sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam")),
    "projections", "matrices", "dropout", "sums", "orders",
    *(f"training {scorer}" for scorer in TRAINED),
]  # fmt: skip


def made(*sizes: int) -> torch.Tensor:
    """Numbers without a round one among them."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def with_gradients(function, *inputs):
    """Return the outputs of a function and the gradients of its inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum((out * made(*out.shape)).sum() for out in outputs)
    return *outputs, *torch.autograd.grad(total, leaves, allow_unused=True)


def pairs(kind: str):
    from kge_torchrec.kernels.pair_scores import pair_scores

    index = torch.arange(21).view(3, 7) % 6
    inputs = made(3, 5, 10), made(6, 10)
    if kind in COMPARISONS:
        return with_gradients(lambda query, rows: pair_scores(kind, query, rows, index), *inputs)
    maps = torch.nn.functional.normalize(made(3, 5, 10), dim=-1)
    scored = lambda query, rows, maps: pair_scores(kind, query, rows, index, maps)  # noqa: E731
    return with_gradients(scored, *inputs, maps)


def triples(kind: str):
    from kge_torchrec.kernels.triple_products import encode_triples

    places = torch.arange(24) % 9
    positions = [places, places % 4, (places + 2) % 9, places[:8]]

    def run(rows, relations):
        return tuple(encode_triples(rows, relations, [kind], positions, places[:3]))

    return with_gradients(run, made(9, 10), made(4, 10))


def losses(kind: str):
    from kge_torchrec.kernels.score_gradients import gradients, log_sums, normalizers

    softmax, scores, out = kind == "softmax", made(6, 150), torch.empty(6, dtype=torch.float64)
    mask = made(6, 150) > -1
    result = with_gradients(lambda x: log_sums(x, mask, softmax), scores)
    parts = []
    for stored in (scores.clone(), scores.bfloat16()):
        normalizers(stored, out, softmax)
        parts.append(out.clone())
        gradients(stored, out, made(6), torch.full((6,), 0.1), softmax)
        parts.append(stored.float())
    return *result, *parts


def updates(kind: str):
    from kge_torchrec.embeddings.optimizers import TableOptimizer, optimizer_class
    from kge_torchrec.kernels.rows import update_rows

    states = [
        torch.zeros(9) if s.by_row else torch.zeros(9, 10) for s in optimizer_class(kind).states
    ]
    weights, optimizer = made(9, 10), TableOptimizer(kind, lr=0.1)
    for step, rows in enumerate((torch.tensor([1, 4, 7]), torch.tensor([5, 2, 5]))):
        update_rows(optimizer, 0.1, step + 1, rows, made(3, 10), weights, *states)
    return weights, *states


def projections(_: str):
    from kge_torchrec.kernels.projected_distances import projected_distances

    inputs = made(2, 3, 12), made(2, 3, 24), made(2, 3, 6), made(2, 5, 12)
    return with_gradients(lambda *x: projected_distances(*x, 4), *inputs)


def matrices(_: str):
    from kge_torchrec.kernels.dropout import relation_products

    relation, results = torch.arange(7) % 3, ()
    for left in (True, False):
        run = lambda x, m: relation_products(x, m, relation, left=left, share=0.3, key=11)  # noqa: B023, E731
        results += with_gradients(run, made(7, 10), made(3, 100))
    return results


def dropout(_: str):
    from kge_torchrec.kernels.dropout import dropped

    return (dropped(made(40, 10), 0.3, 12345678901),)


def sums(_: str):
    from kge_torchrec.kernels.rows import sums_by_row

    return (sums_by_row(torch.arange(30) % 7, (made(10, 10), made(20, 10)), 8),)


def orders(_: str):
    """Call the kernels that training does not use by default."""
    from kge_torchrec.data.batches.order import sample_distinct
    from kge_torchrec.data.negatives import STEP, _add_up, _find
    from kge_torchrec.data.typed_negatives import _mark_sharing

    sizes, numbers = np.array([3, 50, 9]), np.array([5, 6, 7])
    pointers, sums, ids = np.array([0, 2, 3, 7, 8]), np.empty(2), np.empty(12, np.int64)
    _add_up(pointers, pointers, 0.75, STEP, sums)
    _find(pointers, pointers, 0.75, sums, np.linspace(0, 0.99, 12) * sums[-1], ids)
    alike = np.zeros((4, 2), bool)
    types, candidates = np.arange(8) % 3, np.arange(8).reshape(4, 2) % 4
    _mark_sharing(pointers, types, np.full(3, -1), np.arange(4), candidates, alike)
    drawn = sample_distinct(sizes, 8, numbers, np.arange(6, dtype=np.uint64))
    return drawn, sums, ids, alike


def training(scorer: str):
    import kge_torchrec

    with tempfile.TemporaryDirectory() as folder:
        config = {
            "seed": 5, "threads": 1, "device": "cpu", "model.scorer": scorer, "model.dim": 72,
            "train.epochs": 2, "train.batch_size": 256, "negatives.count": 24, "train.lr": 0.05,
            "evaluation.max_triples": 40, "run.progress": False, "run.trackers.tensorboard": False,
            "entities.engine": "handrolled", **TRAINED[scorer], "run.dir": f"{folder}/run",
        }  # fmt: skip
        with kge_torchrec.train(config) as run:
            run.export(Path(folder, "export"))
        files = sorted(
            p for p in Path(folder, "export").rglob("*") if p.suffix in (".npy", ".safetensors")
        )
        return tuple(np.frombuffer(file.read_bytes(), np.uint8) for file in files)


def hashed(arrays) -> str:
    total = hashlib.sha256()
    for array in arrays:
        if array is not None:
            total.update(np.ascontiguousarray(
                array.detach().numpy() if isinstance(array, torch.Tensor) else array
            ).tobytes())  # fmt: skip
    return total.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {}
    for name in sys.argv[1:]:
        function, _, kind = name.partition(" ")
        results[name] = hashed(globals()[function](kind))
    print(json.dumps(results))
