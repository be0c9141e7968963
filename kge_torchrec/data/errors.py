"""What can go wrong between a user's files and a triple store."""

from kge_torchrec.errors import KGEError


class DataError(KGEError, ValueError):
    """The input data is unusable; the message names the file, the line and the remedy."""


class StoreError(DataError):
    """A path does not hold a readable triple store, or must not be written to."""


class UnknownLabelError(DataError, LookupError):
    """A label is not in the vocabulary; the message lists close matches."""
