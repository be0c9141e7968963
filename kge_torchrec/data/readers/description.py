"""Read a description of edge files: a YAML file that says what their columns are.

    edges:
      - {file: follows.csv, head: user, relation: follows, tail: user}
      - file: events.csv
        head: {type: user, column: user_id}
        relation: {column: event_type}
        tail: {type: item, column: item_id}
        weight: {view: 1, cart: 3, purchase: 5}

Ends with a type have labels such as ``user:17``, as TwHIN (El-Kishky et al. 2022) and GiGL describe
typed graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from kge_torchrec.config.yaml_file import read_yaml
from kge_torchrec.data import SPLITS, TIME, WEIGHT
from kge_torchrec.data.labels import fault_of
from kge_torchrec.data.readers.columns import Columns, given_columns
from kge_torchrec.data.readers.files import WHOLE
from kge_torchrec.data.readers.where import Where
from kge_torchrec.errors import DataError

_NEEDED = ("file", "head", "relation", "tail")
_KEYS = (*_NEEDED, WEIGHT, TIME, "where", "split")


def is_description(sources: Any) -> TypeGuard[str | Path]:
    """Return whether the sources of ``prepare`` name a description of edge files."""
    is_path = isinstance(sources, str | Path)
    return is_path and Path(sources).suffix in (".yaml", ".yml") and Path(sources).is_file()


def read_description(path: str | Path) -> list[tuple[str, Path, Columns]]:
    """Return the edge files of a description: split, file and columns.

    Files are relative to the description.  If one of them names its split, those that name none are
    of train; otherwise all are split.

    Raises:
        ConfigError: The file is no YAML.
        DataError: It is no description, or names a file that is not there.
    """
    path, content = Path(path), read_yaml(path)[0]
    entries = content.get("edges") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries or len(content) > 1:
        raise DataError(
            f"{path}: a description of edge files has one key, edges, a list of "
            "{file: FILE, head: TYPE, relation: NAME, tail: TYPE}"
        )
    edges = [_edges(path, number, entry) for number, entry in enumerate(entries, 1)]
    if any(split != WHOLE for split, *_ in edges):
        edges = [("train" if s == WHOLE else s, file, columns) for s, file, columns in edges]
    if not any(split in ("train", WHOLE) for split, *_ in edges):
        raise DataError(f"{path}: no edges are of train")
    return edges


def _edges(path: Path, number: int, entry: Any) -> tuple[str, Path, Columns]:
    where = f"{path}: edges, entry {number}"
    if not isinstance(entry, dict) or not set(_NEEDED) <= set(entry) <= set(_KEYS):
        raise DataError(
            f"{where}: give {', '.join(_NEEDED)}, and perhaps {', '.join(_KEYS[4:])}; got {entry}"
        )
    constants, places = {}, {name: entry.get(name) for name in (TIME, WEIGHT)}
    for end in ("head", "tail"):
        given = entry[end] if isinstance(entry[end], Mapping) else {"type": entry[end]}
        if not given or not set(given) <= {"type", "column"}:
            raise DataError(
                f"{where}: {end} is a type or {{type: TYPE, column: COLUMN}}, got {given}"
            )
        if "type" in given:
            constants[f"{end}_type"] = _name(where, end, given["type"])
        places[end] = given.get("column")
    if len(constants) == 1:
        raise DataError(f"{where}: head and tail both have a type, or neither")
    relation = entry["relation"]
    if not isinstance(relation, Mapping):
        constants["relation"] = _name(where, "relation", relation)
    elif set(relation) == {"column"}:
        places["relation"] = relation["column"]
    else:
        raise DataError(f"{where}: relation is a name or {{column: COLUMN}}, got {relation}")
    if not isinstance(entry["file"], str) or not (path.parent / entry["file"]).is_file():
        raise DataError(f"{where}: {path.parent / str(entry['file'])}: no such file")
    split = entry.get("split", WHOLE)
    if split not in (*SPLITS, WHOLE):
        raise DataError(f"{where}: split must be train, valid or test, not {split!r}")
    places = {role: place for role, place in places.items() if place is not None}
    columns = given_columns(places, constants, f"{where}:")
    if "where" in entry:
        columns = replace(columns, where=Where(str(entry["where"])))
    return split, path.parent / entry["file"], columns


def _name(where: str, key: str, value: Any) -> str:
    fault = fault_of(value) if isinstance(value, str) else "is no text; quote it"
    if fault is None and key != "relation" and ":" in value:
        fault = "has a colon, which ends the type in labels such as user:17"
    if fault is not None:
        raise DataError(f"{where}: {key} {value!r} {fault}")
    return str(value)
