"""The packages match the card, and the card its data sheet."""

from __future__ import annotations

import pytest
import torch
from gpu_runs import preset_of, seconds

from kge_torchrec.environment import check_packages


def test_packages_fit_each_other_and_the_card(device, note):
    check_packages()
    if device.type == "cuda":
        assert (torch.version.cuda or "none").split(".")[0] == "13", "FBGEMM's wheels need CUDA 13"
        assert torch.cuda.get_device_capability(device) >= (8, 0)
        note("memory", torch.cuda.mem_get_info(device)[1] / 2**30, "GiB")


def test_card_has_the_memory_and_half_of_the_speed_that_the_planner_has_for_it(device, note):
    """The planner assumes 0.7 of the data sheet's speeds."""
    on_card = device.type == "cuda"
    numbers, size = (1 << 28, 8192) if on_card else (1 << 18, 128)
    one, other = torch.zeros(2, numbers, device=device)
    copied = 8 * numbers / seconds(lambda: other.copy_(one), device)
    left, right = torch.rand(2, size, size, device=device)
    product = 2 * size**3 / seconds(lambda: left @ right, device)
    note("copy in memory", copied / 1e9, "GB/s")
    note("float32 product", product / 1e12, "TFLOP/s")
    few = torch.zeros(8, device=device)
    note("one tiny kernel after another", 1e6 * seconds(few.neg, device, 1000), "us")
    if on_card:
        preset = preset_of(device)
        if preset is None:
            pytest.skip(f"the planner has no {torch.cuda.get_device_name(device)}")
        assert torch.cuda.mem_get_info(device)[1] == pytest.approx(preset.memory, rel=0.02)
        assert copied > preset.memory_bandwidth / 2 and product > preset.flops / 2
