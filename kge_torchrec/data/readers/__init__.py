"""Read files and tables of any form into batches of the columns head, relation and tail.

`columns` finds the columns of a table, the other files open tables of a format, and `fields` turns
their fields into labels, weights and times.  A `Reader` of another package reads other formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from kge_torchrec.config.data import DataConfig
from kge_torchrec.config.keys import parse_options
from kge_torchrec.config.registry import construct, resolve
from kge_torchrec.data.readers.columns import Columns
from kge_torchrec.data.readers.delimited import SUFFIXES as _SEPARATED
from kge_torchrec.data.readers.delimited import open_delimited
from kge_torchrec.data.readers.fields import Table
from kge_torchrec.data.readers.files import SUFFIXES, has_numbers
from kge_torchrec.data.readers.rdf import FORMATS, open_rdf
from kge_torchrec.data.readers.tables import open_batches, open_parquet
from kge_torchrec.data.streams import COMPRESSIONS, suffix_of
from kge_torchrec.errors import DataError


class Reader:
    """Base of readers of other formats; constructed with the fields of its ``Options``."""

    @dataclass(frozen=True)
    class Options:
        """Settings of this reader: ``data.reader_options`` of the config."""

    suffixes: tuple[str, ...] = ()  # file endings to look for in a directory, such as ".jsonl"

    def read(self, path: Path) -> Iterator[pa.RecordBatch]:
        """Yield record batches of the columns head, relation and tail, never a whole file.

        A column ``weight`` of numbers is read as well if there is one, and a column ``time`` of
        numbers or dates if the split needs it.  ``data.columns`` gives columns other names.

        Args:
            path: The file.

        Raises:
            DataError: Bad input, named by file and line.
        """
        raise NotImplementedError


def make_reader(name: str | None, options: Mapping[str, Any]) -> Reader | None:
    """Return the reader of a name; None stands for going by the names of files.

    Raises:
        ConfigError: The reader cannot be made.
    """
    if name is None:
        return None
    own = parse_options(resolve("reader", name), dict(options), "data.reader_options")
    reader: Reader = construct("reader", name, **asdict(own))
    return reader


def open_file(
    path: Path,
    columns: Columns,
    data: DataConfig,
    reader: Reader | None = None,
) -> Table:
    """Open a file of triples, by a reader or by the format that its name says.

    Raises:
        DataError: A missing file, an unknown format, or columns that are missing or unclear.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    suffix = suffix_of(path)
    if reader is not None:
        source = f"{path}: its reader"
        return open_batches(source, _batches(source, reader.read(path)), columns)
    if suffix in _SEPARATED:
        if has_numbers(path) and path.name.lower().endswith(".txt") and not columns.places:
            columns = replace(columns, places={"head": 0, "tail": 1, "relation": 2})  # OpenKE
        return open_delimited(path, columns, data)
    if suffix == ".parquet" and path.suffix.lower() == ".parquet":
        return open_parquet(path, columns)
    if suffix not in FORMATS:
        raise DataError(
            f"{path}: unknown format {path.suffix!r}; known are {', '.join(SUFFIXES)}, "
            f"all but .parquet also compressed ({', '.join(COMPRESSIONS)})"
        )
    if columns.places or columns.where:
        raise DataError(f"{path}: data.columns and data.where name columns, and RDF has none")
    return open_rdf(path, data.literals == "keep")


def _batches(source: str, batches: Iterator[Any]) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a reader of another package."""
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            raise DataError(f"{source} gave a {type(batch).__name__}, no record batch")
        yield batch
