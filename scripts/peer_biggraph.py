"""Train with PyTorch-BigGraph 1.0 for other scripts here, in a Python that has it.

    PYTHON scripts/peer_biggraph.py DATA complex|distmult BATCH [--partitions P] [--save FILE]

It needs torch, h5py, attrs, tqdm and "setuptools<81", then `pip install --no-deps torchbiggraph`.
DATA is a folder with train.txt, or a file .npy of ids (T, 3). Both ends are corrupted, so a triple
is two queries; as many triples share negatives as there are. Each worker is a process; all write to
the same memory without locks. Prints "mark" when an epoch begins and when it ends, and a line per
epoch with its speed without the exchange of partitions, except for the first epoch.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import tempfile
import warnings
from pathlib import Path

import h5py
import numpy as np
from torchbiggraph.checkpoint_storage import CHECKPOINT_STORAGES, FileCheckpointStorage
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
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--entities", type=int, help="of a file of ids; more than occur")
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--loss", default="logistic")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--negatives", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--background", action="store_true", help="read and write in a process")
    parser.add_argument("--forget", action="store_true", help="keep no file in memory")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--save", type=Path, help="a file .npz of entities and relations")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logger = logging.getLogger("torchbiggraph")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Rates())
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        places = _write_graph(folder, options)
        train(_config(folder, options))
        if options.save:
            _save(folder / "model", options, places)


class _Rates(logging.Handler):
    """Print the beginnings of epochs, and the rates that BigGraph logs."""

    epochs, edges, seconds = 0, 0.0, 0.0

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if match := _TRAINED.search(message):
            edges, seconds = map(float, match.groups())
            self.edges += edges
            self.seconds += seconds
        if message.startswith(("Starting epoch", "Switching to the new")):
            print("mark", flush=True)
        if message.startswith("Switching to the new"):
            if self.epochs:
                print(f"biggraph {2 * self.edges / self.seconds:.6g} queries/s", flush=True)
            self.epochs, self.edges, self.seconds = self.epochs + 1, 0.0, 0.0


@CHECKPOINT_STORAGES.register_as("forget")
class Forgetful(FileCheckpointStorage):
    """Files of partitions that leave no pages in memory, as if they were larger than it."""

    def __init__(self, path: str):
        super().__init__(path.removeprefix("forget://"))

    def save_entity_partition(self, version, entity_name, partition, *values) -> None:
        super().save_entity_partition(version, entity_name, partition, *values)
        self._forget(version, entity_name, partition)

    def load_entity_partition(self, version, entity_name, partition):
        result = super().load_entity_partition(version, entity_name, partition)
        self._forget(version, entity_name, partition)
        return result

    def _forget(self, *of: object) -> None:
        with open(self.get_entity_partition_file(*of), "rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_graph(folder: Path, options: argparse.Namespace) -> np.ndarray:
    """Write the graph with partitions at random; return the place of each entity in them."""
    if options.data.suffix == ".npy":
        triples = np.load(options.data)
        entities, relations = (int(triples[:, c].max()) + 1 for c in ([0, 2], 1))
        entities = max(entities, options.entities or 0)
    else:
        triples, entities, relations = _read(options.data / "train.txt")
    parts = options.partitions
    places = np.random.default_rng(0).permutation(entities)
    ends = np.arange(parts + 1) * entities // parts
    for part, count in enumerate(np.diff(ends)):
        (folder / f"entity_count_all_{part}.txt").write_text(str(count))
    (folder / "dynamic_rel_count.txt").write_text(str(relations))
    head, tail = places[triples[:, 0]], places[triples[:, 2]]
    bucket = (np.searchsorted(ends, x, "right") - 1 for x in (head, tail))
    bucket = next(bucket) * parts + next(bucket)
    order = np.split(np.argsort(bucket, kind="stable"), np.cumsum(np.bincount(bucket))[:-1])
    for number, own in enumerate(order):
        left, right = divmod(number, parts)
        with h5py.File(folder / f"edges_{left}_{right}.h5", "w") as file:
            file.attrs["format_version"] = 1
            file.create_dataset("lhs", data=head[own] - ends[left])
            file.create_dataset("rel", data=triples[own, 1].astype(np.int64))
            file.create_dataset("rhs", data=tail[own] - ends[right])
    return places


def _config(folder: Path, options: argparse.Namespace):
    """Return BigGraph's config."""
    relation = {"name": "all", "lhs": "all", "rhs": "all", "operator": OPERATORS[options.scorer]}
    settings = {
        "entity_path": str(folder),
        "edge_paths": [str(folder)],
        "checkpoint_path": f"{'forget' if options.forget else 'file'}://{folder / 'model'}",
        "entities": {"all": {"num_partitions": options.partitions}},
        "relations": [relation],
        "dynamic_relations": True,
        "global_emb": False,
        "dimension": options.dim,
        "comparator": "dot",
        "loss_fn": options.loss,
        "lr": options.lr,
        "num_epochs": options.epochs,
        "batch_size": options.batch_size,
        "num_batch_negs": 0,
        "num_uniform_negs": options.negatives,
        "eval_fraction": 0.0,
        "hogwild_delay": 0.0,
        "background_io": options.background,
        "workers": options.workers,
    }
    path = folder / "config.py"
    path.write_text(f"def get_torchbiggraph_config():\n    return {settings!r}\n")
    return ConfigFileLoader().load_config(str(path))


def _save(folder: Path, options: argparse.Namespace, places: np.ndarray) -> None:
    """Save entities (N, D), and relations (2 R, D): those of tail queries, then of head queries."""
    version = int((folder / "checkpoint_version.txt").read_text())
    parts = []
    for part in range(options.partitions):
        with h5py.File(folder / f"embeddings_all_{part}.v{version}.h5") as file:
            parts.append(file["embeddings"][...])
    with h5py.File(folder / f"model.v{version}.h5") as file:
        operators = file["model/relations/0/operator"]
        names = ("real", "imag") if options.scorer == "complex" else ("diagonals",)
        relations = [
            np.concatenate([operators[side][name][...] for name in names], 1)
            for side in ("lhs", "rhs")
        ]
    entities = np.concatenate(parts)[places]
    np.savez(options.save, entities=entities, relations=np.concatenate(relations))


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
