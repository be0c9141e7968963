"""A run that an earlier version left behind, for tests that it can still be used.

``fixtures/run_of_289f43d.tar.gz`` was made by commit 289f43d on two ranks: the files of a graph
(data), a run of 2 epochs on it, an export of that run, and what it gave: metrics (expected.json)
and the parameters after resuming to 4 epochs.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

FIXTURE = Path(__file__).parent / "fixtures" / "run_of_289f43d.tar.gz"


def unpack_old_run(folder: Path) -> Path:
    """Unpacks the fixture; returns the run's folder.  The others lie beside it."""
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "run"
