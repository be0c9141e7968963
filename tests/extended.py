"""The names of the parts in docs/how-to/write-your-own-parts.md, and a run of them all.

The parts are in another package.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training_runs import fit

from kge_torchrec.config import registry

REFE, SQUARED, LP = "my_parts.refe:RefE", "my_parts.squared:SquaredError", "my_parts.lp:Lp"
MIXED, LION, JSON_LINES = (
    "my_parts.mixed:MixedSampler",
    "my_parts.lion:Lion",
    "my_parts.jsonlines:JsonLines",
)
BERNOULLI = "my_parts.bernoulli:BernoulliSampler"
ENGINES = ("torchrec", "handrolled")
# One run of all of them; Adagrad, since Lion's signs make much of a last bit.
ALL = {
    "model__scorer": REFE,
    "loss__name": SQUARED,
    "loss__options": {"rest": 0.2},
    "loss__regularizers": {LP: {"weight": 0.01, "p": 1.5}},
    "negatives__sampling": MIXED,
    "negatives__options": {"share": 0.25},
    "negatives__chunk_size": 8,
    "train__epochs": 2,
}


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Make ``my_parts`` of the folder importable, even if another test imported its own."""
    forget = lambda: [sys.modules.pop(n) for n in list(sys.modules) if n.startswith("my_parts")]  # noqa: E731
    forget()
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        forget()


def part(kind: str, name: str):
    return registry.resolve(kind, name)


def rank_trains(folder: Path, runs: list) -> list[tuple[dict, dict]]:
    """Parameters and metrics of some runs, one after another."""
    with importable(folder):
        sessions = (fit(config) for config in runs)
        return [(s.parameters, s.rank("test")["both"]["realistic"]) for s in sessions]
