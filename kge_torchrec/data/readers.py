"""From a file of triples, whatever its format, to batches of three string columns."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from kge_torchrec.data.delimited import read_delimited
from kge_torchrec.data.errors import DataError
from kge_torchrec.data.ntriples import read_ntriples
from kge_torchrec.data.numbered import layout_of, read_numbered
from kge_torchrec.data.parquet import read_parquet
from kge_torchrec.data.streams import COMPRESSIONS, OnBytes, bare_name

DELIMITERS = {".tsv": "\t", ".txt": "\t", ".tab": "\t", ".csv": ","}
SUFFIXES = (*DELIMITERS, ".nt", ".parquet", ".del")


def is_readable(path: Path) -> bool:
    """Whether the file's name ends like a format that `read_triples` knows."""
    return Path(bare_name(path)).suffix.lower() in SUFFIXES


def read_triples(
    path: Path,
    has_header: bool | None = None,
    on_bytes: OnBytes | None = None,
    on_literals: Callable[[int], object] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Record batches of the large_string columns head, relation, tail; never the whole file.

    The format follows from the name: ``.tsv``/``.txt``/``.tab`` (tabs), ``.csv``, ``.nt``
    (N-Triples), each also ``.gz``, ``.zst`` or ``.bz2``; ``.parquet``; numbered triples with
    their labels beside them as OpenKE (``train2id.txt``) and LibKGE (``train.del``) have them.
    ``has_header`` overrides the recognition of a header in TSV and CSV; ``on_bytes(n)`` hears of
    the n bytes just read, ``on_literals(n)`` of n triples of N-Triples that were left out because
    their object is a literal; None keeps them.

    Raises:
        DataError: a missing file, an unknown format, or bad input, named by file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    suffix = Path(bare_name(path)).suffix.lower()
    layout = layout_of(path)
    if layout:
        return read_numbered(path, layout, on_bytes)
    if suffix in DELIMITERS:
        return read_delimited(path, DELIMITERS[suffix], has_header, on_bytes)
    if suffix == ".nt":
        return read_ntriples(path, on_bytes, on_literals)
    if suffix == ".parquet" and path.suffix.lower() == ".parquet":
        return read_parquet(path, on_bytes)
    raise DataError(
        f"{path}: unknown format {path.suffix!r}; known are {', '.join(SUFFIXES)}, "
        f"all but .parquet also compressed ({', '.join(COMPRESSIONS)})"
    )
