"""One trained run and its parameters, for all tests of exports."""

from __future__ import annotations

import pytest
from training_runs import config_of, parameters, tiny_store

from kge_torchrec import api

N, R, D = 37, 3, 8


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    config = config_of(tiny_store(folder / "store").path, folder / "run", evaluation__every=2)
    with api.train(config) as run:
        run.table = parameters(run.session)["entities"].numpy().copy()
        yield run


@pytest.fixture(scope="session")
def export(run, tmp_path_factory):
    """An export of the run; tests that damage it take a copy."""
    return run.export(tmp_path_factory.mktemp("exports") / "export")
