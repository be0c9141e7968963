"""Types of entities, of a store or from a file of lines ``entity<TAB>type``; there may be several.

Shapes: N entities, K types, M pairs of an entity that is in the graph and a type.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from kge_torchrec.data.sort import sorted_rows
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError


class TypeTable(NamedTuple):
    """Types as a store has them."""

    names: pa.Array  # (K,)
    indptr: np.ndarray  # (N + 1,) int64, where the types of each entity start
    types: np.ndarray  # (M,) int64, ascending for each entity, each once

    def pairs(self) -> np.ndarray:
        """(M, 2) int64: entity and type."""
        entities = np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))
        return np.stack([entities, self.types], 1)


def table_of(
    names: pa.Array, entities: np.ndarray, types: np.ndarray, num_entities: int
) -> TypeTable:
    """Of pairs of entity (M,) and type (M,), in any order, some perhaps repeated."""
    entities, types = sorted_rows((entities, types), (num_entities, len(names)))
    new = np.ones(len(types), bool)
    new[1:] = (np.diff(entities) != 0) | (np.diff(types) != 0)
    indptr = np.zeros(num_entities + 1, np.int64)
    np.cumsum(np.bincount(entities[new], minlength=num_entities), out=indptr[1:])
    return TypeTable(names, indptr, types[new])


class EntityTypes:
    """The types of all entities of a store.

    Attributes:
        names: (K,) their names, a pyarrow array.
        indptr: (N + 1,) int64, where the types of each entity start in ``types``.
        types: (M,) int64, ascending for each entity.
        ignored: lines of entities that are not in the graph.
    """

    def __init__(self, names: pa.Array, indptr: np.ndarray, types: np.ndarray, ignored: int = 0):
        self.names, self.indptr, self.types, self.ignored = names, indptr, types, ignored

    @classmethod
    def read(cls, path: str | Path, store: TripleStore) -> EntityTypes:
        """Reads a file; lines of entities that are not in the graph are counted.

        Raises DataError for a file that is missing, that is not of two columns, or that has none
        of the graph's entities.
        """
        table = _read(Path(path))
        place = pc.index_in(table["entity"], value_set=store.entities.array)
        known = place.is_valid().to_numpy()
        if not known.any():
            raise DataError(
                f"{path}: none of its {len(table):,} entities is in the graph; a line should be an "
                "entity's label, a tab and a type"
            )
        encoded = table["type"].combine_chunks().dictionary_encode()
        entities = place.drop_null().to_numpy().astype(np.int64)
        types = encoded.indices.to_numpy().astype(np.int64)[known]
        table = table_of(encoded.dictionary, entities, types, store.num_entities)
        return cls(*table, int((~known).sum()))

    @classmethod
    def find(cls, path: str | Path | None, store: TripleStore) -> EntityTypes:
        """Those of a file, or where None is given those that the store has.

        Raises DataError as ``read`` does, and for a store that has none.
        """
        if path is not None:
            return cls.read(path, store)
        table = store.types()
        if table is None:
            raise DataError(
                f"{store.path} has no types of entities: prepare it again with --types-from "
                "RELATION, or name a file of lines entity, tab, type"
            )
        return cls(*table)

    def __len__(self) -> int:
        return len(self.names)

    def of(self, entities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The types of entities (B,): which of the B (M,), ascending, and its type (M,)."""
        starts = self.indptr[entities]
        counts = self.indptr[entities + 1] - starts
        which = np.repeat(np.arange(len(entities)), counts)
        offset = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        return which, self.types[starts[which] + offset]


def _read(path: Path) -> pa.Table:
    columns = {"entity": pa.large_string(), "type": pa.large_string()}
    try:
        return csv.read_csv(
            path,
            read_options=csv.ReadOptions(column_names=list(columns)),
            parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=csv.ConvertOptions(column_types=columns),
        )
    except FileNotFoundError:
        raise DataError(f"{path}: no such file of entities and their types") from None
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{path}: {error}; every line should be an entity's label, a tab and a type"
        ) from None
