"""Devices to plan for: their memory, and how fast bytes move in them and between them.

The presets hold the vendors' data sheets, with the memory that CUDA reports as total. Only memory
decides what fits; the speeds feed the model of a step's time.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from kge_torchrec.config import ConfigError
from kge_torchrec.embeddings.torchrec.planner import GIB
from kge_torchrec.environment import host_memory

GB = 10**9
DEVICES_PER_HOST = 8  # GPUs that a host holds, unless the cluster's hosts hold more


@dataclass(frozen=True)
class Device:
    """One GPU with its share of a host, or (without memory) a CPU host that its ranks share.

    Bandwidths are in bytes per second, in one direction.
    """

    name: str
    memory: int  # bytes of one GPU; 0 for a CPU
    memory_bandwidth: float  # of one GPU, or of a host's main memory
    gather_bandwidth: float  # the same for single rows at random places
    flops: float  # per second, in large products of float32; a multiply-add counts as two
    flops_16bit: float  # the same in bfloat16 and float16
    host_link: float  # between a GPU and main memory
    within_host: float  # from one rank to the others on its host
    between_hosts: float  # from one rank to other hosts
    host_memory: int  # bytes of main memory of one host; 0 for this machine's
    launch: float = 7e-6  # seconds to start one operation; a GPU's was measured beside an H200

    @property
    def is_cuda(self) -> bool:
        return self.memory > 0


_GPUS = {
    #              GiB    GB/s  TFLOP/s 16-bit PCIe NVLink network host GiB
    "A100-40GB": (39.4, 1555, 19.5, 312, 32, 300, 25, 1024),
    "A100-80GB": (79.1, 2039, 19.5, 312, 32, 300, 25, 1024),
    "H100-80GB": (79.1, 3350, 67, 989, 64, 450, 50, 2048),
    "H200-141GB": (139.8, 4800, 67, 989, 64, 450, 50, 2048),
    "B200-180GB": (178.3, 7700, 75, 2250, 64, 900, 50, 2048),
    "L4-24GB": (22.0, 300, 30.3, 121, 32, 32, 3, 192),
}  # a GPU reaches about two thirds of its bandwidth for single rows of some hundred bytes
PRESETS = {
    name: Device(name, int(gib * GIB), speed * GB, speed * GB * 2 / 3, tflops * 1e12, half * 1e12,
                 link * GB, near * GB, far * GB, int(host * GIB))
    for name, (gib, speed, tflops, half, link, near, far, host) in _GPUS.items()
}  # fmt: skip
# Two cores of a virtual machine, measured for this project. The bandwidth between ranks is that of
# gloo over the loopback.
PRESETS["CPU"] = Device("CPU", 0, 32 * GB, 4.2 * GB, 150e9, 150e9, 32 * GB, 1.5 * GB, 1.25 * GB, 0,
                        launch=1.5e-5)  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """W equal devices, one rank each, spread evenly over hosts."""

    device: Device
    world_size: int
    hosts: int = 1

    def __post_init__(self) -> None:
        for name, value in (("devices", self.world_size), ("hosts", self.hosts)):
            if type(value) is not int:
                raise ConfigError(f"--{name} must be a whole number, got {value!r}")
            if value < 1:
                raise ConfigError(f"--{name}: there must be at least one, got {value}")
        if self.world_size % self.hosts:
            raise ConfigError(
                f"--hosts: {self.world_size} devices cannot be spread evenly over {self.hosts} "
                "hosts"
            )

    @property
    def per_host(self) -> int:
        return self.world_size // self.hosts

    @property
    def larger(self) -> list[Cluster]:
        """Clusters of up to 1,024 of the same devices, on as few hosts as hold them.

        A host is full where there are several. The ranks of a CPU host share its memory, so only
        more hosts help.
        """
        per_host, first = self.per_host, self.world_size + 1
        if self.device.is_cuda:
            per_host = max(per_host, DEVICES_PER_HOST)
        counts = [*range(first, per_host), *range(per_host, 1025, per_host)]
        counts = [n for n in counts if n >= first and (self.device.is_cuda or n % per_host == 0)]
        return [Cluster(self.device, n, -(-n // per_host)) for n in counts]

    def __str__(self) -> str:
        where = "one host" if self.hosts == 1 else f"{self.hosts} hosts"
        return f"{self.world_size} x {self.device.name} on {where}"


def parse_devices(
    text: str,
    hosts: int = 1,
    host_gib: float | None = None,
    between_hosts: float | None = None,
) -> Cluster:
    """Return the cluster that a text such as "8xH100-80GB", "8xh100" or "2xCPU-64GB" names.

    ``host_gib`` is the main memory of one host (of CPUs by default this machine's), the link is
    in GB/s; None leaves that of the device.
    """
    match = re.fullmatch(r"\s*(?:(-?\d+)\s*[xX*]\s*)?([A-Za-z][\w.+-]*)\s*", text)
    if not match:
        raise ConfigError(f"--devices must look like 8xH100-80GB, got {text!r}")
    options = {"host-memory": host_gib, "between-hosts": between_hosts}
    for name, value in options.items():
        if value is not None and not (is_number(value) and 0 < value < float("inf")):
            raise ConfigError(f"--{name} must be a number above 0, got {value}")
    device = _find(match[2])
    device = replace(
        device,
        host_memory=int(host_gib * GIB) if host_gib else device.host_memory or host_memory(),
        between_hosts=between_hosts * GB if between_hosts else device.between_hosts,
    )
    return Cluster(device, int(match[1] or 1), hosts)


def is_number(value: object) -> bool:
    """Return whether an option of the Python function is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _find(name: str) -> Device:
    """Return a device by its name, with or without "GB", or by the part before its memory.

    GPU-96GB is any card of this memory, with the speeds of the preset that is nearest in memory.
    """
    wanted = re.sub("gi?b$", "", name.lower())
    if sized := re.fullmatch(r"(cpu|gpu)-(\d+(?:\.\d+)?)", wanted):
        memory = int(float(sized[2]) * GIB)
        if sized[1] == "cpu":
            return replace(PRESETS["CPU"], name=name, host_memory=memory)
        gpus = (device for device in PRESETS.values() if device.is_cuda)
        near = min(gpus, key=lambda device: abs(device.memory - memory))
        return replace(near, name=name, memory=memory)
    plain = {key.lower().removesuffix("gb"): device for key, device in PRESETS.items()}
    found = [device for key, device in plain.items() if wanted in (key, key.split("-")[0])]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"--devices: {name} may be {' or '.join(d.name for d in found)}; say which"
        )
    there_are = f"{', '.join(PRESETS)}, and any other GPU by its memory, such as GPU-96GB"
    close = difflib.get_close_matches(wanted, plain, n=1, cutoff=0.5)
    hint = f"; did you mean {plain[close[0]].name}?" if close else ""
    raise ConfigError(f"--devices: no device {name!r}; there are {there_are}{hint}")
