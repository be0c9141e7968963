"""What holds for all tests."""

import gc
import os

# Other processes of the tests want the cores; read once, when a test module loads torch.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def pytest_collection_finish(session):
    """What is loaded by now stays: a collection need not walk through torch again."""
    gc.collect()
    gc.freeze()
