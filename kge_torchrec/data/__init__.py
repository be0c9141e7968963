"""Read triples, store them, and make the batches of a rank: `readers`, `store`, `batches`."""

from typing import Literal

ENTITY = "entity"  # name of the entity table and of its only feature, in every backend
FEATURES = "features"  # name of the table of features beside those of node types
Side = Literal["head", "tail"]  # the missing entity of a query
SIDES: tuple[Side, ...] = ("head", "tail")
OTHER: dict[str, Side] = {"head": "tail", "tail": "head"}
HEAD, RELATION, TAIL = range(3)  # columns of triples of ids
COLUMNS = ("head", "relation", "tail")  # columns of triples of labels
WEIGHT = "weight"  # a fourth column, of numbers
TIME = "time"  # a column of numbers or dates, by which triples are split
SPLITS = ("train", "valid", "test")


def answer_column(side: str) -> int:
    """Return the column of a triple that answers its query for a side."""
    return HEAD if side == "head" else TAIL
