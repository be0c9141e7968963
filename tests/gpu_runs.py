"""Small runs on the embedded graph, and steps on random triples of any size, for tests/gpu."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from training_runs import largest_difference, parameters, without_checkpoints
from worlds import run_world

from kge_torchrec.config import Config
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.config.registry import resolve
from kge_torchrec.distributed.processes import Processes, processes
from kge_torchrec.embeddings import backend
from kge_torchrec.models import scorers
from kge_torchrec.planning.devices import PRESETS, Device
from kge_torchrec.training.assembly import build_backend, build_batches, build_pipeline
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer

EPOCHS = 2 if os.environ.get("KGE_GPU_TESTS") == "cpu" else 8
FIFTY_STEPS = {
    "model.dim": 16, "model.init_scale": 0.1, "negatives.count": 24, "train.batch_size": 256,
    "train.epochs": EPOCHS, "train.lr": 0.05, "evaluation.every": 0, "run.progress": False,
    "seed": 5, "train.optimizer_options.eps": 1e-4,  # last bits near zero have little effect
}  # fmt: skip
OF_SIZE = {  # ComplEx with shared negatives for both sides
    "threads": 0, "model.init": "normal", "model.init_scale": 0.1, "loss.n3": 0.0,
    "loss.relation_weight": 0.0, "negatives.count": 512, "train.epochs": 1, "train.lr": 1e-3,
}  # fmt: skip


def config_of(device: torch.device, folder: Path | None, base: dict, **keys: Any) -> Config:
    """A config of a base with changes; ``keys`` have __ for the dot."""
    changes = {key.replace("__", "."): value for key, value in keys.items()}
    settings = {**base, "device": device.type, "run.dir": folder and str(folder), **changes}
    if settings.get("train.optimizer") == "sgd":
        settings.pop("train.optimizer_options.eps", None)  # its formula has none
    return config_from_dict(settings)


@dataclass
class Trained:
    """The parameters, on the CPU, and the mean loss of every epoch."""

    parameters: dict[str, Tensor]
    losses: list[float]

    def off(self, other: Trained) -> float:
        """The largest difference of two elements."""
        return largest_difference(self.parameters, other.parameters)

    def off_in_loss(self, other: Trained) -> float:
        """The largest difference of the losses of an epoch, as a share of the loss."""
        pairs = zip(self.losses, other.losses, strict=True)
        return max(abs(one / two - 1) for one, two in pairs)


def trained(
    device: torch.device, folder: Path, change: Callable[[Trainer], object] = lambda _: None,
    **keys: Any,
) -> Trained:  # fmt: skip
    """Train fifty steps without checkpoints; ``change`` gets the loop before."""
    config, losses = config_of(device, folder, FIFTY_STEPS, **keys), []

    def remember(kind: str, values: dict) -> None:
        if kind == "epoch":
            losses.append(values["loss"])

    with processes(device.type) as ranks:
        session = Session(config, RunFolder(folder), ranks)
        loop = Trainer(session, session.restore(), None, [remember])
        without_checkpoints(loop)
        change(loop)
        loop.run()
        return Trained({name: x.cpu() for name, x in parameters(session).items()}, losses)


def trained_by_two_ranks(device: torch.device, folder: Path, **keys: Any) -> Trained:
    """Train on two ranks of one device, over gloo: NCCL refuses two ranks on one GPU."""
    return run_world(2, _rank_trains, device, folder, keys)[0]


def _rank_trains(device: torch.device, folder: Path, keys: dict) -> Trained:
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"  # both have the first GPU
    return trained(device, folder, **keys)


@dataclass
class RandomGraph:
    """The parts of a store that training needs, with random triples."""

    num_entities: int
    num_relations: int
    num_triples: int
    base: None = None  # not extended
    has_features: bool = False

    def __post_init__(self) -> None:
        stream, sizes = np.random.default_rng(0), (self.num_entities, self.num_relations)
        columns = [stream.integers(size, size=self.num_triples, dtype=np.int32)
                   for size in (*sizes, self.num_entities)]  # fmt: skip
        self.train = np.stack(columns, 1)

    @property
    def num_rows(self) -> int:
        return self.num_entities

    def weights(self, split: str) -> None:
        return None

    def features(self) -> None:
        return None


@contextmanager
def rows_drawn_on_the_device() -> Iterator[None]:
    """Initialize tables faster than training does, with different values."""
    before = backend.fill_rows
    backend.fill_rows = lambda shard, seed, init, ids: shard.rows.normal_(0, init.scale)
    try:
        yield
    finally:
        backend.fill_rows = before


class Steps:
    """Steps of a config on a random graph; ``stream`` has its batches without an end."""

    def __init__(self, config: Config, graph: Any, ranks: Processes, engine: Any = None) -> None:
        self.config, self.device = config, ranks.device
        self.engine = engine or build_backend(config, graph, ranks)
        self.pipeline = build_pipeline(config, self.engine, ranks)
        self.stream = self._endless(build_batches(config, graph, ranks))

    @staticmethod
    def _endless(batches: Any) -> Iterator[Any]:
        epoch = 0
        while True:
            yield from batches.epoch(epoch)
            epoch += 1

    def __call__(self) -> Tensor:
        return self.pipeline.progress(self.stream)

    def rate(self, steps: int) -> float:
        """Triples per second, after a few steps that are not counted."""
        for _ in range(max(3, steps // 10)):
            self()
        return self.config.train.batch_size / seconds(self, self.device, steps, warm_up=0)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(
    work: Callable[[], object], device: torch.device, repeats: int = 10, warm_up: int = 2
) -> float:
    """The mean seconds of some runs."""
    for _ in range(warm_up):
        work()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def scorer_of(name: str, dim: int, relations: int = 7) -> scorers.Scorer:
    """A scorer on the CPU with parameters of about size one."""
    torch.manual_seed(0)
    reciprocal = resolve("scorer", name).needs_reciprocal
    settings = {"model.scorer": name, "model.dim": dim, "model.reciprocal": reciprocal}
    scorer = scorers.build_scorer(config_from_dict(settings).model, relations)
    for parameter in scorer.parameters():
        torch.nn.init.normal_(parameter)
    return scorer


def triples_of(count: int, entities: int, relations: int = 7) -> np.ndarray:
    """Random triples (T, 3)."""
    stream = np.random.default_rng(1)
    columns = [stream.integers(size, size=count) for size in (entities, relations, entities)]
    return np.stack(columns, 1)


def preset_of(device: torch.device) -> Device | None:
    """The planner's preset for the card."""
    name, (_, total) = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)
    known = [p for p in PRESETS.values() if p.is_cuda and p.name.split("-")[0] in name]
    return min(known, key=lambda preset: abs(preset.memory - total), default=None)
