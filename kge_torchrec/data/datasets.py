"""Sources of triples besides files: data sets by name.

    countries                 a small graph of real facts, in this package
    pykeen:fb15k237           PyKEEN's data sets
    hf:ORGANIZATION/NAME      Hugging Face; hf:ORGANIZATION/NAME:CONFIGURATION for one of several

The libraries download and keep the files in their usual places; each is an optional package.

Shapes: T triples.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kge_torchrec.config.data import DataConfig
from kge_torchrec.data import COLUMNS, SPLITS
from kge_torchrec.data.readers.columns import Columns
from kge_torchrec.data.readers.delimited import open_delimited
from kge_torchrec.data.readers.fields import Block, Table
from kge_torchrec.data.readers.files import WHOLE, split_named
from kge_torchrec.data.readers.tables import open_batches, open_memory
from kge_torchrec.errors import DataError

EMBEDDED = "countries"  # in place of a path
Tables = list[tuple[str, Table]]  # split ("whole" for a single one) and its triples


def is_named(sources: Any) -> bool:
    """Return whether this names a data set, and no file."""
    if not isinstance(sources, str) or Path(sources).exists():
        return False
    scheme, _, name = sources.partition(":")
    return sources == EMBEDDED or (bool(name) and scheme in _LOADERS)


def embedded_files() -> dict[str, Path]:
    """Return the files of the embedded graph by split."""
    folder = Path(__file__).with_name(EMBEDDED)
    return {split: folder / f"{split}.tsv" for split in SPLITS}


def open_dataset(source: str, columns: Columns) -> Tables:
    """Open the data set of a name: its splits and their triples.

    Keys of reading do not act on the embedded graph.

    Raises:
        DataError: The library or the data set is missing, or columns are missing or unclear.
    """
    if source == EMBEDDED:
        files = embedded_files().items()
        return [(split, open_delimited(path, Columns(), DataConfig())) for split, path in files]
    scheme, _, name = source.partition(":")
    with _telling(source):
        module, load = _LOADERS[scheme]
        tables = load(importlib.import_module(module), source, name, columns)
    return [
        (split, table._replace(blocks=_guarded(source, table.blocks))) for split, table in tables
    ]


def _guarded(source: str, blocks: Iterator[Block]) -> Iterator[Block]:
    with _telling(source):
        yield from blocks


@contextmanager
def _telling(source: str) -> Iterator[None]:
    """Turn any error of a library, from no network to an unknown name, into a DataError."""
    scheme = source.partition(":")[0]
    package = _LOADERS[scheme][0].split(".")[0]
    try:
        yield
    except (DataError, GeneratorExit):
        raise
    except ImportError as error:
        raise DataError(
            f"{source}: this takes the package {package}, which cannot be imported "
            f"({error}); install it (pip install -e '.[{scheme}]')"
        ) from None
    except Exception as error:
        raise DataError(f"{source}: {package} cannot load it: {error!r}") from error


def _pykeen(library: Any, source: str, name: str, columns: Columns) -> Tables:
    dataset = library.get_dataset(dataset=name)
    parts = {"train": dataset.training, "valid": dataset.validation, "test": dataset.testing}
    entities, relations = (
        pa.array([str(label) for label in sorted(ids, key=ids.__getitem__)], pa.large_string())
        for ids in (dataset.entity_to_id, dataset.relation_to_id)
    )
    tables: Tables = []
    for split, part in parts.items():
        if part is not None:
            ids = np.ascontiguousarray(np.asarray(part.mapped_triples).T)
            triples = zip(ids, (entities, relations, entities), strict=True)
            own = [pa.DictionaryArray.from_arrays(ids, labels) for ids, labels in triples]
            table = open_memory(f"{source} {split}", pa.table(own, [*COLUMNS]), columns)
            tables.append((split, table))
    return tables


def _hugging_face(library: Any, source: str, name: str, columns: Columns) -> Tables:
    """Load a data set of Hugging Face as a stream; columns are found as in Parquet."""
    path, _, configuration = name.partition(":")
    loaded = library.load_dataset(path, configuration or None, streaming=True)
    parts = dict(loaded) if isinstance(loaded, Mapping) else {"train": loaded}
    named = {split_named(key): part for key, part in parts.items() if split_named(key)}
    if "train" not in named:
        raise DataError(f"{source}: no split for training among {', '.join(parts)}")
    splits = {split: named[split] for split in SPLITS if split in named}
    if list(splits) == ["train"]:
        splits = {WHOLE: splits["train"]}
    return [
        (split, open_batches(f"{source} {split}", _streamed(part), columns))
        for split, part in splits.items()
    ]


def _streamed(part: Any) -> Iterator[pa.RecordBatch]:
    for table in part.with_format("arrow").iter(batch_size=1 << 16):
        yield from table.combine_chunks().to_batches()


# By scheme: the module to import, and the function that loads a data set with it.
_LOADERS: dict[str, tuple[str, Callable[..., Tables]]] = {
    "pykeen": ("pykeen.datasets", _pykeen),
    "hf": ("datasets", _hugging_face),
}
