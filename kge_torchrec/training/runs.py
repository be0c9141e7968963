"""Starts and resumes runs: locks the folder, trains, and writes the results."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.keys import (
    changed_keys,
    check_effects,
    check_resume,
    declared,
    key_of,
)
from kge_torchrec.config.parser import Overrides, read_config
from kge_torchrec.config.sizing import KEYS as RESOLVED_KEYS
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.distributed.processes import (
    Processes,
    on_all_ranks,
    on_first_rank,
    processes,
)
from kge_torchrec.training.checkpoints import (
    CheckpointError,
    Checkpoints,
)
from kge_torchrec.training.copier import copied
from kge_torchrec.training.failed_runs import interrupts_named, undone_on_failure
from kge_torchrec.training.remote_runs import folder_to_resume, take_over
from kge_torchrec.training.run_data import check_start, facts_of, with_absolute_paths
from kge_torchrec.training.run_folder import MetricsLog, RunFolder
from kge_torchrec.training.run_results import final_results, notes_of
from kge_torchrec.training.session import Session
from kge_torchrec.training.state import TrainState
from kge_torchrec.training.trackers import check_trackers, trackers_of
from kge_torchrec.training.warm_start import begin

if TYPE_CHECKING:
    from kge_torchrec.training.trainer import Callback

log = logging.getLogger(__name__)


# Called on every rank with the config and folder of a run and its ranks.  It returns the config to
# train with, and may leave checkpoints of it in the folder, from which training continues.
Choose = Callable[[Config, RunFolder, Processes], Config]


@dataclass(frozen=True)
class Extras:
    """The caller's additions to a training.

    Attributes:
        callbacks: Called as callback(kind, values) on every rank, with the values of metrics.jsonl.
        rank_test: Whether to rank test at the end.
        choose: Completes a config that leaves the training open, see ``Choose``; None: rules do.
        is_trial: Whether this is a trial of a search: keys without effect are accepted, and the
            files of a trial that fails stay.
    """

    callbacks: Sequence[Callback] = ()
    rank_test: bool = True
    choose: Choose | None = None
    is_trial: bool = False


NOTHING = Extras()


def start_run(
    config: Config, extras: Extras = NOTHING, triples: Mapping[str, InMemory] | None = None
) -> RunFolder:
    """Train a new run, or resume the run in run.dir if run.resume says so.  Collective.

    Args:
        config: The config.
        extras: What the caller adds.
        triples: Splits in memory to train on instead of data.path.

    Returns:
        The folder of the run.
    """
    if triples is not None and config.run.resume != "never":
        raise ConfigError(
            "run.resume: triples in memory cannot be compared with those of a run; write a store "
            "with `prepare` and name it as data.path, or leave run.resume at never"
        )
    config = with_absolute_paths(config)
    with processes(config.device, config.timeout) as ranks, ExitStack() as held:
        if not extras.is_trial:
            on_first_rank(ranks, lambda: _check_start(config, ranks, triples))
        folder = RunFolder(ranks.broadcast(str(RunFolder.new(config).path)))
        lock(folder, ranks, held)
        held.enter_context(interrupts_named(folder))
        resumed = on_first_rank(ranks, lambda: _run_to_resume(folder, config))
        copied(folder, resumed or config, ranks, held)
        if resumed is not None:
            continue_run(folder, resumed, ranks, extras)
        else:
            _begin(folder, config, ranks, extras, triples)
        free_memory()
    return folder


def resume_run(
    path: str | Path, overrides: Overrides = (), extras: Extras = NOTHING, force: bool = False
) -> RunFolder:
    """Resume the run in a folder, see ``api.resume``.  Collective.

    Args:
        path: The run's folder, or its URL; see ``folder_to_resume``.
        overrides: Dotted keys to change from now on.
        extras: What the caller adds.
        force: Whether to start at epoch 1 if all checkpoints are missing.
    """
    folder = folder_to_resume(path, lambda: read_config(None, overrides).run.dir)
    before, config = folder.load_config(), with_absolute_paths(folder.load_config(overrides))
    check_resume(before, config, folder.path)
    with processes(config.device, config.timeout) as ranks, ExitStack() as held:
        on_first_rank(ranks, lambda: _check_changes(before, config, folder, ranks))
        lock(folder, ranks, held)
        held.enter_context(interrupts_named(folder))
        before, config = ranks.broadcast((before, config))  # another host may see an older file
        copied(folder, config, ranks, held)
        continue_run(folder, config, ranks, extras, before, force)
        free_memory()
    return folder


def _check_start(config: Config, ranks: Processes, triples: Mapping[str, InMemory] | None) -> None:
    """Raise ConfigError for a configured key without effect, unless a run resumes."""
    if config.run.resume == "never" or not RunFolder.new(config).holds_run:
        check_start(config, facts_of(config, ranks.device.type == "cuda", triples))


def _check_changes(before: Config, config: Config, folder: RunFolder, ranks: Processes) -> None:
    """Raise ConfigError for a key that changes on resume and has no effect."""
    facts = facts_of(config, ranks.device.type == "cuda", extended=folder.extension.is_file())
    check_effects(config, facts, changed_keys(before, config))


def lock(folder: RunFolder, ranks: Processes, held: ExitStack) -> None:
    """Lock the folder against other training processes until ``held`` closes.  Collective."""

    def lock() -> None:
        held.enter_context(folder.locked())

    on_first_rank(ranks, lock)


def _run_to_resume(folder: RunFolder, config: Config) -> Config | None:
    """Return the config with which to resume the run in the folder, or None to start a new run.

    Raises:
        ConfigError: run.resume is "require" and there is no run, or the run's config differs.
    """
    resume, url = config.run.resume, config.checkpoint.saving.copy_to
    if resume != "never" and url is not None and config.run.dir is not None:
        take_over(url, folder, config.run.dir)
    if resume == "require" and not folder.holds_run:
        raise ConfigError(
            f"run.resume require: {folder.path} holds no run to resume; "
            "start one with run.resume never or auto"
        )
    if resume == "never" or not folder.holds_run:
        return None
    there = folder.load_config()
    # Reuse resolved values, also with other ranks than before.
    config = config.filled_from(there, raced=folder.race.is_file())
    for key in changed_keys(there, config):
        rule = key_of(declared(Config)[key]).resume
        if rule.per_start:
            continue
        remedy = "name another run.dir"
        if not rule.refuses(there, config):
            remedy += f", or change the run by `train --resume {folder.path} --{key} ...`"
        raise ConfigError(
            f"run.resume {resume}: {folder.path} holds a run with a different config: {key} is "
            f"{attrgetter(key)(there)!r} there and {attrgetter(key)(config)!r} here; {remedy}"
        )
    return config


def _begin(
    folder: RunFolder,
    config: Config,
    ranks: Processes,
    extras: Extras,
    triples: Mapping[str, InMemory] | None,
) -> None:
    """Train a new run.  A run that fails before its first checkpoint leaves nothing in the way."""
    if triples is not None:
        config = replace(config, data=replace(config.data, path=os.path.abspath(folder.store)))
    on_first_rank(ranks, lambda: check_trackers(config.run))
    before = on_first_rank(ranks, lambda: folder.entries - {".lock"})
    on_first_rank(ranks, lambda: folder.create(config))
    with nullcontext() if extras.is_trial else undone_on_failure(folder, before, ranks):
        if triples is not None:
            on_first_rank(ranks, lambda: _prepare(config, triples, folder))
        config = _chosen(folder, config, ranks, extras)
        if Checkpoints(folder.checkpoints, ranks).names():  # of the winner of a race
            return continue_run(folder, config, ranks, extras)
        session = Session(config, folder, ranks)
        start = begin(session)
        _save_resolved(config, session)
        _fit(session, start, extras, resumed_at=None)


def _prepare(config: Config, triples: Mapping[str, InMemory], folder: RunFolder) -> None:
    prepare(triples, folder.store, config.data, seed=config.seed, log_notes=False)


def _chosen(folder: RunFolder, config: Config, ranks: Processes, extras: Extras) -> Config:
    """Return the config to train with, chosen by a race if it leaves that open.  Collective."""
    if extras.choose is None:
        return config
    is_racing = on_first_rank(ranks, lambda: folder.racers.is_dir())
    if config.decided_by is not None and not is_racing:
        return config
    return extras.choose(config, folder, ranks)


def _save_resolved(config: Config, session: Session) -> None:
    """Write and print the values resolved for null keys.  Collective."""
    if session.config == config:
        return
    on_first_rank(session.processes, lambda: session.folder.save_config(session.config))
    if session.show:
        open_keys = [key for key in RESOLVED_KEYS if attrgetter(key)(config) is None]
        chosen = {key: attrgetter(key)(session.config) for key in open_keys}
        values = ", ".join(f"{key} {value}" for key, value in chosen.items() if value != "all")
        print(f"defaults for this graph: {values}", file=sys.stderr)


def continue_run(
    folder: RunFolder,
    config: Config,
    ranks: Processes,
    extras: Extras,
    before: Config | None = None,
    force: bool = False,
) -> None:
    """Resume training from the newest checkpoint, or start if no checkpoint was written yet.

    Before a start, a race may choose what the config leaves open.

    Args:
        folder: Folder of the run.
        config: The config from now on.
        ranks: The ranks of the run.
        extras: What the caller adds.
        before: The config so far; None if it is the same.
        force: Whether to start at epoch 1 if all written checkpoints are missing.
    """
    on_first_rank(ranks, lambda: check_trackers(config.run))
    chosen = _chosen(folder, config, ranks, extras)
    before = chosen if before in (None, config) else before
    config = chosen
    starts_anew = not Checkpoints(folder.checkpoints, ranks).names()
    if starts_anew:
        on_first_rank(ranks, lambda: _check_nothing_is_lost(folder, force))
    session = Session(config, folder, ranks)
    progress = begin(session) if starts_anew else session.restore()
    if starts_anew and before == config:
        _save_resolved(config, session)
    if session.config != before:
        on_first_rank(ranks, lambda: folder.save_config(session.config))
    _fit(session, progress, extras, progress.global_step)


def _check_nothing_is_lost(folder: RunFolder, force: bool) -> None:
    """Raise CheckpointError unless a run without checkpoints may start at epoch 1."""
    if folder.extension.is_file():
        raise CheckpointError(
            f"{folder.path} has no checkpoint; its first checkpoint held the rows of the run "
            "that it extends. Extend that run again into another folder"
        )
    recorded = Checkpoints.recorded(folder.path)
    if recorded is not None and not force:
        raise CheckpointError(
            f"all checkpoints of {folder.path} are missing; the newest was "
            f"{recorded['newest']}. Restore them, or start at epoch 1 with "
            f"`train --resume {folder.path} --force`"
        )


def free_memory() -> None:
    """Free the memory of a finished session before an evaluation loads the table again.

    TorchRec's pipeline and the model refer to each other, so only the garbage collector frees them.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _fit(session: Session, progress: TrainState, extras: Extras, resumed_at: int | None) -> None:
    from kge_torchrec.training.trainer import Trainer  # imported late: a trained run needs none

    ranks, folder = session.processes, session.folder
    notes = notes_of(session, shows=extras.rank_test)
    on_first_rank(ranks, lambda: _write_layout(session))
    log = on_all_ranks(ranks, lambda: _open_log(session, resumed_at))
    if folder.copier is not None:
        folder.copier.follow(session.checkpoints)
    try:
        progress = Trainer(session, progress, log, extras.callbacks).run()
        results = final_results(session, progress, extras.rank_test) | {"notes": notes}

        def write() -> None:
            assert log is not None  # on the first rank
            log.write("test", progress.global_step, results)
            extension = folder.load_extension()
            extended = {} if extension is None else {"extended": extension}
            folder.write_results(results | extended)

        on_first_rank(ranks, write)
    finally:
        if log is not None:
            log.close()
        if session.buffer is not None:
            session.buffer.close()


def _write_layout(session: Session) -> None:
    """Write and print which rank holds which rows."""
    layout = session.backend.layout
    (session.folder.path / "plan.txt").write_text(f"{layout}\n", encoding="utf-8")
    if session.show:
        print(layout, file=sys.stderr)


def _open_log(session: Session, resumed_at: int | None) -> MetricsLog | None:
    if not session.processes.is_first:
        return None
    trackers = trackers_of(session.folder.path, session.config, resumed_at)
    return MetricsLog(session.folder, trackers, resumed_at)
