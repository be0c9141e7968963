"""Devices by name, from files, and clusters of them."""

from __future__ import annotations

import pytest

from kge_torchrec.config import ConfigError
from kge_torchrec.embeddings.torchrec.planner import GIB, host_memory
from kge_torchrec.planning.devices import PRESETS, parse_devices, read_devices


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("8xH100-80GB", "H100-80GB", 8),
        ("8xh100", "H100-80GB", 8),
        ("4xA100-40", "A100-40GB", 4),
        ("H200", "H200-141GB", 1),
        (" 16 x B200 ", "B200-180GB", 16),
        ("2*L4", "L4-24GB", 2),
        ("3xCPU", "CPU", 3),
    ],
)
def test_device_names_are_parsed(text, name, count):
    cluster = parse_devices(text)
    assert (cluster.device.name, cluster.world_size, cluster.hosts) == (name, count, 1)


def test_every_preset_is_complete():
    for device in PRESETS.values():
        cluster = parse_devices(f"2x{device.name}")
        assert cluster.device.host_memory > 0
        assert (device.memory > 0) == device.is_cuda
        speeds = ("memory_bandwidth", "gather_bandwidth", "flops", "host_link", "launch")
        assert all(getattr(device, name) > 0 for name in (*speeds, "within_host", "between_hosts"))


def test_devices_are_spread_over_hosts():
    cluster = parse_devices("8xH100", hosts=2)
    assert cluster.local_world_size == 4
    assert [cluster.host_of(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    assert str(cluster) == "8 x H100-80GB on 2 hosts"


def test_main_memory():
    assert parse_devices("2xCPU").device.host_memory == host_memory()
    assert parse_devices("2xCPU-48GB").device.host_memory == 48 * GIB
    assert parse_devices("8xH100", host_gib=300).device.host_memory == 300 * GIB


@pytest.mark.parametrize(
    ("text", "hosts", "said"),
    [
        ("8xH100Z", 1, "did you mean H100-80GB"),
        ("8xquantum", 1, "no device 'quantum'; there are A100-40GB"),
        ("8xA100", 1, "A100-40GB or A100-80GB; say which"),
        ("0xH100", 1, "devices: there must be at least one, got 0"),
        ("-2xH100", 1, "at least one, got -2"),
        ("8xH100", 0, "hosts: there must be at least one"),
        ("8xH100", 3, "8 devices cannot be spread evenly over 3 hosts"),
        ("4xT4-16GB", 1, "compute capability 8.0 or more; T4-16GB has 7.5"),
        ("eight", 1, "no device 'eight'"),
        ("8x", 1, "must look like 8xH100-80GB"),
    ],
)
def test_invalid_devices_are_rejected(text, hosts, said):
    with pytest.raises(ConfigError, match=said):
        parse_devices(text, hosts)


def test_devices_of_a_file(tmp_path):
    file = tmp_path / "devices.yaml"
    file.write_text(
        """
        MI300X: {like: H200, memory_gib: 191.5, memory_gb_per_s: 5300}
        Own-10GB: {kind: cuda, memory_gib: 10, memory_gb_per_s: 1, gather_gb_per_s: 1, tflops: 2,
                   tflops_16bit: 4, host_link_gb_per_s: 1, within_host_gb_per_s: 1,
                   between_hosts_gb_per_s: 1, host_memory_gib: 8, launch_us: 5}
        """
    )
    known = read_devices(file)
    device = parse_devices("4xmi300x", known=known).device
    assert device.memory == int(191.5 * GIB)
    assert device.memory_bandwidth == 5300e9
    assert device.flops == PRESETS["H200-141GB"].flops
    own = parse_devices("1xown", known=known).device
    assert (own.flops, own.host_memory) == (2e12, 8 * GIB)
    assert own.launch == pytest.approx(5e-6)
    assert parse_devices("2xL4", known=known).device.name == "L4-24GB"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("X: {like: nothing}", "no device 'nothing'"),
        ("X: {like: L4, memory: 3}", "unknown key X.memory"),
        ("X: {like: L4, memory_gib: big}", "X.memory_gib in .* must be a number >= 0, got 'big'"),
        ("X: {like: L4, memory_gib: -1}", "X.memory_gib"),
        ("X: {like: L4, kind: tpu}", "X.kind .* cuda or cpu"),
        ("X: {memory_gib: 3}", "X in .* lacks kind, memory_gb_per_s"),
        ("X: 3", "X in .* should hold"),
        ("[1, 2]", "should hold 'name"),
        ("{", "not valid YAML"),
    ],
)
def test_invalid_device_files_are_rejected(tmp_path, content, said):
    file = tmp_path / "devices.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_devices(file)
