"""The errors of this package, with messages for users.

All errors derive from KGEError.  A program that shows messages instead of tracebacks catches
KGEError and OSError.
"""

from __future__ import annotations

from typing import TypeVar


class KGEError(Exception):
    """An error that the user can fix; the message says what is wrong, where, and what to do.

    Attributes:
        on_every_rank: Whether all ranks raise the error, so that one rank may report it for all.
        exit_code: Exit status of a program that ends with this error.
    """

    on_every_rank = False
    exit_code = 1


AnyError = TypeVar("AnyError", bound=Exception)


def raised_alike(error: AnyError) -> AnyError:
    """Mark an error of any class as raised on every rank, and return it."""
    error.on_every_rank = True  # type: ignore[attr-defined]  # exceptions take any attribute
    return error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class ConfigError(KGEError, ValueError):
    """A setting is unknown or out of range; the message names its key."""

    on_every_rank = True


class DataError(KGEError, ValueError):
    """The input data is unusable; the message says in which file and line, and what to do."""


class StoreError(DataError):
    """A path has no readable triple store, or must not be overwritten."""


class UnknownLabelError(DataError, LookupError):
    """A label is not in the vocabulary; the message lists close matches."""


class ExportError(KGEError, RuntimeError):
    """An export could not be written or read; the message says which one and why."""

    on_every_rank = True
