"""Find the types of the entities of a new store: in labels, a file, or triples of a relation.

Labels such as ``user:17`` have a type before the colon; columns ``head_type`` and ``tail_type`` and
the edge files of a description give such labels.  If every entity has one type, the graph is typed:
the ids have runs of one type and relations know the types of their ends.  Otherwise a note says
which entities have none or several.

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
from kge_torchrec.data.readers.lists import read_pairs
from kge_torchrec.data.reading import Source
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
        name: ``PREFIX``, the path of a file, or the label of a relation; ``rdf:type`` also stands
            for its IRI.
        source: The triples.  If a description gives the ends of edges, relations have the ends of
            all triples, otherwise those of train.
        base: The store that is extended.  Its entities keep their ids and types.
    """

    def __init__(self, name: str, source: Source, base: TripleStore | None = None):
        before = {} if base is None else base.report["types"]
        self._name, self._source, self._base = name, source, base
        self._ends: dict[str, list[list[str]]] = before.get("ends", {})
        is_other = base is None and name != PREFIX and not Path(name).is_file()
        self._is_relation = is_other or "triples" in before
        self._count = before.get("triples", 0)
        self._rows: list[pa.RecordBatch] = []  # entity and type, of the triples of the relation

    def passing(
        self, batches: Iterable[tuple[str, pa.RecordBatch]]
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield the batches without the triples that say types, which are kept here."""
        names = pa.array([self._name, RDF_TYPE][: 1 + (self._name == "rdf:type")])
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
        source, base = self._source, self._base
        before = None if base is None else types_of(base)
        if self._name == PREFIX:
            parts = pc.extract_regex(entities, r"^(?P<type>[^:]+):(?s:.+)$")
            if parts.null_count:
                raise DataError(
                    f"{parts.null_count:,} entities have no type before a colon, such as "
                    f"{entities.filter(parts.is_null())[0].as_py()!r}; types by prefix need labels "
                    "such as 'user:17'"
                )
            places, kinds = np.arange(len(entities)), parts.field("type").cast(pa.large_string())
        else:
            if self._is_relation:
                rows = pa.Table.from_batches(self._rows, _ROWS)
                self._count += len(rows)
            else:
                rows = read_pairs(
                    Path(self._name), "type", source.entities, source.labels, source.notes
                )
            place = pc.index_in(rows["entity"], value_set=entities).combine_chunks()
            kinds = rows["type"].filter(place.is_valid()).cast(pa.large_string()).combine_chunks()
            places = place.drop_null().to_numpy()
            if base is None and self._is_relation and not len(rows):
                close = difflib.get_close_matches(self._name, relations.to_pylist()[:20_000], 3)
                hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
                raise DataError(
                    f"data.types: there is no file {self._name!r}, and no triple has such a "
                    f"relation, which should say types{hint}"
                )
            if not self._is_relation and not len(places):
                raise DataError(
                    f"{self._name}: none of its {len(rows):,} entities is in the graph; a line "
                    "should be an entity's label, a tab and a type"
                )
        self.types = Attributes.of_pairs(places, kinds, len(entities), before=before)
        odd = np.flatnonzero(np.diff(self.types.indptr) != 1)
        self.typed = not len(odd) and (base is None or base.size.typed)
        if base is not None and base.size.typed and len(odd):
            raise DataError(
                f"{len(odd):,} entities have no type or several by {self._name}, such as "
                f"{entities[int(odd[0])].as_py()!r}; those of {base.path} have one each"
            )
        if not self.typed:
            return None
        old, count = (0, PARTS) if base is None else (base.num_entities, 1)
        new = np.argsort(self.types.ids[old:], kind="stable")
        own = self.types.ids[old:][new]
        part = (np.arange(len(new)) - np.searchsorted(own, own)) % count
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
        report: dict[str, Any] = {"source": self._name}
        if self._is_relation:
            report["triples"] = self._count
        if not self.typed:
            return report
        kinds, types = self.types.names.to_pylist(), self.types.ids
        size, none = len(kinds), np.empty(0, np.int64)

        def keys(rows: np.ndarray) -> np.ndarray:
            """Return one number (T,) for relation, type of the head and type of the tail."""
            own = rows[:, RELATION].astype(np.int64)
            return (own * size + types[rows[:, HEAD]]) * size + types[rows[:, TAIL]]

        found: dict[str, dict[int, tuple[str, list[str]]]] = {}  # relation and types, by key
        for split, rows in triples.items():
            distinct = [np.unique(keys(part)) for part in chunks(rows)]
            for key in np.unique(np.concatenate([none, *distinct])).tolist():
                relation, *pair = key // size**2, key // size % size, key % size
                name = relations[relation].as_py()
                found.setdefault(split, {})[key] = name, [kinds[kind] for kind in pair]
        judges = SPLITS if is_whole or self._source.is_described else ("train",)
        judged = {key: end for split in judges for key, end in found.get(split, {}).items()}
        ends: dict[str, list[list[str]]] = {}
        for _, (name, both) in sorted(judged.items()):
            ends.setdefault(name, []).append(both)
        for name, pairs in self._ends.items():  # of the base
            more = ends.get(name, []) if self._source.is_described else []
            ends[name] = sorted(pairs + [pair for pair in more if pair not in pairs])
        for split, own in found.items():
            wrong = [key for key, (name, both) in own.items() if both not in ends.get(name, [both])]
            if not wrong:
                continue
            rows = np.concatenate([x[np.isin(keys(x), wrong)] for x in chunks(triples[split])])
            labels = entities, relations, entities
            head, name, tail = (of[at].as_py() for of, at in zip(labels, rows[0], strict=True))
            source = "the extended store" if name in self._ends else "train"
            _, both = own[int(keys(rows[:1])[0])]
            right = " or ".join(" to ".join(pair) for pair in ends[name])
            raise DataError(
                f"{split}: {head!r}, {name!r}, {tail!r} leads from {' to '.join(both)}, as do "
                f"{len(rows) - 1:,} other such triples; by {source}, {name!r} leads from {right}"
            )
        return report | {"ends": ends}
