"""Measure PyKEEN on the floor's work, in a Python that has it (README.md has versions).

    PYTHON scripts/peers/peer_pykeen.py DATA SCORER [--work per-triple|whole]

Prints one line per repeat: "pykeen", the rate, its unit. DATA is a folder with train.txt, valid.txt
and test.txt; SCORER is ComplEx, DistMult, TransE or RotatE, with 256 numbers per entity.
per-triple: bce with 128 negatives for every triple, Adam; an epoch has --steps steps. whole: kvsall
with bce and reciprocal relations on the whole graph for --epochs epochs; prints the minutes of
training and the filtered test MRR (realistic, both sides).
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import torch
from pykeen.evaluation import RankBasedEvaluator
from pykeen.models import ComplEx, DistMult, RotatE, TransE
from pykeen.training import LCWATrainingLoop, SLCWATrainingLoop
from pykeen.triples import CoreTriplesFactory, TriplesFactory

MODELS = {"ComplEx": (ComplEx, 128), "DistMult": (DistMult, 256), "TransE": (TransE, 256),
          "RotatE": (RotatE, 128)}  # fmt: skip
BATCH = 1024


def sample(graph: CoreTriplesFactory, count: int) -> CoreTriplesFactory:
    chosen = graph.mapped_triples[torch.randperm(graph.num_triples)[:count]]
    return CoreTriplesFactory(
        chosen, num_entities=graph.num_entities, num_relations=graph.num_relations
    )


def model_of(name: str, graph: CoreTriplesFactory):
    kind, dim = MODELS[name]
    norm = {"scoring_fct_norm": 1} if name == "TransE" else {}
    options = {"embedding_dim": dim, "loss": "BCEWithLogitsLoss", "random_seed": 0}
    return kind(triples_factory=graph, **options, **norm)


def training_rates(
    name: str, graph: CoreTriplesFactory, options: argparse.Namespace
) -> list[float]:
    """Return triples per second of whole epochs; the first one is not counted."""
    part = sample(graph, BATCH * options.steps)
    model = model_of(name, part)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loop = SLCWATrainingLoop(model=model, triples_factory=part, optimizer=optimizer,
                             negative_sampler_kwargs={"num_negs_per_pos": 128})  # fmt: skip
    rates = []
    for epoch in range(options.repeats + 1):
        start = time.perf_counter()
        loop.train(part, num_epochs=epoch + 1, batch_size=BATCH, use_tqdm=False,
                   continue_training=epoch > 0)  # fmt: skip  # num_epochs is the total
        rates.append(part.num_triples / (time.perf_counter() - start))
    return rates[1:]


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
    parser.add_argument("--work", choices=("per-triple", "whole"), default="per-triple")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(2)
    if options.work == "whole":
        minutes, mrr = whole_run(options.scorer, options.data, options.epochs)
        print(f"pykeen {minutes:.4g} minutes, test mrr {mrr:.4f}")
        return
    train = TriplesFactory.from_path(options.data / "train.txt")
    for rate in training_rates(options.scorer, train, options):
        print(f"pykeen {rate:.6g} triples/s", flush=True)


if __name__ == "__main__":
    main()
