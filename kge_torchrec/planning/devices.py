"""Devices to plan for: their memory, and how fast bytes move in them and between them.

The presets hold the vendors' data sheets, with the memory that CUDA reports as total. A YAML file
can add devices. Only memory decides what fits; the speeds feed the model of a step's time.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kge_torchrec.config import ConfigError
from kge_torchrec.config.yaml_file import read_yaml
from kge_torchrec.embeddings.torchrec.planner import GIB
from kge_torchrec.environment import host_memory

GB = 10**9
DEVICES_PER_HOST = 8  # GPUs that a host holds, unless the cluster's hosts hold more


@dataclass(frozen=True)
class Device:
    """One GPU with its share of a host, or (kind "cpu") a whole host that its ranks share.

    Bandwidths are in bytes per second, in one direction.
    """

    name: str
    kind: str  # "cuda" or "cpu"
    memory: int  # bytes of one GPU; 0 for a CPU
    memory_bandwidth: float  # of one GPU, or of a host's main memory
    gather_bandwidth: float  # the same for single rows at random places
    flops: float  # per second, in large products of float32; a multiply-add counts as two
    flops_16bit: float  # the same in bfloat16 and float16
    host_link: float  # between a GPU and main memory
    within_host: float  # from one rank to the others on its host
    between_hosts: float  # from one rank to other hosts
    host_memory: int  # bytes of main memory of one host; 0 for this machine's
    launch: float  # seconds to start one operation

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.kind == "cuda"


# Keys of a device file: the field that each one sets, and its unit.
_UNITS = {
    "memory_gib": ("memory", GIB),
    "memory_gb_per_s": ("memory_bandwidth", GB),
    "gather_gb_per_s": ("gather_bandwidth", GB),
    "tflops": ("flops", 1e12),
    "tflops_16bit": ("flops_16bit", 1e12),
    "host_link_gb_per_s": ("host_link", GB),
    "within_host_gb_per_s": ("within_host", GB),
    "between_hosts_gb_per_s": ("between_hosts", GB),
    "host_memory_gib": ("host_memory", GIB),
    "launch_us": ("launch", 1e-6),
}
_GPUS = {
    #              GiB    GB/s  TFLOP/s 16-bit PCIe NVLink network host GiB
    "A100-40GB": (39.4, 1555, 19.5, 312, 32, 300, 25, 1024),
    "A100-80GB": (79.1, 2039, 19.5, 312, 32, 300, 25, 1024),
    "H100-80GB": (79.1, 3350, 67, 989, 64, 450, 50, 2048),
    "H200-141GB": (139.8, 4800, 67, 989, 64, 450, 50, 2048),
    "B200-180GB": (178.3, 7700, 75, 2250, 64, 900, 50, 2048),
    "L4-24GB": (22.0, 300, 30.3, 121, 32, 32, 3, 192),
}
# Two cores of a virtual machine, measured for this project. The bandwidth between ranks is that of
# gloo over the loopback.
_CPU = Device(
    name="CPU",
    kind="cpu",
    memory=0,
    memory_bandwidth=32 * GB,
    gather_bandwidth=4.2 * GB,
    flops=150e9,
    flops_16bit=150e9,
    host_link=32 * GB,
    within_host=1.5 * GB,
    between_hosts=1.25 * GB,
    host_memory=0,
    launch=1.5e-5,
)


def _gpu(name: str, *row: float) -> Device:
    """Return a preset from one line of the table above."""
    keys = [key for key in _UNITS if key not in ("gather_gb_per_s", "launch_us")]
    return Device(
        name,
        "cuda",
        # A GPU reaches about two thirds of its bandwidth for rows of some hundred bytes.
        gather_bandwidth=row[1] * GB * 2 / 3,
        launch=7e-6,  # measured beside an H200
        **_in_bytes(dict(zip(keys, row, strict=True))),
    )


def _in_bytes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Device from keys and values of a device file."""
    values_in_bytes = {}
    for key, value in values.items():
        name, unit = _UNITS[key]
        values_in_bytes[name] = int(value * unit) if unit is GIB else value * unit
    return values_in_bytes


