"""Read RDF: N-Triples by pyarrow's CSV reader, the rest by pyoxigraph.

A line of a dump is terms with a blank between them, so it is a row of a table.  One regular
expression reads the lines that are not: literals with blanks, comments, escapes.  That takes .5 CPU
seconds per million triples of IRIs; pyoxigraph (Tanon) takes 3.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.csv import InvalidRow

from kge_torchrec.data import COLUMNS
from kge_torchrec.data.labels import text_of
from kge_torchrec.data.readers.columns import Columns, Found, clipped
from kge_torchrec.data.readers.fields import TEXT, Block, Table, no_rows, place_among
from kge_torchrec.data.readers.text_rows import Text, read_rows
from kge_torchrec.data.streams import open_bytes, suffix_of, unreadable
from kge_torchrec.errors import DataError

# pyoxigraph's name of the format, by the end of a file's name.
FORMATS = {
    ".nt": "N_TRIPLES", ".nq": "N_QUADS", ".ttl": "TURTLE", ".trig": "TRIG", ".n3": "N3",
    ".rdf": "RDF_XML", ".owl": "RDF_XML", ".jsonld": "JSON_LD",
}  # fmt: skip
BATCH_ROWS = 1 << 16  # triples that are Python objects at the same time


def open_rdf(path: Path, keeps_literals: bool) -> Table:
    """Open a file of RDF; named graphs are read as one.

    Labels are IRIs without angle brackets, and blank nodes as ``_:name``.  Literals that are kept
    have their language or type, and are in canonical form; of others `Table.literals` has numbers.
    """
    found = Found({role: at for at, role in enumerate(COLUMNS)})
    literals: list[int] = []
    if suffix_of(path) == ".nt" and not keeps_literals:
        blocks = _lines(path, literals)
    else:
        blocks = _parsed(path, None if keeps_literals else literals)
    return Table(str(path), Columns(), found, blocks, literals=literals)


Triple = tuple[list[str], Callable[[], str]]  # labels, and what returns the place


def _block(triples: Sequence[Triple]) -> Block:
    columns = zip(*(labels for labels, _ in triples), strict=True) if triples else ((), (), ())
    labels = {at: pa.array(column, TEXT) for at, column in enumerate(columns)}
    return labels, lambda row: triples[row][1]()


# N-Triples

_CODE = r"(?![Dd][89A-Fa-f])[0-9A-Fa-f]{4}"  # but of half a character
_ESCAPE = rf"\\u{_CODE}|\\U(?:0000{_CODE}|00(?:0[1-9A-Fa-f]|10)[0-9A-Fa-f]{{4}})"
_IRI = rf"<[^<>\s\\]*(?:(?:{_ESCAPE})[^<>\s\\]*)*>"
_NODE = rf"(?:{_IRI}|_:[^\s<>]*[^\s<>.])"
_LITERAL = r'"(?:[^"\\]|\\.)*"(?:@[A-Za-z0-9-]+|\^\^<[^<>\s]+>)?'
_LINE = re.compile(rf"(?:({_NODE}) ?({_IRI}) ?(?:({_NODE})|{_LITERAL}) ?\.)? ?(?:#.*)?")


def _lines(path: Path, dropped: list[int]) -> Iterator[Block]:
    """Yield the triples of a file whose lines are terms with gaps between them."""
    text = Text(path, " ")
    others: list[Triple] = []  # of lines that are no rows
    count = literals = 0

    def parse(written: str, place: Callable[[], str]) -> None:
        nonlocal count, literals
        terms = _LINE.fullmatch(written)
        if terms is None:
            raise DataError(
                f"{place()}: not a line of RDF (<subject> <predicate> <object or literal> .): "
                f"{clipped(written, 80)!r}"
            )
        if terms[3] is not None:
            count += 1
            others.append(([_label(term) for term in terms.groups()], place))
        elif terms[1] is not None:
            literals += 1

    def leave_out(row: InvalidRow) -> None:
        number = row.number
        parse(row.text, lambda: f"{path}:{text.line_of(number)}")

    for cells, place in read_rows(text, 4, range(4), leave_out):
        head, relation, tail, dot = cells.values()
        good = _are_nodes(head) & _are_nodes(relation, "<") & _as_numpy(pc.equal(dot, "."))
        is_read = good & _are_nodes(tail)
        is_literal = good & _as_numpy(pc.starts_with(tail, '"'))
        own = tail.filter(pa.array(is_literal))
        is_literal[is_literal] = _as_numpy(pc.match_substring_regex(own, f"^{_LITERAL}$"))
        literals += int(is_literal.sum())
        rows, left = np.flatnonzero(is_read), np.flatnonzero(~(is_read | is_literal))
        terms = [column.take(pa.array(left)).to_pylist() for column in cells.values()]
        for row, written in zip(left.tolist(), zip(*terms, strict=True), strict=True):
            parse(" ".join(written), partial(place, row))
        columns = [head, relation, tail]
        if len(rows) < len(dot):
            columns = [column.take(pa.array(rows)) for column in columns]
        labels = {at: pc.utf8_trim(column, "<>") for at, column in enumerate(columns)}
        count += len(rows)
        yield labels, place_among(place, rows)
        yield _block(others)
        others = []
    yield _block(others)
    dropped.append(literals)
    if not count + literals:
        raise no_rows(path, Columns())


def _are_nodes(column: pa.Array, other: str = "_:") -> np.ndarray:
    """Return which terms (B,) are IRIs without escapes, or start with another text."""
    iris = pc.and_(pc.starts_with(column, "<"), pc.ends_with(column, ">"))
    codes = text_of(column)[1]
    special = sum(np.count_nonzero(codes == ord(character)) for character in "<>\\")
    if special != 2 * np.count_nonzero(_as_numpy(iris)):  # slower
        iris = pc.match_substring_regex(column, r"^<[^<>\\]*>$")
    return _as_numpy(iris if other == "<" else pc.or_(iris, pc.starts_with(column, other)))


def _as_numpy(mask: pa.Array) -> np.ndarray:
    return mask.to_numpy(zero_copy_only=False)


def _label(term: str) -> str:
    """Return the label of an IRI or a blank node."""
    if term.startswith("_:"):
        return term
    return re.sub(_ESCAPE, lambda match: chr(int(match[0][2:], 16)), term[1:-1])


# The other formats

# The parser invents other names of blank nodes in every run: 128 bits without leading zeros.
_NAMELESS = re.compile("[0-9a-f]{24,32}")


def _parsed(path: Path, dropped: list[int] | None) -> Iterator[Block]:
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
    triple, count, numbers = f"{path}: triple {{:,}}", 0, dict[str, int]()

    def label(term: Any) -> str:
        if isinstance(term, pyoxigraph.Triple):
            raise SyntaxError("a triple as subject or object (RDF-star) is no entity")
        if isinstance(term, pyoxigraph.BlankNode) and _NAMELESS.fullmatch(term.value):
            return f"_:{path.name}#{numbers.setdefault(term.value, len(numbers))}"
        return term.value if isinstance(term, pyoxigraph.NamedNode) else str(term)

    try:
        with io.BufferedReader(open_bytes(path), 1 << 20) as stream:
            parser = pyoxigraph.parse(
                stream, format=form, lenient=suffix_of(path) in (".nt", ".nq")
            )
            while quads := list(islice(parser, BATCH_ROWS)):
                kept: list[Triple] = [
                    ([label(term) for term in terms], partial(triple.format, number))
                    for number, (*terms, _) in enumerate(quads, count + 1)
                    if dropped is None or not isinstance(terms[2], pyoxigraph.Literal)
                ]
                count += len(quads)
                if dropped is not None:
                    dropped.append(len(quads) - len(kept))
                yield _block(kept)
    except SyntaxError as error:
        at = f"{path}:{error.lineno}" if error.lineno else f"{path}"
        raise DataError(f"{at}: not readable as {form}: {error.msg}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if count == 0:
        raise no_rows(path, Columns())
