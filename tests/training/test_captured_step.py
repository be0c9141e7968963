"""A step with a CUDA graph trains like the plain one, shown on a CPU by recorded operations.

As with a CUDA graph, a replay runs no Python of the step, reads and writes the same memory, and
repeats the numbers that the host had when it was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_runs import (
    config_of,
    fit,
    kernels_of_cuda,
    largest_difference,
    with_duplicates,
)

from kge_torchrec.config import Config
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.kernels import operators
from kge_torchrec.models import model
from kge_torchrec.training import assembly, captured_step
from kge_torchrec.training.captured_step import NotCaptured, captured
from kge_torchrec.training.trainer import Trainer

NO_KERNEL = {name: lambda x: "torch" for name in ("pairs", "distances", "sums", "dropout")}
FBGEMM = {"train__optimizer": "rowwise_adagrad"}  # steps in backward, by the table that GPUs have
CASES = {
    "adam, penalties": {"train__optimizer": "adam", "train__schedule": "linear", "loss__n3": 0.1,
                        "loss__relation_weight": 0.5},
    "fbgemm, clipped": {**FBGEMM, "train__clip__norm": 0.1, "train__clip__value": 0.01},
    "dropout": {"model__dropout": {"entity": 0.3, "relation": 0.2}},
    "chunks, filtered": {"negatives__chunk_size": 5, "negatives__filtered": True},
    "in batch, log_q": {"negatives__in_batch": True, "negatives__log_q": True},
    "on the device": {"train__batches": "device"},
}  # fmt: skip
STEPS, EPOCHS = 5, 3  # 130 triples in batches of 32, the last one of 2


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


@contextmanager
def operations_of_cuda() -> Iterator[None]:
    """Let a CPU take the operations that a GPU has, instead of its kernels."""
    unsummed = lambda ids, shares, count: (ids, shares)  # noqa: E731
    with ExitStack() as held:
        held.enter_context(patch.dict(operators.IMPLEMENTATION, NO_KERNEL))
        held.enter_context(patch.object(model, "summed_weights", unsummed))
        yield


@contextmanager
def recorded_graphs() -> Iterator[list[Recorder]]:
    """Let train.pipeline graph record on a CPU; yield the recorders of the block."""
    graphs, usual = list[Recorder](), Config.capture_problem

    def recorded(run):
        run()
        with Recorder() as recorder:
            results = run()
        graphs.append(recorder)
        return results, recorder.replay

    problem = lambda config, on_cuda, *others: usual(config, True, *others)  # noqa: E731
    with (
        operations_of_cuda(),
        patch.object(Config, "capture_problem", problem),
        patch.object(captured_step, "captured", recorded),
    ):
        yield graphs


def trained(store: Path, folder: Path, pipeline: str, **changes) -> tuple[dict, list[float]]:
    """Return the parameters, and the mean loss of every two steps."""
    losses: list[float] = []

    def watch(loop: Trainer) -> None:
        loop.callbacks.append(lambda kind, x: losses.append(x["loss"]) if kind == "step" else None)

    config = config_of(store, folder / pipeline, train__pipeline=pipeline, train__log_every=2,
                       train__epochs=EPOCHS, **changes)  # fmt: skip
    return fit(config, watch).parameters, losses


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_the_loop_to_the_bit(store, tmp_path, case):
    changes = {"model__scorer": "complex", **CASES[case]}
    with kernels_of_cuda(case.startswith("fbgemm")):
        with operations_of_cuda(), with_duplicates():
            plain = trained(store, tmp_path, "loop", **changes)
        with recorded_graphs() as graphs:
            graph = trained(store, tmp_path, "graph", **changes)
    assert plain[1] == graph[1]
    assert largest_difference(plain[0], graph[0]) == 0
    # All steps but the first one, and the last one of every epoch.
    assert [recorder.replays for recorder in graphs] == [(STEPS - 1) * EPOCHS - 1]


def test_auto_continues_without_a_graph(store, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "kge_torchrec")

    def fails(run):
        raise NotCaptured("the stream is capturing\nFor debugging, see the manual")

    with operations_of_cuda(), with_duplicates():
        plain = trained(store, tmp_path, "loop")
    with recorded_graphs():
        monkeypatch.setattr(captured_step, "captured", fails)
        with pytest.raises(NotCaptured, match=r"is capturing\); use train.pipeline loop"):
            trained(store, tmp_path, "graph")
        auto = trained(store, tmp_path, "auto")
    assert plain[1] == auto[1] and largest_difference(plain[0], auto[0]) == 0
    said = [line for line in caplog.messages if line.startswith("train.pipeline auto: ")]
    assert len(said) == 1 and "(the stream is capturing); steps take the plain path" in said[0]


PROBLEMS = {
    "a CUDA graph needs a GPU": (False, 1, {}),
    "2 ranks exchange rows in other numbers each step": (True, 2, {}),
    "entities.engine handrolled reads ids on the host": (
        True, 1, {"entities.engine": "handrolled"}),
    "batches of negatives.regime 1vsall differ in size": (True, 1, {"negatives.regime": "1vsall"}),
    "train.accumulation sums gradients, which a graph overwrites": (
        True, 1, {"train.accumulation": 2}),
    "train.precision fp16 scales the loss by a number of the host": (
        True, 1, {"train.precision": "fp16"}),
    "dense.wrapper ddp acts within backward": (True, 1, {"dense.wrapper": "ddp"}),
    "tests.foreign_parts:CrossEntropy may compute on the host": (
        True, 1, {"loss.name": "tests.foreign_parts:CrossEntropy"}),
    "": (True, 1, {"dense.compile": True, "train.clip.norm": 1.0, "dense.wrapper": "none"}),
}  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_has_no_graph_is_named(problem):
    on_cuda, world_size, changes = PROBLEMS[problem]
    config = config_from_dict(changes)
    assert config.capture_problem(on_cuda, world_size, False) == problem
    assert config.captures(on_cuda, world_size, False) == (problem == "")


def test_plain_path_is_announced(caplog):
    config = config_from_dict({"train.pipeline": "graph", "negatives.regime": "sampled"})
    backend = SimpleNamespace(gains_by_pipeline=False)
    with patch.object(assembly, "SampledStep", lambda *_: "plain"):
        ranks = Processes(0, 1, 1, torch.device("cpu"))
        assert assembly.build_pipeline(config, backend, ranks, None) == "plain"
    (said,) = (line for line in caplog.messages if line.startswith("train.pipeline graph: "))
    assert said.endswith("; steps take the plain path")


def test_another_thread_may_allocate_while_a_step_is_captured(monkeypatch):
    """It makes batches; only a card would refuse its memory."""
    modes, stream = [], SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda aside: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=None),
        "graph": lambda graph, capture_error_mode: nullcontext(modes.append(capture_error_mode)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    assert captured(list) == ([], None)
    assert modes == ["thread_local"]
