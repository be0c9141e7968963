"""Wrappers that distribute the dense parameters (relations and other scorer parameters).

    none    a single rank
    ddp     every rank holds all parameters
    fsdp    every rank holds a part of each parameter; whole parameters exist only while the
            objective runs
    hybrid  fsdp within groups of ranks; the groups are replicas of each other

All wrappers average gradients over all ranks and keep the parameter names, in every backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kge_torchrec.config import ConfigError, DenseConfig
from kge_torchrec.distributed.processes import Processes, Rows, rows_by_rank, world_size

if TYPE_CHECKING:
    from kge_torchrec.models.model import KGEModel


class DenseWrapper:
    """The wrapper of a single rank, and the base class of the other wrappers."""

    name = "none"
    title = "one rank"  # in words
    frozen: FrozenDense | None = None  # rows that no step changes, see ``training.start``

    def wrap(self, model: KGEModel) -> nn.Module:
        """Return the model to train.  The entity table in it is not wrapped."""
        self.objective = model.objective
        return model

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the dense optimizer."""
        return list(self.objective.parameters())

    def without_exchange(self) -> AbstractContextManager[None]:
        """Return a context for a forward and backward in which ranks exchange no gradients."""
        return nullcontext()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Give this rank the whole parameters inside the context, to read and differentiate.

        Collective.
        """
        yield

    def set_gradients(self, terms: Sequence[Tensor]) -> None:
        """Sum gradients over the ranks and set them on the parameters.  Collective.

        Use it for gradients of ``gathered`` parameters.

        Args:
            terms: This rank's terms, one whole tensor per parameter that requires a gradient.
        """
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        for parameter, grad in zip(trained, _summed(terms), strict=True):
            parameter.grad = self._part_of(grad, parameter)

    def _part_of(self, grad: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return this rank's part of a whole gradient."""
        return grad

    def own_rows(self, parameter: nn.Parameter) -> range:
        """Return the rows (along the first dimension) of a parameter that this rank holds."""
        return range(parameter.shape[0])

    def sum_of_parts(self, sums: Tensor) -> Tensor:
        """Turn sums over this rank's parts into sums over whole parameters.  Collective."""
        return sums

    def state(self, optimizer: Optimizer) -> list[Rows]:
        """Return this rank's rows of the parameters and of their optimizer's state."""
        start_optimizer_state(optimizer)
        own = self.objective.state_dict(prefix="objective.")
        state = [self._rows_of(f"model.{name}", tensor) for name, tensor in own.items()]
        for name, parameter in self.objective.named_parameters(prefix="objective"):
            for kind, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    raise TypeError(f"{kind} of {name} is no tensor; a checkpoint holds tensors")
                state.append(self._rows_of(f"optimizer.{name}.{kind}", value))
        return state

    def _rows_of(self, name: str, tensor: Tensor) -> Rows:
        """Return this rank's rows of a parameter or state."""
        return Rows(name, tensor.detach())


class Replicated(DenseWrapper):
    """The ddp wrapper: DistributedDataParallel."""

    name = "ddp"

    def __init__(self, processes: Processes):
        self.processes = processes
        self.title = f"ddp, all of them on each of {processes.world_size} ranks"

    def wrap(self, model: KGEModel) -> nn.Module:
        super().wrap(model)
        device = self.processes.device
        dense = {f"objective.{name}" for name, _ in model.objective.named_parameters()}
        not_dense = [name for name, _ in model.named_parameters() if name not in dense]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, not_dense)
        self._model = DistributedDataParallel(
            model,
            device_ids=None if device.type == "cpu" else [device],
            process_group=self.processes.group,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )
        return self._model

    def without_exchange(self) -> AbstractContextManager[None]:
        return self._model.no_sync()

    def _rows_of(self, name: str, tensor: Tensor) -> Rows:
        return Rows(name, tensor.detach(), is_replica=not self.processes.is_first)


class Sharded(DenseWrapper):
    """The fsdp and hybrid wrappers: FSDP2 (``fully_shard``) of the whole objective.

    Args:
        mesh: Its dimensions are ("shard",) for fsdp and ("replicate", "shard") for hybrid.
        frees_between: Whether whole parameters are freed between forward and backward.
        offload: Whether parts, their gradients and their optimizer state are in main memory.
    """

    def __init__(self, mesh: DeviceMesh, frees_between: bool, offload: bool):
        self.mesh, self._frees_between, self._offload = mesh, frees_between, offload
        self.name = "fsdp" if mesh.ndim == 1 else "hybrid"
        order = "replicas x parts, " if mesh.ndim == 2 else ""
        words = ["full" if frees_between else "grad_op", *["in main memory"] * offload]
        sizes = " x ".join(map(str, mesh.shape))
        self.title = f"{self.name}, {', '.join(words)}, ranks {order}{sizes}"

    def wrap(self, model: KGEModel) -> nn.Module:
        super().wrap(model)
        pin = self.mesh.device_type == "cuda"
        self._parts: FSDPModule = fully_shard(
            model.objective,
            mesh=self.mesh,
            reshard_after_forward=self._frees_between,
            offload_policy=CPUOffloadPolicy(pin_memory=pin) if self._offload else OffloadPolicy(),
        )
        return model

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        self._parts.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._parts.set_requires_gradient_sync(True)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        self._parts.unshard()
        try:
            yield
        finally:
            self._parts.reshard()

    @torch.no_grad()
    def _part_of(self, grad: Tensor, parameter: nn.Parameter) -> Tensor:
        part = torch.empty_like(parameter)  # sharded and placed like the parameter
        own = self.own_rows(parameter)
        local_part(part).copy_(grad[own.start : own.stop])
        return part

    def own_rows(self, parameter: nn.Parameter) -> range:
        return self._rows(parameter.shape[0])[self.mesh.get_local_rank("shard")]

    def sum_of_parts(self, sums: Tensor) -> Tensor:
        dist.all_reduce(sums, group=self.mesh.get_group("shard"))
        return sums

    def _rows_of(self, name: str, tensor: Tensor) -> Rows:
        if not isinstance(tensor, DTensor):  # such as the number of steps
            return Rows(name, tensor.detach(), is_replica=dist.get_rank() > 0)
        first = self._rows(tensor.shape[0])[self.mesh.get_local_rank("shard")].start
        is_replica = self.mesh.ndim == 2 and self.mesh.get_local_rank("replicate") > 0
        return Rows(name, local_part(tensor.detach()), first, is_replica)

    def _rows(self, count: int) -> list[range]:
        """Return the rows of each part of a parameter with ``count`` rows."""
        return rows_by_rank(count, self.mesh.shape[-1])  # FSDP splits as torch.chunk does