PRESETS = {name: _gpu(name, *row) for name, row in _GPUS.items()} | {_CPU.name: _CPU}
# FBGEMM's wheels hold machine code for compute capability 8.0, 9.0 and 10.0, and no PTX.
_OLDEST_CAPABILITY = "8.0"
_TOO_OLD = {"p100": "6.0", "v100": "7.0", "t4": "7.5"}


# Speeds of one direction of common links, in bits per second: IEEE 802.3, InfiniBand 4x.
LINKS = {"1GbE": 1e9, "10GbE": 10e9, "25GbE": 25e9, "100GbE": 100e9, "HDR": 200e9, "NDR": 400e9}
_BITS = {"kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9, "kB": 8e3, "MB": 8e6, "GB": 8e9}


def link_speed(text: str) -> float:
    """Return the bytes per second of a link such as 1Gbit, 12.5GB/s or 10GbE.

    Raises:
        ConfigError: The text has another form.
    """
    bits = {name.lower(): speed for name, speed in LINKS.items()}.get(text.lower(), 0.0)
    if match := re.fullmatch(rf"([\d.]*\d)\s*({'|'.join(_BITS)})(?:/?s|ps)?", text):
        bits = float(match[1]) * _BITS[match[2]]
    if bits <= 0:
        raise ConfigError(
            f"a link is a speed such as 1Gbit or 12.5GB/s, or one of {', '.join(LINKS)}; "
            f"got {text!r}"
        )
    return bits / 8


@dataclass(frozen=True)
class Straggler:
    """A rank that computes more slowly than the others, which wait for it.

    Args:
        times: How many times as long a slow rank computes.
        chance: That a rank is slow in a step. 1: some rank always is.

    Raises:
        ConfigError: A slow rank would be faster, or the chance is no probability.
    """

    times: float = 1.0
    chance: float = 1.0

    def __post_init__(self) -> None:
        if not (1 <= self.times < float("inf") and 0 <= self.chance <= 1):
            raise ConfigError(
                "--straggler must be a number >= 1, perhaps with a chance from 0 to 1, such as "
                f"1.5 or 1.5:0.01; got {self.times:g}:{self.chance:g}"
            )

    @classmethod
    def parse(cls, text: str) -> Straggler:
        """Return the straggler that 1.5 or 1.5:0.01 means."""
        times, _, chance = text.partition(":")
        try:
            return cls(float(times), float(chance or 1))
        except ValueError:
            return cls(0)  # its message says what a straggler is

    def slowdown(self, ranks: int) -> float:
        """Return the expected time of the slowest rank, over that of the others.

        At least one of n ranks is slow with probability 1 - (1 - chance) ** n (Dean and Barroso,
        The Tail at Scale, 2013).
        """
        return 1 + (self.times - 1) * (1 - (1 - self.chance) ** ranks)


@dataclass(frozen=True)
class Cluster:
    """W equal devices, one rank each, spread evenly over hosts.

    Raises:
        ConfigError: There is no device or no host, or the hosts would not hold equally many
            devices.
    """

    device: Device
    world_size: int
    hosts: int = 1
    straggler: Straggler = Straggler()

    def __post_init__(self) -> None:
        for name, value in (("devices", self.world_size), ("hosts", self.hosts)):
            if value < 1:
                raise ConfigError(f"--{name}: there must be at least one, got {value}")
        if self.world_size % self.hosts:
            raise ConfigError(
                f"--hosts: {self.world_size} devices cannot be spread evenly over {self.hosts} "
                "hosts"
            )

    @property
    def local_world_size(self) -> int:
        """Number of ranks on one host."""
        return self.world_size // self.hosts

    def host_of(self, rank: int) -> int:
        """Return the host of a rank. Ranks are numbered host by host, as torchrun does."""
        return rank // self.local_world_size

    @property
    def slowdown(self) -> float:
        """How many times as long the slowest rank computes."""
        return self.straggler.slowdown(self.world_size)

    def with_links(self, within: float | None = None, between: float | None = None) -> Cluster:
        """Return the cluster with other speeds of a rank's links, in bytes per second."""
        device = self.device
        device = replace(
            device,
            within_host=within or device.within_host,
            between_hosts=between or device.between_hosts,
        )
        return replace(self, device=device)

    def __str__(self) -> str:
        where = "one host" if self.hosts == 1 else f"{self.hosts} hosts"
        return f"{self.world_size} x {self.device.name} on {where}"


def parse_devices(
    text: str, hosts: int = 1, known: Mapping[str, Device] | None = None, host_gib: float = 0
) -> Cluster:
    """Return the cluster that a text such as "8xH100-80GB", "8xh100" or "2xCPU-64GB" names.

    Args:
        text: Number and name of the devices.
        hosts: Number of hosts, over which the devices are spread evenly.
        known: Devices by name. Default: the presets.
        host_gib: GiB of main memory of one host. 0 takes the device's, and for CPUs this machine's.

    Raises:
        ConfigError: The text has another form, the device is unknown, or a number is below one.
    """
    match = re.fullmatch(r"\s*(?:(-?\d+)\s*[xX*]\s*)?([A-Za-z][\w.+-]*)\s*", text)
    if not match:
        raise ConfigError(f"--devices must look like 8xH100-80GB, got {text!r}")
    count = 1 if match[1] is None else int(match[1])
    device = _find(match[2], PRESETS if known is None else known)
    if host_gib:
        device = replace(device, host_memory=int(host_gib * GIB))
    elif not device.host_memory:
        device = replace(device, host_memory=host_memory())
    return Cluster(device, count, hosts)


def read_devices(path: str | Path) -> dict[str, Device]:
    """Return the presets and the devices of a YAML file, which can build on others by ``like``.

        MI300X: {like: H200-141GB, memory_gib: 191.5, memory_gb_per_s: 5300}

    Raises:
        ConfigError: The file is not valid; the message names the device and the key.
    """
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} should hold 'name: {{key: value}}' pairs")
    known = dict(PRESETS)
    for name, values in content.items():
        known[str(name)] = _from_values(str(name), values, known, path)
    return known


