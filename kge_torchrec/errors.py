"""The errors of this package: each has a message for the person who reads it.

All of them derive from KGEError, so whoever shows messages in place of tracebacks catches that one
class (and OSError) and needs no list that a new error could be missing from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar


class KGEError(Exception):
    """Something is wrong that a person can mend; the message says what, where and how.

    settings: what would help, by the names of the Python interface; they end the message as
        ``name=value`` unless whoever was called by the person ``spell``s them otherwise.
    on_every_rank: all ranks raise it alike, so that one of them may speak for all.
    exit_code: of a program that ends with it.
    """

    on_every_rank = False
    exit_code = 1

    def __init__(self, message: str = "", **settings: Any):
        super().__init__(message)
        self._message, self._settings = message, settings
        self._end_with("{}={!r}".format)

    def spell(self, style: Callable[[str, Any], str]) -> None:
        """Ends the message as people type the settings, by style(name, value).

        The first to say so is nearest to what was called, and is right.
        """
        self._end_with(style)
        self._settings = {}

    def _end_with(self, style: Callable[[str, Any], str]) -> None:
        if self._settings:
            ending = " ".join(style(name, value) for name, value in self._settings.items())
            self.args = (f"{self._message} {ending}",)


AnyError = TypeVar("AnyError", bound=Exception)


def raised_alike(error: AnyError) -> AnyError:
    """The error, of any class, marked as one that every rank raises: one may speak for all."""
    error.on_every_rank = True  # type: ignore[attr-defined]  # exceptions take any attribute
    return error


class DataError(KGEError, ValueError):
    """The input data is unusable; the message names the file, the line and the remedy."""


class StoreError(DataError):
    """A path does not hold a readable triple store, or must not be written to."""


class UnknownLabelError(DataError, LookupError):
    """A label is not in the vocabulary; the message lists close matches."""


class ExportError(KGEError, RuntimeError):
    """An export could not be written or read; the message says which and why."""

    on_every_rank = True  # one rank may speak for all
