"""Measure PyTorch-BigGraph on FB15k-237 for bench.py, in queries per second.

    PYTHON scripts/peer_biggraph.py DATA complex|distmult BATCH [--epochs N]

PYTHON is one that has PyTorch-BigGraph. Settings: both ends corrupted, so two queries per triple;
128 uniform negatives shared by 128 queries; row-wise Adagrad; one worker per core, all of which
write to the same memory without locks. Prints one line per epoch, without the first epoch.
"""

from __future__ import annotations

import argparse
import logging
import re
import tempfile
import warnings
from pathlib import Path

import h5py
import numpy as np
from torchbiggraph.config import ConfigFileLoader
from torchbiggraph.train import train

OPERATORS = {"complex": "complex_diagonal", "distmult": "diagonal"}
_TRAINED = re.compile(r"Processed ([\d.e+]+) edges in ([\d.e+]+) s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("scorer", choices=OPERATORS)
    parser.add_argument("batch_size", type=int)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logger = logging.getLogger("torchbiggraph")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Rates())
    with tempfile.TemporaryDirectory() as folder:
        train(_config(Path(folder), options))


class _Rates(logging.Handler):
    """Print the rates that BigGraph logs."""

    epochs = 0

    def emit(self, record: logging.LogRecord) -> None:
        if match := _TRAINED.search(record.getMessage()):
            self.epochs += 1
            edges, seconds = map(float, match.groups())
            if self.epochs > 1:
                print(f"biggraph {2 * edges / seconds:.6g} queries/s", flush=True)


def _config(folder: Path, options: argparse.Namespace):
    """Write the graph and a config with one worker per core."""
    triples, entities, relations = _read(options.data / "train.txt")
    (folder / "entity_count_all_0.txt").write_text(str(entities))
    (folder / "dynamic_rel_count.txt").write_text(str(relations))
    with h5py.File(folder / "edges_0_0.h5", "w") as file:
        file.attrs["format_version"] = 1
        for name, column in zip(("lhs", "rel", "rhs"), triples.T, strict=True):
            file.create_dataset(name, data=column)
    operator = OPERATORS[options.scorer]
    settings = {
        "entity_path": str(folder),
        "edge_paths": [str(folder)],
        "checkpoint_path": str(folder / "model"),
        "entities": {"all": {"num_partitions": 1}},
        "relations": [{"name": "all", "lhs": "all", "rhs": "all", "operator": operator}],
        "dynamic_relations": True,
        "global_emb": False,
        "dimension": 256,
        "comparator": "dot",
        "loss_fn": "logistic",
        "lr": 0.1,
        "num_epochs": options.epochs,
        "batch_size": options.batch_size,
        "num_batch_negs": 0,
        "num_uniform_negs": 128,
        "eval_fraction": 0.0,
        "workers": 2,
    }
    path = folder / "config.py"
    path.write_text(f"def get_torchbiggraph_config():\n    return {settings!r}\n")
    return ConfigFileLoader().load_config(str(path))


def _read(path: Path) -> tuple[np.ndarray, int, int]:
    """Return ids (T, 3) in order of occurrence, and the numbers of entities and relations."""
    entities: dict[str, int] = {}
    relations: dict[str, int] = {}
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        head, relation, tail = line.split("\t")
        ends = [entities.setdefault(label, len(entities)) for label in (head, tail)]
        rows.append((ends[0], relations.setdefault(relation, len(relations)), ends[1]))
    return np.array(rows), len(entities), len(relations)


if __name__ == "__main__":
    main()
