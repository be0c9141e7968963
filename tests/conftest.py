"""Fixtures and settings of all tests."""

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile

import hypothesis
import pytest
from _pytest.logging import catching_logs

# Every worker, and every process that a test starts, reads the same files: keep their bytecode.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests write thousands of small files, which a disk makes wait for. In memory a third of the time
# of such tests goes. A test that passes leaves nothing (pyproject.toml, tmp_path_retention_policy).
if "TMPDIR" not in os.environ and os.path.isdir("/dev/shm"):
    memory = "/dev/shm"
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30:
        os.environ["TMPDIR"], tempfile.tempdir = memory, None
os.fsync = lambda file: None  # no test cuts the power, and disks of test machines are slow
# Without a GPU, Triton's kernels run in its interpreter; read when torch loads Triton.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Other processes of the tests want the cores; read once, when a test module loads torch.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# Of tests that name no number; without a deadline, as other work slows tests.
hypothesis.settings.register_profile("few", max_examples=25, deadline=None)
hypothesis.settings.load_profile("few")


def catch_at_root(catch, enter=catching_logs.__enter__):
    """Listen only to the root logger.

    pytest looks through torch's thousands of loggers six times per test, for some that do not
    propagate; that took half the time of a small test.
    """
    manager = logging.root.manager
    loggers, manager.loggerDict = manager.loggerDict, {}
    try:
        return enter(catch)
    finally:
        manager.loggerDict = loggers


catching_logs.__enter__ = catch_at_root


@pytest.fixture(scope="session", autouse=True)
def shared_folders(tmp_path_factory):
    """Folder for files that tests share; pytest removes it with its other folders."""
    os.environ["KGE_TESTS_SHARED"] = str(tmp_path_factory.mktemp("shared"))
    from kge_torchrec.data import numbering

    numbering.BUCKETS = 4  # any number gives the same store; 64 take twice as long


@pytest.fixture(scope="session")
def store():
    """The path of a store of 37 entities, 3 relations and 150 random triples."""
    from training_runs import small_store  # which loads torch

    return small_store()


@pytest.fixture
def ctrl_c():
    """Sends SIGINT, which raises KeyboardInterrupt even where a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Begin with the folders whose tests take longest, so that all processes end together.

    ``make test`` hands out the files in this order.
    """
    long = ["training", "tuning", "growth", "kernels", "comparison", "distributed"]
    order = {name: number for number, name in enumerate(long)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(long)))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Freeze what a file has imported as well: each training collects garbage at its end."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_collection_finish(session):
    """Freeze the loaded objects, so that the garbage collector skips those of torch."""
    if "torch" in sys.modules:
        seed_only_the_cpu()
    gc.collect()
    gc.freeze()


def seed_only_the_cpu():
    """Without a GPU, torch notes where it was called for three kinds of devices, in 2 ms."""
    import torch

    if not torch.cuda.is_available():
        seed = torch.default_generator.manual_seed
        torch.random._manual_seed_impl = lambda value: seed(int(value))
