"""Which variants of a parametrized test are in the first tier."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

import pytest
from tiers import cover, move_variants


class Variant:
    """An item of pytest, as far as the tiers read it."""

    originalname, parent = "test_it", SimpleNamespace(nodeid="test_file.py")

    def __init__(self, *marks: pytest.MarkDecorator, **params: object):
        self.marks = [mark.mark for mark in marks]
        name = "-".join(map(str, params.values()))
        self.callspec = SimpleNamespace(params=params, id=name)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def variants(*marks: pytest.MarkDecorator) -> list[Variant]:
    values = product("abcd", (1, 2, 3), (None, False))
    return [Variant(*marks, x=x, y=y, z=z) for x, y, z in values]


def first_tier(items: list[Variant]) -> list[str]:
    move_variants(items)
    return [item.callspec.id for item in items if item.get_closest_marker("slow") is None]


@pytest.mark.parametrize("strength, count", [(1, 4), (2, 12), (3, 24)])
def test_all_values_or_pairs_occur_in_few_variants(strength, count):
    items = variants()
    chosen = cover(items, strength)
    assert len(chosen) == count

    def occurring(of: list[Variant]) -> set:
        return {c for item in of for c in combinations(item.callspec.params.items(), strength)}

    assert occurring(chosen) == occurring(items)


def test_values_occur_about_equally_often():
    """Every scorer once would else be only the scorer's first side."""
    items = [Variant(scorer=n, side=side) for n in range(10) for side in ("head", "tail")]
    sides = [item.callspec.params["side"] for item in cover(items)]
    assert sorted(sides) == ["head"] * 5 + ["tail"] * 5


def test_marks_choose_the_first_tier():
    assert len(first_tier(variants())) == 24
    assert len(first_tier(variants(pytest.mark.covering))) == 4
    assert len(first_tier(variants(pytest.mark.covering(2)))) == 12
    assert first_tier(variants(pytest.mark.first_tier("a-1-None"))) == ["a-1-None"]


def test_unknown_variants_are_reported():
    with pytest.raises(pytest.UsageError, match=r"test_file.py::test_it: no variants \['e-1'\]"):
        move_variants(variants(pytest.mark.first_tier("a-1-None", "e-1")))
