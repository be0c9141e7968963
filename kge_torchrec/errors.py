"""The errors of this package, with messages for users.

All errors derive from KGEError.  A program that shows messages instead of tracebacks catches
KGEError and OSError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar


class KGEError(Exception):
    """An error that the user can fix; the message says what is wrong, where, and what to do.

    Args:
        message: The message.
        settings: Arguments that would help, by their names in the Python interface.  They are
            appended to the message as ``name=value``, or in the style of ``spell``.

    Attributes:
        on_every_rank: Whether all ranks raise the error, so that one rank may report it for all.
        exit_code: Exit status of a program that ends with this error.
    """

    on_every_rank = False
    exit_code = 1

    def __init__(self, message: str = "", **settings: Any):
        super().__init__(message)
        self._message, self._settings = message, settings
        self._end_with("{}={!r}".format)

    def spell(self, style: Callable[[str, Any], str]) -> None:
        """Append the settings to the message as style(name, value).

        Only the first call counts: it comes from the interface closest to the failed call.
        """
        self._end_with(style)
        self._settings = {}

    def _end_with(self, style: Callable[[str, Any], str]) -> None:
        if self._settings:
            ending = " ".join(style(name, value) for name, value in self._settings.items())
            self.args = (f"{self._message} {ending}",)


AnyError = TypeVar("AnyError", bound=Exception)


def raised_alike(error: AnyError) -> AnyError:
    """Mark an error of any class as raised on every rank, and return it."""
    error.on_every_rank = True  # type: ignore[attr-defined]  # exceptions take any attribute
    return error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class DataError(KGEError, ValueError):
    """The input data is unusable; the message says in which file and line, and what to do."""


class StoreError(DataError):
    """A path has no readable triple store, or must not be overwritten."""


class UnknownLabelError(DataError, LookupError):
    """A label is not in the vocabulary; the message lists close matches."""


class ExportError(KGEError, RuntimeError):
    """An export could not be written or read; the message says which one and why."""

    on_every_rank = True
