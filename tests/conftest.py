"""What holds for all tests."""

import gc
import os

import pytest

# Other processes of the tests want the cores; read once, when a test module loads torch.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")


@pytest.fixture(scope="session", autouse=True)
def shared_folders(tmp_path_factory):
    """Where tests keep what they share, which pytest takes away with its other folders."""
    os.environ["KGE_TESTS_SHARED"] = str(tmp_path_factory.mktemp("shared"))


def pytest_collection_finish(session):
    """What is loaded by now stays: a collection need not walk through torch again."""
    gc.collect()
    gc.freeze()
