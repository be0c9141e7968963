"""Formats of the entity table by name, and how to open a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from safetensors import SafetensorError

from kge_torchrec.errors import ExportError
from kge_torchrec.export.table_files import NUMBER, Npy, Parquet, Safetensors, TableFile
from kge_torchrec.export.text import Word2vec

FORMATS: dict[str, type[TableFile]] = {
    "npy": Npy,
    "safetensors": Safetensors,
    "word2vec": Word2vec,
    "parquet": Parquet,
}
_UNREADABLE = (ValueError, EOFError, KeyError, OSError, SafetensorError, pa.ArrowException)


def open_table(file: Path, table_format: str, num_entities: int, dim: int) -> np.ndarray:
    """Return the table (N, D) float32 of a file, read-only and memory-mapped if possible.

    Raises:
        ExportError: The file does not hold such a table.
    """
    try:
        table = FORMATS[table_format](num_entities, dim).read(file)
    except _UNREADABLE as error:
        raise ExportError(f"{file} is no readable {table_format} file: {error}") from error
    if table.shape != (num_entities, dim) or table.dtype != NUMBER:
        raise ExportError(
            f"{file} holds {table.dtype} numbers of shape {tuple(table.shape)} instead of "
            f"float32 ({num_entities}, {dim})"
        )
    table.flags.writeable = False
    return table
