"""Node types: each entity has one type, such as user or item, and relations know their ends.

The types come from labels (``user:17``), or from a file of lines entity, tab, type.  Files of
triples with columns ``head_type`` and ``tail_type``, and the edge files of a description, get such
labels when they are read.  A description is a YAML file that names files of edges and the types of
their ends, as TwHIN (El-Kishky et al. 2022) and GiGL have them:

    edges:
      - {file: follows.csv, head: user, relation: follows, tail: user}
      - {file: visits.tsv, head: user, relation: visits, tail: place}
      - {file: visits_test.tsv, head: user, relation: visits, tail: place, split: test}

Shapes: N entities, K types, T triples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.data import (
    ENTITY,
    FEATURES,
    HEAD,
    OTHER,
    RELATION,
    SIDES,
    TAIL,
    Side,
    answer_column,
)
from kge_torchrec.data.sort import chunks
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.entity_types import EntityTypes, read_types
from kge_torchrec.errors import DataError

PREFIX = "prefix"  # the source of types that are in the labels


class NodeTypes:
    """Gives each entity of a new store its type, and checks the ends of relations.

    Args:
        source: ``PREFIX``, or the path of a file of lines entity, tab, type.
        base: The store that is extended; its types keep their numbers.
        declared: The ends [head type, tail type] of relations by a description; relations that it
            does not name have those of train.
        spread: Number of equal parts of the ids, each with an equal share of every type.
    """

    def __init__(
        self,
        source: str,
        base: TripleStore | None = None,
        declared: Mapping[str, list[list[str]]] | None = None,
        spread: int = 1,
    ):
        self.source, self._base, self._declared = source, base, declared or {}
        self._spread = spread

    @classmethod
    def of_extended(
        cls, base: TripleStore, declared: Mapping[str, list[list[str]]]
    ) -> NodeTypes | None:
        """Return the same for triples that extend a store; None if it has no node types.

        Relations of the store keep their ends; ``declared`` adds to them.
        """
        types = base.report.get("types") or {}
        if "ends" not in types:
            return None
        ends = {name: [*pairs] for name, pairs in types["ends"].items()}
        for name, pairs in declared.items():
            own = ends.setdefault(name, [])
            own += [pair for pair in pairs if pair not in own]
        return cls(types["source"], base, ends)

    def order(self, entities: pa.Array) -> np.ndarray | None:
        """Return the entities (N,) in an order in which each type is contiguous in each part.

        None stands for the order that they have.  The entities of an extended store stay first; new
        ones follow, by type.

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
        judges: Sequence[str] = ("train",),
    ) -> tuple[EntityTypes, dict[str, Any]]:
        """Return the types of the entities (N,), and their entry in the store's report.

        Args:
            entities: Labels (N,).
            relations: Labels (R,).
            triples: (T, 3) by split.
            judges: Splits whose triples say which types a relation has at its ends.

        Raises:
            DataError: A triple leads from or to another type than its relation does in these.
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

    def _of_file(self, entities: pa.Array) -> pa.Array:
        table = read_types(Path(self.source)).group_by(["entity", "type"]).aggregate([])
        repeated = table.group_by("entity").aggregate([("type", "count"), ("type", "list")])
        twice = repeated.filter(pc.greater(repeated["type_count"], 1))
        if len(twice):
            label, kinds = twice["entity"][0].as_py(), sorted(twice["type_list"][0].as_py())
            raise DataError(
                f"{self.source}: {label!r} has the types {' and '.join(kinds)}; an entity has one "
                "type here. Several types, as of rdf:type, go into --negatives.among_options.types "
                "and --evaluation.candidates_options.types"
            )
        place = pc.index_in(entities, value_set=table["entity"].combine_chunks())
        if place.null_count:
            label = entities.filter(place.is_null())[0].as_py()
            raise DataError(
                f"{self.source}: {place.null_count:,} entities have no type, such as {label!r}; "
                "add a line for each: entity, tab, type"
            )
        return table["type"].combine_chunks().take(place)

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


def runs_of_types(store: TripleStore) -> list[tuple[str, range]]:
    """Return the runs of consecutive ids of one type, in order of ids, with the type's label.

    An extended store may have several runs of a type.  Entities without types are one run, and
    features another one behind all entities.
    """
    runs = [(ENTITY, range(store.num_entities))]
    if store.size.typed:
        table = EntityTypes.find(None, store)
        bounds = np.flatnonzero(np.diff(table.types, prepend=-1, append=-1)).tolist()
        names = table.names.to_pylist()
        runs = [(names[int(table.types[a])], range(a, b)) for a, b in pairwise(bounds)]
    if store.has_features:
        runs.append((FEATURES, range(store.num_entities, store.num_rows)))
    return runs


class Ends:
    """Which types stand at the ends of each relation.

    Args:
        store: A store in which every entity has one type.
    """

    def __init__(self, store: TripleStore):
        types = EntityTypes.find(None, store)
        self._store, self._types, self.names = store, types.types, types.names.to_pylist()
        bounds = np.flatnonzero(np.diff(types.types, prepend=-1, append=-1))
        self._bounds, self._type_of_run = bounds, types.types[bounds[:-1]]
        shape = store.num_relations, len(self.names)
        self._allowed = {side: np.zeros(shape, bool) for side in SIDES}
        ends = store.report["types"]["ends"]
        for relation, label in enumerate(store.relations.array.to_pylist()):
            # A relation that train does not have may have any ends.
            for pair in ends.get(label) or ([name, name] for name in self.names):
                for side, name in zip(SIDES, pair, strict=True):
                    self._allowed[side][relation, self.names.index(name)] = True

    @classmethod
    def of(cls, store: TripleStore | None) -> Ends | None:
        """Return the ends by a store; None without a store, or without one type per entity."""
        return cls(store) if store is not None and store.size.typed else None

    def kinds(self, side: Side, relations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct sets of types (U, K) bool of relations (B,), and each one's (B,)."""
        sets, place = np.unique(self._allowed[side][relations], axis=0, return_inverse=True)
        return sets, place.reshape(-1)

    def ranges(self, types: np.ndarray) -> np.ndarray:
        """Return the entities of types (K,) bool as ranges of ids: (S, 2), start and stop."""
        chosen = np.concatenate([[False], types[self._type_of_run], [False]])
        return self._bounds[np.diff(chosen)].reshape(-1, 2)

    def check(self, missing: str, queries: np.ndarray) -> None:
        """Check the types of the known entities of queries.

        Args:
            missing: The side that the queries ask for.
            queries: (B, 3) ids, of which the missing one counts for nothing.

        Raises:
            DataError: An entity is of a type that the relation does not have there.
        """
        side = OTHER[missing]
        entities, relations = queries[:, answer_column(side)], queries[:, RELATION]
        wrong = ~self._allowed[side][relations, self._types[entities]]
        if wrong.any():
            entity, relation = (int(ids[wrong.argmax()]) for ids in (entities, relations))
            right = [self.names[k] for k in np.flatnonzero(self._allowed[side][relation])]
            own = self.names[self._types[entity]]
            raise DataError(
                f"the {side} {self._store.entities[entity]!r} is a {own}; "
                f"{self._store.relations[relation]!r} has a {' or '.join(right)} as its {side}"
            )
