"""Vectors of entities from elsewhere: files of them, and texts that a sentence encoder reads.

    .npy           (M, W) numbers, labels in a .txt of the same name beside it (`labels`)
    .safetensors   one tensor (M, W), labels in the same way
    .parquet       a column of strings and one of lists of W numbers
    .vec, .txt     word2vec's text: "label v1 ... vW", after a line "M W" or without; .w2v as well

A folder stands for the file ``entities`` of one of these forms in it, as in an export.

Texts, such as descriptions of entities, are the labels of a store or a file of lines "label, tab,
text".  The encoder is a model of sentence-transformers (Reimers and Gurevych 2019).  Both read and
write some thousand vectors at a time.

Shapes: M vectors, W elements each, m of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from kge_torchrec import files
from kge_torchrec.data.labels import WHITESPACE, read_label_file
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.streams import text_lines
from kge_torchrec.errors import DataError

ROWS = 1 << 14  # rows at a time


@dataclass(frozen=True)
class Vectors:
    """Labels, and their vectors in the same order.

    Args:
        source: The file.
        labels: (M,) labels.
        width: W.
        rows: Yields the vectors, (m, W) float32 at a time.
        words: Whether labels are single words, with underscores for whitespace.
    """

    source: Path
    labels: pa.Array
    width: int
    rows: Callable[[], Iterator[np.ndarray]]
    words: bool = False


def open_vectors(path: str | Path) -> Vectors:
    """Open the vectors of a file or folder; the labels are read, the vectors not yet.

    Raises:
        DataError: The file has none of the forms above; the message says what is wrong where.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder of vectors")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path}: vectors are read from {', '.join(_READERS)}, not from {path.suffix or 'this'}"
        )
    vectors = reader(path)
    if not len(vectors.labels) or not vectors.width:
        raise DataError(f"{path} has no vectors; check how it was written")
    return vectors


