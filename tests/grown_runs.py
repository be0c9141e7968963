"""A small run, and triples to extend it by, for the tests of graphs that grow."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from training_runs import config_of, random_triples, shared_folder, tiny_store
from worlds import run_world

from kge_torchrec import api
from kge_torchrec.config import Config
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.training.checkpoint_files import Checkpoint

TABLE = "model.entities.embeddings.entity.weight"
OLD_ENTITIES, OLD_RELATIONS = 37, 3
TABLES = {"entities__tables": {"features": {"optimizer": "adam", "lr": 0.02}}}
TOLERANCE = 1e-5


def new_triples() -> dict[str, list[tuple[str, str, str]]]:
    """9 new entities and 2 new relations, among themselves and with old ones."""
    random = np.random.default_rng(5)
    names = [*(f"n{i}" for i in range(9)), *(f"e{i}" for i in range(20))]
    relations = ["r0", "r2", "new0", "new1"]
    train = {(f"n{i % 9}", relations[i % 4], names[random.integers(29)]): None for i in range(60)}
    return {"train": list(train), "test": [("n0", "r1", "e3"), ("e4", "new0", "n5")]}


def base_config(store: Path, folder: Path | None, **changes) -> Config:
    inputs = {"model__scorer": "complex", "model__reciprocal": True, "train__epochs": 2,
             "train__optimizer_options__eps": 1e-3, "checkpoint__every__epochs": 0,
             **changes}  # fmt: skip
    return config_of(store, folder, **inputs)


@functools.cache
def base_run(**changes) -> Path:
    folder = shared_folder()
    store = tiny_store(folder / "store").path
    return api.train(base_config(store, folder / "run", **changes), rank_test=False).path


def old_features() -> str:
    """11 features of old entities, of which c0 and c1 are in no triple; only e30 has "last"."""
    rows = [f"e{i}\tkind {i % 9}\t0.{i % 3 + 1}" for i in range(0, 36, 2)]
    return "\n".join([*rows, "e30\tlast\t1", "c0\tkind 1\t2", "c1\tkind 3\t1", "c1\tc\t1", ""])


def new_features() -> str:
    """Features of new entities, of which x0 is in no triple; e2 has others than before."""
    return "n0\tkind 1\nn3\tnew kind\nn4\ta kind\nx0\tkind 3\ne2\tnew kind\ne2\tkind 8\n"


@functools.cache
def featured_run(ranks: int = 1, tables: bool = False, **changes) -> Path:
    """A run of the same triples as ``base_run``, with features; they may have their own table."""
    folder = shared_folder()
    (folder / "features.tsv").write_text(old_features())
    (folder / "new.tsv").write_text(new_features())
    triples = random_triples(OLD_ENTITIES, OLD_RELATIONS, 150)
    splits = {"train": triples[:130], "valid": triples[130:140], "test": triples[140:]}
    store = prepare(
        splits, folder / "store", {"features": folder / "features.tsv"}, log_notes=False
    )
    run_world(ranks, rank_trains, store.path, folder / "run", changes | (TABLES if tables else {}))
    return folder / "run"


def rank_trains(store: Path, folder: Path, changes: dict) -> None:
    api.train(base_config(store, folder, **changes), rank_test=False)


def tensors(run: Path, name: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a run's newest checkpoint."""
    checkpoint = (
        run / "checkpoints" / name if name else sorted((run / "checkpoints").glob("step*"))[-1]
    )
    opened = Checkpoint.open(checkpoint)
    results = {
        key: torch.cat([opened.read(key, piece) for piece in sorted(pieces, key=lambda p: p[1])])
        for key, pieces in opened.tensors.items()
    }
    return {k: value.squeeze() if k.endswith(".step") else value for k, value in results.items()}


FIRST = "step-000000000000"


def labels_of(store: TripleStore) -> dict[str, list]:
    """What the rows of tensors belong to, by the kind of the rows."""
    features = store.features()
    names = [] if features is None else features.names.to_pylist()
    return {
        "entity": [("entity", label) for label in store.entities.array.to_pylist()],
        "feature": [("feature", name) for name in names],
        "relation": [("relation", label) for label in store.relations.array.to_pylist()],
    }


def check_rows(
    old: Path, new: Path, fresh: Path | None = None, checkpoint: str | None = None
) -> None:
    """Check that the rows of a new run are those of the old one by label, the others as drawn.

    Args:
        old: The old run.
        new: The new run.
        fresh: A run of the same config and triples that starts from nothing.
    """
    before, after = tensors(old), tensors(new, FIRST)
    drawn = after if fresh is None else tensors(fresh, FIRST)
    was, now = (labels_of(api.open_run(run)._store) for run in (old, new))
    assert after.keys() == {name for name in before if not name.startswith("raw.")}
    for name, values in after.items():
        kinds: tuple[str, ...] = ()
        if TABLE.removeprefix("model.") in name:  # one table, or one of a type
            sizes = {len(was[kind]): (kind,) for kind in ("feature", "entity")}
            kinds = sizes.get(len(before[name]), ("entity", "feature"))
        elif values.dim() and len(before[name]) in (len(was["relation"]), 2 * len(was["relation"])):
            kinds = ("relation",) * (len(before[name]) // len(was["relation"]))
        if not kinds:
            assert torch.equal(values, before[name]), name
            continue
        rows = [[(i, x) for i, k in enumerate(kinds) for x in run[k]] for run in (was, now)]
        places = torch.tensor([rows[0].index(row) if row in rows[0] else -1 for row in rows[1]])
        expected = torch.zeros_like(values) if "optimizer" in name else drawn[name].clone()
        expected[places >= 0] = before[name][places[places >= 0]]
        assert torch.equal(values, expected), name
