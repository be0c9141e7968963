"""Vectors of texts, such as descriptions of entities, for ``model.init_from``.

The texts are the labels of a store, or a file of lines "label, tab, text", compressed or not.  The
encoder is a model of sentence-transformers (Reimers and Gurevych 2019).  Vectors are written as
they come: besides the labels no more than some thousand texts are in memory.

Shapes: m texts at a time, W numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from kge_torchrec import files
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.streams import lines
from kge_torchrec.errors import DataError

_TEXTS = 1 << 12  # encoded between two writes; the encoder sorts them by length

Encode = Callable[[list[str]], np.ndarray]  # m texts -> (m, W)


class Encoded(NamedTuple):
    """How many vectors were written, and their width W."""

    vectors: int
    width: int


def encode_texts(
    source: str | Path,
    output: str | Path,
    encoder: str,
    device: str | None = None,
    batch_size: int = 64,
) -> Encoded:
    """Writes a Parquet file of the columns ``label`` and ``vector``, a row a text.

    source: a prepared store, whose entities' labels are the texts; or a file of lines "label, tab,
        text".
    encoder: a model of sentence-transformers: its name, or the folder that it lies in.
    device: of the encoder; None leaves it to sentence-transformers.
    batch_size: texts that the encoder sees at once.

    Raises:
        DataError: a batch size below 1; sentence-transformers or the model is not there; a line
            without a tab, label or text, or of a label that was there before; NaN; no texts.
        OSError: the file cannot be written; what had its name stays.
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
        raise DataError(f"{source} holds no texts")
    return _write(output, first, texts, sentence_encoder(encoder, device, batch_size))


def read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """(label, text) of every line that is not blank.  Raises DataError, naming the line."""
    seen: dict[str, int] = {}
    for number, line in lines(path):
        if not line.strip():
            continue
        try:
            label, tab, text = line.decode().partition("\t")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: no valid UTF-8: {error}") from error
        if not (tab and label and text.strip()):
            raise DataError(f"{path}:{number}: should be a label, a tab and a text")
        if label in seen:
            raise DataError(
                f"{path}:{number}: {label!r} has a text already, in line {seen[label]:,}; leave "
                "one of them, or join them"
            )
        seen[label] = number
        yield label, text


def sentence_encoder(name: str, device: str | None, batch_size: int) -> Encode:
    """The encoder of a model.  Raises DataError where it or the package is not there."""
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


def _write(
    output: Path, part: list[tuple[str, str]], rest: Iterator[tuple[str, str]], encode: Encode
) -> Encoded:
    import pyarrow.parquet as pq  # starts threads

    output = output.resolve()
    partial = files.partial_of(output)
    writer: Any = None
    count, bar = 0, tqdm(desc="texts", unit="", unit_scale=True, leave=False)
    try:
        while part:
            labels, texts = map(list, zip(*part, strict=True))
            vectors = np.ascontiguousarray(encode(texts), np.float32)
            _check_finite(labels, vectors)
            column = pa.FixedSizeListArray.from_arrays(vectors.ravel(), vectors.shape[1])
            table = pa.table({"label": pa.array(labels, pa.large_string()), "vector": column})
            writer = writer or pq.ParquetWriter(partial, table.schema, use_dictionary=False)
            writer.write_table(table)
            count += len(part)
            bar.update(len(part))
            part = list(islice(rest, _TEXTS))
        writer.close()
        files.sync(partial)
        partial.replace(output)
    finally:
        bar.close()
        partial.unlink(missing_ok=True)
    return Encoded(count, vectors.shape[1])


def _check_finite(labels: list[str], vectors: np.ndarray) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(1))
    if len(bad):
        raise DataError(f"the encoder's vector of {labels[bad[0]]!r} holds NaN or infinity")
