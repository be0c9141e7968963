"""What a step drops: a function of where it is in training, not of what was drawn before."""

from __future__ import annotations

import numpy as np
import torch

_STREAM = 0xD60  # keeps these draws apart from others of the same seed


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Seeds torch's generators, on all devices, for step number ``step`` of a run on this rank.

    So a resumed run drops what the uninterrupted one does; another number of ranks does not.
    """
    seed_generators(seed, _STREAM, step, rank)


def seed_generators(*words: int) -> None:
    """Makes what torch draws next a function of the words.

    ``torch.manual_seed`` would do, but where CUDA is not in use it formats the call stack each
    time, in case CUDA will be: a millisecond.
    """
    seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
