"""The triple store: a directory of memory-mapped ids, labels (``Vocabulary``) and filter index.

Shapes: T triples, N entities, R relations, M ids.
"""

from __future__ import annotations

import difflib
import json
import shutil
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.config.sizing import GraphSize
from kge_torchrec.data import SIDES, SPLITS
from kge_torchrec.data.labels import hash_of
from kge_torchrec.data.store.attributes import Attributes
from kge_torchrec.data.store.filter_index import FilterIndex, SideIndex
from kge_torchrec.errors import StoreError, UnknownLabelError
from kge_torchrec.files import crc32_of

FORMAT = "kge-torchrec triple store"
FORMAT_VERSION = 3
META = "meta.json"
TABLES = {"types": ("indptr", "ids"), "features": ("indptr", "ids", "weights")}  # and names
CHECKED_ON_OPEN = 1 << 26  # bytes; the checksums of a store of this size take some 20 ms


class TripleStore:
    """A prepared knowledge graph, read in place: opening it costs no memory.

    Attributes:
        path: The store's directory.
        num_entities, num_relations: N and R.
        entities, relations: The `Vocabulary` of each.
        train, valid, test: (T, 3) memory-mapped int32 ids in columns head, relation, tail.
        report: Counts, duplicates, unseen entities and relations, leaks (see `prepare`).
        fingerprint: Hash of labels, triples and features, not of weights of triples; equal for
            stores in which an id means the same.
    """

    def __init__(self, path: Path, meta: Mapping[str, Any]):
        self.path = path
        self._checksums: dict[str, int] = meta["crc32"]
        if sum(meta["files"].values()) <= CHECKED_ON_OPEN:
            self.check()
        self.num_entities: int = meta["num_entities"]
        self.num_relations: int = meta["num_relations"]
        self.fingerprint: str = meta["fingerprint"]
        self.report: dict[str, Any] = meta["report"]
        self.entities = Vocabulary.open(path / "entities.arrow", "entity")
        self.relations = Vocabulary.open(path / "relations.arrow", "relation")
        self.train, self.valid, self.test = (_map(path / f"{split}.npy") for split in SPLITS)
        self._sides: dict[tuple[str, str], SideIndex] = {}
        self._files = frozenset(meta["files"])

    @classmethod
    def open(cls, path: str | Path) -> TripleStore:
        """Open the store at ``path``.

        Raises:
            StoreError: There is no store, or it is damaged or of another version.
        """
        path = Path(path)
        meta = _read_meta(path)
        for name, size in meta["files"].items():
            file = path / name
            if not file.is_file():
                raise _damaged(path, f"{name} is missing")
            if (own := file.stat().st_size) != size:
                raise _damaged(path, f"{name} has {own} bytes instead of {size}")
        return cls(path, meta)

    def check(self) -> None:
        """Compare the files with their checksums, once.

        Reads all files.  ``open`` does this for small stores, training and extending for all.

        Raises:
            StoreError: A file is not as it was written.
        """
        checksums = checksums_of([self.path / name for name in self._checksums])
        for name, checksum in self._checksums.items():
            if checksums[name] != checksum:
                raise _damaged(self.path, f"the checksum of {name} does not match")
        self._checksums = {}

    def copy(self, folder: Path) -> None:
        """Copy the store to a new folder."""
        folder.mkdir()
        for name in sorted({META, *self._files}):
            shutil.copyfile(self.path / name, folder / name)

    @property
    def size(self) -> GraphSize:
        """Counts from which open keys of a config are resolved."""
        typed = "ends" in (self.report.get("types") or ())
        counts = len(self.train), len(self.valid)
        features = self.num_rows - self.num_entities
        return GraphSize(self.num_entities, self.num_relations, *counts, typed, features)

    @property
    def num_rows(self) -> int:
        """Number of rows of the entity table: N, and one for each feature."""
        return self.num_entities + self.report.get("features", {}).get("features", 0)

    @property
    def has_features(self) -> bool:
        """Whether entities have features, so that the table has rows for them."""
        return self.num_rows > self.num_entities

    @property
    def base(self) -> GraphSize | None:
        """Counts of the store that this one extends, whose ids come first; or None."""
        extends = self.report.get("extends")
        return None if extends is None else GraphSize(**extends)

    def split(self, name: str) -> np.ndarray:
        """Return the triples (T, 3) of split "train", "valid" or "test"."""
        if name not in SPLITS:
            raise ValueError(f"no split {name!r}; there are {', '.join(SPLITS)}")
        return getattr(self, name)

    def weights(self, split: str = "train") -> np.ndarray | None:
        """Return the weights of a split's triples, (T,) float32, memory-mapped; None without."""
        self.split(split)
        name = weights_name(split)
        return _map(self.path / name) if name in self._files else None

    def types(self) -> Attributes | None:
        """Return the types of entities, or None."""
        return self._attributes("types")

    def features(self) -> Attributes | None:
        """Return the features of entities, or None."""
        return self._attributes("features")

    def _attributes(self, kind: str) -> Attributes | None:
        if f"{kind}.arrow" not in self._files:
            return None
        names = Vocabulary.open(self.path / f"{kind}.arrow").array
        return Attributes(names, *(_map(self.path / f"{kind}-{part}.npy") for part in TABLES[kind]))

    def filter_index(self, splits: Sequence[str] = SPLITS) -> FilterIndex:
        """Return the filter index over some splits."""
        return FilterIndex([{s: self.side_index(split, s) for s in SIDES} for split in splits])

    def degrees(self, side: str | None = None) -> np.ndarray:
        """Return how often each entity is in a training triple, on a side or both, (N,) int64."""
        if side is None:
            return self.degrees("head") + self.degrees("tail")
        return _map(self.path / degrees_name(side))

    def side_index(self, split: str, side: str) -> SideIndex:
        """Return the part of the filter index for one split and side."""
        self.split(split)
        if (split, side) not in self._sides:  # opening files takes longer than a few queries
            names = (index_name(split, side, part) for part in SideIndex._fields)
            self._sides[split, side] = SideIndex(*(_map(self.path / name) for name in names))
        return self._sides[split, side]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {len(self.split(split)):,}" for split in SPLITS)
        return (
            f"TripleStore({str(self.path)!r}: {self.num_entities:,} entities, "
            f"{self.num_relations:,} relations; {sizes})"
        )


