"""One way to lay a run out: what a person chooses, or --all goes through."""

from __future__ import annotations

from dataclasses import dataclass

from kge_torchrec.config import ConfigError
from kge_torchrec.embeddings.torchrec.planner import (
    DENSE,
    FUSED,
    SHARDINGS,
    UVM,
    UVM_CACHING,
    VALUE_BYTES,
    TableForm,
    check_cuda_dim,
)
from kge_torchrec.planning.devices import Cluster
from kge_torchrec.planning.workload import Workload

KERNELS = (FUSED, UVM, UVM_CACHING)


@dataclass(frozen=True)
class Choice:
    """How the table is laid out.

    Args:
        sharding: row_wise, column_wise, table_wise or data_parallel.
        kernel: fused (rows on the device), fused_uvm (in main memory) or fused_uvm_caching (in
            main memory with a cache on the GPU); data_parallel has none of them.
        cache_ratio: Share of the rows that the cache holds.
        dtype: Of the table: fp32, fp16 or bf16.
        replicas: 2-D parallelism: whole tables, each laid out over W / replicas ranks.
        sync_every: Steps between averaging the replicas.
        reserve: Share of each device's memory, and of a CPU host's, that is left free.

    Raises ConfigError for a value that is none of these.
    """

    sharding: str = "row_wise"
    kernel: str = FUSED
    cache_ratio: float = 0.2
    dtype: str = "fp32"
    replicas: int = 1
    sync_every: int = 100
    reserve: float = 0.05

    def __post_init__(self) -> None:
        for name, choices in (
            ("sharding", SHARDINGS),
            ("kernel", KERNELS),
            ("dtype", tuple(VALUE_BYTES)),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"--{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        for name in ("replicas", "sync_every"):
            if getattr(self, name) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be an integer >= 1, got {getattr(self, name)}")
        if not 0 < self.cache_ratio < 1:
            raise ConfigError(f"--cache-ratio must be in (0, 1), got {self.cache_ratio}")
        if not 0 <= self.reserve < 1:
            raise ConfigError(f"--reserve must be in [0, 1), got {self.reserve}")

    def check(self, workload: Workload, cluster: Cluster) -> None:
        """Raises ConfigError, saying why, where this cannot be."""
        if cluster.world_size % self.replicas:
            raise ConfigError(
                f"--replicas: {cluster.world_size} devices cannot be split into {self.replicas} "
                "equal groups"
            )
        regime = workload.config.negatives.regime
        if workload.config.negatives.is_full and (self.sharding != "row_wise" or self.replicas > 1):
            raise ConfigError(
                f"--sharding: with negatives.regime {regime} every rank scores its own rows of one "
                "table; only row_wise without replicas does that"
            )
        if self.sharding == "data_parallel" and self.kernel != FUSED:
            raise ConfigError(
                "--kernel: data_parallel tables lie whole on every device, never in UVM"
            )
        if not cluster.device.is_cuda:
            self._check_cpu()
        elif workload.config.entities.engine == "torchrec":
            check_cuda_dim(workload.dim)

    def _check_cpu(self) -> None:
        if self.kernel != FUSED:
            raise ConfigError(
                f"--kernel: {self.kernel} is of GPUs; a CPU's rows are in main memory"
            )
        if self.dtype != "fp32":
            raise ConfigError(f"--dtype: CPU tables are fp32, not {self.dtype}")
        if self.replicas > 1:
            raise ConfigError("--replicas: TorchRec's 2-D parallelism (DMPCollection) needs GPUs")

    def form(self, workload: Workload) -> TableForm:
        """What a shard's rows and optimizer state look like."""
        options = workload.config.entities.sparse_options(workload.optimizer)
        by_hand = workload.config.entities.engine == "handrolled"
        counts = options.bias_correction == "row" and "adam" in workload.optimizer
        return TableForm(
            workload.optimizer,
            DENSE if self.sharding == "data_parallel" else self.kernel,
            self.cache_ratio if self.kernel == UVM_CACHING else 0.0,
            VALUE_BYTES[self.dtype],
            state_bytes=2 if by_hand and options.state_dtype == "bf16" else 4,
            counts_rows=by_hand and counts,
            state_in_main=by_hand and options.state_device == "cpu",
        )

    def notes(self) -> list[str]:
        """What stands between this plan and training it."""
        found = []
        if self.sharding != "row_wise":
            found.append(f"{self.sharding} is planned only: training splits the table by rows")
        if self.kernel != FUSED or self.dtype != "fp32":
            found.append("training here has fp32 tables and the kernel fused only so far")
        if self.dtype == "bf16":
            found.append(
                "FBGEMM 1.8 trains no bf16 tables on CUDA (its kernels take float and half, its "
                "cache refuses bf16): fp16 has the same size"
            )
        if self.replicas > 1:
            found.append(
                f"2-D parallelism is planned only; its replicas are averaged every "
                f"{self.sync_every} steps, so that it is not synchronous training"
            )
        return found

    def __str__(self) -> str:
        kernel = "dense" if self.sharding == "data_parallel" else self.kernel
        parts = [self.sharding, kernel]
        if self.kernel == UVM_CACHING:
            parts.append(f"cache {self.cache_ratio:.3g}")
        parts.append(self.dtype)
        if self.replicas > 1:
            parts.append(f"{self.replicas} replicas")
        return ", ".join(parts)
