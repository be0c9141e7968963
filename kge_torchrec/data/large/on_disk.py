"""Prepare a store of more triples than memory holds, in stages that a later start can resume.

`work.py`: the folder of the preparation and its finished stages.  `labels.py`: labels to ids.
`rows.py`: repeats and splits.  `index.py`: the filter index.  The store is the same to the byte.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from kge_torchrec import files
from kge_torchrec.data import SIDES, SPLITS
from kge_torchrec.data.large import GIB, Estimate
from kge_torchrec.data.large.index import write_side
from kge_torchrec.data.large.labels import number_labels, read_batches, write_ids
from kge_torchrec.data.large.rows import drop_repeats, split_at_random
from kge_torchrec.data.large.work import STORE, NpyFile, WorkFolder
from kge_torchrec.data.readers.files import WHOLE
from kge_torchrec.data.reading import Batches, Source
from kge_torchrec.data.store import Vocabulary, index_name, weights_name
from kge_torchrec.data.store.contents import content_report, leaks, unseen_relations
from kge_torchrec.data.store.filter_index import SideIndex
from kge_torchrec.data.store.writing import StoreContents, check_writable, write_store
from kge_torchrec.data.target import Target, check_triples, check_weights, unseen_error
from kge_torchrec.errors import DataError

log = logging.getLogger(__name__)

OTHERS = 1.25  # GiB beside the arrays whose size follows from the bound
PER_ENTITY = 8  # bytes: 4 while ids are written and triples are split, up to 4 for the report
PER_ROW = 72  # bytes of a row while rows are compared or sorted


class OnDisk:
    """A preparation of files without types and features, on disk.

    Args:
        target: The store.
        key: What the store depends on, see `key_of`.
        estimate: The size of the graph.
        memory: The bound, in GiB.
    """

    def __init__(self, target: Target, key: Mapping[str, Any], estimate: Estimate, memory: float):
        self._target, self._estimate, self._memory = target, estimate, memory
        self._output = target.output.resolve()  # a symbolic link stays
        self._work = WorkFolder(
            self._output.with_name(f".{self._output.name}.unfinished"),
            {**key, "memory": memory},
            target.progress,
        )
        self._store = self._work.path / STORE
        self._free = int((memory - OTHERS) * GIB)
        self._rows = self._free // PER_ROW

    def prepare(self, source: Source) -> None:
        """Write the store; what an earlier start has finished is not done again."""
        work = self._work
        check_writable(self._output, self._target.overwrite)
        with work.locked():
            self._say()
            work.check_space(self._estimate.triples, self._estimate.text)
            try:
                needed = math.ceil(self._estimate.in_memory)
                self._write(source, needed)
            except BaseException as error:
                # Bad data is read again; an option may accept what is found wrong later.
                if isinstance(error, DataError) and "ids" not in work.resumes:
                    work.remove()
                    raise
                log.warning(f"{work.path} keeps what is finished: the same command resumes")
                raise
            check_writable(self._output, self._target.overwrite)  # somebody may have made one
            files.put_in_place(self._store, self._output)
            work.remove()

    def _say(self) -> None:
        log.warning(
            f"about {self._estimate.triples:,} triples are prepared on disk, with at most "
            f"{self._memory:g} GiB of memory (option memory of prepare), in {self._work.path}"
        )
        if self._work.resumes:
            log.warning(f"an earlier start has finished: {', '.join(self._work.resumes)}")
        elif self._work.started_over:
            log.warning(f"starts over: {self._work.started_over} since an earlier start")

    def _write(self, source: Source, needed: int) -> None:
        work, target = self._work, self._target
        rows, notes = self._read(source, needed)
        labels = [
            Vocabulary.open(self._store / f"{kind}.arrow").array
            for kind in ("entities", "relations")
        ]
        sizes = len(labels[0]), len(labels[1])
        duplicates: dict[str, int] = {}
        for split in rows:
            duplicates[split] = work.once(
                f"repeats {split}", partial(self._drop_repeats, split, sizes), f"ids-{split}*"
            )
        if WHOLE in rows:
            work.once("split", partial(self._split, sizes), "whole*")
            notes["split"] = target.split.report(None, np.empty(0, np.int8))
        triples = {split: np.load(self._store / f"{split}.npy", mmap_mode="r") for split in SPLITS}
        unseen = unseen_relations(labels[1], triples)
        if unseen and not target.allow_unseen_relations:
            raise unseen_error(unseen)
        indices: dict[str, dict[str, SideIndex]] = {
            split: {side: self._index(split, side, sizes) for side in SIDES} for split in triples
        }
        own = {split: self._store / weights_name(split) for split in SPLITS}
        weights = {
            split: np.load(path, mmap_mode="r") for split, path in own.items() if path.exists()
        }
        report = {
            **content_report(labels[0], labels[1], triples, weights),
            "duplicates": duplicates,
            "shared": {} if WHOLE in rows else leaks(triples, indices, *sizes),
            **notes,
        }
        contents = StoreContents(labels[0], labels[1], triples, indices, weights)
        write_store(self._store, contents, report, has_arrays=True)

    def _read(self, source: Source, needed: int) -> tuple[dict[str, int], dict[str, Any]]:
        """Write labels and triples of ids; return triples by split, and notes of the report."""
        work = self._work
        read = work.once(
            "read",
            lambda: {
                "batches": read_batches(work, _without_types(source, needed)),
                "notes": source.report(),
            },
        )
        notes = read["notes"]
        count = read["batches"]
        if not count:
            check_triples({}, notes)
        numbered = work.once("number", lambda: number_labels(work, count, self._free))
        entities = sum(numbered["counts"])
        if entities * PER_ENTITY > self._free:
            needed = math.ceil(entities * PER_ENTITY / GIB + OTHERS)
            raise DataError(f"{entities:,} entities take more memory; set memory {needed}")
        obsolete = "batch-*", "labels-*", "entities.*"
        written = work.once("ids", lambda: write_ids(work, count, numbered), *obsolete)
        rows = written["rows"]
        check_triples(rows, notes)
        check_weights(written["weighted"], rows, self._target.needs_weights)
        if WHOLE not in rows:
            for split in SPLITS:
                rows.setdefault(split, 0)
        return rows, notes

    def _drop_repeats(self, split: str, sizes: tuple[int, int]) -> int:
        ids, folder = self._work.path / f"ids-{split}.npy", self._work.path
        if not ids.exists():
            np.save(ids, np.empty((0, 3), np.int32))
        target = (folder if split == WHOLE else self._store) / f"{split}.npy"
        return drop_repeats(NpyFile(ids), target, sizes, self._rows, self._work)

    def _split(self, sizes: tuple[int, int]) -> dict[str, int]:
        whole, split = NpyFile(self._work.path / f"{WHOLE}.npy"), self._target.split
        options = split.ratio, split.seed
        return split_at_random(whole, self._store, sizes, options, self._free // 16, self._work)

    def _index(self, split: str, side: str, sizes: tuple[int, int]) -> SideIndex:
        targets = [self._store / index_name(split, side, part) for part in SideIndex._fields]
        rows = NpyFile(self._store / f"{split}.npy")
        write = partial(write_side, rows, side, targets, (*sizes, self._rows), self._work)
        self._work.once(f"index {split} {side}", write)
        return SideIndex(*(np.load(target, mmap_mode="r") for target in targets))


def _without_types(source: Source, needed: int) -> Batches:
    """Yield the batches; raise DataError if the files turn out to have types of entities.

    Args:
        source: The files.
        needed: GiB that a preparation in memory takes.
    """
    for item in source.batches():
        if source.typed:
            raise DataError(
                "the files have columns of types, and such a graph is prepared in memory, which "
                f"takes about {needed:,} GiB; on a machine that has them, set memory {needed}"
            )
        yield item
