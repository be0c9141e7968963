"""Modules and kernels that every rank needs, loaded once in the server that forks the ranks.

Three quarters of the first second of a rank are spent on reading compiled kernels and on the parser
of the config.  No threads may be started here: they do not exist after a fork, and code that
waits for them would wait forever.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import get_args

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # scipy, which numba loads, would start threads of its own

import hypothesis  # noqa: F401 (half of all test modules import it, and pytest)
import numpy as np
import pytest  # noqa: F401
import torch
import training_runs  # noqa: F401 (it imports what trains)

from kge_torchrec.config import OPTIMIZER_NAMES
from kge_torchrec.config.parser import load_config
from kge_torchrec.data.shuffle import EpochShuffle
from kge_torchrec.data.store import search  # noqa: F401 (read where a ranking starts)
from kge_torchrec.environment import silence_dependencies
from kge_torchrec.kernels import scores as score_kernels
from kge_torchrec.kernels.dropout import dropped
from kge_torchrec.kernels.library import Compared
from kge_torchrec.kernels.operators import count_block
from kge_torchrec.kernels.pair_scores import pair_scores
from kge_torchrec.kernels.rows import update_rows
from kge_torchrec.kernels.triple_products import EncodeTriples


def load_kernels() -> None:
    """Calls those that nearly every test needs, on a few numbers."""
    EpochShuffle(8, 0, 0)(np.arange(4))
    rows, grad = torch.tensor([0, 1, 1]), torch.ones(3, 4)
    for name in OPTIMIZER_NAMES:
        states = [torch.zeros(2, *shape) for shape in _STATES[name]]
        update_rows(name, {}, 0.1, 1, rows, grad, torch.zeros(2, 4), *states)
    query, table = torch.ones(1, 2, 4).requires_grad_(), torch.ones(2, 4).requires_grad_()
    for comparison in get_args(Compared):
        pair_scores(comparison, query, table, torch.tensor([[0, 1]])).sum().backward()
    statistics, scores = torch.zeros(1, dtype=torch.float64), torch.ones(1, 2)
    score_kernels.normalizers(scores, statistics, True)
    score_kernels.gradients(scores, statistics, torch.ones(1), statistics, True)
    score_kernels.LogSums.apply(scores, scores > 0, True)
    dropped(torch.ones(2), 0.5, 0)
    none = torch.zeros(1, dtype=torch.int64)
    parts = EncodeTriples.apply(table, table, ["real"], none, *[none] * 4)
    sum(part.sum() for part in parts).backward()
    counts = torch.zeros(2, 1, dtype=torch.int64)
    count_block(torch.zeros(1, 4), torch.zeros(1), *counts)


_STATES = {"adam": [(4,), (4,)], "rowwise_adam": [(4,), ()], "adagrad": [(4,)],
           "rowwise_adagrad": [()], "sgd": []}  # fmt: skip


def threads() -> int:
    """Count the threads of this process, without those that start again after a fork.

    OpenBLAS's is there before and after; Arrow's allocator starts its own when it likes.
    """
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return len([name for name in names if not name.startswith("jemalloc")])


sys.dont_write_bytecode = False  # so that ranks read the module of their test, as in conftest.py
_before = threads()
os.fsync = lambda file: None  # as in conftest.py
torch.set_num_threads(1)
if not torch.cuda.is_available():  # as in conftest.py
    torch.random._manual_seed_impl = lambda value: torch.default_generator.manual_seed(int(value))
silence_dependencies()  # once: a change of a level takes a while, and every training makes twenty
load_kernels()
load_config()
gc.freeze()  # a rank collects what it made itself, and writes to no page that it shares
assert threads() == _before
