"""Find the reading options that have no effect on the way some triples are stored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kge_torchrec.data.datasets import EMBEDDED, is_named
from kge_torchrec.data.readers import DELIMITERS, SUFFIXES, WHOLE, Reader, Sources, find_sources
from kge_torchrec.data.readers.id_files import layout_of
from kge_torchrec.data.readers.rdf import FORMATS
from kge_torchrec.data.store import META
from kge_torchrec.data.streams import bare_name
from kge_torchrec.errors import DataError

# What each option of `prepare` acts on, in words.
ACTS_ON = {
    "ratio": "triples without splits",
    "seed": "triples without splits",
    "has_header": "text files (.tsv, .txt, .tab, .csv)",
    "columns": "text or Parquet files",
    "literals": "RDF files (.nt, .ttl, ...)",
    "reader": "files of triples",
    "types_from": "triples that are no store yet",
    "allow_unseen_relations": "triples that are no store yet",
}
_OF_FILES = {"has_header", "columns", "literals", "reader"}
_OF_SPLITS = {"ratio", "seed"}


def unread_options(
    sources: Sources | Mapping[str, Any], reader: Reader | None = None
) -> frozenset[str]:
    """Return the options of ``prepare`` that change nothing for these triples.

    Triples that cannot be read leave every option in use, so that their own error comes first.

    Args:
        sources: As for `prepare`, or the folder of a store.
        reader: As for `prepare`.
    """
    if isinstance(sources, Mapping):
        return frozenset(_OF_FILES | _OF_SPLITS)
    if isinstance(sources, str | Path) and (Path(sources) / META).is_file():
        return frozenset(ACTS_ON)
    if sources == EMBEDDED and not Path(EMBEDDED).exists():
        return frozenset(_OF_FILES | _OF_SPLITS)
    if is_named(sources):
        has_columns = str(sources).startswith("hf:")
        return frozenset(_OF_FILES - {"columns"} if has_columns else _OF_FILES)
    try:
        files = find_sources(sources, SUFFIXES if reader is None else reader.suffixes)
    except DataError:
        return frozenset()
    unread = set() if WHOLE in files else set(_OF_SPLITS)
    paths = [path for of_split in files.values() for path in of_split]
    plain = [path for path in paths if reader is None and not layout_of(path)]
    kinds = {Path(bare_name(path)).suffix.lower() for path in plain}
    if not kinds & set(DELIMITERS):
        unread.add("has_header")
    if not kinds & {*DELIMITERS, ".parquet"}:
        unread.add("columns")
    if not kinds & {".nt", *FORMATS}:
        unread.add("literals")
    return frozenset(unread)
