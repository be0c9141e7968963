"""ConfigError, and the checks that raise it; messages name the key."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional, TypeAlias, Union

from kge_torchrec.errors import KGEError

# Types of keys whose null stands for a number that `sizing.py` chooses for the graph, before
# anything else reads the config.
if TYPE_CHECKING:
    PickedInt: TypeAlias = int
    PickedFloat: TypeAlias = float
    PickedNumber: TypeAlias = float
    PickedText: TypeAlias = str
else:
    PickedInt = Optional[int]  # noqa: UP045 - jsonargparse on Python 3.10
    PickedFloat = Optional[float]  # noqa: UP045
    PickedNumber = Optional[Union[int, float]]  # noqa: UP007, UP045
    PickedText = Optional[str]  # noqa: UP045
PICKED: Any = None


class ConfigError(KGEError, ValueError):
    """A setting is unknown or out of range; the message names its key."""

    on_every_rank = True


def check(ok: bool, key: str, expected: str, value: Any) -> None:
    """Raise ConfigError unless a value is as expected."""
    if not ok:
        raise ConfigError(f"{key} must be {expected}, got {value!r}")


def positive(key: str, value: float | None) -> None:
    """Raise ConfigError unless a value is null or a finite number > 0."""
    if value is not None:
        check(math.isfinite(value) and value > 0, key, "a number > 0", value)


def not_negative(key: str, value: float | None) -> None:
    """Raise ConfigError unless a value is null or a finite number >= 0."""
    if value is not None:
        check(math.isfinite(value) and value >= 0, key, "a number >= 0", value)


def at_least(key: str, value: int | None, least: int) -> None:
    """Raise ConfigError unless a value is null or at least ``least``."""
    if value is not None:
        check(value >= least, key, f"an integer >= {least}", value)


def one_of(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigError unless a value is one of the choices."""
    if value in choices:
        return
    close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.7)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"{key} must be one of {', '.join(choices)}, got {value!r}{hint}")


def check_share(key: str, value: float) -> None:
    """Raise ConfigError unless a value is in [0, 1)."""
    check(0 <= value < 1, key, "in [0, 1)", value)


def is_url(value: Any) -> bool:
    """Return whether a value is the URL of a run rather than its folder."""
    return isinstance(value, str) and "://" in value


def check_url(key: str, value: str) -> None:
    """Raise ConfigError unless a value is a URL of fsspec without a password."""
    protocol, _, place = value.partition("://")
    if "?" in value or ":" in place.partition("/")[0].rpartition("@")[0]:
        raise ConfigError(
            f"{key} must have no password and no ?, since configs and logs would show it: got "
            f"{protocol}://...; the library of the file system reads them from the environment or "
            "from its own files"
        )
    example = "a URL such as s3://bucket/runs/x or file:///mnt/nas/runs/x"
    is_whole = bool(protocol and place) and (protocol != "file" or place.startswith("/"))
    check(is_whole and "::" not in value, key, example, value)


# Checks for `key`, each made once and called with the dotted key and its value.


def choice(*choices: str) -> Callable[[str, Any], None]:
    """Return the check that a value is one of these."""
    return lambda key, value: one_of(key, value, choices)


def least(bound: int) -> Callable[[str, Any], None]:
    """Return the check that an integer is at least this."""
    return lambda key, value: at_least(key, value, bound)


def between(expected: str, holds: Callable[[Any], bool]) -> Callable[[str, Any], None]:
    """Return the check that a value satisfies ``holds``, which ``expected`` says in words."""
    return lambda key, value: check(holds(value), key, expected, value)
