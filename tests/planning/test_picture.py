"""Pictures: what is drawn is what the plan says."""

from __future__ import annotations

import re

import pytest
from matplotlib.image import imread
from planned_runs import freebase, planned, workload

from kge_torchrec.planning.memory import PARTS
from kge_torchrec.planning.picture import _COLORS, draw


def text_of(plan, tmp_path, monkeypatch) -> str:
    """The words of the SVG, which matplotlib writes as comments when it draws glyphs."""
    draw(plan, tmp_path / "plan.svg")
    return " ".join(re.findall(r"<!-- (.*?) -->", (tmp_path / "plan.svg").read_text()))


@pytest.mark.slow
def test_plan_is_drawn_as_png(tmp_path):
    draw(planned(workload(), "2xCPU"), tmp_path / "plan.png")
    height, width, _ = imread(tmp_path / "plan.png").shape
    assert height > 400 and width > 400


def test_picture_shows_ranks_parts_and_capacity(tmp_path, monkeypatch):
    words = text_of(planned(freebase(model__dim=400), "8xH100"), tmp_path, monkeypatch)
    for word in ("weights", "optimizer state", "usable 75.14", "capacity 79.1", "adam: fits"):
        assert word in words
    assert len(re.findall(r"\b53\.7\b", words)) == 8


def test_parts_above_the_capacity_are_marked(tmp_path, monkeypatch):
    words = text_of(planned(freebase(model__dim=400), "1xH200"), tmp_path, monkeypatch)
    assert "does not fit" in words
    assert "+254" in words


@pytest.mark.slow
def test_many_ranks_are_grouped(tmp_path, monkeypatch):
    plan = planned(workload(1001, model__dim=8), "64xH100", 8)
    words = text_of(plan, tmp_path, monkeypatch)
    assert "0-61" in words  # 16 rows each
    assert words.count("rank") <= 6


def test_every_part_has_a_color_in_the_order_of_parts():
    assert tuple(_COLORS) == PARTS


def test_main_memory_is_drawn_where_it_matters(tmp_path, monkeypatch):
    plan = planned(freebase(model__dim=400), "8xH100", kernel="fused_uvm_caching")
    words = text_of(plan, tmp_path, monkeypatch)
    assert "main memory of a host" in words
    assert "cache" in words
