"""Devices by name, and clusters of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kge_torchrec.embeddings.torchrec.planner import GIB, host_memory
from kge_torchrec.planning.devices import PRESETS, parse_devices


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
        ("8xGPU-96GB", "GPU-96GB", 8),
    ],
)
def test_device_names_are_parsed(text, name, count):
    cluster = parse_devices(text)
    assert (cluster.device.name, cluster.world_size, cluster.hosts) == (name, count, 1)


def test_clusters_have_hosts_memory_and_links():
    cluster = parse_devices("8xH100", 2, 300, 12.5)
    assert cluster.per_host == 4 and str(cluster) == "8 x H100-80GB on 2 hosts"
    device = cluster.device
    assert device.between_hosts == 12.5e9
    assert device.host_memory == 300 * GIB
    assert parse_devices("2xCPU").device.host_memory == host_memory() > 2**28
    assert parse_devices("2xCPU-48GB").device.host_memory == 48 * GIB


def test_larger_clusters_fill_a_host_then_whole_hosts():
    """The ranks of a CPU host share its memory, so only more hosts help."""
    larger = parse_devices("1xH100").larger
    assert [cluster.world_size for cluster in larger[:9]] == [2, 3, 4, 5, 6, 7, 8, 16, 24]
    larger = parse_devices("2xCPU-64GB").larger
    assert [(cluster.world_size, cluster.hosts) for cluster in larger[:2]] == [(4, 2), (6, 3)]


def test_any_card_has_the_speeds_of_the_preset_that_is_nearest_in_memory():
    device, near = parse_devices("8xGPU-96GB").device, PRESETS["A100-80GB"]
    assert device == replace(near, name="GPU-96GB", memory=96 * GIB)
    assert parse_devices("1xgpu-16").device.flops == PRESETS["L4-24GB"].flops
