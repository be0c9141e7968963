"""Small runs on the embedded graph of countries, and their final parameters."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import worlds
from torch import Tensor

from gpu_checks.oracle import Result
from kge_torchrec.config import Config
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.distributed.processes import processes
from kge_torchrec.trained_model import TrainedModel
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer

SHARED = {
    "model.dim": 16,
    "model.init_scale": 0.1,
    "negatives.count": 24,
    "train.batch_size": 256,
    "train.epochs": 8,  # about 50 steps
    "train.lr": 0.05,
    # With a large eps the last bits of gradients near zero have little effect.
    "train.optimizer_options.eps": 1e-4,
    "evaluation.every": 0,
    "run.progress": False,
    "run.trackers.tensorboard": False,
    "seed": 5,
}


@dataclass
class Trained:
    """The parameters, on the CPU, and the mean loss of every epoch."""

    parameters: dict[str, Tensor]
    losses: list[float]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return both as arrays by name, for a file."""
        tensors = {name: value.numpy() for name, value in self.parameters.items()}
        return {"losses": np.array(self.losses), **tensors}

    @classmethod
    def of(cls, arrays: Result) -> Trained:
        """Return what ``arrays`` was called on."""
        parameters = {n: torch.from_numpy(a) for n, a in arrays.items() if n != "losses"}
        return cls(parameters, arrays["losses"].tolist())

    def off(self, other: Trained) -> float:
        """Return the largest difference of two elements; infinite if one is not finite."""
        pairs = ((self.parameters[name], value) for name, value in other.parameters.items())
        largest = max(float((one.double() - two.double()).abs().max()) for one, two in pairs)
        return largest if largest == largest else float("inf")

    def off_in_loss(self, other: Trained) -> float:
        """Return the largest difference of the losses of an epoch, as a share of the loss."""
        pairs = zip(self.losses, other.losses, strict=True)
        return max(abs(one / two - 1) for one, two in pairs)


def config_of(device: str, folder: Path, **keys) -> Config:
    """Return a config; ``keys`` are config keys with __ for the dot."""
    changes = {key.replace("__", "."): value for key, value in keys.items()}
    settings = {**SHARED, "device": device, "run.dir": str(folder), **changes}
    if settings.get("train.optimizer") == "sgd":
        del settings["train.optimizer_options.eps"]  # its formula has none
    return config_from_dict(settings)


def trained(
    device: str, folder: Path, prepare: Callable[[Trainer], object] | None = None, **keys
) -> Trained:
    """Train without checkpoints and final ranking; ``prepare(fit)`` may change the loop."""
    config, losses = config_of(device, folder, **keys), []

    def remember(kind: str, values: dict) -> None:
        if kind == "epoch":
            losses.append(values["loss"])

    with processes(device) as ranks:
        session = Session(config, RunFolder(folder), ranks)
        loop = Trainer(session, session.restore(), None, [remember])
        loop._save = lambda ends=False: None
        if prepare is not None:
            prepare(loop)
        loop.run()
        return Trained(parameters_of(session), losses)


def trained_by_two_ranks(device: str, folder: Path, **keys) -> Trained:
    """Train on two ranks of one device, over gloo: NCCL refuses two ranks on one GPU.

    It forks this process: call it before CUDA or a backward pass starts here.
    """
    fork = multiprocessing.get_context("fork")
    with patch.object(worlds, "_context", lambda: fork):  # the server would import all again
        first, second = worlds.run_world(2, _trained_by_rank, device, folder, keys)
    rows = torch.cat([first.parameters["entities"], second.parameters["entities"]])
    return Trained({**first.parameters, "entities": rows}, first.losses)


def _trained_by_rank(device: str, folder: Path, keys: dict) -> Trained:
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"  # both have the first GPU
    return trained(device, folder, **keys)


@torch.no_grad()
def parameters_of(of: Session | TrainedModel) -> dict[str, Tensor]:
    """Return the table and the scorer's parameters of one rank, on the CPU."""
    with of.trained_model() if isinstance(of, Session) else nullcontext(of) as model:
        parameters = model.scorer.named_parameters()
        dense = {name: p.detach().cpu().clone() for name, p in parameters}
        return {"entities": model.shard.rows.float().cpu().clone(), **dense}
