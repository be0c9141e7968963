"""Which files hold which split."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from kge_torchrec.data.errors import DataError
from kge_torchrec.data.numbered import layout_of
from kge_torchrec.data.readers import SUFFIXES, is_readable
from kge_torchrec.data.streams import bare_name

SPLITS = ("train", "valid", "test")
# Triples that come without a split, to be divided by ratio.
WHOLE = "whole"

_NAMES = {
    "train": "train", "training": "train",
    "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid",
    "test": "test", "testing": "test",
}  # fmt: skip
# "train", a part of it such as "train-00000-of-00002", or OpenKE's "train2id".
_PART = re.compile(rf"({'|'.join(_NAMES)})(2id|[-_.]?\d+([-_]of[-_]\d+)?)?", re.IGNORECASE)

Sources = str | Path | Sequence[str | Path]


def find_sources(sources: Sources) -> dict[str, list[Path]]:
    """The files of each split; or of the single key ``WHOLE`` where no file names a split.

    ``sources`` is a directory with train, valid and test files (``train.txt``, ``dev.csv.gz``,
    ``test-00000-of-00002.parquet``, ...), one file, or a list of files told apart by name.

    Raises:
        DataError: nothing to read, or names that leave open what a file is.
    """
    if isinstance(sources, str | Path):
        sources = [sources]
    paths = [Path(source) for source in sources]
    if not paths:
        raise DataError("no input files given")
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file or directory")
    if len(paths) == 1 and paths[0].is_dir():
        return _of_directory(paths[0])
    if len(paths) == 1:
        return {WHOLE: paths}
    return _of_files(paths)


def _split_of(path: Path) -> str | None:
    match = _PART.fullmatch(Path(bare_name(path)).stem)
    return _NAMES[match[1].lower()] if match else None


def _of_directory(directory: Path) -> dict[str, list[Path]]:
    files = sorted(path for path in directory.iterdir() if path.is_file() and is_readable(path))
    named = [path for path in files if _split_of(path)]
    if named:
        # Triples as text and as numbers side by side are the same data.
        return _of_files([path for path in named if not layout_of(path)] or named)
    if len(files) == 1:
        return {WHOLE: files}
    if not files:
        raise DataError(
            f"{directory}: no file of triples here; looked for train, valid and test "
            f"with one of {', '.join(SUFFIXES)}"
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
        raise DataError(f"no train file among {', '.join(map(str, paths))}")
    for split, files in splits.items():
        _check_same_format(split, files)
    return dict(splits)


def _check_same_format(split: str, files: list[Path]) -> None:
    """Parts of one split share a format; train.txt beside train.csv is the same data twice."""
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
