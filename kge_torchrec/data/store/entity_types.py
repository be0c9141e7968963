"""Types of entities: of a store, of a file, or from triples of one relation such as rdf:type.

An entity may have several types.

Shapes: N entities, K types, M pairs of an entity and a type, B queries, T triples.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data.numbering import Labels
from kge_torchrec.data.sort import pointers, sorted_rows
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import Ranges, gathered
from kge_torchrec.data.streams import read_tsv
from kge_torchrec.errors import DataError


@dataclass(frozen=True)
class EntityTypes:
    """The types of all entities of a store.

    Args:
        names: (K,) labels of the types, a pyarrow array.
        indptr: (N + 1,) int64, where the types of each entity start in ``types``.
        types: (M,) int64, ascending for each entity, each once.
        ignored: Number of lines of entities that are not in the graph.
    """

    names: pa.Array
    indptr: np.ndarray
    types: np.ndarray
    ignored: int = 0

    @classmethod
    def of_pairs(
        cls, names: pa.Array, entities: np.ndarray, types: np.ndarray, num_entities: int
    ) -> EntityTypes:
        """Return the types from pairs of entity (M,) and type (M,), in any order, with repeats."""
        entities, types = sorted_rows((entities, types), (num_entities, len(names)))
        new = np.ones(len(types), bool)
        new[1:] = (np.diff(entities) != 0) | (np.diff(types) != 0)
        return cls(names, pointers(entities[new], num_entities), types[new])

    @classmethod
    def read(cls, path: str | Path, store: TripleStore) -> EntityTypes:
        """Read a file of lines "entity, tab, type"; count entities that are not in the graph.

        Raises:
            DataError: The file is missing, has other columns or none of the graph's entities.
        """
        table = read_types(Path(path))
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
        table = cls.of_pairs(encoded.dictionary, entities, types, store.num_entities)
        return replace(table, ignored=int((~known).sum()))

    @classmethod
    def find(cls, path: str | Path | None, store: TripleStore) -> EntityTypes:
        """Return the types of a file or, where ``path`` is None, of the store.

        Raises:
            DataError: The file is unusable (see ``read``), or the store has no types.
        """
        if path is not None:
            return cls.read(path, store)
        table = store.types()
        if table is None:
            raise DataError(
                f"{store.path} has no types of entities: prepare it again with data.types_from "
                "RELATION, or name a file of lines entity, tab, type"
            )
        return cls(*table)

    def __len__(self) -> int:
        return len(self.names)

    def pairs(self) -> np.ndarray:
        """Return the pairs of entity and type, (M, 2) int64."""
        entities = np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))
        return np.stack([entities, self.types], 1)

    def of(self, entities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the types of entities (B,): which of the B (M,), ascending, and its type (M,)."""
        ends = self.indptr[entities], self.indptr[entities + 1]
        return gathered([Ranges(self.types, np.arange(len(entities)), *ends)])


def read_types(path: Path) -> pa.Table:
    """Return the columns entity and type of a file of lines entity, tab, type.

    Raises:
        DataError: The file is missing, or has other columns.
    """
    try:
        return read_tsv(path, {"entity": pa.large_string(), "type": pa.large_string()})
    except FileNotFoundError:
        raise DataError(f"{path}: no such file of entities and their types") from None
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{path}: {error}; every line should be an entity's label, a tab and a type"
        ) from None


RDF_TYPE = "http://www.w3.org/1999/02/22-rdf-syntax-ns#type"
USES = ("drop", "keep")  # what becomes of the triples


