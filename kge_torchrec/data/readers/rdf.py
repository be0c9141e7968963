"""RDF in Turtle, TriG, N-Quads, N3, RDF/XML and JSON-LD to record batches, by pyoxigraph (Tanon).

N-Triples, the form that large graphs come in, has a reader of its own, several times as fast.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from kge_torchrec.data.labels import fault_of, first_fault
from kge_torchrec.data.streams import COLUMNS, OnBytes, bare_name, open_bytes, unreadable
from kge_torchrec.errors import DataError

# By the end of a file's name, what pyoxigraph calls the format.
FORMATS = {
    ".ttl": "TURTLE",
    ".trig": "TRIG",
    ".nq": "N_QUADS",
    ".n3": "N3",
    ".rdf": "RDF_XML",
    ".owl": "RDF_XML",
    ".jsonld": "JSON_LD",
}
BATCH_ROWS = 1 << 16  # triples that are Python objects at once


def read_rdf(
    path: Path,
    on_bytes: OnBytes | None = None,
    on_literals: Callable[[int], object] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Batches of the string columns head, relation, tail; named graphs are read as one.

    Labels are as in N-Triples: IRIs without angle brackets, blank nodes as ``_:name``, literals
    with language or type.  Nameless blank nodes are numbered as they come, ``_:FILE#0`` and so on,
    in memory of a few hundred bytes each; all else is read in a stream (of JSON-LD the parser may
    hold more).

    on_literals: hears of the number of triples whose object is a literal, which are left out;
        None keeps them.

    Raises:
        DataError: naming file and line: what is no such format, a relative IRI without a base; no
            triples at all; or pyoxigraph is not there.
    """
    try:
        import pyoxigraph
    except ImportError:
        raise DataError(
            f"{path}: reading {Path(bare_name(path)).suffix} takes the package pyoxigraph; install "
            "it (pip install 'kge-torchrec[rdf]'), or convert the file to N-Triples"
        ) from None
    form = getattr(pyoxigraph.RdfFormat, FORMATS[Path(bare_name(path)).suffix.lower()])
    label, count = _Labels(pyoxigraph, path.name), 0
    try:
        with io.BufferedReader(open_bytes(path, on_bytes), 1 << 20) as stream:
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
                    position = first_fault(column)
                    if position is not None:
                        fault = fault_of(column[position].as_py())
                        number = before + quads.index(kept[position]) + 1
                        raise DataError(f"{path}: triple {number:,}: the {name} {fault}")
                yield pa.record_batch(columns, list(COLUMNS))
    except SyntaxError as error:
        place = f"{path}:{error.lineno}" if error.lineno else f"{path}"
        raise DataError(f"{place}: not readable as {form}: {error.msg}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if count == 0:
        raise DataError(f"{path}: empty file: no triples")


# The names that the parser invents, others in every run: 128 bits without leading zeros.
_NAMELESS = re.compile("[0-9a-f]{24,32}")


class _Labels:
    """The label of a term.  Raises SyntaxError for a triple in place of one."""

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
