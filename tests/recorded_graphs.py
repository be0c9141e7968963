"""CUDA graphs without a GPU: operations are recorded with their tensors, and run again on these.

As with a CUDA graph, a replay runs no Python of the step, reads and writes the same memory, and
repeats the numbers that the host had when it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from host_waits import host_waits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kge_torchrec.config import Config
from kge_torchrec.kernels import comparisons, operators, side_rows
from kge_torchrec.models import triple_objective
from kge_torchrec.training import captured_step

NO_KERNEL = [
    (operators, "_has_kernel"), (operators, "has_pair_kernels"),
    (comparisons, "has_pair_kernels"), (side_rows, "has_pair_kernels"),
]  # fmt: skip


class Recorder(TorchDispatchMode):
    """Records the operations of a block."""

    def __init__(self):
        super().__init__()
        self.calls, self.replays = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operations again; what they return goes where it was."""
        self.replays += 1
        for function, args, kwargs, before in self.calls:
            after = function(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Launches(TorchDispatchMode):
    """Counts operations that start something on a device; views and empty tensors do not."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        free = any(word in name for word in ("empty", "detach", "alias", "profiler"))
        self.count += not (function.is_view or free)
        return function(*args, **(kwargs or {}))


def recorded(run: Callable) -> tuple[list, Callable]:
    """Do on a CPU what ``captured_step.captured`` does on a GPU; a wait for the device fails."""
    run()
    recorder = Recorder()
    with host_waits() as waits, recorder:
        results = run()
    assert not waits, f"the scores wait for the device: {waits}"
    GRAPHS.append(recorder)
    return results, recorder.replay


GRAPHS: list[Recorder] = []


@contextmanager
def operations_of_cuda() -> Iterator[None]:
    """Let a CPU take the operations that a GPU has, instead of its kernels."""
    with ExitStack() as held:
        for module, name in NO_KERNEL:
            held.enter_context(patch.object(module, name, lambda x: False))
        unsummed = lambda ids, shares, count: (ids, shares)  # noqa: E731
        held.enter_context(patch.object(triple_objective, "summed_weights", unsummed))
        yield


@contextmanager
def recorded_graphs() -> Iterator[list[Recorder]]:
    """Let train.pipeline graph record on a CPU; yield the recorders of the block."""
    GRAPHS.clear()
    usual = Config.capture_problem
    problem = lambda config, on_cuda, *others: usual(config, True, *others)  # noqa: E731
    with (
        operations_of_cuda(),
        patch.object(Config, "capture_problem", problem),
        patch.object(captured_step, "captured", recorded),
    ):
        yield GRAPHS
