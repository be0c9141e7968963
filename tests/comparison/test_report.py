"""Files, tables and pictures of made-up comparisons."""

from __future__ import annotations

import json

import pytest
from comparison_made_up import comparison, measurement, training

from kge_torchrec.comparison.launch import read_json, write_json
from kge_torchrec.comparison.report import draw, summarize, tables, traffic, verdict

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def whole() -> dict:
    return comparison(
        training(0.0, 1e-6),
        torchrec=[measurement(0, 1e5, 1.1e5, ranks=2), measurement(1, 1e5, 1.2e5, ranks=2)],
        handrolled=[measurement(0, 2e5, 2.1e5, ranks=2), measurement(1, 2e5, 2.4e5, ranks=2)],
    )


def test_speed_counts_the_examples_of_an_epoch():
    """A query of kvssample has several triples: a speed in triples would be none."""
    alike = {name: [measurement(0, 1e5, 1.1e5, ranks=2)] for name in ("torchrec", "handrolled")}
    results = comparison(training(0.0, 1e-6), **alike)
    for regime, counted, other in (
        ("sampled", "triples/s", "queries/s"),
        ("kvssample", "queries/s", "triples/s"),
    ):
        results["config"]["negatives"]["regime"] = regime
        for text in (tables(results), verdict(results)[0]):
            assert counted in text and other not in text


def test_numbers_that_json_lacks_become_null(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"a": [float("nan"), 1.5, (float("inf"),)], "b": {"c": -float("inf")}})
    assert read_json(file) == {"a": [None, 1.5, [None]], "b": {"c": None}}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_tables(whole):
    text = tables(whole)
    rows = [line.split() for line in text.splitlines()]
    assert ["2", "handrolled", "20", "2", "0.5000", "0.7500", "1.0e-06"] in rows
    assert ["2", "torchrec", "107,500", "105,000", "110,000", "1.00", "300"] in rows
    assert ["2", "handrolled", "212,500", "205,000", "220,000", "1.98", "300"] in rows
    assert ["2", "torchrec", "1", "2", "3", "4", "5", "15"] in rows
    duplicated = ["2", "torchrec", "duplicated", "100", "90", "50", "8.0", "4", "all_to_all"]
    assert duplicated in rows
    assert not any(line.endswith(" ") for line in text.splitlines())
    json.dumps(whole["summary"])


def test_memory_of_gpus_has_its_column(whole):
    for by_name in whole["speed"].values():
        by_name["torchrec"][0]["ranks"][1] = {
            **by_name["torchrec"][0]["ranks"][1],
            "peak_device_bytes": 5 << 20,
        }
    whole["summary"] = summarize(whole["speed"])
    rows = [line.split() for line in tables(whole).splitlines()]
    assert any(row[:2] == ["2", "torchrec"] and row[-2:] == ["300", "5"] for row in rows)


def test_traffic_is_the_mean_of_the_ranks():
    results = measurement(0, 1.0, ranks=2)
    other = {"deduplicated": {"rows_sent": 10.0, "collectives": {"all_reduce": 1.0}}}
    one = {"deduplicated": {"rows_sent": 20.0, "collectives": {"all_to_all": 4.0}}}
    results["ranks"] = [{"traffic": one}, {"traffic": other}]
    assert traffic([results])["deduplicated"] == {
        "rows_sent": 15.0,
        "collectives": {"all_to_all": 2.0, "all_reduce": 0.5},
    }


@pytest.mark.slow
def test_all_pictures(whole, tmp_path):
    written = draw(whole, tmp_path)
    assert [file.name for file in written] == [
        "losses.png", "differences.png", "speed.png", "split.png", "traffic.png"
    ]  # fmt: skip
    assert all(file.read_bytes().startswith(PNG) for file in written)


@pytest.mark.parametrize(
    ("results", "names"),
    [
        (comparison(), set()),
        (comparison(training(0.0, steps=0)), set()),
        (comparison(training(0.0, None)), {"losses", "differences"}),
        (comparison(torchrec=[measurement(0, 1.0)]), {"speed", "split", "traffic"}),
    ],
)
@pytest.mark.first_tier("results0-names0", "results1-names1", "results2-names2")
def test_no_picture_without_measurements(results, names, tmp_path):
    assert {file.stem for file in draw(results, tmp_path)} == names
    tables(results)
