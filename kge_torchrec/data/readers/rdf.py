"""Read RDF: N-Triples and N-Quads by pyarrow's CSV reader, the rest by pyoxigraph.

A line of a dump is terms with a blank between them, so it is a row of a table.  One regular
expression reads the lines that are not: literals with blanks, comments, other gaps between terms.
That takes .5 CPU seconds per million triples of IRIs; pyoxigraph (Tanon) takes 3.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.csv import InvalidRow

from kge_torchrec.data import COLUMNS
from kge_torchrec.data.labels import text_of
from kge_torchrec.data.readers.columns import Columns, Found, clipped
from kge_torchrec.data.readers.fields import TEXT, Block, Table, no_rows
from kge_torchrec.data.readers.text_rows import Text, first_lines, read_rows
from kge_torchrec.data.streams import open_bytes, suffix_of, unreadable
from kge_torchrec.errors import DataError

# pyoxigraph's name of the format, by the end of a file's name.
FORMATS = {
    ".nt": "N_TRIPLES", ".nq": "N_QUADS", ".ttl": "TURTLE", ".trig": "TRIG", ".n3": "N3",
    ".rdf": "RDF_XML", ".owl": "RDF_XML", ".jsonld": "JSON_LD",
}  # fmt: skip
_LINES = {".nt": 4, ".nq": 5}  # fields of a line, its final dot included
BATCH_ROWS = 1 << 16  # triples that are Python objects at the same time


def open_rdf(path: Path, on_literals: Callable[[int], object] | None) -> Table:
    """Open a file of RDF; named graphs are read as one.

    Labels are IRIs without angle brackets, and blank nodes as ``_:name``.

    Args:
        path: The file.
        on_literals: Called with numbers of triples that are left out because their object is a
            literal; None keeps them, with language or type and in canonical form.

    Raises:
        DataError: While it is read, the file is not of its format, named by file and line; or
            pyoxigraph is missing.
    """
    found = Found({role: at for at, role in enumerate(COLUMNS)})
    width = _LINES.get(suffix_of(path))
    if width is None or on_literals is None:
        blocks = _parsed(path, on_literals)
    else:
        blocks = _lines(path, width, on_literals)
    return Table(str(path), Columns(), found, blocks)


# N-Triples and N-Quads

_IRI = r"<[^<>\s]*>"
_NODE = rf"(?:{_IRI}|_:[^\s<>]*[^\s<>.])"
_LITERAL = r'"(?:[^"\\]|\\.)*"(?:@[A-Za-z0-9-]+|\^\^<[^<>\s]+>)?'
_NOTHING = r"^[ \t]*(?:#.*)?$"
Place: TypeAlias = Callable[[int], str]


def _line(tail: str, graph: str) -> str:
    """Return the expression of a line, by those of its object and of its graph."""
    return (
        rf"^[ \t]*(?P<head>{_NODE})[ \t]*(?P<relation>{_IRI})[ \t]*(?P<tail>{tail})"
        rf"[ \t]*(?:{graph})?[ \t]*\.[ \t]*(?:#.*)?$"
    )


def _lines(path: Path, width: int, on_literals: Callable[[int], object]) -> Iterator[Block]:
    """Yield the triples of a file whose lines are terms with gaps between them."""
    graph = _NODE if width == 5 else ""
    every = _line(f"{_NODE}|{_LITERAL}", graph)
    start = next((line for line in first_lines(path) if re.match(every, line)), "")
    text = Text(path, "\t" if start.count("\t") >= 3 > start.count(" ") else " ")
    form = "<subject> <predicate> <object or literal> " + "<graph> " * (width == 5)
    width -= width == 5 and len(start.split(text.separator)) == 4
    others: list[tuple[str, Callable[[], str]]] = []  # lines of another form, and their places
    count = literals = 0

    def leave_out(row: InvalidRow) -> None:
        number = row.number
        others.append((row.text, lambda: f"{path}:{text.line_of(number)}"))

    def unusual() -> Block:
        nonlocal count, literals
        lines = pa.array([line for line, _ in others], TEXT)
        is_literal = pc.match_substring_regex(lines, _line(_LITERAL, graph))
        left = np.flatnonzero(~_as_numpy(is_literal))
        lines, places = lines.take(pa.array(left)), [others[row][1] for row in left]
        literals += len(others) - len(left)
        others.clear()
        terms = pc.extract_regex(lines, _line(_NODE, graph))
        bad = pc.and_not(terms.is_null(), pc.match_substring_regex(lines, _NOTHING))
        for row in np.flatnonzero(_as_numpy(bad))[:1].tolist():
            line = clipped(lines[row].as_py(), 80)
            raise DataError(f"{places[row]()}: not a line of RDF ({form}.): {line!r}")
        rows = np.flatnonzero(_as_numpy(terms.is_valid()))
        count += len(rows)
        columns = [terms.field(role).cast(TEXT).take(pa.array(rows)) for role in COLUMNS]
        return _block(columns, lambda row: places[rows[row]]())

    def usual(terms: list[pa.Array], place: Place) -> Block:
        nonlocal count, literals
        head, relation, tail, dot = (*terms[:3], terms[-1])
        good = _are_terms(head, "_:") & _are_terms(relation) & _as_numpy(pc.equal(dot, "."))
        rows = np.flatnonzero(good & _are_terms(tail, "_:"))
        count += len(rows)
        if len(rows) == len(dot):
            return _block([head, relation, tail], place)
        ends = np.flatnonzero(good & _as_numpy(pc.starts_with(tail, '"')))
        whole = pc.match_substring_regex(tail.take(pa.array(ends)), f"^{_LITERAL}$")
        ends = ends[_as_numpy(whole)]
        literals += len(ends)
        for row in np.setdiff1d(np.arange(len(dot)), np.concatenate([rows, ends])).tolist():
            line = text.separator.join(column[row].as_py() for column in terms)
            others.append((line, partial(place, row)))
        columns = [column.take(pa.array(rows)) for column in (head, relation, tail)]
        return _block(columns, lambda row: place(int(rows[row])))

    for cells, place in read_rows(text, width, range(width), leave_out):
        yield usual([*cells.values()], place)
        if others:
            yield unusual()
    if others:
        yield unusual()
    if literals:
        on_literals(literals)
    if not count + literals:
        raise no_rows(path, Columns())


def _block(terms: list[pa.Array], place: Place) -> Block:
    terms = [pc.utf8_trim(term, "<>") for term in terms]
    return {at: _without_escapes(term, place) for at, term in enumerate(terms)}, place


def _are_terms(column: pa.Array, other: str = "<") -> np.ndarray:
    """Return which terms (B,) are in angle brackets without others inside, or start with a text."""
    iris = pc.and_(pc.starts_with(column, "<"), pc.ends_with(column, ">"))
    codes = text_of(column)[1]
    angles = np.count_nonzero(codes == ord("<")) + np.count_nonzero(codes == ord(">"))
    if angles != 2 * pc.sum(iris).as_py():  # slower
        iris = pc.match_substring_regex(column, "^<[^<>]*>$")
    return _as_numpy(iris if other == "<" else pc.or_(iris, pc.starts_with(column, other)))


def _as_numpy(mask: pa.Array) -> np.ndarray:
    return mask.to_numpy(zero_copy_only=False)


_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.?)")


def _without_escapes(column: pa.Array, place: Place) -> pa.Array:
    """Return IRIs with escapes decoded; raise DataError for one that stands for nothing."""
    if not (text_of(column)[1] == ord("\\")).any():
        return column
    plain = column.to_pylist()
    for row in np.flatnonzero(_as_numpy(pc.match_substring(column, "\\"))).tolist():
        try:
            plain[row] = plain[row] if plain[row].startswith("_:") else _unescaped(plain[row])
        except ValueError as error:
            raise DataError(f"{place(row)}: {error}") from None
    return pa.array(plain, TEXT)


def _unescaped(iri: str) -> str:
    return _ESCAPE.sub(_character, iri)


def _character(match: re.Match[str]) -> str:
    """Return the character that an escape stands for in an IRI."""
    code = int(match[1][1:], 16) if len(match[1]) > 1 else 0xD800
    if code >= 0x110000 or 0xD800 <= code < 0xE000 or chr(code) in '<>"\\' or code <= ord(" "):
        raise ValueError(f"the escape {match[0]!r} stands for no character of an IRI")
    return chr(code)


# The other formats


def _parsed(path: Path, on_literals: Callable[[int], object] | None) -> Iterator[Block]:
    """Yield the triples of a file by pyoxigraph, as a stream.

    Nameless blank nodes are numbered in order, ``_:FILE#0`` and so on, and take a few hundred bytes
    of memory each.
    """
    try:
        import pyoxigraph
    except ImportError:
        raise DataError(
            f"{path}: reading {suffix_of(path)} takes the package pyoxigraph; install "
            "it (pip install -e '.[rdf]'), or convert the file to N-Triples"
        ) from None
    form = getattr(pyoxigraph.RdfFormat, FORMATS[suffix_of(path)])
    label, count = _Labels(pyoxigraph, path.name), 0
    try:
        with io.BufferedReader(open_bytes(path), 1 << 20) as stream:
            parser = pyoxigraph.parse(stream, format=form, lenient=suffix_of(path) in _LINES)
            while quads := list(islice(parser, BATCH_ROWS)):
                first, count, kept = count + 1, count + len(quads), [*range(len(quads))]
                if on_literals is not None:
                    literal = pyoxigraph.Literal
                    kept = [at for at in kept if not isinstance(quads[at].object, literal)]
                    if len(kept) < len(quads):
                        on_literals(len(quads) - len(kept))
                parts = enumerate(("subject", "predicate", "object"))
                columns = {
                    column: pa.array([label(getattr(quads[at], part)) for at in kept], TEXT)
                    for column, part in parts
                }
                yield columns, partial(_triple, path, first, kept)
    except SyntaxError as error:
        at = f"{path}:{error.lineno}" if error.lineno else f"{path}"
        raise DataError(f"{at}: not readable as {form}: {error.msg}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if count == 0:
        raise no_rows(path, Columns())


def _triple(path: Path, first: int, kept: Sequence[int], row: int) -> str:
    return f"{path}: triple {first + kept[row]:,}"


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
