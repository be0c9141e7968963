"""Which files are read for a graph, and how: splits, headers, columns, files of edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from tqdm import tqdm

from kge_torchrec.config.data import DataConfig
from kge_torchrec.data.node_types import read_description
from kge_torchrec.data.readers import (
    SPLITS,
    SUFFIXES,
    WHOLE,
    Reader,
    Sources,
    find_sources,
    make_reader,
    read_triples,
)
from kge_torchrec.data.readers.columns import ColumnChoice, Edge, FirstLine
from kge_torchrec.errors import DataError

Batches = Iterable[tuple[str, pa.RecordBatch]]


@dataclass
class Reading:
    """How files are read, see `prepare`, and what is noted on the way.

    Args:
        has_header, reader, choice, progress: As for `read_triples` and `prepare`.
        keeps_literals: Whether triples of RDF whose object is a literal are read.
        literals: Number of such triples that were left out, by split.
        first_lines: How the first line of each file was read.
        edges: Files of edges, and what their edges have in common.
    """

    has_header: bool | None
    reader: Reader | None
    choice: ColumnChoice
    progress: bool
    keeps_literals: bool
    literals: Counter[str] = field(default_factory=Counter)
    first_lines: list[FirstLine] = field(default_factory=list)
    edges: dict[Path, Edge] = field(default_factory=dict)

    @classmethod
    def of(cls, data: DataConfig, progress: bool) -> Reading:
        """Return how files are read by the section ``data`` of a config."""
        reader = make_reader(data.reader, data.reader_options, "data.reader_options")
        choice = ColumnChoice.of(data.columns, True if data.weights == "loss" else None)
        return cls(data.has_header, reader, choice, progress, data.literals == "keep")

    def files(self, sources: Sources) -> dict[str, list[Path]]:
        """Return the files of each split."""
        return find_sources(sources, SUFFIXES if self.reader is None else self.reader.suffixes)

    def described(self, path: Any) -> tuple[dict[str, list[Path]], dict[str, list[list[str]]]]:
        """Return the files of each split by a description, and the ends of each relation."""
        files: dict[str, list[Path]] = {}
        ends: dict[str, list[list[str]]] = {}
        for split, file, edge in read_description(path):
            if file in self.edges:
                raise DataError(f"{path}: {file} stands there twice; its edges have one relation")
            self.edges[file] = edge
            files.setdefault(split, []).append(file)
            pairs = ends.setdefault(edge.relation, [])
            if [edge.head, edge.tail] not in pairs:
                pairs.append([edge.head, edge.tail])
        return files, ends

    def batches(self, files: Mapping[str, list[Path]]) -> Batches:
        """Yield batches with their split."""
        disable = hidden(self.progress)
        with tqdm(desc="read", unit=" triples", unit_scale=True, disable=disable) as bar:
            for split in (*SPLITS, WHOLE):
                count = partial(self._count_literals, split)
                on_literals = None if self.keeps_literals else count
                for path in files.get(split, ()):
                    choice = self.choice._replace(edge=self.edges.get(path))
                    how = self.has_header, on_literals, self.reader, choice
                    for batch in read_triples(path, *how, self.first_lines.append):
                        choice.check_time(str(path), batch)
                        bar.update(batch.num_rows)
                        yield split, batch

    def _count_literals(self, split: str, number: int) -> None:
        self.literals[split] += number


def hidden(progress: bool) -> bool | None:
    """Return tqdm's ``disable``; None looks for a terminal."""
    return None if progress else True  # None: tqdm checks whether there is a terminal


def has_types(first_lines: Iterable[FirstLine]) -> bool:
    """Return whether a file has columns of types, so that labels are such as ``user:17``."""
    return any("head_type" in (line.columns or ()) for line in first_lines)


def names_of(files: Mapping[str, list[Path]]) -> dict[str, list[str]]:
    """Return the names of the files of each split."""
    return {split: [str(path) for path in paths] for split, paths in files.items()}
