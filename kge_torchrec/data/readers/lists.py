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
from kge_torchrec.data.readers.fields import TEXT, LabelFile, Table, batches_of
from kge_torchrec.data.readers.tables import open_parquet, parquet_names
from kge_torchrec.data.readers.where import Where
from kge_torchrec.errors import DataError

_PAIRS = Columns(("entity", "feature"), (WEIGHT, "entity_type"), (WEIGHT,), key="")


def open_list(path: Path, columns: Columns) -> Table:
    """Open a list in text or Parquet."""
    if _is_parquet(path):
        return open_parquet(path, columns)
    return open_delimited(path, columns, DataConfig())


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def read_types(path: Path, labels: Mapping[str, LabelFile] | None = None) -> pa.Table:
    """Return the columns entity and type of a file of such pairs, whose ids may have labels.

    Raises:
        DataError: The file is missing or empty, or a row has no entity or no type.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file of entities and their types")
    columns = Columns(("entity", "type"), (), key="")
    return pa.Table.from_batches(batches_of(open_list(path, columns), labels=labels))


def read_features(
    path: Path,
    kinds: Iterable[str] = (),
    labels: Mapping[str, LabelFile] | None = None,
    notes: list[tuple[str, str]] | None = None,
) -> pa.Table:
    """Return the features of a file: columns entity, feature and weight.

    A column user_id holds ids of entities of type user, if that is one of ``kinds``.  ``notes``
    takes how the file was read, where that was a guess.

    Raises:
        DataError: The file is missing or empty, or a row has no entity, feature or weight.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file of entities and features")
    names = parquet_names(path) if _is_parquet(path) else first_row(path, _PAIRS, DataConfig())
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
        own, where = columns, None
        if name is not None and entity is not None:
            places = {"entity": entity, "feature": name}
            own = replace(columns, optional=(), places=places, others=(name,))
            where = Where(f"`{name}` != ''")
        table = open_list(path, own)
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
