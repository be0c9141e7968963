"""A small graph and a DistMult model, for comparing how programs rank the same scores.

``scripts/confirm_evaluation.py`` gives them to other programs, where this package is not installed,
so the file needs only NumPy. Scores are small integers and tie often. Entity k is in valid only,
and entity l in test only.
"""

from pathlib import Path

import numpy as np

ENTITIES = {
    "a": (1, -1, 1), "b": (0, 0, 1), "c": (1, 1, 1), "d": (-1, 1, 1), "e": (0, 0, 1),
    "f": (-1, -1, 1), "g": (-1, 1, 1), "h": (0, 1, 1), "i": (-1, 1, 1), "j": (0, -1, 1),
    "k": (-1, 1, 1), "l": (0, 0, 1),
}  # fmt: skip
RELATIONS = {"r": (1, 1, 1), "s": (1, 2, 1), "t": (2, 1, 1)}
DIM = 3
_TRIPLES = {
    "train": "jrg bra bta fth jsc grf hsd ita hrc jsb fra ath esc dsh ctb csb jti ith",
    "valid": "bsf atf hta irh fsg krg",
    "test": "eti eth irg htj bre drg isj bsl",
}
SPLITS = {split: [tuple(word) for word in words.split()] for split, words in _TRIPLES.items()}
# Five candidates for the head and five for the tail of each test triple.
CANDIDATES = {
    "head": ["ijajf", "ghdla", "degeb", "aaabl", "chjcd", "fdlck", "jkbeh", "fhiha"],
    "tail": ["lgkde", "kcaei", "bkecg", "kkkda", "jijaa", "geflc", "gddjb", "dbbdi"],
}


def entity_rows(labels: list[str], untied: bool = False) -> np.ndarray:
    """Return the rows (N, 3) float32 of entities.

    Args:
        labels: The entities.
        untied: Add less than 1e-5 to the last element, so that equal scores differ a little.
    """
    rows = np.array([ENTITIES[label] for label in labels], np.float32)
    order = list(ENTITIES)
    rows[:, 2] += untied * np.array([8e-7 * (1 + order.index(label)) for label in labels])
    return rows


def relation_rows(labels: list[str]) -> np.ndarray:
    """Return the rows (R, 3) float32 of relations; an inverse has that of its relation."""
    return np.array([RELATIONS[label[0]] for label in labels], np.float32)


def splits_of_trained() -> dict[str, list[tuple[str, str, str]]]:
    """Return the splits without triples whose head or tail is not in train."""
    trained = {entity for triple in SPLITS["train"] for entity in triple[::2]}
    return {
        split: [triple for triple in triples if trained.issuperset(triple[::2])]
        for split, triples in SPLITS.items()
    }


def write(folder: Path) -> None:
    """Write train.txt, valid.txt and test.txt."""
    for split, triples in SPLITS.items():
        lines = ["\t".join(triple) + "\n" for triple in triples]
        (folder / f"{split}.txt").write_text("".join(lines), encoding="utf-8")
