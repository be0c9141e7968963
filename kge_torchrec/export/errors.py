"""What can go wrong between a trained run and its plain files."""


class ExportError(RuntimeError):
    """An export could not be written or read; the message says which and why."""

    on_every_rank = True  # one rank may speak for all
