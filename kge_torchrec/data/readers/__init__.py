"""Read files of triples of any format into batches of three string columns.

The names of files say which split and which format they have.  A ``Reader`` of another package
reads other formats.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from kge_torchrec.config.options import parse_options
from kge_torchrec.config.registry import construct, resolve
from kge_torchrec.data import COLUMNS, TIME, WEIGHT
from kge_torchrec.data import SPLITS as SPLITS
from kge_torchrec.data.labels import first_fault
from kge_torchrec.data.readers.columns import (
    ColumnChoice,
    NotATime,
    NotAWeight,
    OnFirstLine,
    parse_times,
    parse_weights,
)
from kge_torchrec.data.readers.rdf import FORMATS, read_ntriples, read_rdf
from kge_torchrec.data.readers.tables import layout_of, read_id_files
from kge_torchrec.data.streams import COMPRESSIONS, bare_name, suffix_of
from kge_torchrec.errors import DataError

DELIMITERS = {".tsv": "\t", ".txt": "\t", ".tab": "\t", ".csv": ","}
SUFFIXES = (*DELIMITERS, ".nt", *FORMATS, ".parquet", ".del")


class Reader:
    """Base of readers of other formats; constructed with the fields of its ``Options``."""

    @dataclass(frozen=True)
    class Options:
        """Settings of this reader: ``data.reader_options`` of the config."""

    suffixes: tuple[str, ...] = ()  # file endings to look for in a directory, such as ".jsonl"

    def read(self, path: Path) -> Iterator[pa.RecordBatch]:
        """Yield record batches of the string columns head, relation and tail, never a whole file.

        A column ``weight`` of numbers is read as well if there is one, and a column ``time`` of
        numbers or dates if the split needs it.

        Args:
            path: The file.

        Raises:
            DataError: Bad input, named by file and line.
        """
        raise NotImplementedError


def make_reader(name: str | None, options: Mapping[str, Any], key: str) -> Reader | None:
    """Return the reader of a name; None stands for going by the names of files.

    Raises:
        ConfigError: The reader cannot be made; ``key`` names its options.
    """
    if name is None:
        return None
    kind = resolve("reader", name)
    reader: Reader = construct("reader", name, **asdict(parse_options(kind, dict(options), key)))
    return reader


def read_triples(
    path: Path,
    has_header: bool | None = None,
    on_literals: Callable[[int], object] | None = None,
    reader: Reader | None = None,
    choice: ColumnChoice = ColumnChoice(),  # noqa: B008 - immutable
    on_first_line: OnFirstLine | None = None,
) -> Iterator[pa.RecordBatch]:
    """Return record batches of the large_string columns head, relation, tail, never a whole file.

    Columns weight (float32) and time (int64, float64 or timestamp) are there where TSV, CSV or
    Parquet has them and ``choice`` wants them.  The format follows from the name:
    ``.tsv``/``.txt``/``.tab`` (tabs), ``.csv``, ``.nt`` (N-Triples), ``.ttl`` and other RDF (see
    `rdf`), each also ``.gz``, ``.zst`` or ``.bz2``; ``.parquet``; numbered triples with files of
    labels beside them, as OpenKE (``train2id.txt``) and LibKGE (``train.del``) have them.

    Args:
        path: The file.
        has_header: Whether TSV and CSV start with a header; None recognizes one.
        on_literals: Called with the number of triples of RDF that are left out because their object
            is a literal; None keeps them.
        reader: Reads the file, for any name of the file.
        choice: Which columns are read.
        on_first_line: Called with what was guessed about a header or about columns.

    Raises:
        DataError: A missing file, an unknown format, or bad input, named by file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if reader is not None:
        return _checked(path, reader.read(path), choice)
    suffix = suffix_of(path)
    layout = layout_of(path)
    if choice.names is not None and (layout or suffix not in (*DELIMITERS, ".parquet")):
        raise DataError(f"{path}: columns by name: this format has none")
    if layout:
        return read_id_files(path, layout)
    if suffix in DELIMITERS:
        from kge_torchrec.data.readers.delimited import read_delimited

        return read_delimited(path, DELIMITERS[suffix], has_header, choice, on_first_line)
    if suffix == ".nt":
        return read_ntriples(path, on_literals)
    if suffix in FORMATS:
        return read_rdf(path, on_literals)
    if suffix == ".parquet" and path.suffix.lower() == ".parquet":
        from kge_torchrec.data.readers.tables import read_parquet

        return read_parquet(path, choice, on_first_line)
    raise DataError(
        f"{path}: unknown format {path.suffix!r}; known are {', '.join(SUFFIXES)}, "
        f"all but .parquet also compressed ({', '.join(COMPRESSIONS)})"
    )


_COLUMNS = pa.schema([(name, pa.large_string()) for name in COLUMNS])