def dense_wrapper(config: DenseConfig, processes: Processes) -> DenseWrapper:
    """Make the wrapper that ``dense.wrapper`` names.  Collective.

    Raises:
        ConfigError: The wrapper does not fit the number of ranks.
    """
    ranks, name = processes.world_size, config.wrapper
    if name == "auto":
        name = "none" if ranks == 1 else "ddp"
    if name == "none":
        if ranks > 1:
            raise ConfigError(
                f"dense.wrapper none would let the relations of {ranks} ranks drift apart; use "
                "auto, ddp, fsdp or hybrid"
            )
        return DenseWrapper()
    if name == "ddp":
        return Replicated(processes)
    mesh = _mesh(config, processes)
    options = config.options
    return Sharded(mesh, options.sharding == "full", options.cpu_offload)


def _mesh(config: DenseConfig, processes: Processes) -> DeviceMesh:
    kind, ranks = processes.device.type, processes.world_size
    if config.wrapper == "fsdp":
        return init_device_mesh(kind, (ranks,), mesh_dim_names=("shard",))
    replicas = config.options.replicas or max(1, ranks // processes.local_world_size)
    if ranks % replicas:
        raise ConfigError(
            f"dense.options.replicas: {ranks} ranks cannot form {replicas} groups of equal size; "
            "use a divisor of the number of ranks, or dense.wrapper fsdp"
        )
    names = ("replicate", "shard")
    return init_device_mesh(kind, (replicas, ranks // replicas), mesh_dim_names=names)


def _summed(terms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Sum each tensor over all ranks, with one collective."""
    if world_size() == 1 or not terms:
        return terms
    flat = torch.cat([term.reshape(-1) for term in terms])
    dist.all_reduce(flat)
    parts = flat.split([term.numel() for term in terms])
    return [part.view_as(term) for part, term in zip(parts, terms, strict=True)]


class FrozenDense:
    """Rows of dense parameters that no step changes, including their optimizer state.

    Weight decay and momentum also change rows without a gradient, so a hook restores the frozen
    rows after every step.  Create it after parameters and state have the values to keep; ``frozen``
    has (rows,) bool by name of the parameter.
    """

    def __init__(self, wrapper: DenseWrapper, optimizer: Optimizer, frozen: dict[str, Tensor]):
        start_optimizer_state(optimizer)
        self._state = optimizer.state
        named = dict(wrapper.objective.named_parameters())
        self._rows: dict[nn.Parameter, Tensor] = {}
        for name, rows in frozen.items():
            own = wrapper.own_rows(named[name])
            device = local_part(named[name]).device
            self._rows[named[name]] = rows[own.start : own.stop].to(device)
        self._kept = [part[rows].clone() for part, rows in self._parts()]
        optimizer.register_step_post_hook(lambda *_: self._put_back())

    def drop_gradients(self) -> None:
        """Set the gradients of frozen rows to zero, so that they do not count when clipping."""
        for parameter, rows in self._rows.items():
            if parameter.grad is not None:
                local_part(parameter.grad)[rows] = 0

    @torch.no_grad()
    def _put_back(self) -> None:
        for (part, rows), numbers in zip(self._parts(), self._kept, strict=True):
            part[rows] = numbers

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's part of each parameter and row-wise state, and its frozen rows."""
        for parameter, rows in self._rows.items():
            for tensor in (parameter.detach(), *self._state.get(parameter, {}).values()):
                part = local_part(tensor)
                if part.dim() and len(part) == len(rows):
                    yield part, rows


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor as a view, or any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def start_optimizer_state(optimizer: Optimizer) -> None:
    """Create the initial state of a dense optimizer, unless the state exists.

    A checkpoint can only be loaded into state that exists.  A step with zero gradients creates it;
    it also counts and applies weight decay, which this function undoes.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if all(optimizer.state.get(p) for p in parameters):
        return
    before = [p.clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for parameter, values in zip(parameters, before, strict=True):
        parameter.copy_(values)
        for state in optimizer.state.get(parameter, {}).values():
            state.zero_()
