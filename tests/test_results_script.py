"""scripts/results.py: records of runs, and the tables made of them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from training_runs import config_of, tiny_store

from kge_torchrec import api
from kge_torchrec.config.parser import load_config

SCRIPT = Path(__file__).parents[1] / "scripts" / "results.py"


@pytest.fixture(scope="module")
def results():
    spec = importlib.util.spec_from_file_location("results", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of one config, and a run of another."""
    folder = tmp_path_factory.mktemp("runs")
    store = tiny_store(folder / "fb15k-237").path
    keys = {"train__epochs": 4, "evaluation__every": 2, "model__dim": 8}
    configs = [config_of(store, folder / str(seed), seed=seed, **keys) for seed in (0, 1)]
    configs.append(config_of(store, folder / "other", **{**keys, "model__dim": 4}))
    for config in configs:
        api.train(config).close()
    return [Path(config.run.dir) for config in configs]


def test_record_contains_the_evidence_of_its_figures(results, runs, tmp_path):
    results.add_record(tmp_path / "both", runs[:2], "a note", "abc1234")
    record = json.loads((tmp_path / "both" / "record.json").read_text())
    assert record["commit"] == "abc1234"
    assert record["data"] == "fb15k-237" and [run["seed"] for run in record["runs"]] == [0, 1]
    outcomes = json.loads((runs[1] / "results.json").read_text())
    assert record["runs"][1]["test"]["both"]["mrr"] == pytest.approx(
        outcomes["test"]["both"]["realistic"]["mrr"], abs=1e-6
    )
    curve = record["runs"][0]["curve"]
    assert [point["epoch"] for point in curve] == [2, 4]
    assert 0 <= curve[0]["seconds"] <= curve[1]["seconds"] <= record["runs"][0]["seconds"] + 0.2
    config = load_config(tmp_path / "both" / "config.yaml")  # which train takes as it is
    assert config.model.dim == 8 and config.run.dir is None


def test_runs_of_another_config_do_not_count_as_seeds(results, runs, tmp_path):
    with pytest.raises(SystemExit, match="they differ in model"):
        results.add_record(tmp_path / "mixed", runs)


def test_tables_are_written_between_the_marks(results, tmp_path):
    runs = [{"test": {"both": {"mrr": mrr, "hits@1": 0.2, "hits@3": 0.4, "hits@10": 0.5}},
             "curve": [{"epoch": 1, "seconds": 60.0, "mrr": 0.31},
                       {"epoch": 2, "seconds": 120.0, "mrr": 0.345}],
             "seconds": 120.0, "epochs": 2} for mrr in (0.34, 0.36)]  # fmt: skip
    record = {"data": "fb15k-237", "commit": "abc", "note": "quiet", "runs": runs}
    page = f"top {results.START} old {results.STOP} bottom"
    made = results.with_tables(page, {"mine": record})
    assert made.startswith("top ") and made.endswith(" bottom") and " old " not in made
    assert ".3500 ± .0141" in made and "- `mine`: quiet" in made
    assert "| `mine` | 1.0 | 2.0 | 2.0 | - |" in made
    assert results.with_tables(made, {"mine": record}) == made


def test_page_matches_the_records(results):
    page = results.PAGE.read_text("utf-8")
    assert results.with_tables(page, results.read_records(results.RECORDS)) == page
