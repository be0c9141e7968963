"""Measurements as a comparison would make them, made up for the tests of its report."""

from __future__ import annotations

from typing import Any

from plain_config import PLAIN

from kge_torchrec.comparison.measurements import PARTS
from kge_torchrec.comparison.report import summarize
from kge_torchrec.config.parser import config_from_dict

LEARNING_RATE = PLAIN["train.lr"]


def measurement(repeat: int, *rates: float, ranks: int = 1) -> dict[str, Any]:
    """One variant in one repeat: triples/s of each block, the rest the same for all."""
    traffic = {
        "ids_looked_up": 100.0,
        "rows_sent": 90.0,
        "integers_sent": 50.0,
        "bytes_sent": 2048.0,
        "collectives": {"all_to_all": 4.0} if ranks > 1 else {},
        "payload_bytes": {"all_to_all": 4096.0} if ranks > 1 else {},
    }
    rank = {
        "threads": 1,
        "triples_per_second": list(rates),
        "peak_memory_bytes": 300 << 20,
        "split": {part: float(i) for i, part in enumerate(PARTS, 1)},
        "traffic": {"deduplicated": traffic, "duplicated": {**traffic, "bytes_sent": 8192.0}},
    }
    return {"repeat": repeat, "triples_per_second": list(rates), "ranks": [rank] * ranks}


def training(*differences: float | None, steps: int = 20, mrr: float = 0.5) -> dict[str, Any]:
    """Two variants; the differences are at step 0 and, if there are two, at the last one."""
    at = [0, steps]
    measured = [
        {"step": step, "entities": value, "dense": 0.0}
        for step, value in zip(at, differences, strict=False)
    ]
    metrics = {"both": {"realistic": {"mrr": mrr, "hits@10": 0.75}}}
    return {
        "complete": True,
        "steps": steps,
        "threads": 1,
        "losses": {"torchrec": [2.0] * steps, "handrolled": [2.0] * steps},
        "differences": {"handrolled": measured},
        "split": "test",
        "metrics": {"torchrec": metrics, "handrolled": metrics},
    }


def comparison(training_found: dict | None = None, **speed: list[dict]) -> dict[str, Any]:
    """At world size 2; ``speed``: measurements by variant."""
    by_world_size = {"2": speed} if speed else {}
    return {
        "format": 1,
        "complete": True,
        "failure": None,
        "verdict": [],
        "engines": ["torchrec", "handrolled"],
        "config": config_from_dict(PLAIN).to_dict(),
        "training": {"2": training_found} if training_found else {},
        "speed": by_world_size,
        "summary": summarize(by_world_size),
    }
