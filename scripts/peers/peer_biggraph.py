"""Measure PyTorch-BigGraph on the floor's work, in a Python that has it (README.md has versions).

    PYTHON scripts/peers/peer_biggraph.py DATA complex|distmult BATCH

Prints one line per epoch but the first: "biggraph", queries per second, the unit. Both ends are
corrupted, so a triple is two queries; as many triples share negatives as there are negatives. Two
workers are two processes, and write to the same memory without locks.
"""

from __future__ import annotations

import argparse
import logging
import re
import tempfile
import warnings
from pathlib import Path

import h5py
from floor import read_graph
from torchbiggraph.config import ConfigFileLoader
from torchbiggraph.train import train

OPERATORS = {"complex": "complex_diagonal", "distmult": "diagonal"}
_TRAINED = re.compile(r"Processed ([\d.e+]+) edges in ([\d.e+]+) s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("scorer", choices=OPERATORS)
    parser.add_argument("batch_size", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logger = logging.getLogger("torchbiggraph")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Rates())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_graph(folder, options.data)
        train(_config(folder, options))


class _Rates(logging.Handler):
    """Print the rates of the epochs that BigGraph logs."""

    epochs = 0

    def emit(self, record: logging.LogRecord) -> None:
        if match := _TRAINED.search(record.getMessage()):
            edges, seconds = map(float, match.groups())
            if self.epochs:
                print(f"biggraph {2 * edges / seconds:.6g} queries/s", flush=True)
            self.epochs += 1


def _write_graph(folder: Path, data: Path) -> None:
    splits, entities, relations = read_graph(data)
    (folder / "entity_count_all_0.txt").write_text(str(entities))
    (folder / "dynamic_rel_count.txt").write_text(str(relations))
    with h5py.File(folder / "edges_0_0.h5", "w") as file:
        file.attrs["format_version"] = 1
        for name, column in zip(("lhs", "rel", "rhs"), splits["train"].T, strict=True):
            file.create_dataset(name, data=column)


def _config(folder: Path, options: argparse.Namespace):
    """Return BigGraph's config."""
    relation = {"name": "all", "lhs": "all", "rhs": "all", "operator": OPERATORS[options.scorer]}
    settings = {
        "entity_path": str(folder),
        "edge_paths": [str(folder)],
        "checkpoint_path": str(folder / "model"),
        "entities": {"all": {"num_partitions": 1}},
        "relations": [relation],
        "dynamic_relations": True,
        "global_emb": False,
        "dimension": 256,
        "comparator": "dot",
        "loss_fn": "logistic",
        "lr": 0.1,
        "num_epochs": options.repeats + 1,
        "batch_size": options.batch_size,
        "num_batch_negs": 0,
        "num_uniform_negs": 128,
        "eval_fraction": 0.0,
        "hogwild_delay": 0.0,
        "workers": 2,
    }
    path = folder / "config.py"
    path.write_text(f"def get_torchbiggraph_config():\n    return {settings!r}\n")
    return ConfigFileLoader().load_config(str(path))


if __name__ == "__main__":
    main()
