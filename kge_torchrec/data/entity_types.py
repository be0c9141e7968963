"""Types of entities, from a file of lines ``entity<TAB>type``; an entity may have several.

Shapes: N entities, K types, M lines of entities that are in the graph.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from kge_torchrec.data.sort import sorted_rows
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError


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
        sizes = (store.num_entities, len(encoded.dictionary))
        entities, types = sorted_rows((entities, types), sizes)
        indptr = np.zeros(store.num_entities + 1, np.int64)
        np.cumsum(np.bincount(entities, minlength=store.num_entities), out=indptr[1:])
        return cls(encoded.dictionary, indptr, types, int((~known).sum()))

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
