"""What can go wrong between a user's files and a triple store."""


class DataError(ValueError):
    """The input data is unusable; the message names the file, the line and the remedy."""


class StoreError(DataError):
    """A path does not hold a readable triple store, or must not be written to."""


class UnknownLabelError(DataError, LookupError):
    """A label is not in the vocabulary; the message lists close matches."""
