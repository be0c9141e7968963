"""Read lists of entities: their types, or their features.

item:7 <tab> comedy              pairs, and perhaps a weight
item_id,feature,weight           the same with names
item_id,genre,year               other columns: the features are "genre=comedy" and "year=1994"
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.config.data import DataConfig
from kge_torchrec.data import WEIGHT
from kge_torchrec.data.readers.columns import Columns, stem
from kge_torchrec.data.readers.delimited import first_row, open_delimited
from kge_torchrec.data.readers.fields import TEXT, LabelFile, batches_of
from kge_torchrec.data.readers.tables import open_parquet, parquet_names
from kge_torchrec.data.readers.where import Where
from kge_torchrec.errors import DataError

_PAIRS = Columns(("entity", "feature"), (WEIGHT, "entity_type"), (WEIGHT,), key="")


def read_types(path: Path, labels: Mapping[str, LabelFile] | None = None) -> pa.Table:
    """Return the columns entity and type of a file.

    Args:
        path: Text or Parquet: lines of entity and type, or columns of these names.
        labels: Files of the labels of ids, as for triples.

    Raises:
        DataError: The file is missing or empty, or a row has no entity or no type.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file of entities and their types")
    columns = Columns(("entity", "type"), (), key="")
    is_parquet = path.suffix.lower() == ".parquet"
    table = (
        open_parquet(path, columns) if is_parquet else open_delimited(path, columns, DataConfig())
    )
    return pa.Table.from_batches(batches_of(table, labels=labels))


def read_features(
    path: Path,
    kinds: Iterable[str] = (),
    labels: Mapping[str, LabelFile] | None = None,
    notes: list[tuple[str, str]] | None = None,
) -> pa.Table:
    """Return the features of a file: columns entity, feature and weight.

    Args:
        path: Text or Parquet.
        kinds: Types of entities; a column user_id holds ids of entities of type user.
        labels: Files of the labels of ids, as for triples.
        notes: Takes how the file was read, where that was a guess.

    Raises:
        DataError: The file is missing or empty, or a row has no entity, feature or weight.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file of entities and features")
    is_parquet = path.suffix.lower() == ".parquet"
    names = parquet_names(path) if is_parquet else first_row(path, _PAIRS, DataConfig())
    kind_of = {kind.lower(): kind for kind in kinds}
    typed = [name for name in names if stem(name) in kind_of]
    entity = next((n for n in names if _PAIRS.means(n, "entity")), typed[0] if typed else None)
    columns = _PAIRS
    if entity is not None:
        kind = kind_of.get(stem(entity))
        constants = {} if kind is None else {"entity_type": kind}
        columns = replace(_PAIRS, places={"entity": entity}, constants=constants)
    others = [name for name in names if name != entity and not _PAIRS.means(name, "entity_type")]
    is_wide = entity is not None and not any(_PAIRS.means(name, "feature") for name in others)

    def parts(name: str | None) -> Iterator[pa.RecordBatch]:
        own, where, used = columns, None, [] if name is None else [name]
        if name is not None and entity is not None:
            own = replace(columns, optional=(), places={"entity": entity, "feature": name})
            where = Where(f"`{name}` != ''")
        if is_parquet:
            table = open_parquet(path, own, used)
        else:
            table = open_delimited(path, own, DataConfig(), used)
        if notes is not None and name in (None, others[0]):
            notes.extend(table.notes)
        for batch in batches_of(table, where, labels):
            feature, weight = batch["feature"], pa.repeat(pa.scalar(1, pa.float32()), len(batch))
            if name is not None:
                feature = pc.binary_join_element_wise(
                    pa.scalar(name, TEXT), feature, pa.scalar("=", TEXT)
                )
            if WEIGHT in batch.schema.names:
                weight = batch[WEIGHT]
            row = {"entity": batch["entity"], "feature": feature, WEIGHT: weight}
            yield pa.record_batch(row)

    wanted: list[str | None] = [*others] if is_wide else [None]
    return pa.Table.from_batches(batch for name in wanted for batch in parts(name))
