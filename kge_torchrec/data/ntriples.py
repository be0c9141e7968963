"""N-Triples files to record batches, parsed by one vectorised regular expression."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from kge_torchrec.data.delimited import BLOCK_BYTES
from kge_torchrec.data.prefetch import map_prefetched
from kge_torchrec.data.streams import COLUMNS, OnBytes, lines, open_bytes, unreadable
from kge_torchrec.errors import DataError

_IRI = r"<(?P<{}>[^<>\s]+)>"
_BLANK_NODE = r"_:[^\s<>]*[^\s<>.]"
_LITERAL = r'"(?:[^"\\]|\\.)*"(?:@[A-Za-z0-9-]+|\^\^<[^<>\s]+>)?'
# Of the groups for a subject or object exactly one matches; the others stay empty.
TRIPLE = (
    rf"^[ \t]*(?:{_IRI.format('head')}|(?P<head_node>{_BLANK_NODE}))"
    rf"[ \t]*{_IRI.format('relation')}"
    rf"[ \t]*(?:{_IRI.format('tail')}|(?P<tail_node>{_BLANK_NODE})|(?P<literal>{_LITERAL}))"
    r"[ \t]*\.[ \t]*(?:#.*)?$"
)
NO_TRIPLE = r"^[ \t]*(?:#.*)?$"

# A byte that no valid file holds, so that each line is one field.
_NO_DELIMITER = "\x01"


def read_ntriples(
    path: Path,
    on_bytes: OnBytes | None = None,
    on_literals: Callable[[int], object] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Batches of the string columns head, relation, tail.

    IRIs lose their angle brackets; blank nodes, and literals with language or type, stay as
    written; escapes are not decoded. Comments and blank lines are skipped.

    on_literals: hears of the number of triples whose object is a literal, which are left out;
        None keeps them.

    Raises:
        DataError: naming file and line: a malformed line, invalid UTF-8; or no triples at all.
    """
    count = 0
    try:
        with open_bytes(path, on_bytes) as stream:
            for triples, is_literal in map_prefetched(_parse, _texts(path, stream)):
                count += triples.num_rows
                literals = pc.sum(is_literal).as_py()
                if on_literals and literals:
                    on_literals(literals)
                    triples = triples.filter(pc.invert(is_literal))
                yield triples
    except pa.ArrowInvalid as error:
        raise _fault(path) or DataError(f"{path}: {error}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if count == 0:
        raise DataError(f"{path}: empty file: no triples")


def _texts(path: Path, stream: pa.NativeFile) -> Iterator[tuple[Path, pa.Array, int]]:
    """The lines in blocks, each with the number of its first line."""
    first_line = 1
    for batch in _open_lines(path, stream):
        yield path, batch.column(0), first_line
        first_line += batch.num_rows


def _open_lines(path: Path, stream: pa.NativeFile) -> arrow_csv.CSVStreamingReader:
    if next(lines(path), None) is None:
        raise DataError(f"{path}: empty file: no triples")
    return arrow_csv.open_csv(
        stream,
        read_options=arrow_csv.ReadOptions(column_names=["line"], block_size=BLOCK_BYTES),
        # Blank lines are kept, so that a row's position gives its line number.
        parse_options=arrow_csv.ParseOptions(
            delimiter=_NO_DELIMITER, quote_char=False, ignore_empty_lines=False
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types={"line": pa.large_string()}, strings_can_be_null=False
        ),
    )


def _parse(block: tuple[Path, pa.Array, int]) -> tuple[pa.RecordBatch, pa.Array]:
    """The triples of some lines, and which of them have a literal."""
    path, text, first_line = block
    parts = pc.extract_regex(text, TRIPLE)
    if parts.null_count:
        unparsed = pc.is_null(parts)
        faulty = pc.and_(unparsed, pc.invert(pc.match_substring_regex(text, NO_TRIPLE)))
        position = pc.index(faulty, True).as_py()
        if position >= 0:
            raise _malformed(path, first_line + position, text[position].as_py())
        parts = parts.filter(pc.invert(unparsed))
    head, head_node, relation, tail, tail_node, literal = parts.flatten()
    nothing = pa.scalar("", pa.large_string())
    head = pc.binary_join_element_wise(head, head_node, nothing)
    tail = pc.binary_join_element_wise(tail, tail_node, literal, nothing)
    is_literal = pc.greater(pc.binary_length(literal), 0)
    return pa.record_batch([head, relation, tail], list(COLUMNS)), is_literal


def _malformed(path: Path, line: int, text: str) -> DataError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return DataError(
        f"{path}:{line}: not an N-Triples line (<subject> <predicate> <object or literal> .): "
        f"{shown!r}"
    )


def _fault(path: Path) -> DataError | None:
    """What the line reader stumbled over: bytes that are not UTF-8, or a control character."""
    for number, line in lines(path):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            return DataError(
                f"{path}:{number}: invalid UTF-8 (byte 0x{line[error.start]:02x} at position "
                f"{error.start + 1} of the line); convert the file to UTF-8"
            )
        if _NO_DELIMITER in text:
            return _malformed(path, number, text)
    return None
