"""The Python interface for training: each function trains, and returns the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kge_torchrec.config.keys import check_resume
from kge_torchrec.config.parser import AnyConfig, Overrides, as_config
from kge_torchrec.data.readers.files import WHOLE
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.distributed.processes import on_first_rank
from kge_torchrec.trained_run import Run
from kge_torchrec.trained_run import open_run as open_run
from kge_torchrec.training.run_data import with_absolute_paths
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.runs import Extras, train_run

if TYPE_CHECKING:
    from kge_torchrec.config import Config
    from kge_torchrec.distributed.processes import Processes
    from kge_torchrec.training.trainer import Callback


def train(
    config: AnyConfig = None,
    callbacks: Sequence[Callback] = (),
    rank_test: bool = True,
    triples: Mapping[str, InMemory] | InMemory | None = None,
) -> Run:
    """Train, rank test with the best model, and return the run.

    Under torchrun all ranks call it.  With run.resume it resumes the run in run.dir.

    Args:
        config: A Config, nested or dotted values, a YAML file, or the name of a file in
            ``configs/``.
        callbacks: Called as callback(kind, values) on every rank, with the values of metrics.jsonl,
            after every interval ("step"), epoch ("epoch") and validation ("valid").
        rank_test: False does not rank test, and its results are None.  Hyperparameter searches
            use it.
        triples: Triples in memory to train on instead of data.path, in the form for ``prepare``,
            such as a data frame with columns head, relation and tail, which data.split splits. Or
            splits of them, {"train": triples, "valid": triples, "test": triples}.

    Raises:
        ConfigError: The config is invalid.
        DataError: The data is unusable.
        NonFiniteLoss, NonFiniteParameters: Training diverged.
        CheckpointError: A checkpoint cannot be written or read.
        TrainingStopped: SIGTERM or SIGUSR1.
        TrainingInterrupted: Ctrl-C; a KeyboardInterrupt.  A checkpoint is written if training has
            begun.
        RankLost: Another rank died.
    """
    extras = Extras(callbacks, rank_test, _race)
    if triples is not None and not isinstance(triples, Mapping):
        triples = {WHOLE: triples}
    folder = train_run(as_config(config), extras, triples)
    return Run(folder.path, folder.load_config())


def resume(
    path: str | Path,
    overrides: Overrides = (),
    callbacks: Sequence[Callback] = (),
    force: bool = False,
) -> Run:
    """Resume a run as if it had never stopped, on any number of ranks.

    A run that ended before its first checkpoint starts again.

    Args:
        path: The run's folder.
        overrides: Dotted keys to change from now on, such as {"train.epochs": 200}.
        callbacks: See ``train``.
        force: Whether to start at epoch 1 if all checkpoints are missing.

    Raises:
        ConfigError: An override changes a key that the checkpoint depends on.
        CheckpointError: All checkpoints are missing.
        Exception: All errors of ``train``.
    """
    folder = RunFolder(path)
    config = with_absolute_paths(folder.load_config(overrides))
    check_resume(folder.load_config(), config, folder.path)  # before a process group is joined
    train_run(config, Extras(callbacks, choose=_race), resumes=folder, force=force)
    return Run(folder.path, folder.load_config())


def _race(config: Config, folder: RunFolder, ranks: Processes) -> Config:
    """Choose a default by a race, unless the config says what to train.  Collective."""
    is_racing = on_first_rank(ranks, lambda: folder.racers.is_dir())
    if config.decided_by is not None and not is_racing:
        return config
    from kge_torchrec.tuning.race import race  # imported late: few runs need it

    return race(config, folder, ranks)
