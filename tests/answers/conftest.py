"""One trained run and its export, for all tests of answers."""

from __future__ import annotations

import random

import pytest
from training_runs import config_of, tiny_store

from kge_torchrec import api, load_model, prepare


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a run over 37 entities and 3 relations, and that of its export."""
    folder = tmp_path_factory.mktemp("answers")
    store = tiny_store(folder / "store", held_out=30)
    with api.train(config_of(store.path, folder / "run", model__scorer="complex")) as run:
        return run.path, run.export(folder / "export")


@pytest.fixture(scope="module")
def run(trained):
    with api.open_run(trained[0]) as run:
        yield run


@pytest.fixture(scope="module")
def model(trained):
    return load_model(trained[1])


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """A run over users and places, where users visit places and follow users."""
    draw = random.Random(0)
    lines = {(f"user:{draw.randrange(20)}", "visits", f"place:{draw.randrange(15)}")
             for _ in range(90)}  # fmt: skip
    lines |= {(f"user:{draw.randrange(20)}", "follows", f"user:{draw.randrange(20)}")
              for _ in range(90)}  # fmt: skip
    ordered, folder = sorted(lines), tmp_path_factory.mktemp("typed")
    draw.shuffle(ordered)
    splits = {"valid": ordered[:20], "test": ordered[20:40], "train": ordered[40:]}
    store = prepare(splits, folder / "store", {"types": "prefix"}, log_notes=False)
    with api.train(config_of(store.path, folder / "run")) as run:
        yield run
