"""Which variants of a parametrized test are in the first tier; the others get the mark ``slow``.

    @pytest.mark.covering          each value of each parameter occurs once or more
    @pytest.mark.covering(2)       each pair of values of two parameters occurs once or more
    @pytest.mark.first_tier(*ids)  these variants

A product of parameters finds little that a covering table does not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import combinations

import pytest


def move_variants(items: list[pytest.Item]) -> None:
    """Give ``slow`` to the variants that the marks of their function leave to the second tier.

    Raises:
        pytest.UsageError: ``first_tier`` names a variant that does not exist.
    """
    functions = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            functions[item.parent.nodeid, item.originalname].append(item)
    for name, variants in functions.items():
        covering = variants[0].get_closest_marker("covering")
        named = variants[0].get_closest_marker("first_tier")
        if covering is not None:
            stay = {item.callspec.id for item in cover(variants, *covering.args)}
        elif named is not None:
            stay = {*named.args}
            if unknown := stay - {item.callspec.id for item in variants}:
                raise pytest.UsageError(f"{'::'.join(name)}: no variants {sorted(unknown)}")
        else:
            continue
        for item in variants:
            if item.callspec.id not in stay:
                item.add_marker(pytest.mark.slow)


def cover(variants: list[pytest.Function], strength: int = 1) -> list[pytest.Function]:
    """Choose few variants in which all values, or all pairs of them, occur.

    Where several add as much, the one with the values that occur least is chosen.
    """
    values = {item: values_of(item) for item in variants}
    parts = {item: {*combinations(own, strength)} for item, own in values.items()}
    missing, uses, chosen = set().union(*parts.values()), Counter(), []
    while missing:
        most = max(len(own & missing) for own in parts.values())
        best = min(
            (item for item, own in parts.items() if len(own & missing) == most),
            key=lambda item: sum(uses[value] for value in values[item]),
        )
        chosen.append(best)
        missing -= parts.pop(best)
        uses.update(values[best])
    return chosen


def values_of(item: pytest.Function) -> list[tuple]:
    """Return the values of a variant, by their text or identity, which a loss or tensor lacks."""
    plain = (str, int, float, type(None))
    return [
        (name, repr(value) if isinstance(value, plain) else id(value))
        for name, value in sorted(item.callspec.params.items())
    ]
