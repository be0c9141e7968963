"""Tests of a card: `make gpu`, at most nine minutes, what decides most first.

`KGE_GPU_TESTS=cpu` runs them in small sizes without a card, which shows that the tests themselves
work. `KGE_GPU_REPORT=FILE` writes a line of JSON after each test, with the figures of `note`.
"""

import faulthandler
import json
import os
import signal
import time

import pytest
import torch

ORDER = ("test_machine", "test_table", "test_speed", "test_training", "test_ranking")
SECONDS = {"test_speed": 60, "test_training": 40}  # of a test; others have 25
WHOLE = 540
DEVICE = os.environ.get("KGE_GPU_TESTS", "cuda")
_BEGUN = time.monotonic()


def pytest_collection_modifyitems(items):
    """Mark the tests of this folder, and begin with what decides most."""
    here = [item for item in items if item.path.parent.name == "gpu"]
    for item in here:
        item.add_marker(pytest.mark.gpu)
    here.sort(key=lambda item: ORDER.index(item.path.stem))
    items[:] = here + [item for item in items if item.path.parent.name != "gpu"]


@pytest.fixture(autouse=True)
def in_time(request):
    """Fail a test after its seconds; end the program if it hangs inside the driver."""
    if time.monotonic() - _BEGUN > WHOLE and DEVICE == "cuda":
        pytest.skip(f"the {WHOLE} s of all tests are over")
    seconds = SECONDS.get(request.path.stem, 25) * (1 if DEVICE == "cuda" else 4)

    def end(*_):
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(seconds + 20, exit=True)
    yield
    signal.alarm(0)
    faulthandler.cancel_dump_traceback_later()
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def device():
    """The card, or the CPU that stands for one."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.fail(f"torch {torch.__version__} finds no CUDA device")
    return torch.device(DEVICE)


@pytest.fixture
def note(record_property):
    """Print and keep a figure: note("a step", 2.5, "ms")."""

    def keep(name, value, unit=""):
        print(f"{name}: {value:,.4g} {unit}")
        record_property(f"{name} [{unit}]", value)

    return keep


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Write the line of JSON; stop where the CUDA context is lost, as later tests mean nothing."""
    report = (yield).get_result()
    if call.excinfo is not None and "CUDA error" in str(call.excinfo.value):
        item.session.shouldstop = "the CUDA context is lost"
    # One that was skipped as the time was over, or failed in a fixture, has no call.
    is_told = report.when == "call" or report.outcome != "passed"
    if is_told and "KGE_GPU_REPORT" in os.environ:
        line = {"test": item.nodeid, "outcome": report.outcome, "seconds": report.duration}
        line |= {"figures": dict(report.user_properties), "why": report.longreprtext[-500:]}
        with open(os.environ["KGE_GPU_REPORT"], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
