"""A step whose scores, loss and gradients are one CUDA graph, for small batches.

A graph repeats the same kernels on the same memory, with the same numbers of the host.  So its
batches have one shape: every entity is looked up at every place, since distinct entities differ in
number, and FBGEMM sums the gradients of a row.  The lookup, clipping and both optimizers stay
outside, because FBGEMM and torch read learning rate and step number on the host.

Shapes: M looked-up rows, D elements per row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from kge_torchrec.data import ENTITY
from kge_torchrec.data.batches import SampledBatch
from kge_torchrec.errors import KGEError
from kge_torchrec.models.model import Objective
from kge_torchrec.training.step import SampledStep

log = logging.getLogger(__name__)

_WARM_UPS = 3  # runs before a capture, as torch's documentation of CUDA graphs advises


class NotCaptured(KGEError, RuntimeError):
    """A CUDA graph cannot hold the scores of this model."""

    on_every_rank = True

    def __init__(self, problem: object):
        first = str(problem).partition("\n")[0]  # CUDA adds lines about how to debug
        self.reason = f"no CUDA graph can hold the scores of this model ({first})"
        super().__init__(f"train.pipeline graph: {self.reason}; use train.pipeline loop")


class CapturedStep(SampledStep):
    """A step that replays a graph for batches of one shape.

    The first batch that has the shape of the one before is captured.  Batches of another shape,
    such as the last one of an epoch, take the plain path.  With train.pipeline auto so do all
    batches if the capture fails.

    Raises:
        NotCaptured: The scorer or the loss waits for the device.  Raised after the second step
            with train.pipeline graph.
    """

    _shape: object = None
    _graph: _Graph | None = None
    _can_capture = True

    def train_batch(self, batch: SampledBatch) -> Tensor:
        before, self._shape = self._shape, shape_of(batch)
        repeated = self._shape == (before if self._graph is None else self._graph.shape)
        if not (repeated and self._can_capture):
            return super().train_batch(batch)
        model, watch = self.backend.unwrapped_model, self.watch or (lambda part: None)
        rows: Tensor = model.entities(batch.ids)[ENTITY].values()  # no other engine has a graph
        watch("lookup")
        if self._graph is None:
            try:
                self._graph = _Graph(model.objective, rows, batch)
            except NotCaptured as error:
                if self.train.pipeline == "graph":
                    raise
                self._can_capture = False
                plain = "steps take the plain path, as with loop"
                log.warning("train.pipeline auto: %s; %s", error.reason, plain)
                loss = model.objective(rows, batch)
                loss.backward()
                return loss.detach()
        loss, gradient = self._graph.replay(rows, batch)
        watch("score")
        rows.backward(gradient)  # FBGEMM's table on CUDA steps here, unless deferred
        watch("backward")
        return loss


def shape_of(batch: SampledBatch) -> tuple[object, ...]:
    """Return what two batches have in common if one graph can compute both."""
    others = (v for v in vars(batch).values() if not hasattr(v, "record_stream"))
    return *(x.shape for x in _tensors(batch).values()), *others


def _tensors(batch: SampledBatch) -> dict[str, Tensor]:
    """Return the tensors of a batch that the objective reads, by field."""
    fields = ((name, value) for name, value in vars(batch).items() if name != "ids")
    return {name: value for name, value in fields if isinstance(value, Tensor)}


class _Graph:
    """Scores, loss and gradients of batches of one shape, captured with the rows (M, D) of one."""

    def __init__(self, objective: Objective, rows: Tensor, batch: SampledBatch):
        self.shape = shape_of(batch)
        self._rows = rows.detach().clone().requires_grad_()
        self._inputs = {name: value.clone() for name, value in _tensors(batch).items()}
        copy = replace(cast(Any, batch), **self._inputs)
        self._parameters = [p for p in objective.parameters() if p.requires_grad]

        def run() -> list[Tensor | None]:
            loss = objective(self._rows, copy)
            leaves = [self._rows, *self._parameters]
            return [loss.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True)]

        devices = [rows.device] if rows.is_cuda else []
        with torch.random.fork_rng(devices, device_type="cuda"):  # runs before a capture draw
            self._results, self._replay = captured(run)

    def replay(self, rows: Tensor, batch: SampledBatch) -> tuple[Tensor, Tensor]:
        """Compute a batch; return its loss, and the gradients (M, D) of its rows.

        Sets the gradients of dense parameters. The next replay overwrites all gradients.
        """
        inputs = [self._rows.detach(), *self._inputs.values()]
        torch._foreach_copy_(inputs, [rows.detach(), *_tensors(batch).values()])
        self._replay()
        loss, gradient, *others = self._results
        for parameter, grad in zip(self._parameters, others, strict=True):
            parameter.grad = grad
        assert loss is not None and gradient is not None  # every row has a score
        return loss.clone(), gradient


def captured(run: Callable[[], list[Tensor | None]]) -> tuple[list[Tensor | None], Callable]:
    """Capture what a function starts on the GPU.

    Returns:
        The results of ``run``, and a function that computes them again in the same memory.

    Raises:
        NotCaptured: ``run`` waits for the device, or has no memory.
    """
    aside, current = torch.cuda.Stream(), torch.cuda.current_stream()
    aside.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                run()
        current.wait_stream(aside)
        # Another thread makes batches meanwhile, and may allocate memory.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = run()
    except RuntimeError as error:
        # The failed capture keeps hold of the generator's state; a clone of it is free.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise NotCaptured(error) from error
    return results, graph.replay