def _checked(
    path: Path, batches: Iterator[pa.RecordBatch], choice: ColumnChoice
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a reader from outside in our types, or raise DataError."""
    for batch in batches:
        try:
            columns = pa.Table.from_batches([batch]).select(_COLUMNS.names)
            _check_text(path, columns.schema)
            columns = columns.cast(_COLUMNS)
        except (TypeError, KeyError, AttributeError, pa.ArrowException) as error:
            raise DataError(
                f"{path}: its reader gave no record batch of the string columns head, relation and "
                f"tail: {error}"
            ) from error
        for name, column in zip(_COLUMNS.names, columns.columns, strict=True):
            if fault := first_fault(column.combine_chunks()):
                raise DataError(f"{path}: its reader gave a triple whose {name} {fault.reason}")
        try:
            if choice.weights is not False and WEIGHT in batch.schema.names:
                columns = columns.append_column(WEIGHT, parse_weights(batch[WEIGHT]))
            if choice.time and TIME in batch.schema.names:
                columns = columns.append_column(TIME, parse_times(batch[TIME]))
        except NotAWeight as error:
            raise DataError(f"{path}: its reader gave a weight that is {error}") from None
        except NotATime as error:
            raise DataError(f"{path}: its reader gave a wrong time: {error}") from None
        yield from columns.to_batches()


def _check_text(path: Path, schema: pa.Schema) -> None:
    """Raise DataError for numbers in place of labels, which a cast would turn into text."""
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if pa.types.is_primitive(kind) or pa.types.is_decimal(kind):
            raise DataError(
                f"{path}: its reader gave the column {field.name} as {field.type}, and labels are "
                "text; look up the labels of ids, or cast numbers that are names to pa.string()"
            )


# The key of triples without a split, which are split by ratio.
WHOLE = "whole"

_NAMES = {
    "train": "train", "training": "train",
    "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid",
    "test": "test", "testing": "test",
}  # fmt: skip
# "train", a part of it such as "train-00000-of-00002", or OpenKE's "train2id".
_PART = re.compile(rf"({'|'.join(_NAMES)})(2id|[-_.]?\d+([-_]of[-_]\d+)?)?", re.IGNORECASE)

Sources = str | Path | Sequence[str | Path]


def find_sources(sources: Sources, suffixes: Sequence[str] = SUFFIXES) -> dict[str, list[Path]]:
    """Return the files of each split, or of the single key ``WHOLE`` if no file names a split.

    Args:
        sources: A directory with train, valid and test files (``train.txt``, ``dev.csv.gz``,
            ``test-00000-of-00002.parquet``, ...), one file, or a list of files with such names.
        suffixes: Endings of the files in a directory.

    Raises:
        DataError: Nothing to read, or names that leave open what a file is.
    """
    if isinstance(sources, str | Path):
        sources = [sources]
    try:
        paths = [Path(source) for source in sources]
    except TypeError:
        raise DataError(
            'triples are files, or splits in memory such as {"train": triples}; name the split'
        ) from None
    if not paths:
        raise DataError("no input files; name a directory or files")
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file or directory")
    if len(paths) == 1 and paths[0].is_dir():
        return _of_directory(paths[0], suffixes)
    if len(paths) == 1:
        return {WHOLE: paths}
    return _of_files(paths)


def _split_of(path: Path) -> str | None:
    return split_named(Path(bare_name(path)).stem)


def split_named(name: str) -> str | None:
    """Return the split that a name such as "dev" or "train-00000-of-00002" means, or None."""
    match = _PART.fullmatch(name)
    return _NAMES[match[1].lower()] if match else None


def _of_directory(directory: Path, suffixes: Sequence[str]) -> dict[str, list[Path]]:
    there = (path for path in directory.iterdir() if path.is_file())
    files = sorted(path for path in there if suffix_of(path) in suffixes)
    named = [path for path in files if _split_of(path)]
    if named:
        # Triples as text and as numbers side by side are the same data.
        return _of_files([path for path in named if not layout_of(path)] or named)
    if files == [directory / "plan.txt"] and (directory / "config.yaml").is_file():
        raise DataError(
            f"{directory}: this is a run, not files of triples; name its folder store, or what its "
            "config.yaml has as data.path"
        )
    if len(files) == 1:
        return {WHOLE: files}
    if not suffixes:
        raise DataError(f"{directory}: its reader has no suffixes; name the files one by one")
    if not files and (directory / "train.npy").is_file():
        raise DataError(
            f"{directory}: this is a prepared store, not files of triples; give it to --data.path, "
            "or prepare the files again if its meta.json is gone"
        )
    if not files:
        raise DataError(
            f"{directory}: no file of triples here; looked for train, valid and test "
            f"with one of {', '.join(suffixes)}"
        )
    raise DataError(
        f"{directory}: none of its {len(files)} files is named train, valid or test; "
        "name the files to read one by one"
    )


def _of_files(paths: list[Path]) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        if path.is_dir():
            raise DataError(f"{path}: is a directory; give one directory, or files only")
        splits[_split_of(path) or WHOLE].append(path)
    if WHOLE in splits and len(splits) > 1:
        raise DataError(
            f"{splits[WHOLE][0]}: not named train, valid or test, unlike the other files; "
            "rename it or leave it out"
        )
    if WHOLE not in splits and "train" not in splits:
        raise DataError(f"no train file among {', '.join(map(str, paths))}; name one train.*")
    for split, files in splits.items():
        _check_same_format(split, files)
    return dict(splits)


def _check_same_format(split: str, files: list[Path]) -> None:
    """Check that the parts of a split share a format: train.txt and train.csv are the same data."""
    if split == WHOLE:
        return
    stems = [Path(bare_name(path)).stem.lower() for path in files]
    whole = [stem for stem in stems if stem in _NAMES]
    same_data = len(whole) > 1 or len(set(stems)) < len(stems)
    if same_data or len({Path(bare_name(path)).suffix for path in files}) > 1:
        raise DataError(
            f"more than one {split} file: {', '.join(map(str, files))}; name the ones to read"
        )
    if whole and len(files) > 1:
        raise DataError(
            f"{split} both whole and in parts: {', '.join(map(str, files))}; name the ones to read"
        )