class TypeTriples:
    """Finds the triples of a relation, such as rdf:type, and makes types of entities of them.

    Triples that are dropped are not ranked, so those of all splits give types.  Of triples that
    stay only those of train give types: the others would leak answers of test.

    Args:
        relation: Label of the relation; ``rdf:type`` also stands for its IRI.
        use: "drop" takes the triples out of the graph, "keep" leaves them in.
        base: The store that is extended, whose own types come first.
    """

    def __init__(self, relation: str, use: str = "drop", base: TripleStore | None = None):
        if use not in USES:
            raise DataError(f"type_triples must be one of {', '.join(USES)}, not {use!r}")
        self.relation, self.use = relation, use
        names = [relation, RDF_TYPE] if relation == "rdf:type" else [relation]
        self._names = pa.array(names, pa.large_string())
        self._base = base if use == "drop" else None  # triples that stay are in its graph
        self._before = None if self._base is None else EntityTypes.find(None, self._base)
        self._entities: list[pa.Array] = []  # by batch
        self._types = Labels(None if self._before is None else self._before.names)
        self._pairs: list[np.ndarray] = []

    @classmethod
    def of_extended(cls, base: TripleStore) -> TypeTriples | None:
        """Return the same for triples that extend a store; None if it has no types."""
        types = base.report.get("types") or {}
        return cls(types["relation"], types["use"], base) if "use" in types else None

    def passing(
        self, batches: Iterable[tuple[str, pa.RecordBatch]]
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield the batches, without the triples if they are dropped; those are kept here."""
        if self.use == "keep":
            yield from batches
            return
        for split, batch in batches:
            is_type = pc.is_in(batch["relation"], value_set=self._names)
            if pc.any(is_type).as_py():
                self._add(batch.filter(is_type))
                batch = batch.filter(pc.invert(is_type))
            yield split, batch

    def _add(self, batch: pa.RecordBatch) -> None:
        heads, tails = (batch[role].dictionary_encode() for role in ("head", "tail"))
        pairs = np.empty((batch.num_rows, 2), np.int64)
        pairs[:, 0] = heads.indices
        pairs[:, 0] += sum(map(len, self._entities))
        pairs[:, 1] = self._types.add(tails.dictionary)[tails.indices]
        self._entities.append(heads.dictionary)
        self._pairs.append(pairs)

    def table(
        self, entities: pa.Array, relations: pa.Array, triples: Mapping[str, np.ndarray]
    ) -> tuple[EntityTypes, dict[str, Any]]:
        """Return the types of the entities (N,), and their entry in the store's report.

        Raises:
            DataError: No triple has the relation.
        """
        if self.use == "keep":
            count, names, pairs = self._of_train(entities, relations, triples["train"])
        else:
            count, names, pairs = self._of_dropped(entities)
        known = pairs[pairs[:, 0] >= 0]
        ignored = len(pairs) - len(known)
        if self._base is not None and self._before is not None:
            before = self._base.report["types"]
            count, ignored = count + before["triples"], ignored + before["ignored"]
            known = np.concatenate([self._before.pairs(), known])
        if not count:
            raise self._missing(relations)
        table = EntityTypes.of_pairs(names, known[:, 0], known[:, 1], len(entities))
        return table, {
            "relation": self.relation,
            "triples": count,
            "use": self.use,
            "types": len(table.names),
            "entities": int((np.diff(table.indptr) > 0).sum()),
            "ignored": ignored,
        }

    def _of_dropped(self, entities: pa.Array) -> tuple[int, pa.Array, np.ndarray]:
        """Return the number of triples, names of types, and pairs (M, 2), -1 for no entity."""
        pairs = np.concatenate([np.empty((0, 2), np.int64), *self._pairs])
        labels = pa.chunked_array(self._entities, pa.large_string())
        place = pc.fill_null(pc.index_in(labels, value_set=entities), -1)
        pairs[:, 0] = place.to_numpy()[pairs[:, 0]]
        return len(pairs), self._types.values, pairs

    def _of_train(
        self, entities: pa.Array, relations: pa.Array, train: np.ndarray
    ) -> tuple[int, pa.Array, np.ndarray]:
        """Return the same for triples that stay; their types are entities."""
        ids = np.flatnonzero(pc.is_in(relations, value_set=self._names).to_numpy(False))
        rows = train[np.isin(train[:, 1], ids)]
        tails, types = np.unique(rows[:, 2], return_inverse=True)
        pairs = np.stack([rows[:, 0].astype(np.int64), types], 1)
        return len(rows), entities.take(pa.array(tails)), pairs

    def _missing(self, relations: pa.Array) -> DataError:
        close = difflib.get_close_matches(self.relation, relations.to_pylist()[:20_000], 3)
        hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
        where = " of train" if self.use == "keep" else ""
        return DataError(
            f"types_from: no triple{where} has the relation {self.relation!r}, which should say "
            f"types{hint}"
        )
