"""What holds for all tests."""

import gc

from kge_torchrec.environment import limit_spinning

limit_spinning()  # as in the programs, before any test module loads torch


def pytest_collection_finish(session):
    """What is loaded by now stays: a collection need not walk through torch again."""
    gc.collect()
    gc.freeze()
