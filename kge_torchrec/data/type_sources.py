"""Find the types of the entities of a new store: in labels, a file, or triples of a relation.

Labels such as ``user:17`` have a type before the colon; columns ``head_type`` and ``tail_type`` and
the edge files of a description give such labels.  A file has lines entity, tab, type.  Triples of a
relation such as rdf:type lead from entities to types, and are taken out of the graph.

One rule holds for all of them: if every entity has one type, the graph is typed, so the ids have
runs of one type and relations know the types of their ends.  Otherwise entities have sets of
types, and a note says which entities have none or several.

Shapes: N entities, K types, T triples.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data import HEAD, RELATION, SPLITS, TAIL
from kge_torchrec.data.readers.fields import LabelFiles
from kge_torchrec.data.readers.lists import read_types
from kge_torchrec.data.sort import chunks
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.attributes import Attributes
from kge_torchrec.data.types import PARTS, types_of
from kge_torchrec.errors import DataError

PREFIX = "prefix"  # as data.types: types are in the labels
RDF_TYPE = "http://www.w3.org/1999/02/22-rdf-syntax-ns#type"
_ROWS = pa.schema(
    {"entity": pa.large_string(), "type": pa.dictionary(pa.int32(), pa.large_string())}
)


class TypeSource:
    """Gives the entities of a new store their types, and checks the ends of relations.

    Args:
        source: ``PREFIX``, the path of a file, or the label of a relation; ``rdf:type`` also stands
            for its IRI.
        base: The store that is extended.  Its entities keep their ids and types.
        is_described: Whether a description gives the ends of edges; then relations have the ends of
            all triples, otherwise those of train.
        labels: Files of labels, if the file of types has the ids of triples.
    """

    def __init__(
        self,
        source: str,
        base: TripleStore | None = None,
        is_described: bool = False,
        labels: LabelFiles | None = None,
    ):
        before = {} if base is None else base.report["types"]
        self._source, self._base, self._labels = source, base, labels or {}
        self._ends: dict[str, list[list[str]]] = before.get("ends", {})
        self._is_described = is_described
        is_other = base is None and source != PREFIX and not Path(source).is_file()
        self._is_relation = is_other or "triples" in before
        self._count = before.get("triples", 0)
        self._rows: list[pa.RecordBatch] = []  # entity and type, of the triples of the relation

    def passing(
        self, batches: Iterable[tuple[str, pa.RecordBatch]]
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield the batches without the triples that say types, which are kept here."""
        names = pa.array([self._source, RDF_TYPE][: 1 + (self._source == "rdf:type")])
        for split, batch in batches:
            is_type = pc.is_in(batch["relation"], value_set=names.cast(pa.large_string()))
            if self._is_relation and pc.any(is_type).as_py():
                own = batch.filter(is_type)
                pairs = [own["head"], own["tail"].dictionary_encode()]
                self._rows.append(pa.record_batch(pairs, _ROWS))
                batch = batch.filter(pc.invert(is_type))
            yield split, batch

    def find(self, entities: pa.Array, relations: pa.Array) -> np.ndarray | None:
        """Find the types of entities; return the order (N,) that makes runs of one type.

        The ids then have ``PARTS`` equal parts, each with an equal share of every type.  Returns
        None for the order that there is, which graphs that are not typed keep.  The entities of an
        extended store stay first; new ones follow, by type.

        Raises:
            DataError: Nothing says a type, or a label or an entity of a typed store has none.
        """
        before = None if self._base is None else types_of(self._base)
        if self._source == PREFIX:
            places, kinds = np.arange(len(entities)), of_labels(entities)
        elif not self._is_relation:
            rows = read_types(Path(self._source), self._labels)
            places, kinds = _inside(rows, entities)
            if not len(places):
                raise DataError(
                    f"{self._source}: none of its {len(rows):,} entities is in the graph; a line "
                    "should be an entity's label, a tab and a type"
                )
        elif self._rows or before is not None:
            rows = pa.Table.from_batches(self._rows, _ROWS)
            self._count += len(rows)
            places, kinds = _inside(rows, entities)
        else:
            raise self._missing(relations)
        self.types = Attributes.of_pairs(places, kinds, len(entities), before=before)
        counts = np.diff(self.types.indptr)
        odd = np.flatnonzero(counts != 1)
        self.typed = not len(odd) and (self._base is None or self._base.size.typed)
        if self._base is not None and self._base.size.typed and len(odd):
            raise DataError(
                f"{len(odd):,} entities have no type or several by {self._source}, such as "
                f"{entities[int(odd[0])].as_py()!r}; those of {self._base.path} have one each"
            )
        if not self.typed:
            return None
        old, parts = (0, PARTS) if self._base is None else (self._base.num_entities, 1)
        new = np.argsort(self.types.ids[old:], kind="stable")
        own = self.types.ids[old:][new]
        part = (np.arange(len(new)) - np.searchsorted(own, own)) % parts
        order = np.concatenate([np.arange(old), old + new[np.argsort(part, kind="stable")]])
        if (np.diff(order) == 1).all():
            return None
        self.types = self.types._replace(ids=self.types.ids[order])
        return order

    def report(
        self,
        entities: pa.Array,
        relations: pa.Array,
        triples: Mapping[str, np.ndarray],
        is_whole: bool,
    ) -> dict[str, Any]:
        """Return the entry of the types in the store's report; check the ends of relations.

        If triples were split here (``is_whole``), all say which types a relation has at its ends.
        """
        counts = np.diff(self.types.indptr)
        report: dict[str, Any] = {
            "source": self._source,
            "types": len(self.types.names),
            "entities": int((counts > 0).sum()),
        }
        if self._is_relation:
            report["triples"] = self._count
        if not self.typed:
            return report
        kinds, types = self.types.names.to_pylist(), self.types.ids
        size = len(kinds)
        labels = entities, relations, entities

        def keys(rows: np.ndarray) -> np.ndarray:
            """Return one number (T,) for relation, type of the head and type of the tail."""
            own = rows[:, RELATION].astype(np.int64)
            return (own * size + types[rows[:, HEAD]]) * size + types[rows[:, TAIL]]

        none = np.empty(0, np.int64)
        found = {
            split: np.unique(np.concatenate([none, *(np.unique(keys(x)) for x in chunks(rows))]))
            for split, rows in triples.items()
        }
        ends: dict[str, list[list[str]]] = {}
        judges = SPLITS if is_whole or self._is_described else ("train",)
        judged = np.unique(np.concatenate([found[split] for split in judges]))
        for key in judged.tolist():
            relation, pair = divmod(key, size**2)
            both = [kinds[kind] for kind in divmod(pair, size)]
            ends.setdefault(relations[relation].as_py(), []).append(both)
        for name, pairs in self._ends.items():  # of the base
            more = ends.get(name, []) if self._is_described else []
            ends[name] = sorted(pairs + [pair for pair in more if pair not in pairs])
        known = pc.index_in(pa.array([*ends], pa.large_string()), value_set=relations).to_numpy()
        allowed = [
            (relation * size + kinds.index(head)) * size + kinds.index(tail)
            for relation, pairs in zip(known.tolist(), ends.values(), strict=True)
            for head, tail in pairs
        ]
        for split, own in found.items():
            wrong = own[np.isin(own // size**2, known) & ~np.isin(own, allowed)]
            if not len(wrong):
                continue
            rows = np.concatenate([x[np.isin(keys(x), wrong)] for x in chunks(triples[split])])
            first = rows[0].tolist()
            head, name, tail = (of[at].as_py() for of, at in zip(labels, first, strict=True))
            source = "the extended store" if name in self._ends else "train"
            right = " or ".join(" to ".join(pair) for pair in ends[name])
            raise DataError(
                f"{split}: {head!r}, {name!r}, {tail!r} leads from {kinds[types[first[HEAD]]]} "
                f"to {kinds[types[first[TAIL]]]}, as do {len(rows) - 1:,} other such triples; "
                f"by {source}, {name!r} leads from {right}"
            )
        sizes = np.bincount(types, minlength=size).tolist()
        return report | {"sizes": dict(zip(kinds, sizes, strict=True)), "ends": ends}

    def _missing(self, relations: pa.Array) -> DataError:
        close = difflib.get_close_matches(self._source, relations.to_pylist()[:20_000], 3)
        hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
        return DataError(
            f"data.types: there is no file {self._source!r}, and no triple has such a relation, "
            f"which should say types{hint}"
        )


def _inside(rows: pa.Table, entities: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Return places among the entities (N,) and types, without rows of other entities."""
    place = pc.index_in(rows["entity"], value_set=entities).combine_chunks()
    kinds = rows["type"].filter(place.is_valid()).cast(pa.large_string()).combine_chunks()
    return place.drop_null().to_numpy(), kinds


def of_labels(labels: pa.Array) -> pa.Array:
    """Return the types of labels such as ``user:17``.

    Raises:
        DataError: A label has no type before its first colon.
    """
    parts = pc.extract_regex(labels, r"^(?P<type>[^:]+):(?s:.+)$")
    if parts.null_count:
        label = labels.filter(parts.is_null())[0].as_py()
        raise DataError(
            f"{parts.null_count:,} entities have no type before a colon, such as {label!r}; types "
            "by prefix need labels such as 'user:17'"
        )
    return parts.field("type").cast(pa.large_string())