def _read_meta(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise StoreError(f"{path}: no such store; write one with `kge-torchrec prepare`")
    try:
        meta = json.loads((path / META).read_text("utf-8"))
    except FileNotFoundError:
        raise StoreError(
            f"{path}: not a triple store (no {META}); write one with `kge-torchrec prepare`"
        ) from None
    except ValueError as error:
        raise _damaged(path, f"{META}: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise StoreError(f"{path}: not a triple store ({META} is of another program)")
    if meta.get("version") != FORMAT_VERSION:
        raise StoreError(
            f"{path}: store of version {meta.get('version')}, this program reads version "
            f"{FORMAT_VERSION}; prepare it again"
        )
    if meta.pop("checksum", None) != checksum_of(meta):
        raise _damaged(path, f"the checksum of {META} does not match")
    return meta


def checksum_of(meta: Mapping[str, Any]) -> int:
    """Return the CRC-32 of what is in the meta file."""
    return zlib.crc32(json.dumps(meta).encode())


def _damaged(path: Path, said: str) -> StoreError:
    return StoreError(f"{path}: damaged store: {said}; prepare it again")


def checksums_of(paths: Sequence[Path]) -> dict[str, int]:
    """Return the CRC-32 of files by name; several are read at once."""
    with ThreadPoolExecutor(4) as threads:
        return dict(zip((path.name for path in paths), threads.map(crc32_of, paths), strict=True))


def index_name(split: str, side: str, part: str) -> str:
    """Return the name of a file of the filter index."""
    return f"known-{split}-{side}-{part}.npy"


def degrees_name(side: str) -> str:
    """Return the name of the file of the degrees of a side."""
    return f"degrees-{side}.npy"


def weights_name(split: str) -> str:
    """Return the name of the file of the weights of a split."""
    return f"weights-{split}.npy"


def _map(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r")


# To compare a label with more labels than this takes too long.
MAX_COMPARED = 20_000
MAX_SEARCHED = 16  # unknown labels of a batch that are searched by their ends
FEW = 16  # labels that are searched by their hashes, which takes about 0.1 ms each


class Vocabulary:
    """The labels of ids ``0..len-1``, an Arrow file read in place: opening costs no memory.

    A search scans the file, except for a few labels of a store whose ids follow their hashes: it is
    meant for labels that a user types, not for whole data sets.
    """

    def __init__(self, labels: pa.Array, kind: str = "label"):
        self._labels = labels.cast(pa.large_string())
        self._kind = kind

    @classmethod
    def open(cls, path: Path, kind: str = "label") -> Vocabulary:
        """Open a file; ``kind`` ("entity", "relation") names the labels in messages."""
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        return cls(table["label"].chunk(0), kind)

    def save(self, path: Path) -> None:
        """Write the labels to an Arrow file."""
        batch = pa.record_batch([self._labels], ["label"])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, id: int) -> str:
        return self._labels[id].as_py()

    def __contains__(self, label: object) -> bool:
        return isinstance(label, str) and bool(self.find([label])[0] >= 0)

    def __repr__(self) -> str:
        some = ", ".join(map(repr, self._labels[:3].to_pylist()))
        return f"<Vocabulary of {len(self):,} labels: {some}{', ...' if len(self) > 3 else ''}>"

    @property
    def array(self) -> pa.Array:
        """All labels in order of id, a pyarrow array."""
        return self._labels

    def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the labels of ids (M,).

        Raises:
            IndexError: An id is outside ``[0, len)``.
        """
        return self.take(ids).to_pylist()

    def take(self, ids: Sequence[int] | np.ndarray) -> pa.Array:
        """Return the labels of ids (M,) as a pyarrow array; raise as ``labels``."""
        return self._labels.take(pa.array(np.asarray(ids, np.int64)))

    def ids(self, labels: Sequence[str], exact: bool = False) -> np.ndarray:
        """Return the ids (M,) int64 of labels, see `search`; ``exact`` takes whole labels only.

        Raises:
            UnknownLabelError: A label is unknown; the message names labels that resemble it.
        """
        ids = self.find(labels) if exact else self.search(labels)
        missing = np.flatnonzero(ids < 0)
        if len(missing):
            raise self.unknown(labels[missing[0]], len(missing))
        return ids

    def find(self, labels: Sequence[str]) -> np.ndarray:
        """Return the ids (M,) int64 of labels, -1 where there is no such label."""
        if len(labels) <= FEW:
            places = [self._by_hash(label) for label in labels]
            if -1 not in places:
                return np.array(places, np.int64)
        wanted = pa.array(labels, pa.large_string())
        distinct = wanted.unique()
        slot = pc.index_in(self._labels, value_set=distinct)
        matches = np.flatnonzero(slot.is_valid().to_numpy(zero_copy_only=False))
        id_of = np.full(len(distinct), -1, np.int64)
        id_of[slot.take(pa.array(matches)).to_numpy(zero_copy_only=False)] = matches
        return id_of[pc.index_in(wanted, value_set=distinct).to_numpy(zero_copy_only=False)]

    def _by_hash(self, label: str) -> int:
        """Return the id of a label where ids follow hashes, as `numbering` gives them, or -1."""
        id = bisect_left(range(len(self)), hash_of(label), key=lambda id: hash_of(self[id]))
        return id if id < len(self) and self[id] == label else -1

    def search(self, labels: Sequence[str]) -> np.ndarray:
        """Return the ids (M,) int64 of labels as people write them, -1 where there is none.

        "treats" means "http://x/treats" or "http://x#treats" too, if there is only one such label.
        """
        ids = self.find(labels)
        unknown = dict.fromkeys(
            label for label, id in zip(labels, ids, strict=True) if id < 0 and label
        )
        for label in [*unknown][:MAX_SEARCHED]:
            ends = (pc.ends_with(self._labels, f"{mark}{label}") for mark in "/#")
            (matches,) = pc.or_(*ends).to_numpy(zero_copy_only=False).nonzero()
            if len(matches) == 1:
                ids[[own == label for own in labels]] = matches[0]
        return ids

    def close_to(self, label: str) -> list[str]:
        """Return up to three labels that resemble ``label``, best first."""
        candidates = self._labels
        if len(candidates) > MAX_COMPARED:
            lowered, part = pc.utf8_lower(candidates), max(1, len(label) // 2)
            starts = pc.starts_with(lowered, label.lower()[:part])
            ends = pc.ends_with(lowered, label.lower()[-part:])
            candidates = candidates.filter(pc.or_(starts, ends))[:MAX_COMPARED]
        spelled: dict[str, str] = {}
        for candidate in candidates.to_pylist():
            spelled.setdefault(candidate.lower(), candidate)
        close = difflib.get_close_matches(label.lower(), list(spelled), 3)
        return [spelled[match] for match in close]

    def unknown(self, label: str, missing: int = 1) -> UnknownLabelError:
        """Return the error for an unknown label, the first of ``missing``."""
        if close := self.close_to(label):
            hint = f"; did you mean {', '.join(map(repr, close))}?"
        else:  # labels may be ids of another system
            some = self._labels[:3].to_pylist()
            hint = f"; labels here are such as {', '.join(map(repr, some))}" if some else ""
        others = f" (and {missing - 1} more labels)" if missing > 1 else ""
        return UnknownLabelError(f"unknown {self._kind} {label!r}{others}{hint}")
