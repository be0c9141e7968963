"""One trained run and its export, for all tests of answers."""

from __future__ import annotations

import pytest
from training_runs import config_of, tiny_store

from kge_torchrec import api, load_model


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


def run_like(store, folder, **changes):
    """A run of another model, trained for an epoch."""
    return api.train(config_of(store, folder, train__epochs=1, **changes))
