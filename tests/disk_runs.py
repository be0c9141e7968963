"""Runs of a small graph whose table lies on disk."""

from __future__ import annotations

import functools
from pathlib import Path

from training_runs import config_of, shared_folder, small_store

from kge_torchrec import train
from kge_torchrec.config import Config

DISK = {
    "model__dim": 512,  # two rows a page, so that a part of this small graph has a few rows
    "model__scorer": "complex",
    "train__optimizer_options__eps": 1e-3,
    "entities__placement": "disk",
    "entities__placement_options": {"parts": 5, "buffer": 3},
}


def disk_config(folder: Path | str, **changes) -> Config:
    return config_of(small_store(), folder, **{**DISK, **changes})


@functools.cache
def trained_run() -> Path:
    return train(disk_config(shared_folder() / "run", checkpoint__keep=2)).path
