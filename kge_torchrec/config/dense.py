"""Settings of the dense parameters: relations and all others of the scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from kge_torchrec.config.checks import ConfigError, at_least, one_of

WRAPPERS = ("auto", "none", "ddp", "fsdp", "hybrid")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class DenseConfig:
    """How the dense parameters (relations and all others of the scorer) lie on the ranks.

    Args:
        wrapper: none (one rank only), ddp (every rank holds all), fsdp (every rank holds a part),
            hybrid (parts within groups of ranks that repeat each other), or auto: none on one
            rank, ddp on several.
        sharding: Of fsdp and hybrid: full holds whole parameters only while a forward or a
            backward runs, grad_op from forward to the end of backward.
        replicas: Of hybrid: groups of ranks that each hold all; null makes each host one.
        cpu_offload: Of fsdp and hybrid: parts, their gradients and optimizer state lie in main
            memory.
        compile: Compile scorer and loss with torch.compile.
        compile_mode: What torch.compile is after: default; reduce-overhead (on CUDA the kernels of
            a loss are replayed as one graph, which launches faster and keeps their memory); or
            max-autotune and max-autotune-no-cudagraphs (kernels are timed first, with or without
            graphs).
    """

    wrapper: str = "auto"
    sharding: str = "full"
    replicas: Optional[int] = None  # noqa: UP045
    cpu_offload: bool = False
    compile: bool = False
    compile_mode: str = "default"

    def __post_init__(self) -> None:
        one_of("dense.wrapper", self.wrapper, WRAPPERS)
        one_of("dense.sharding", self.sharding, ("full", "grad_op"))
        one_of("dense.compile_mode", self.compile_mode, COMPILE_MODES)
        if self.compile_mode != "default" and not self.compile:
            raise ConfigError("dense.compile_mode is of dense.compile true; set that too")
        if self.replicas is not None:
            at_least("dense.replicas", self.replicas, 1)
            if self.wrapper != "hybrid":
                raise ConfigError("dense.replicas is of dense.wrapper hybrid; set that too")
        if self.wrapper not in ("fsdp", "hybrid"):
            if self.sharding != "full":
                raise ConfigError("dense.sharding is of dense.wrapper fsdp or hybrid; set one")
            if self.cpu_offload:
                raise ConfigError("dense.cpu_offload needs dense.wrapper fsdp or hybrid")
