"""Tiny graphs and runs of them, for the tests of training."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from kge_torchrec import api
from kge_torchrec.config import Config
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.torchrec import sharder
from kge_torchrec.trained_model import TrainedModel
from kge_torchrec.training import assembly
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.start import begin
from kge_torchrec.training.trackers import MetricsLog
from kge_torchrec.training.trainer import Trainer

# Values of the keys whose default depends on the graph: the base config of the tests.
PLAIN = {
    "model.dim": 128,
    "model.init": "normal",
    "model.init_scale": 1e-3,
    "loss.n3": 0.0,
    "loss.relation_weight": 0.0,
    "negatives.count": 512,
    "train.epochs": 50,
    "train.batch_size": 1024,
    "train.lr": 0.1,
    "evaluation.every": 5,
    "evaluation.patience": 0,
    "evaluation.max_triples": 0,
}
QUIET = {
    **PLAIN,
    "threads": 1,
    "device": "cpu",
    "model.dim": 8,
    "model.init_scale": 0.5,
    "negatives.count": 6,
    "train.batch_size": 32,
    "train.epochs": 2,
    "train.lr": 0.05,
    "train.optimizer_options.eps": 1e-4,
    "evaluation.every": 0,
    "run.progress": False,
    "run.trackers.tensorboard": False,
}


def shared_folder() -> Path:
    """Make a folder for files that the tests of a process share."""
    return Path(tempfile.mkdtemp(prefix="shared_", dir=os.environ["KGE_TESTS_SHARED"]))


def random_triples(entities: int, relations: int, count: int, seed: int = 0) -> list[tuple]:
    """Distinct triples of labels in which every entity and relation occurs if they can."""
    random, triples = np.random.default_rng(seed), {}
    turn = 0
    while len(triples) < count:
        head, relation = turn % entities, (turn + turn // entities) % relations
        triples[f"e{head}", f"r{relation}", f"e{random.integers(entities)}"] = None
        turn += 1
    return list(triples)


def tiny_store(
    path: Path, entities: int = 37, relations: int = 3, train: int = 130, held_out: int = 10
) -> TripleStore:
    """A store of random triples; 130 in batches of 32 leave 2 for the last batch."""
    triples = random_triples(entities, relations, train + 2 * held_out)
    splits = {"train": triples[:train], "valid": triples[train : train + held_out]}
    return prepare({**splits, "test": triples[train + held_out :]}, path)


@functools.cache
def small_store() -> Path:
    """The path of a ``tiny_store`` that the tests of a process share."""
    return tiny_store(shared_folder() / "store").path


def quiet(changes: dict[str, Any]) -> dict[str, Any]:
    """``QUIET`` with changes, and without eps for optimizers without."""
    values = {**QUIET, **changes}
    if "ada" not in values.get("train.optimizer", "adagrad"):
        values.pop("train.optimizer_options.eps", None)
    return values


def config_of(store: Path | str, folder: Path | str | None = None, **changes: Any) -> Config:
    """A quiet config; ``changes`` are keys with __ for the dot."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    paths = {"data.path": str(store), "run.dir": folder and str(folder)}
    values = {**paths, **quiet(dotted)}
    config = _parsed(repr(sorted({**values, **dict.fromkeys(paths, "x")}.items())), values)
    data = replace(config.data, path=values["data.path"])
    return replace(config, data=data, run=replace(config.run, dir=values["run.dir"]))


_configs: dict[str, Config] = {}


def _parsed(name: str, values: dict[str, Any]) -> Config:
    """The config of values; parsing takes as long as three steps, so configs are kept by name."""
    if name not in _configs:
        _configs[name] = config_from_dict(values)
    return _configs[name]


def open_config(store: Path | str, folder: Path | str | None = None, **changes: Any) -> Config:
    """A config that leaves its training to a race; ``changes`` are keys with __ for the dot."""
    values = {"data.path": str(store), "run.dir": folder and str(folder), "model.dim": 8}
    values |= {"evaluation.patience": 0, "threads": 1, "device": "cpu", "run.progress": False}
    values["run.trackers.tensorboard"] = False
    return config_from_dict(values | {k.replace("__", "."): v for k, v in changes.items()})


def longer_config(store: Path | str, folder: Path | str | None = None, **changes: Any) -> Config:
    """``config_of`` with four epochs, for runs that end early and resume, or add up roundings."""
    return config_of(store, folder, **{"train__epochs": 4, **changes})


