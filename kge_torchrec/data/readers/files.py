"""Find the files of triples by their names, which say their split and format."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from kge_torchrec.data.readers import delimited, rdf
from kge_torchrec.data.streams import bare_name, suffix_of
from kge_torchrec.errors import DataError

SUFFIXES = (*(s for s in delimited.SUFFIXES if s != ".dict"), *rdf.FORMATS, ".parquet")

# The key of triples without a split, which are split by ratio.
WHOLE = "whole"

_NAMES = {
    "train": "train", "training": "train",
    "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid",
    "test": "test", "testing": "test",
}  # fmt: skip
# "train", a part of it such as "train-00000-of-00002", or OpenKE's "train2id".
_PART = re.compile(rf"({'|'.join(_NAMES)})(2id|[-_.]?\d+([-_]of[-_]\d+)?)?", re.IGNORECASE)

# Files of ids and labels: entity2id.txt, entities.dict, entity_ids.del, entity_to_id.tsv, ...
_LABELS = {
    kind: re.compile(rf"{stem}(2id|_ids|_to_id)?\.(txt|dict|del|tsv)", re.IGNORECASE)
    for kind, stem in (("entities", "(entity|entities)"), ("relations", "relations?"))
}

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
        if path.is_dir() and len(paths) > 1:
            raise DataError(f"{path}: is a directory; give one directory, or files only")
    if len(paths) == 1:
        if not paths[0].is_dir():
            return {WHOLE: paths}
        paths = _files_of(paths[0], suffixes)
    splits: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        splits[_split_of(path) or WHOLE].append(path)
    if WHOLE in splits and len(splits) > 1:
        raise DataError(
            f"{splits[WHOLE][0]}: not named train, valid or test, unlike the other files; "
            "rename it or leave it out"
        )
    if WHOLE not in splits and "train" not in splits:
        raise DataError(f"no train file among {', '.join(map(str, paths))}; name one train.*")
    for split, files in splits.items():
        stems = [Path(bare_name(path)).stem.lower() for path in files]
        are_parts = len({suffix_of(path) for path in files}) == 1 and not {*stems} & {*_NAMES}
        if split != WHOLE and len(files) > 1 and not (are_parts and len({*stems}) == len(stems)):
            raise DataError(
                f"more than one {split} file, which may hold the same triples: "
                f"{', '.join(map(str, files))}; name the ones to read"
            )
    return dict(splits)


def _split_of(path: Path) -> str | None:
    return split_named(Path(bare_name(path)).stem)


def split_named(name: str) -> str | None:
    """Return the split that a name such as "dev" or "train-00000-of-00002" means, or None."""
    match = _PART.fullmatch(name)
    return _NAMES[match[1].lower()] if match else None


def _files_of(directory: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files of triples in a directory."""
    labels = {path for kind in _LABELS for path in label_files(directory, kind)}
    there = (path for path in directory.iterdir() if path.is_file() and path not in labels)
    files = sorted(path for path in there if suffix_of(path) in suffixes)
    if named := [path for path in files if _split_of(path)]:
        # Triples as text and as numbers side by side are the same data.
        return [path for path in named if not has_numbers(path)] or named
    is_ours = any((directory / name).is_file() for name in ("config.yaml", "train.npy"))
    if is_ours and files in ([], [directory / "plan.txt"]):
        raise DataError(
            f"{directory}: this is a prepared store or a run, not files of triples; name a store "
            "(that of a run is its folder store), or prepare the files again if its meta.json is "
            "gone"
        )
    if len(files) == 1:
        return files
    if not suffixes:
        raise DataError(f"{directory}: its reader has no suffixes; name the files one by one")
    if not files:
        raise DataError(
            f"{directory}: no file of triples here; looked for train, valid and test "
            f"with one of {', '.join(suffixes)}"
        )
    raise DataError(
        f"{directory}: none of its {len(files)} files is named train, valid or test; "
        "name the files to read one by one"
    )


def has_numbers(path: Path) -> bool:
    """Return whether a file has triples of numbers by its name: ``train2id.txt``, ``train.del``."""
    name = bare_name(path).lower()
    return name.endswith(("2id.txt", ".del"))


def label_files(folder: Path, kind: str) -> list[Path]:
    """Return the files in a folder that have labels of "entities" or "relations" by their names."""
    pattern = _LABELS[kind]
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(bare_name(path)))
