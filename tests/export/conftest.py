"""One trained run and its parameters, for all tests of exports."""

from __future__ import annotations

import pytest
from training_runs import config_of, parameters, tiny_store

from kge_torchrec import api


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a run over 37 entities and 3 relations, dim 8, and its table."""
    folder = tmp_path_factory.mktemp("export")
    config = config_of(tiny_store(folder / "store").path, folder / "run", evaluation__every=2)
    with api.train(config) as run:
        return run.path, parameters(run.model)["entities"].numpy().copy()


@pytest.fixture(scope="module")
def run(trained):
    """Open for one file of tests only: others look at whether a process group is left."""
    path, table = trained
    with api.open_run(path) as run:
        run.table = table
        yield run


@pytest.fixture(scope="module")
def export(run, tmp_path_factory):
    """An export of the run; tests that damage it take a copy."""
    return run.export(tmp_path_factory.mktemp("exports") / "export")
