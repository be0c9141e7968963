"""Train a whole model in PyKEEN, in a Python that has it (README.md has versions).

    PYTHON scripts/peers/peer_pykeen.py DATA SCORER --epochs N

DATA is a folder with train.txt, valid.txt and test.txt; SCORER is ComplEx, DistMult, TransE or
RotatE, with 256 numbers per entity and reciprocal relations. Queries against all entities in
batches of 512, bce, Adam. Prints the minutes of training and the filtered test MRR (realistic, both
sides).
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import torch
from pykeen.evaluation import RankBasedEvaluator
from pykeen.models import ComplEx, DistMult, RotatE, TransE
from pykeen.training import LCWATrainingLoop
from pykeen.triples import TriplesFactory

MODELS = {"ComplEx": (ComplEx, 128), "DistMult": (DistMult, 256), "TransE": (TransE, 256),
          "RotatE": (RotatE, 128)}  # fmt: skip


def whole_run(name: str, folder: Path, epochs: int) -> tuple[float, float]:
    """Return minutes of training and the filtered test MRR of one run."""
    train = TriplesFactory.from_path(folder / "train.txt", create_inverse_triples=True)
    ids = {"entity_to_id": train.entity_to_id, "relation_to_id": train.relation_to_id}
    valid, test = (
        TriplesFactory.from_path(folder / f"{split}.txt", **ids) for split in ("valid", "test")
    )
    kind, dim = MODELS[name]

    def start(values: torch.Tensor) -> torch.Tensor:  # as model.init_scale .1; PyKEEN's is 1
        return values.normal_(std=0.1)

    model = kind(
        triples_factory=train, embedding_dim=dim, loss="BCEWithLogitsLoss", random_seed=0,
        entity_initializer=start, relation_initializer=start,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loop = LCWATrainingLoop(model=model, triples_factory=train, optimizer=optimizer)
    began = time.perf_counter()
    loop.train(train, num_epochs=epochs, batch_size=512, use_tqdm=False)
    minutes = (time.perf_counter() - began) / 60
    results = RankBasedEvaluator(filtered=True).evaluate(
        model, test.mapped_triples, batch_size=512, use_tqdm=False,
        additional_filter_triples=[train.mapped_triples, valid.mapped_triples],
    )  # fmt: skip
    return minutes, results.get_metric("both.realistic.inverse_harmonic_mean_rank")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("scorer", choices=MODELS)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(2)
    minutes, mrr = whole_run(options.scorer, options.data, options.epochs)
    print(f"pykeen {minutes:.4g} minutes, test mrr {mrr:.4f}")


if __name__ == "__main__":
    main()