def scripted(values: list[float], metric: str = "mrr") -> Callable[[Trainer], None]:
    """Return a change of the loop for ``fit``: validations give these values, one after another."""

    def script(loop: Trainer) -> None:
        turn = iter(values)
        loop.session.validate = lambda: {"both": {"realistic": {metric: next(turn)}}}

    return script


def without_checkpoints(loop: Trainer) -> None:
    """Let a loop write none, for speed: checkpoints have tests of their own."""
    loop._save = lambda ends=False: None


def start_and_end(config: Config) -> dict[str, dict]:
    """Train without checkpoints; return the parameters before and after.  Collective."""
    results = {}

    def remember(loop: Trainer) -> None:
        results["start"] = parameters(loop.session)
        without_checkpoints(loop)

    results["end"] = fit(config, remember).parameters
    return results


def fit(config: Config, prepare_fit=None) -> Session:
    """Train without the final ranking; ``prepare_fit(fit)`` may change the loop before.

    Collective. Resumes from the newest checkpoint if there is one.
    """
    folder = RunFolder(config.run.dir)
    with processes("cpu") as ranks:
        metrics = None
        if ranks.is_first:
            folder.path.mkdir(parents=True, exist_ok=True)
        session = Session(config, folder, ranks)
        progress = session.restore() if session.checkpoints.names() else begin(session)
        if ranks.is_first:
            metrics = MetricsLog(folder, resumed_at=progress.global_step)
        loop = Trainer(session, progress, metrics)
        if prepare_fit is not None:
            prepare_fit(loop)
        try:
            loop.run()
        finally:
            if metrics is not None:
                metrics.close()
        session.parameters = parameters(session)
    return session


def rank_trains(store: Path, folder: Path, changes: dict, dies: int | None = None) -> dict:
    """Train or resume a run; return its parameters, or die by SIGKILL after a step."""
    return fit(config_of(store, folder, **changes), dies_after(dies)).parameters


def rank_resumes(run: Path, changes: dict | None = None) -> None:
    """Resume a run as the command does."""
    api.resume(run, changes or {}).close()


def in_step(step: int | None, act: Callable[[Trainer], object]) -> Callable[[Trainer], None]:
    """Return a change of the loop for ``fit``: it acts after the update of a step, from 0.

    A result other than None replaces the loss of the step.
    """

    def change(loop: Trainer) -> None:
        progress = loop.pipeline.progress

        def progress_and_act(batches):
            loss = progress(batches)
            result = act(loop) if loop.progress.global_step == step else None
            return loss if result is None else result

        loop.pipeline.progress = progress_and_act

    return change


def dies_after(step: int | None) -> Callable[[Trainer], None]:
    """Return a change of the loop for ``fit``: it dies by SIGKILL in the middle of a later step."""
    return in_step(step, lambda loop: os.kill(os.getpid(), signal.SIGKILL))


@torch.no_grad()
def parameters(of: Session | TrainedModel) -> dict[str, Tensor]:
    """The whole entity table and the scorer's parameters.  Collective."""
    with of.trained_model() if isinstance(of, Session) else nullcontext(of) as model:
        table = model.rows(torch.arange(model.num_entities))
        dense = {name: p.detach().clone() for name, p in model.scorer.named_parameters()}
    return {"entities": table, **dense}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Over all numbers of all parameters."""
    assert one.keys() == other.keys()
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in one)


def with_duplicates():
    """A context in which batches look every place up, as those of CUDA graphs do."""
    make = assembly._delivery
    return patch.object(assembly, "_delivery", lambda *of: replace(make(*of), deduplicate=False))


def kernels_of_cuda(really: bool):
    """A context in which TorchRec's table has them; FBGEMM has most optimizers on a CPU too."""
    return patch.object(
        sharder, "uses_own_table", lambda device, tables: not really or len(tables) > 1
    )


def rank() -> int:
    """This process's rank in its world."""
    return int(os.environ.get("RANK", 0))


def evaluate(run, *args, **options) -> dict:
    """Open a run, evaluate it and close it."""
    with api.open_run(run) as opened:
        return opened.evaluate(*args, **options)


@contextmanager
def restored() -> Iterator[None]:
    """Restore the settings of the process that a session changes."""
    threads = torch.get_num_threads()
    products = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions
