"""Entity types from triples of one relation, such as rdf:type, as `prepare` finds them.

The triples are taken out of the graph, or stay in it.  Taken out, nobody ranks them, so those of
all splits say types; staying, only those of train do, or the types would tell answers of test.

Shapes: T triples, M pairs of entity and type.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data.encoding import Labels
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.entity_types import TypeTable, table_of
from kge_torchrec.errors import DataError

RDF_TYPE = "http://www.w3.org/1999/02/22-rdf-syntax-ns#type"
USES = ("drop", "keep")  # of the triples


def _table_of_store(store: TripleStore) -> TypeTable:
    table = store.types()
    assert table is not None  # its report speaks of them
    return TypeTable(*table)


class TypeTriples:
    """Finds the triples of a relation, and makes types of entities of them.

    relation: its label; ``rdf:type`` is also the IRI that it stands for.
    use: "drop" takes them out of the graph, "keep" leaves them in.
    base: a store that is extended, whose own types come first.
    """

    def __init__(self, relation: str, use: str = "drop", base: TripleStore | None = None):
        if use not in USES:
            raise DataError(f"type_triples must be one of {', '.join(USES)}, not {use!r}")
        self.relation, self.use = relation, use
        names = [relation, RDF_TYPE] if relation == "rdf:type" else [relation]
        self._names = pa.array(names, pa.large_string())
        self._base = base if use == "drop" else None  # what stays in the graph is found there
        self._entities = Labels()
        self._types = Labels(None if self._base is None else _table_of_store(self._base).names)
        self._pairs: list[np.ndarray] = []

    @classmethod
    def of_extended(cls, base: TripleStore) -> TypeTriples | None:
        """As a store was prepared, for triples that come after its own; None if it has no types."""
        said = base.report.get("types")
        return None if said is None else cls(said["relation"], said["use"], base)

    def passing(
        self, batches: Iterable[tuple[str, pa.RecordBatch]]
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The batches without those triples, which are kept here; or as they are, if they stay."""
        if self.use == "keep":
            yield from batches
            return
        for split, batch in batches:
            found = pc.is_in(batch["relation"], value_set=self._names)
            if pc.any(found).as_py():
                self._add(batch.filter(found))
                batch = batch.filter(pc.invert(found))
            yield split, batch

    def _add(self, batch: pa.RecordBatch) -> None:
        pairs = np.empty((batch.num_rows, 2), np.int32)
        for column, (role, labels) in enumerate((("head", self._entities), ("tail", self._types))):
            encoded = batch[role].dictionary_encode()
            pairs[:, column] = encoded.indices
            labels.add(encoded.dictionary, pairs[:, column : column + 1])
        self._pairs.append(pairs)

    def table(
        self, entities: pa.Array, relations: pa.Array, triples: Mapping[str, np.ndarray]
    ) -> tuple[TypeTable, dict[str, Any]]:
        """The types of the entities (N,), and what the report says of them.

        Raises DataError where no triple has the relation.
        """
        if self.use == "keep":
            found, names, pairs = self._of_train(entities, relations, triples["train"])
        else:
            found, names, pairs = self._of_dropped(entities)
        known = pairs[pairs[:, 0] >= 0]
        ignored = len(pairs) - len(known)
        if self._base is not None:
            said = self._base.report["types"]
            found, ignored = found + said["triples"], ignored + said["ignored"]
            known = np.concatenate([_table_of_store(self._base).pairs(), known])
        if not found:
            raise self._missing(relations)
        table = table_of(names, known[:, 0], known[:, 1], len(entities))
        return table, {
            "relation": self.relation,
            "triples": found,
            "use": self.use,
            "types": len(table.names),
            "entities": int((np.diff(table.indptr) > 0).sum()),
            "ignored": ignored,
        }

    def _of_dropped(self, entities: pa.Array) -> tuple[int, pa.Array, np.ndarray]:
        """Number of triples, names of types, and pairs (M, 2), -1 for what is no entity."""
        self._entities.merge()
        self._types.merge()
        pairs = np.concatenate([np.empty((0, 2), np.int32), *self._pairs]).astype(np.int64)
        place = pc.index_in(self._entities.values, value_set=entities)
        ids = pc.fill_null(place, -1).to_numpy().astype(np.int64)
        if len(pairs):
            pairs[:, 0] = ids[pairs[:, 0]]
        return len(pairs), self._types.values, pairs

    def _of_train(
        self, entities: pa.Array, relations: pa.Array, train: np.ndarray
    ) -> tuple[int, pa.Array, np.ndarray]:
        """The same of triples that stay; types are entities."""
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
