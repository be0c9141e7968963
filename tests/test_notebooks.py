"""Notebooks are run, cell by cell, as a reader would."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict = {}
    with matplotlib.rc_context({"backend": "agg"}):
        for number, source in enumerate(sources):
            exec(compile(source, f"{path.name}, code cell {number}", "exec"), names)
        plt.close("all")
    assert len(sources) > 5 and 0.3 < names["test"]["both"]["realistic"]["mrr"] < 1
