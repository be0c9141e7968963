"""ConfigError, and the checks that raise it; messages name the key."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from kge_torchrec.errors import KGEError


class ConfigError(KGEError, ValueError):
    """A setting is unknown or out of range; the message names its key."""

    on_every_rank = True


def check(ok: bool, key: str, expected: str, value: Any) -> None:
    """Raise ConfigError unless a value is as expected."""
    if not ok:
        raise ConfigError(f"{key} must be {expected}, got {value!r}")


def at_least(key: str, value: int | None, least: int) -> None:
    """Raise ConfigError unless a value is null or at least ``least``."""
    if value is not None:
        check(value >= least, key, f"an integer >= {least}", value)


def one_of(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigError unless a value is one of the choices."""
    if value in choices:
        return
    close = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.7)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"{key} must be one of {', '.join(choices)}, got {value!r}{hint}")


def check_no_url(path: Any) -> None:
    """Raise ConfigError for the URL of a run: its copy is downloaded first."""
    if isinstance(path, str) and "://" in path:
        check_url("the URL of a run", path)
        raise ConfigError(
            f'{path} is no folder; download the run first, such as by `python -c "import fsspec; '
            f"fs, path = fsspec.url_to_fs('{path}'); fs.get(path, 'RUN', recursive=True)\"`, and "
            "name its folder"
        )


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


@dataclass(frozen=True, eq=False)
class Check:
    """A check of a value, which raises ConfigError for a bad one; null is good.

    ``Annotated[int, least(1)]`` is a type with a check.

    Args:
        expected: What a good value is, in words.
        holds: Whether a value is good.
        schema: What a JSON schema says of good values, for editors.
    """

    expected: str
    holds: Callable[[Any], bool]
    schema: dict[str, Any] = field(default_factory=dict)

    def __call__(self, key: str, value: Any) -> None:
        """Raise ConfigError for a bad value of a key."""
        check(value is None or self.holds(value), key, self.expected, value)


def least(bound: int) -> Check:
    """Return the check that an integer is at least this."""
    return Check(f"an integer >= {bound}", lambda value: value >= bound, {"minimum": bound})


positive = Check(
    "a number > 0", lambda value: math.isfinite(value) and value > 0, {"exclusiveMinimum": 0}
)
not_negative = Check(
    "a number >= 0", lambda value: math.isfinite(value) and value >= 0, {"minimum": 0}
)
check_share = Check(
    "in [0, 1)", lambda share: 0 <= share < 1, {"minimum": 0, "exclusiveMaximum": 1}
)
NonNegativeInt = Annotated[int, least(0)]
PositiveInt = Annotated[int, least(1)]
NonNegativeFloat = Annotated[float, not_negative]
PositiveFloat = Annotated[float, positive]
Share = Annotated[float, check_share]
