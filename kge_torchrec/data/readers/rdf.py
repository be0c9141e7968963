"""RDF files to record batches: N-Triples by a regular expression, other formats by pyoxigraph.

N-Triples, the format of large graphs, is read in vectorized blocks, several times as fast as by
pyoxigraph (Tanon), which reads Turtle, TriG, N-Quads, N3, RDF/XML and JSON-LD.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from kge_torchrec.data import COLUMNS
from kge_torchrec.data.labels import first_fault
from kge_torchrec.data.readers.delimited import BLOCK_BYTES
from kge_torchrec.data.streams import (
    lines,
    map_prefetched,
    open_bytes,
    suffix_of,
    text_lines,
    unreadable,
)
from kge_torchrec.errors import DataError

# pyoxigraph's name of the format, by the end of a file's name.
FORMATS = {
    ".ttl": "TURTLE",
    ".trig": "TRIG",
    ".nq": "N_QUADS",
    ".n3": "N3",
    ".rdf": "RDF_XML",
    ".owl": "RDF_XML",
    ".jsonld": "JSON_LD",
}
BATCH_ROWS = 1 << 16  # triples that are Python objects at the same time


def read_rdf(
    path: Path,
    on_literals: Callable[[int], object] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield batches of the string columns head, relation, tail; named graphs are read as one.

    Labels are as in N-Triples: IRIs without angle brackets, blank nodes as ``_:name``, literals
    with language or type.  Nameless blank nodes are numbered in order, ``_:FILE#0`` and so on, and
    take a few hundred bytes of memory each; the rest is a stream (for JSON-LD the parser may hold
    more).

    Args:
        path: The file.
        on_literals: Called with the number of triples that are left out because their object is a
            literal; None keeps them.

    Raises:
        DataError: The file is not of its format, has a relative IRI without a base, or has no
            triples, named by file and line; or pyoxigraph is missing.
    """
    try:
        import pyoxigraph
    except ImportError:
        raise DataError(
            f"{path}: reading {suffix_of(path)} takes the package pyoxigraph; install "
            "it (pip install 'kge-torchrec[rdf]'), or convert the file to N-Triples"
        ) from None
    form = getattr(pyoxigraph.RdfFormat, FORMATS[suffix_of(path)])
    label, count = _Labels(pyoxigraph, path.name), 0
    try:
        with io.BufferedReader(open_bytes(path), 1 << 20) as stream:
            parser = pyoxigraph.parse(stream, format=form)
            while quads := list(islice(parser, BATCH_ROWS)):
                before, count = count, count + len(quads)
                kept = quads
                if on_literals is not None:
                    kept = [q for q in quads if not isinstance(q.object, pyoxigraph.Literal)]
                    if len(kept) < len(quads):
                        on_literals(len(quads) - len(kept))
                columns = [
                    pa.array([label(getattr(q, part)) for q in kept], pa.large_string())
                    for part in ("subject", "predicate", "object")
                ]
                for name, column in zip(COLUMNS, columns, strict=True):
                    if fault := first_fault(column):
                        number = before + quads.index(kept[fault.row]) + 1
                        raise DataError(f"{path}: triple {number:,}: the {name} {fault.reason}")
                yield pa.record_batch(columns, list(COLUMNS))
    except SyntaxError as error:
        place = f"{path}:{error.lineno}" if error.lineno else f"{path}"
        raise DataError(f"{place}: not readable as {form}: {error.msg}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if count == 0:
        raise DataError(f"{path}: empty file: no triples")


# The parser invents other names in every run: 128 bits without leading zeros.
_NAMELESS = re.compile("[0-9a-f]{24,32}")


class _Labels:
    """Returns the label of a term, or raises SyntaxError for a triple in place of a term."""

    def __init__(self, pyoxigraph: Any, file: str):
        self._file = file
        self._iri, self._blank = pyoxigraph.NamedNode, pyoxigraph.BlankNode
        self._literal = pyoxigraph.Literal
        self._numbers: dict[str, int] = {}

    def __call__(self, term: Any) -> str:
        if isinstance(term, self._iri):
            return term.value
        if isinstance(term, self._literal):
            return str(term)
        if not isinstance(term, self._blank):
            raise SyntaxError("a triple as subject or object (RDF-star) is no entity")
        name = term.value
        if not _NAMELESS.fullmatch(name):
            return f"_:{name}"
        return f"_:{self._file}#{self._numbers.setdefault(name, len(self._numbers))}"


# N-Triples

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

# A byte that files hardly hold, so that each line is one field; in a literal it must be escaped.
_NO_DELIMITER = "\x01"


def read_ntriples(
    path: Path,
    on_literals: Callable[[int], object] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield batches of the string columns head, relation, tail of an N-Triples file.

    IRIs lose their angle brackets and escapes, blank nodes stay as written.  Literals keep language
    and type and are in canonical form, with escapes only for quotes, backslashes and control
    characters.  Comments and blank lines are skipped.

    Args:
        path: As for ``read_rdf``.
        on_literals: As for ``read_rdf``.

    Raises:
        DataError: A malformed line or escape, a label that is refused (`labels.fault_of`), invalid
            UTF-8, named by file and line; or no triples.
    """
    count, parse = 0, partial(_parse, keeps_literals=on_literals is None)
    try:
        with open_bytes(path) as stream:
            for triples, is_literal in map_prefetched(parse, _texts(path, stream)):
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
    """Yield the lines in blocks, each with the number of its first line."""
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


def _parse(
    block: tuple[Path, pa.Array, int], keeps_literals: bool
) -> tuple[pa.RecordBatch, pa.Array]:
    """Return the triples of some lines, and which of them have a literal."""
    path, text, first_line = block
    parts = pc.extract_regex(text, TRIPLE)
    rows = np.arange(len(text))  # that the triples are in
    if parts.null_count:
        unparsed = pc.is_null(parts)
        faulty = pc.and_(unparsed, pc.invert(pc.match_substring_regex(text, NO_TRIPLE)))
        position = pc.index(faulty, True).as_py()
        if position >= 0:
            raise _malformed(path, first_line + position, text[position].as_py())
        parts = parts.filter(pc.invert(unparsed))
        rows = np.flatnonzero(~unparsed.to_numpy(zero_copy_only=False))
    head, head_node, relation, tail, tail_node, literal = parts.flatten()
    nothing = pa.scalar("", pa.large_string())
    head = pc.binary_join_element_wise(head, head_node, nothing)
    tail = pc.binary_join_element_wise(tail, tail_node, literal, nothing)
    is_literal = pc.greater(pc.binary_length(literal), 0)
    columns = [head, relation, tail]
    try:
        if pc.any(pc.match_substring_regex(text, _NOT_PLAIN)).as_py():
            columns[:2] = [_decoded(column) for column in columns[:2]]
            columns[2] = _decoded(tail, None if keeps_literals else is_literal)
        for name, column in zip(COLUMNS, columns, strict=True):
            if fault := first_fault(column):
                raise _BadLabel(fault.row, f"the {name} {fault.reason}")
    except _BadLabel as error:
        line = first_line + int(rows[error.position])
        raise DataError(f"{path}:{line}: {error}") from None
    return pa.record_batch(columns, list(COLUMNS)), is_literal


class _BadLabel(ValueError):
    """The label at a position is invalid."""

    def __init__(self, position: int, why: str):
        super().__init__(why)
        self.position = position


# An escape; or a control character, which a literal in canonical form has as an escape.
_NOT_PLAIN = r"[\\\x00-\x1f\x7f]"
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.?)")
_SHORT = {"t": "\t", "b": "\b", "n": "\n", "r": "\r", "f": "\f", '"': '"', "'": "'", "\\": "\\"}
_CANONICAL = {ord(char): f"\\u{ord(char):04X}" for char in (*map(chr, range(32)), "\x7f")}
_CANONICAL |= {ord(char): f"\\{short}" for short, char in _SHORT.items() if short != "'"}


def _decoded(column: pa.Array, left_out: pa.Array | None = None) -> pa.Array:
    """Return labels with their escapes decoded, except those ``left_out`` (N,).

    Raises:
        _BadLabel: An escape stands for nothing.
    """
    escaped = pc.match_substring_regex(column, _NOT_PLAIN)
    if left_out is not None:
        escaped = pc.and_(escaped, pc.invert(left_out))
    labels = column.filter(escaped).dictionary_encode()
    plain = []
    for label in labels.dictionary.to_pylist():
        try:
            plain.append(_without_escapes(label))
        except ValueError as error:
            raise _BadLabel(pc.index(column, label).as_py(), str(error)) from None
    return pc.replace_with_mask(column, escaped, pa.array(plain, column.type).take(labels.indices))


def _without_escapes(label: str) -> str:
    """Return a label without escapes; raise ValueError for one that stands for nothing there."""
    if label.startswith("_:"):
        return label
    if not label.startswith('"'):
        return _ESCAPE.sub(lambda match: _character(match, iri=True), label)
    end = label.rindex('"')
    plain = _ESCAPE.sub(lambda match: _character(match, iri=False), label[1:end])
    ending = _ESCAPE.sub(lambda match: _character(match, iri=True), label[end + 1 :])
    return f'"{plain.translate(_CANONICAL)}"{ending}'


def _character(match: re.Match[str], iri: bool) -> str:
    """Return the character that an escape stands for."""
    code = match[1]
    if len(code) > 1:
        number = int(code[1:], 16)
        is_text = number < 0x110000 and not 0xD800 <= number < 0xE000
        if is_text and not (iri and (number <= ord(" ") or chr(number) in '<>"\\')):
            return chr(number)
    elif code in _SHORT and not iri:
        return _SHORT[code]
    raise ValueError(
        f"the escape {match[0]!r} stands for no character "
        + ("of an IRI" if iri else r"(\uXXXX, \UXXXXXXXX and \t \b \n \r \f \" \' \\ do)")
    )


def _malformed(path: Path, line: int, text: str) -> DataError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return DataError(
        f"{path}:{line}: not an N-Triples line (<subject> <predicate> <object or literal> .): "
        f"{shown!r}"
    )


def _fault(path: Path) -> DataError | None:
    """Return what the line reader stumbled over: invalid UTF-8, or a control character."""
    try:
        for number, text in text_lines(path):
            if _NO_DELIMITER in text:
                return DataError(
                    f"{path}:{number}: not an N-Triples line: write the character U+0001 as \\u0001"
                )
    except DataError as error:
        return error
    return None
