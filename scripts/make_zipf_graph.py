"""Write a synthetic graph whose entity frequencies follow Zipf's law.

python scripts/make_zipf_graph.py OUT.parquet [--entities 2_000_000] [--triples 10_000_000]

Heads and tails have probability 1 / rank^exponent, relations are uniform. Names are scattered, so
that no shard gets all frequent entities.
"""

from __future__ import annotations

import argparse

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def zipf(stream: np.random.Generator, entities: int, exponent: float, count: int) -> np.ndarray:
    """Return ids (count,) int64 in [0, entities), by inverting the cumulative distribution."""
    weights = np.arange(1, entities + 1, dtype=np.float64) ** -exponent
    cumulative = np.cumsum(weights)
    return np.searchsorted(cumulative, stream.random(count) * cumulative[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--entities", type=int, default=2_000_000)
    parser.add_argument("--relations", type=int, default=100)
    parser.add_argument("--triples", type=int, default=10_000_000)
    parser.add_argument("--exponent", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    stream = np.random.default_rng(options.seed)
    names = stream.permutation(options.entities)
    head, tail = (
        names[zipf(stream, options.entities, options.exponent, options.triples)] for _ in range(2)
    )
    # Every entity is the head of one triple, so that the table has the requested size.
    head[: options.entities] = np.arange(options.entities)[: options.triples]
    relation = stream.integers(options.relations, size=options.triples)
    table = pa.table({"head": head, "relation": relation, "tail": tail})
    pq.write_table(table, options.out)


if __name__ == "__main__":
    main()
