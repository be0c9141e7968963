"""Results of a CPU that the checks compare with: carried in a file, or computed by the checks.

A file holds them for the sizes of a GPU. Another machine writes it beforehand, so that a GPU does
not wait for a CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
Result = Mapping[str, np.ndarray]
_CODE = "code"  # the name of the digest in a file
_BETWEEN = "|"  # between the names of a result and of its array


class Oracle:
    """Returns results by name.

    Args:
        path: File of ``write_oracle``, or None to compute every result.

    Raises:
        ValueError: Other code wrote the file, or it is no such file.
    """

    def __init__(self, path: Path | None = None):
        self._results: dict[str, dict[str, np.ndarray]] = {}
        if path is None:
            return
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
            code = str(arrays.pop(_CODE))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is no file of --write-oracle: {error}") from error
        if code != digest_of_code():
            raise ValueError(f"{path}: other code wrote this file; write it by --write-oracle FILE")
        for name, array in arrays.items():
            result, key = name.split(_BETWEEN)
            self._results.setdefault(result, {})[key] = array

    def __call__(self, name: str, compute: Callable[[], Result]) -> Result:
        """Return the result from the file, or compute it."""
        return self._results[name] if name in self._results else compute()


def write_oracle(path: Path, computations: Mapping[str, Callable[[], Result]]) -> None:
    """Compute all results and write them to a file."""
    arrays = {
        f"{name}{_BETWEEN}{key}": array
        for name, compute in computations.items()
        for key, array in compute().items()
    }
    with path.open("wb") as file:  # np.savez would add a suffix to a path
        np.savez_compressed(file, **{_CODE: np.array(digest_of_code())}, **arrays)


def digest_of_code() -> str:
    """Return a digest of the package and of these checks."""
    digest = hashlib.sha256()
    for folder in (ROOT / "kge_torchrec", Path(__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
