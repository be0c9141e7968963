"""Measure time and memory of predictions over a table of random rows of any size.

    python scripts/bench_answers.py --entities 50000000 --dim 16

Prints for each kind of query its seconds, and its peak memory beyond the table in MiB.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from process_memory import resident_bytes
from random_graph import numbered

from kge_torchrec.answers.logical_queries import AskOptions, ask, parse_query
from kge_torchrec.answers.nearest import nearest_entities
from kge_torchrec.answers.predictions import Choice, Query, predict
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.environment import peak_resident_bytes
from kge_torchrec.models.scorers import SCORERS
from kge_torchrec.trained_model import TrainedModel

RELATIONS = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entities", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--scorer", default="complex")
    parsed = parser.parse_args()
    model = made_up(parsed.entities, parsed.dim, parsed.scorer)
    table = parsed.entities * parsed.dim * 4 / 2**20
    print(f"{parsed.scorer}, {parsed.entities:,} entities x {parsed.dim}: {table:,.0f} MiB")
    triples = torch.randint(parsed.entities, (100_000, 3)) % torch.tensor(
        [parsed.entities, RELATIONS, parsed.entities]
    )
    everything = predict(model, Query(7, 3, None), Choice(k=1000))
    query = {"relation": "3", "from": {"relation": "5", "to": "7"}}
    logical = parse_query({"and": [query, {"not": {"relation": "8", "from": "11"}}]}, model)
    questions: dict[str, Callable[[], object]] = {
        "10 tails": lambda: predict(model, Query(7, 3, None), Choice(k=10)),
        "1,000 heads": lambda: predict(model, Query(None, 3, 7), Choice(k=1000)),
        "all above a score, 1,000": lambda: predict(
            model, Query(7, 3, None), Choice(above=everything[-1].score)
        ),
        "relations of a pair": lambda: predict(model, Query(7, None, 9), Choice()),
        "10 nearest": lambda: nearest_entities(model, torch.tensor([7]), 10),
        "scores of 100,000 triples": lambda: model.scores(triples),
        "two steps and a not, beam 16": lambda: ask(model, logical, AskOptions(beam=16)),
    }
    for name, work in questions.items():
        before = resident_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        more = (peak_resident_bytes() - before) / 2**20
        print(f"{name:<30}{seconds:>8.2f} s{more:>8,.0f} MiB", flush=True)
    return 0


def made_up(entities: int, dim: int, scorer: str) -> TrainedModel:
    """Return a model of random rows whose labels are the ids."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.empty(entities, dim).normal_(generator=generator)
    model = SCORERS[scorer](RELATIONS, dim)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    labels, relations = (Vocabulary(numbered("", count)) for count in (entities, RELATIONS))
    both = SimpleNamespace(entities=labels, relations=relations)
    return TrainedModel(model, EntityShard(rows, 0, entities), both)


if __name__ == "__main__":
    sys.exit(main())
