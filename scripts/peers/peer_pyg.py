"""Measure PyTorch Geometric on the floor's work, in a Python that has it (README.md has versions).

    PYTHON scripts/peers/peer_pyg.py DATA SCORER [--dense]

Prints one line per repeat: "pyg", triples per second, the unit. bce with 128 negatives for every
triple, batches of 1,024, 256 numbers per entity. PyG draws one negative for a triple; 128 are its
own random_sample of repeated triples. It trains with its sparse Adam; --dense takes the dense one.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from floor import read_graph
from torch_geometric.nn.kge import ComplEx, DistMult, RotatE, TransE

MODELS = {"ComplEx": (ComplEx, 128), "DistMult": (DistMult, 256), "TransE": (TransE, 256),
          "RotatE": (RotatE, 128)}  # fmt: skip
BATCH, NEGATIVES = 1024, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("scorer", choices=MODELS)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(2)
    splits, entities, relations = read_graph(options.data)
    kind, dim = MODELS[options.scorer]
    norm = {"p_norm": 1.0} if options.scorer == "TransE" else {}
    model = kind(entities, relations, dim, sparse=not options.dense, **norm)
    adam = torch.optim.Adam if options.dense else torch.optim.SparseAdam
    optimizer = adam(list(model.parameters()), lr=1e-3)
    triples = torch.from_numpy(splits["train"]).T
    loader = model.loader(*triples, batch_size=BATCH, shuffle=True)
    model.train()

    def epoch(steps: int) -> None:
        for _, batch in zip(range(steps), loader, strict=False):
            repeated = (ids.repeat(NEGATIVES) for ids in batch)
            optimizer.zero_grad()
            true, false = model(*batch), model(*model.random_sample(*repeated))
            (F.softplus(-true).mean() + F.softplus(false).mean()).backward()
            optimizer.step()

    epoch(1)
    for _ in range(options.repeats):
        start = time.perf_counter()
        epoch(options.steps)
        rate = options.steps * BATCH / (time.perf_counter() - start)
        print(f"pyg {rate:.6g} triples/s", flush=True)


if __name__ == "__main__":
    main()