def ids_of(vectors: Vectors, labels: pa.Array) -> np.ndarray:
    """Return the places of the vectors' labels in ``labels`` (N,): (M,) int64, -1 for none.

    Raises:
        DataError: Two vectors have the same label, or no label is in ``labels``.
    """
    known = labels
    if vectors.words:
        known = pc.replace_substring_regex(labels, WHITESPACE, "_")
    place = pc.index_in(vectors.labels, value_set=known)
    ids = pc.fill_null(place, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    there = ids[ids >= 0]
    if not len(there):
        examples = ", ".join(map(repr, vectors.labels[:3].to_pylist()))
        others = ", ".join(map(repr, labels[:3].to_pylist()))
        raise DataError(
            f"{vectors.source}: none of its {len(ids):,} labels ({examples}, ...) is an entity of "
            f"the graph ({others}, ...)"
        )
    counts = np.bincount(there, minlength=len(labels))
    if counts.max() > 1:
        label = labels[int(counts.argmax())].as_py()
        places = (np.flatnonzero(ids == counts.argmax())[:2] + 1).tolist()
        raise DataError(
            f"{vectors.source}: {label!r} has {counts.max()} vectors (number {places[0]:,} and "
            f"{places[1]:,}); leave one of them"
        )
    return ids


def check_finite(vectors: Vectors, first: int, rows: np.ndarray, wanted: np.ndarray) -> None:
    """Raise DataError, with the label, for a wanted row that has NaN or infinity.

    Args:
        vectors: The file.
        first: Number of the first row among all rows.
        rows: (m, W).
        wanted: (m,) bool.
    """
    bad = np.flatnonzero(~np.isfinite(rows).all(1) & wanted)
    if len(bad):
        place = first + int(bad[0])
        raise DataError(
            f"{vectors.source}: the vector of {vectors.labels[place].as_py()!r} (number "
            f"{place + 1:,}) holds NaN or infinity"
        )


def _in_folder(folder: Path) -> Path:
    """Return the file of vectors in a folder."""
    names = [
        folder / f"entities{suffix}" for suffix in (".npy", ".safetensors", ".vec", ".parquet")
    ]
    files_there = [name for name in names if name.is_file()]
    if len(files_there) != 1:
        what = "none" if not files_there else f"{len(files_there)} of them"
        raise DataError(
            f"{folder}: looked for a run, an export or one of "
            f"{', '.join(name.name for name in names)}, and there is {what}"
        )
    return files_there[0]


def _matrix(path: Path, table: Any, shape: tuple[int, ...], is_real: bool) -> Vectors:
    """Return the rows of a table (M, W) that is sliced like an array, with labels beside it."""
    if len(shape) != 2 or not is_real:
        raise DataError(f"{path}: vectors are real numbers of shape (M, W), this has {shape}")
    count, width = shape
    labels = path.with_suffix(".txt")
    if not labels.is_file():
        raise DataError(f"{path}: its labels should be in {labels.name} beside it, one a line")

    def rows() -> Iterator[np.ndarray]:
        for first in range(0, count, ROWS):
            yield np.asarray(table[first : min(first + ROWS, count)], np.float32)

    return Vectors(path, read_label_file(labels, count, foreign=True), width, rows)


def _npy(path: Path) -> Vectors:
    """Open a .npy file."""
    try:
        table = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is no readable .npy file: {error}") from error
    return _matrix(path, table, table.shape, table.dtype.kind in "fiu")


def _safetensors(path: Path) -> Vectors:
    """Open a .safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(path, "numpy")
        names = list(opened.keys())
        if len(names) != 1:
            raise DataError(f"{path} has {len(names)} tensors; save one tensor with all vectors")
        tensor = opened.get_slice(names[0])
    except SafetensorError as error:
        raise DataError(f"{path} is no readable safetensors file: {error}") from error
    is_real = tensor.get_dtype() in ("F16", "F32", "F64")
    return _matrix(path, tensor, tuple(tensor.get_shape()), is_real)


def _parquet(path: Path) -> Vectors:
    """Open a Parquet file."""
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        fields = {field.name: field.type for field in file.schema_arrow}
        texts = [
            n for n, t in fields.items() if pa.types.is_string(t) or pa.types.is_large_string(t)
        ]
        lists = [n for n, t in fields.items() if _is_list(t)]
        if len(texts) != 1 or len(lists) != 1:
            raise DataError(
                f"{path}: wants one column of labels (strings) and one of vectors (lists of "
                f"numbers), and has {len(texts)} and {len(lists)} among {', '.join(fields)}"
            )
        labels = file.read([texts[0]])[texts[0]].cast(pa.large_string()).combine_chunks()
        first = next(file.iter_batches(1, columns=lists), None)
    except pa.ArrowException as error:
        raise DataError(f"{path} is no readable Parquet file: {error}") from error
    if labels.null_count:
        raise DataError(f"{path}: {labels.null_count:,} vectors have no label")
    width = len(first[0][0].as_py() or ()) if first is not None and len(first) else 0

    def rows() -> Iterator[np.ndarray]:
        done = 0
        for batch in file.iter_batches(ROWS, columns=lists):
            lengths = pc.fill_null(pc.list_value_length(batch[0]), -1).to_numpy(
                zero_copy_only=False
            )
            if (lengths != width).any():
                place = done + int(np.flatnonzero(lengths != width)[0])
                raise DataError(
                    f"{path}: the vector of {labels[place].as_py()!r} (row {place + 1:,}) has not "
                    f"{width} numbers as the first one"
                )
            numbers = pc.list_flatten(batch[0]).cast(pa.float32())
            done += len(batch)
            values = pc.fill_null(numbers, float("nan")).to_numpy(zero_copy_only=False)
            yield values.reshape(-1, width)

    return Vectors(path, labels, width, rows)


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ) and (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type))


def _word2vec(path: Path) -> Vectors:
    """Open a file in word2vec's text format."""
    with path.open("rb") as file:
        head = file.readline().split()
        skipped = 1 if len(head) == 2 and all(part.isdigit() for part in head) else 0
        file.seek(0 if not skipped else file.tell())
        line = file.readline()
        width = len(line.split()) - 1
        ending = ["end of line"] if line.rstrip(b"\r\n").endswith(b" ") else []
    if width < 1:
        raise DataError(f"{path} is no word2vec text: no line 'label v1 ... vW'")
    columns = [str(place) for place in range(width)]
    types = {"label": pa.large_string(), **dict.fromkeys(columns, pa.float32())}

    def batches(wanted: list[str]) -> Iterator[pa.RecordBatch]:
        from pyarrow import csv

        try:
            yield from csv.open_csv(
                path,
                csv.ReadOptions(skip_rows=skipped, column_names=["label", *columns, *ending]),
                csv.ParseOptions(delimiter=" ", quote_char=False),
                csv.ConvertOptions(
                    include_columns=wanted,
                    column_types=types,
                    null_values=[],
                ),
            )
        except (pa.ArrowInvalid, ValueError) as error:
            raise DataError(f"{path} is no word2vec text of {width} numbers: {error}") from error

    def rows() -> Iterator[np.ndarray]:
        for batch in batches(columns):
            yield np.stack([column.to_numpy() for column in batch.columns], 1)

    labels = [batch["label"] for batch in batches(["label"])]
    joined = pa.chunked_array(labels, pa.large_string()).combine_chunks()
    return Vectors(path, joined, width, rows, words=True)


_READERS: dict[str, Callable[[Path], Vectors]] = {
    ".npy": _npy,
    ".safetensors": _safetensors,
    ".parquet": _parquet,
    ".vec": _word2vec,
    ".w2v": _word2vec,
    ".txt": _word2vec,
}


_TEXTS = 1 << 12  # texts encoded between two writes; the encoder sorts them by length

Encode = Callable[[list[str]], np.ndarray]  # m texts -> (m, W)


class Encoded(NamedTuple):
    """The number of vectors written, and their width W."""

    vectors: int
    width: int


def encode_texts(
    source: str | Path,
    output: str | Path,
    encoder: str,
    device: str | None = None,
    batch_size: int = 64,
) -> Encoded:
    """Write a Parquet file of the columns ``label`` and ``vector``, one row per text.

    Args:
        source: A prepared store, whose entities' labels are the texts; or a file of lines "label,
            tab, text".
        output: The file, NAME.parquet.
        encoder: A model of sentence-transformers: its name or its folder.
        device: Device of the encoder; None leaves it to sentence-transformers.
        batch_size: Texts per batch of the encoder.

    Raises:
        DataError: A batch size below 1; sentence-transformers or the model is missing; a line
            without a tab, label or text, or with a label that came before; NaN; no texts.
        OSError: The file cannot be written; an earlier file of that name stays.
    """
    source, output = Path(source), Path(output)
    if batch_size < 1:
        raise DataError(f"the batch size must be at least 1, not {batch_size}")
    if output.suffix != ".parquet":
        raise DataError(f"{output}: vectors of texts are written as Parquet; name it NAME.parquet")
    texts: Iterator[tuple[str, str]]
    if source.is_dir():
        labels = TripleStore.open(source).entities.array
        texts = ((label.as_py(), label.as_py()) for label in labels)
    elif source.is_file():
        texts = read_texts(source)
    else:
        raise DataError(f"{source}: no such file of texts, and no store")
    first = list(islice(texts, _TEXTS))  # before the encoder, which takes seconds to load
    if not first:
        raise DataError(f"{source} has no texts; write lines of label, tab and text")
    return _write_vectors(output, first, texts, sentence_encoder(encoder, device, batch_size))


def read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of every line that is not blank.

    Raises:
        DataError: A line without a label or a text, or with a label that came before.
    """
    line_of: dict[str, int] = {}
    for number, line in text_lines(path):
        if not line.strip():
            continue
        label, tab, text = line.partition("\t")
        if not (tab and label and text.strip()):
            raise DataError(f"{path}:{number}: should be a label, a tab and a text")
        if label in line_of:
            raise DataError(
                f"{path}:{number}: {label!r} has a text already, in line {line_of[label]:,}; leave "
                "one of them, or join them"
            )
        line_of[label] = number
        yield label, text


def sentence_encoder(name: str, device: str | None, batch_size: int) -> Encode:
    """Return the encoder of a model.

    Raises:
        DataError: The model or its package is missing.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise DataError(
            "encoding texts takes the package sentence-transformers; install it (pip install "
            "'kge-torchrec[text]'), or bring vectors that something else made"
        ) from None
    try:
        model = SentenceTransformer(name, device=device)
    except (OSError, ValueError) as error:
        raise DataError(f"{name}: no model of sentence-transformers is there: {error}") from error

    def encode(texts: list[str]) -> np.ndarray:
        return model.encode(texts, batch_size=batch_size, show_progress_bar=False)

    return encode


def _write_vectors(
    output: Path, part: list[tuple[str, str]], rest: Iterator[tuple[str, str]], encode: Encode
) -> Encoded:
    from pyarrow import parquet as pq  # starts threads

    writer: Any = None
    count, bar = 0, tqdm(desc="texts", unit="", unit_scale=True, leave=False)
    with bar, files.replacing(output) as partial:
        while part:
            labels, texts = map(list, zip(*part, strict=True))
            vectors = np.ascontiguousarray(encode(texts), np.float32)
            for row in np.flatnonzero(~np.isfinite(vectors).all(1)).tolist():
                raise DataError(f"the encoder's vector of {labels[row]!r} holds NaN or infinity")
            column = pa.FixedSizeListArray.from_arrays(vectors.ravel(), vectors.shape[1])
            table = pa.table({"label": pa.array(labels, pa.large_string()), "vector": column})
            writer = writer or pq.ParquetWriter(partial, table.schema, use_dictionary=False)
            writer.write_table(table)
            count += len(part)
            bar.update(len(part))
            part = list(islice(rest, _TEXTS))
        writer.close()
    return Encoded(count, vectors.shape[1])
