"""Where the types of a new store come from: labels, a file, a description, or a relation.

Labels such as ``user:17`` have a type before the colon; columns ``head_type`` and ``tail_type`` and
the edge files of a description give such labels.  A file has lines entity, tab, type.  Triples of a
relation such as rdf:type give several types to an entity; the others give one.

Shapes: N entities, R relations, K types, M pairs of an entity and a type, T triples.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.config.data import PREFIX as PREFIX
from kge_torchrec.config.data import DataConfig, names_relation
from kge_torchrec.data import HEAD, RELATION, TAIL
from kge_torchrec.data.numbering import Labels
from kge_torchrec.data.readers.fields import LabelFile
from kge_torchrec.data.readers.lists import read_types
from kge_torchrec.data.sort import chunks
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.types import EntityTypes
from kge_torchrec.errors import DataError

Batches = Iterable[tuple[str, pa.RecordBatch]]
EndTypes = Mapping[str, list[list[str]]]  # by relation, pairs [head type, tail type]


def type_source(
    data: DataConfig,
    declared: EndTypes | None,
    spread: int,
    labels: Mapping[str, LabelFile] | None = None,
) -> TypeSource | None:
    """Return the types of a new store by the section ``data`` of a config; None for none.

    The other arguments are as for `NodeTypes`.
    """
    if data.types is not None and names_relation(data.types):
        return TypeTriples(data.types, data.type_triples)
    if data.types is not None or declared is not None:
        return NodeTypes(data.types or PREFIX, declared=declared, spread=spread, labels=labels)
    return None


def extended_types(base: TripleStore, declared: EndTypes) -> TypeSource | None:
    """Return the types of a store that extends another one, where they come from; None for none.

    Relations of the store keep their ends; ``declared`` adds to them.
    """
    types = base.report.get("types") or {}
    if "use" in types:
        return TypeTriples(types["relation"], types["use"], base)
    if "ends" not in types:
        return None
    ends = {name: [*pairs] for name, pairs in types["ends"].items()}
    for name, pairs in declared.items():
        own = ends.setdefault(name, [])
        own += [pair for pair in pairs if pair not in own]
    return NodeTypes(types["source"], base, ends)


class NodeTypes:
    """Gives each entity of a new store its type, and checks the ends of relations.

    Args:
        source: ``PREFIX``, or the path of a file of lines entity, tab, type.
        base: The store that is extended; its types keep their numbers.
        declared: The ends [head type, tail type] of relations by a description; relations that it
            does not name have those of train.
        spread: Number of equal parts of the ids, each with an equal share of every type.
        labels: Files of labels, if the file of types may have the ids of triples.
    """

    def __init__(
        self,
        source: str,
        base: TripleStore | None = None,
        declared: EndTypes | None = None,
        spread: int = 1,
        labels: Mapping[str, LabelFile] | None = None,
    ):
        self.source, self._base, self._declared = source, base, declared or {}
        self._spread, self._labels = spread, labels

    def order(self, entities: pa.Array) -> np.ndarray | None:
        """Return the entities (N,) in an order in which each type is contiguous in each part.

        The entities of an extended store stay first; new ones follow, by type.

        Raises:
            DataError: An entity has no type, or several.
        """
        _, types = self._of(entities)
        old = 0 if self._base is None else self._base.num_entities
        new = np.argsort(types[old:], kind="stable")
        kinds = types[old:][new]
        part = (np.arange(len(new)) - np.searchsorted(kinds, kinds)) % self._spread
        order = np.concatenate([np.arange(old), old + new[np.argsort(part, kind="stable")]])
        return None if (np.diff(order) == 1).all() else order

    def table(
        self,
        entities: pa.Array,
        relations: pa.Array,
        triples: Mapping[str, np.ndarray],
        judges: Sequence[str],
    ) -> tuple[EntityTypes, dict[str, Any]]:
        """Return the types of the entities, and their entry in the store's report.

        Triples of the splits ``judges`` say which types a relation has at its ends.

        Raises:
            DataError: An entity has no type or several, or a triple has a wrong one.
        """
        names, types = self._of(entities)
        ends = self._ends(names, types, (entities, relations), triples, judges)
        table = EntityTypes(names, np.arange(len(entities) + 1), types)
        sizes = np.bincount(types, minlength=len(names)).tolist()
        return table, {
            "source": self.source,
            "types": len(names),
            "entities": len(entities),
            "sizes": dict(zip(names.to_pylist(), sizes, strict=True)),
            "ends": ends,
        }

    def _of(self, entities: pa.Array) -> tuple[pa.Array, np.ndarray]:
        """Return the names of types (K,) and each entity's type (N,) int64."""
        known = None if self._base is None else EntityTypes.find(None, self._base)
        new = entities if known is None else entities[len(known.types) :]
        labels = of_labels(new) if self.source == PREFIX else self._of_file(new)
        names = [] if known is None else known.names.to_pylist()
        names += sorted(set(labels.unique().to_pylist()) - set(names))
        own = pc.index_in(labels, value_set=pa.array(names, pa.large_string()))
        types = own.to_numpy(zero_copy_only=False).astype(np.int64)
        types = types if known is None else np.concatenate([known.types, types])
        return pa.array(names, pa.large_string()), types

    @cached_property
    def _file(self) -> pa.Table:
        """The columns entity and type of the file, each entity once."""
        table = read_types(Path(self.source), self._labels)
        table = table.group_by(["entity", "type"]).aggregate([]).combine_chunks()
        repeated = table.group_by("entity").aggregate([("type", "count"), ("type", "list")])
        twice = repeated.filter(pc.greater(repeated["type_count"], 1))
        if len(twice):
            label, kinds = twice["entity"][0].as_py(), sorted(twice["type_list"][0].as_py())
            raise DataError(
                f"{self.source}: {label!r} has the types {' and '.join(kinds)}; an entity has one "
                "type here. Several types, as of rdf:type, go into --negatives.among_options.types "
                "and --evaluation.candidates_options.types"
            )
        return table

    def _of_file(self, entities: pa.Array) -> pa.Array:
        place = pc.index_in(entities, value_set=self._file["entity"])
        if place.null_count:
            label = entities.filter(place.is_null())[0].as_py()
            raise DataError(
                f"{self.source}: {place.null_count:,} entities have no type, such as {label!r}; "
                "add a line for each: entity, tab, type"
            )
        return self._file["type"].combine_chunks().take(place)

    def _ends(
        self,
        names: pa.Array,
        types: np.ndarray,
        labels: tuple[pa.Array, pa.Array],
        triples: Mapping[str, np.ndarray],
        judges: Sequence[str],
    ) -> dict[str, list[list[str]]]:
        """Return the pairs (head type, tail type) of each relation; check those of all triples."""
        entities, relations = labels
        kinds = names.to_pylist()
        nothing = np.empty(0, np.int64)
        pairs_of = {
            split: np.unique(
                np.concatenate(
                    [nothing, *(np.unique(_pairs(x, types, len(kinds))) for x in chunks(rows))]
                )
            )
            for split, rows in triples.items()
        }
        ends: dict[str, list[list[str]]] = {}
        for pair in np.unique(np.concatenate([pairs_of[split] for split in judges])).tolist():
            relation, both = divmod(pair, len(kinds) ** 2)
            own = [kinds[kind] for kind in divmod(both, len(kinds))]
            ends.setdefault(relations[relation].as_py(), []).append(own)
        ends |= {name: sorted(pairs) for name, pairs in self._declared.items()}
        numbers = {label: place for place, label in enumerate(relations.to_pylist())}
        allowed = [
            (numbers[name] * len(kinds) + kinds.index(head)) * len(kinds) + kinds.index(tail)
            for name, pairs in ends.items()
            for head, tail in pairs
        ]
        known = [numbers[name] for name in ends]
        for split, pairs in pairs_of.items():
            is_known = np.isin(pairs // len(kinds) ** 2, known)
            wrong = pairs[is_known & ~np.isin(pairs, allowed)]
            if len(wrong):
                parts = chunks(triples[split])
                rows = [x[np.isin(_pairs(x, types, len(kinds)), wrong)] for x in parts]
                count, triple = sum(map(len, rows)), np.concatenate(rows)[0].tolist()
                head, name, tail = (
                    array[place].as_py()
                    for array, place in zip((entities, relations, entities), triple, strict=True)
                )
                source = "what was said of it" if name in self._declared else "train"
                right = " or ".join(" to ".join(pair) for pair in ends[name])
                raise DataError(
                    f"{split}: {head!r}, {name!r}, {tail!r} leads from {kinds[types[triple[0]]]} "
                    f"to {kinds[types[triple[2]]]}, as do {count - 1:,} other such triples; "
                    f"by {source}, {name!r} leads from {right}"
                )
        return ends


def _pairs(triples: np.ndarray, types: np.ndarray, count: int) -> np.ndarray:
    """Return one number (T,) for relation, type of the head and type of the tail."""
    relations = triples[:, RELATION].astype(np.int64)
    return (relations * count + types[triples[:, HEAD]]) * count + types[triples[:, TAIL]]


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

    def passing(self, batches: Batches) -> Iterator[tuple[str, pa.RecordBatch]]:
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
        self,
        entities: pa.Array,
        relations: pa.Array,
        triples: Mapping[str, np.ndarray],
        judges: Sequence[str],
    ) -> tuple[EntityTypes, dict[str, Any]]:
        """Return the types of the entities, and their entry in the store's report.

        Raises:
            DataError: No triple says types.
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
            f"data.types: there is no file {self.relation!r}, and no triple{where} has such a "
            f"relation, which should say types{hint}"
        )


TypeSource = NodeTypes | TypeTriples
