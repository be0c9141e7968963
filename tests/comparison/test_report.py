"""Figures and tables of made-up comparisons."""

from __future__ import annotations

from typing import Any

from plain_config import PLAIN

from kge_torchrec.comparison import PARTS, summary, text
from kge_torchrec.config.parser import config_from_dict


def measurement(repeat: int, *rates: float) -> dict[str, Any]:
    """A repeat of a variant on two ranks; of all variants only the rates of the blocks differ."""
    sent = {"ids_looked_up": 100.0, "rows_sent": 90.0, "integers_sent": 50.0, "bytes_sent": 2048.0}
    rank = {
        "peak_memory_bytes": 300 << 20,
        "split": {part: float(i) for i, part in enumerate(PARTS, 1)},
        "traffic": {
            "deduplicated": {**sent, "collectives": {"all_to_all": 4.0}},
            "duplicated": {**sent, "bytes_sent": 8192.0, "collectives": {"all_to_all": 4.0}},
        },
    }
    other = {**rank, "traffic": {**rank["traffic"], "deduplicated": {**sent, "collectives": {}}}}
    return {"repeat": repeat, "triples_per_second": list(rates), "ranks": [rank, other]}


def repeats(*medians: float) -> list[dict]:
    """A repeat for each median, of three blocks, the outer ones far off."""
    return [measurement(i, 0.5 * rate, rate, 1.5 * rate) for i, rate in enumerate(medians)]


def comparison(difference: float | None, **speed: list[dict]) -> dict[str, Any]:
    """Two variants at world size 2, with their largest difference after 20 steps."""
    metrics = {"both": {"realistic": {"mrr": 0.5, "hits@10": 0.75}}}
    training = {
        "steps": 20,
        "losses": {"torchrec": [2.0] * 20, "handrolled": [2.0] * 20},
        "differences": {"handrolled": [{"step": 20, "entities": difference, "dense": 0.0}]},
        "metrics": {"torchrec": metrics, "handrolled": metrics},
    }
    by_world_size = {"2": speed} if speed else {}
    return {
        "config": config_from_dict(PLAIN).to_dict(),
        "training": {"2": training},
        "summary": summary(by_world_size),
        "failure": None,
    }


def figures(ours: list[dict], base: list[dict]) -> dict[str, tuple]:
    """(median, lowest, highest) of the speed, and of its ratio to the base."""
    found = summary({"2": {"base": base, "ours": ours}})["2"]["ours"]
    return {name: tuple(found[name].values()) for name in ("triples_per_second", "ratio_to_first")}


def test_spread_and_ratio():
    ours, base = repeats(200, 260, 220), repeats(100, 104, 100)
    results = figures(ours, base)
    assert results == {"triples_per_second": (220, 200, 260), "ratio_to_first": (2.2, 2.0, 2.5)}
    results = figures(ours[:1], base)
    assert results == {
        "triples_per_second": (200, 100, 300),  # of its blocks
        "ratio_to_first": (2.0, 2.0, 2.0),
    }


def test_tables():
    said = text(comparison(1e-6, torchrec=repeats(1e5, 1.1e5), handrolled=repeats(2e5, 2.2e5)))
    rows = [line.split() for line in said.splitlines()]
    assert ["2", "handrolled", "20", "2", "0.5000", "0.7500", "1.0e-06"] in rows
    assert ["2", "torchrec", "105,000", "100,000", "110,000", "1.00", "300"] in rows
    assert ["2", "handrolled", "210,000", "200,000", "220,000", "2.00", "300"] in rows
    assert ["2", "torchrec", "1", "2", "3", "4", "5", "15"] in rows
    sent = ["2", "torchrec", "deduplicated", "100", "90", "50", "2.0", "2", "all_to_all"]
    assert sent in rows  # the mean of the ranks


def test_what_was_not_measured_has_no_figure():
    rows = [line.split() for line in text(comparison(None)).splitlines()]
    assert ["2", "handrolled", "20", "2", "0.5000", "0.7500", "-"] in rows
    assert "triples/s" not in text(comparison(None))


def test_a_failure_says_where_and_why():
    failure = {"where": "2 ranks, speed of handrolled, repeat 1 of 3", "rank": 1,
               "reason": "was killed by SIGKILL"}  # fmt: skip
    said = text(comparison(None) | {"failure": failure}).splitlines()[-1]
    assert said == (
        "incomplete: 2 ranks, speed of handrolled, repeat 1 of 3: rank 1 was killed by SIGKILL"
    )
    failure |= {"rank": None, "reason": "it was interrupted"}
    assert text(comparison(None) | {"failure": failure}).endswith("of 3: it was interrupted")