def _from_values(name: str, values: Any, known: Mapping[str, Device], path: str | Path) -> Device:
    if not isinstance(values, dict):
        raise ConfigError(f"{name} in {path} should hold 'key: value' pairs")
    values = dict(values)
    like, kind = values.pop("like", None), values.pop("kind", None)
    if kind not in (None, "cuda", "cpu"):
        raise ConfigError(f"{name}.kind in {path} must be cuda or cpu, got {kind!r}")
    for key, value in values.items():
        if key not in _UNITS:
            raise ConfigError(
                f"unknown key {name}.{key} in {path}; there are kind, like, {', '.join(_UNITS)}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"{name}.{key} in {path} must be a number >= 0, got {value!r}")
    changes = {"name": name, **({"kind": kind} if kind else {}), **_in_bytes(values)}
    if like is not None:
        return replace(_find(str(like), known), **changes)
    missing = {field.name for field in fields(Device)} - changes.keys()
    if missing:
        keys = [key for key, (field, _) in _UNITS.items() if field in missing]
        raise ConfigError(
            f"{name} in {path} lacks {', '.join(sorted(missing & {'kind'}) + keys)}; "
            "set them, or name a device that it is like"
        )
    return Device(**changes)


def _find(name: str, known: Mapping[str, Device]) -> Device:
    """Return a device by its name, with or without "GB", or by the part before its memory."""
    if sized := re.fullmatch(r"(?i)cpu-(\d+(?:\.\d+)?)(?:GB|GiB)?", name):
        return replace(known["CPU"], name=name, host_memory=int(float(sized[1]) * GIB))
    plain = {_plain(known_name): device for known_name, device in known.items()}
    if _plain(name) in plain:
        return plain[_plain(name)]
    same = [device for key, device in plain.items() if key.split("-")[0] == _plain(name)]
    if len(same) == 1:
        return same[0]
    if same:
        raise ConfigError(
            f"--devices: {name} may be {' or '.join(d.name for d in same)}; say which"
        )
    there_are = f"{', '.join(known)}, and others from a file (--device-file)"
    if capability := _TOO_OLD.get(_plain(name).split("-")[0]):
        raise ConfigError(
            f"--devices: FBGEMM's wheels need compute capability {_OLDEST_CAPABILITY} or more; "
            f"{name} has {capability}. There are {there_are}"
        )
    close = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.5)
    hint = f"; did you mean {plain[close[0]].name}?" if close else ""
    raise ConfigError(f"--devices: no device {name!r}; there are {there_are}{hint}")


def _plain(name: str) -> str:
    return name.lower().removesuffix("gib").removesuffix("gb")
