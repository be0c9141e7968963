"""Text tables: alignment, numbers and their units, and the formats for other programs."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kge_torchrec.tables import SHORTEST, aligned, cut, table

ROWS = [
    {"run": "a_b", "step": 1200, "mrr": 0.25, "hits": (0.5, 0.125), "memory": 2048},
    {"run": "long name", "step": 3, "mrr": None, "hits": (0.5, None), "memory": 7},
]


def test_text_is_left_and_numbers_are_right_in_their_units():
    shown = {"memory": lambda size: f"{size / 1024:.1f} KiB", "hits": ".2f"}
    assert table(ROWS, shown=shown).splitlines() == [
        "run         step     mrr         hits   memory",
        "-" * 46,
        "a_b        1,200  0.2500  0.50 ± 0.12  2.0 KiB",
        "long name      3       -         0.50  0.0 KiB",
    ]


def test_formats_for_programs_have_numbers_as_they_are():
    read = json.loads(table(ROWS, "json", {"mrr": ".1f"}))
    assert read[0] == {"run": "a_b", "step": 1200, "mrr": 0.25, "hits": 0.5, "hits_std": 0.125,
                       "memory": 2048}  # fmt: skip
    assert read[1]["hits_std"] is None and read[1]["mrr"] is None
    lines = list(csv.DictReader(io.StringIO(table(ROWS, "csv"))))
    assert lines[0]["hits_std"] == "0.125" and lines[1]["mrr"] == ""
    latex = table(ROWS, "latex").splitlines()
    assert latex[0] == r"\begin{tabular}{lrrrr}"
    assert latex[4] == r"a\_b & 1,200 & 0.2500 & 0.5000 $\pm$ 0.1250 & 2,048 \\"


def test_heading_of_two_lines_ends_at_the_rule():
    lines = table([{"group": "x", "head\nmrr": 0.5, "tail\nmrr": 1.0}]).splitlines()
    assert lines[0] == "         head    tail" and lines[1] == "group     mrr     mrr"
    assert lines[2] == "-" * 21 and lines[3] == "x      0.5000  1.0000"


def test_columns_of_amounts_are_on_the_right():
    lines = aligned(
        [["part", "memory", "fits"], ["rows", "1.5 GiB", "yes"], ["all", "31 ms", "no"]]
    )
    assert lines == ["part   memory  fits", "rows  1.5 GiB  yes", "all     31 ms  no"]
    assert aligned([]) == []


@given(
    st.lists(st.tuples(st.text("abc", max_size=60), st.integers(),
                       st.text("d", min_size=1, max_size=60)), min_size=1, max_size=5),
    st.integers(1, 100),
)  # fmt: skip
def test_wide_columns_are_cut_to_the_width_or_to_the_least_one(rows, width):
    texts = [[first, f"{number}", last] for first, number, last in rows]
    lines = aligned(texts, [False, True, False], width)
    assert len(lines) == len(rows)
    number = max(len(row[1]) for row in texts)
    least = sum(min(SHORTEST, max(len(row[i]) for row in texts)) for i in (0, 2))
    whole = sum(max(len(row[i]) for row in texts) for i in (0, 2))
    widest = max(width, least + number + 4)
    assert max(map(len, lines)) == min(whole + number + 4, widest)  # no more is cut than needed
    assert all(row[1] in line for row, line in zip(texts, lines, strict=True))
    uncut = aligned(texts, [False, True, False])
    assert all(row[0] in line and row[2] in line for row, line in zip(texts, uncut, strict=True))


@pytest.mark.parametrize("width", range(1, 12))
def test_cut_keeps_both_ends(width):
    text = "http://a/b"
    short = cut(text, width)
    assert len(short) == min(width, len(text))
    start, _, end = short.partition("\u2026")
    assert text.startswith(start) and text.endswith(end)
    assert short == text or 0 <= len(start) - len(end) <= 1
