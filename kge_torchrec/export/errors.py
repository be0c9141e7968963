"""What can go wrong between a trained run and its plain files."""

from kge_torchrec.errors import KGEError


class ExportError(KGEError, RuntimeError):
    """An export could not be written or read; the message says which and why."""

    on_every_rank = True  # one rank may speak for all
