"""What a step drops: a function of where it is in training, not of what was drawn before."""

from __future__ import annotations

import numpy as np
import torch

_STREAM = 0xD60  # keeps these draws apart from others of the same seed


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Seeds torch's generators, on all devices, for step number ``step`` of a run on this rank.

    So a resumed run drops what the uninterrupted one does; another number of ranks does not.
    """
    words = np.random.SeedSequence((seed, _STREAM, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(words[0]))
