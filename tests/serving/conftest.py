"""A client of a small server."""

from __future__ import annotations

import pytest
from serving_models import model_of
from starlette.testclient import TestClient
from training_runs import config_of, tiny_store

from kge_torchrec import api
from kge_torchrec.serving import app as app_file
from kge_torchrec.serving.app import create_app


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    return tiny_store(tmp_path_factory.mktemp("serving") / "store")


@pytest.fixture(scope="session")
def model(store):
    return model_of(store)


@pytest.fixture(scope="module")
def client(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_file, "MAX_BODY", 10_000)
        app = create_app(model, "tiny", 20)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def trained_client(store, tmp_path_factory):
    """A client of a trained run, and the run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    config = config_of(store.path, folder, train__epochs=1)
    with api.train(config) as run, TestClient(create_app(run.model, "run")) as client:
        yield client, run
