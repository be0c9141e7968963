"""The store that is prepared, and what its triples must have, in memory and on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kge_torchrec.data.readers.files import WHOLE
from kge_torchrec.data.split import Split
from kge_torchrec.errors import DataError


@dataclass(frozen=True)
class Target:
    """The store to be written, see `prepare` and `extend_store`."""

    output: Path
    progress: bool
    allow_unseen_relations: bool
    overwrite: bool = False
    log_notes: bool = False
    split: Split = Split()  # noqa: RUF009 - immutable
    needs_weights: bool = False
    features: str | Path | None = None
    spread: int = 1


def check_triples(counts: Mapping[str, int], notes: Mapping[str, Any]) -> None:
    """Raise DataError if there is no training triple.

    Args:
        counts: Triples by split.
        notes: What was noted while reading; "literals" counts the triples that were left out.
    """
    if counts.get(WHOLE) or counts.get("train"):
        return
    literals = sum(notes.get("literals", {}).values())
    if literals:
        raise DataError(
            f"no training triples: {literals:,} have a literal as object; take them with "
            "data.literals keep"
        )
    raise DataError("no training triples; check the train file or data.split.ratio")


def check_weights(weighted: Mapping[str, int], triples: Mapping[str, int], needed: bool) -> None:
    """Check that all or none of the triples of a split have weights.

    Args:
        weighted: Triples with a weight by split.
        triples: Triples by split.
        needed: Whether the training triples must have weights.

    Raises:
        DataError: Weights are needed and missing, or only some triples of a split have them.
    """
    for split, count in weighted.items():
        if 0 < count < triples[split]:
            raise DataError(f"{split}: some of its triples have a weight and others have none")
    if needed and not any(weighted.get(split) for split in ("train", WHOLE)):
        raise DataError(
            "the training triples have no weights: give each a fourth column, a positive number"
        )


def unseen_error(unseen: Mapping[str, Mapping[str, int]]) -> DataError:
    """Return the error for relations that only valid or test has, with their counts by split."""
    cases = [
        f"{label!r} ({count} triples in {split})"
        for split, counts in unseen.items()
        for label, count in counts.items()
    ]
    more = f" and {len(cases) - 5} more" if len(cases) > 5 else ""
    return DataError(
        f"relations without a training triple: {', '.join(cases[:5])}{more}; nothing can be "
        "learnt for them. Correct the files, or keep them with data.allow_unseen_relations true"
    )
