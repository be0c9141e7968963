"""Trains runs: claims the folder, restores or starts, trains, and writes the results."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from kge_torchrec import files
from kge_torchrec.config import RESOLVED_KEYS, Config, ConfigError
from kge_torchrec.config.keys import (
    changed_keys,
    check_effects,
    declared,
    replace_keys,
)
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.data.report import leak_notes
from kge_torchrec.data.report import notes as data_notes
from kge_torchrec.distributed.processes import (
    Processes,
    on_all_ranks,
    on_first_rank,
    processes,
)
from kge_torchrec.environment import peak_resident_bytes
from kge_torchrec.lines import say, silence
from kge_torchrec.training.checkpoints import (
    Checkpoints,
    name_of,
    no_checkpoint,
)
from kge_torchrec.training.copies import Copier, fetch
from kge_torchrec.training.run_data import check_start, with_absolute_paths
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.start import begin, changes_of
from kge_torchrec.training.state import TrainState
from kge_torchrec.training.stop_signal import TrainingInterrupted, TrainingStopped
from kge_torchrec.training.trackers import MetricsLog, check_trackers

if TYPE_CHECKING:
    from kge_torchrec.training.trainer import Callback


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
        is_trial: Whether this is a trial of a search: keys without effect are accepted, the files
            of a trial that fails stay, and it writes no lines.
        is_checked: Whether the caller has checked which keys have an effect.
    """

    callbacks: Sequence[Callback] = ()
    rank_test: bool = True
    choose: Choose | None = None
    is_trial: bool = False
    is_checked: bool = False


NOTHING = Extras()


def train_run(
    config: Config,
    extras: Extras = NOTHING,
    triples: Mapping[str, InMemory] | None = None,
    resumes: RunFolder | None = None,
    force: bool = False,
) -> RunFolder:
    """Train a run, from its start or from its newest checkpoint; return its folder.  Collective.

    Args:
        config: The config from now on.
        extras: What the caller adds.
        triples: Splits in memory to train on instead of data.path.
        resumes: The run to resume; None: run.resume says whether the one in run.dir resumes.
        force: Whether a run may start at epoch 1 if all its checkpoints are missing.
    """
    if triples is not None and config.run.resume != "never":
        raise ConfigError(
            "run.resume: triples in memory cannot be compared with those of a run; write a store "
            "with `prepare` and name it as data.path, or leave run.resume at never"
        )
    config = with_absolute_paths(config)
    with (
        processes(config.device, config.timeout) as ranks,
        ExitStack() as held,
        silence(extras.is_trial),
    ):
        folder, before, config = on_first_rank(
            ranks, lambda: _claim(config, extras, ranks, held, triples, resumes)
        )
        with _ending(folder, ranks, clears=folder.is_own and not extras.is_trial):
            on_first_rank(ranks, lambda: _begin_copy(folder, config, held))
            if triples is not None:
                data = config.data
                on_first_rank(
                    ranks,
                    lambda: prepare(triples, folder.store, data, seed=config.seed, log_notes=False),
                )
            _train(folder, config, ranks, extras, before, force)
        # An evaluation may load the table again.  TorchRec's pipeline and the model refer to each
        # other, so only the garbage collector frees them.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return folder


def _claim(
    config: Config,
    extras: Extras,
    ranks: Processes,
    held: ExitStack,
    triples: Mapping[str, InMemory] | None,
    resumes: RunFolder | None,
) -> tuple[RunFolder, Config | None, Config]:
    """Lock the folder of a run until ``held`` closes, and make the run if it is new.

    Return the folder, the config of the run so far (None: it is new), and that from now on.
    """
    on_cuda, mode = ranks.device.type == "cuda", config.run.resume
    continues = resumes is not None or (
        mode != "never" and config.run.dir is not None and RunFolder(config.run.dir).holds_run
    )
    if not (continues or extras.is_trial or extras.is_checked):
        data = config.data if triples is None else replace(config.data, path=os.devnull)
        check_start(replace(config, data=data))
        if config.train.precision == "tf32" and not on_cuda:
            raise ConfigError("train.precision tf32 acts on GPUs, and here is a CPU; use fp32")
    folder = resumes or RunFolder.new(config)
    was_started = (folder.path / ".lock").exists()
    held.enter_context(folder.locked())
    url = config.checkpoint.options.copy_to
    if resumes is None and mode != "never" and url is not None:
        fetch(url, folder.path)
    check_trackers(config.run)
    if resumes is not None:
        before = folder.load_config()
        check_effects(config, changed_keys(before, config))
        return folder, before, config
    if mode != "never" and folder.holds_run:
        config = _as_there(folder, config)
        return folder, config, config
    if mode == "require":
        raise ConfigError(
            f"run.resume require: {folder.path} holds no run to resume; "
            "start one with run.resume never or auto"
        )
    if was_started and folder.is_abandoned:
        say(f"an earlier start in {folder.path} ended before its first checkpoint; starting anew")
        folder.clear()
    if triples is not None:
        config = replace(config, data=replace(config.data, path=os.path.abspath(folder.store)))
    folder.create(config)
    return folder, None, config


def _as_there(folder: RunFolder, config: Config) -> Config:
    """Return the config with which the run in a folder resumes by run.resume, if it is the same."""
    there = replace_keys(folder.load_config(), {"run.dir": config.run.dir})  # it may have moved
    # Reuse resolved values, also with other ranks than before.
    config = config.filled_from(there, raced=folder.race.is_file())
    for key in changed_keys(there, config):
        rule = declared(Config)[key].resume
        if rule.per_start:
            continue
        remedy = "name another run.dir"
        if not rule.refuses(there, config):
            remedy += f", or change the run by `train --resume {folder.path} --{key} ...`"
        raise ConfigError(
            f"run.resume {config.run.resume}: {folder.path} holds a run with a different config: "
            f"{key} is {attrgetter(key)(there)!r} there and {attrgetter(key)(config)!r} here; "
            f"{remedy}"
        )
    return config


def _begin_copy(folder: RunFolder, config: Config, held: ExitStack) -> None:
    """Copy the run to checkpoint.options.copy_to until ``held`` closes."""
    if (url := config.checkpoint.options.copy_to) is not None:
        folder.copier = Copier(folder.path, url)
        held.callback(folder.copier.finish)


@contextmanager
def _ending(folder: RunFolder, ranks: Processes, clears: bool) -> Iterator[None]:
    """Say how to resume an interrupted run, and remove a folder that was made for nothing.

    stopped.json tells a scheduler's script of a run that a signal stopped.
    """
    try:
        yield
    except TrainingStopped:
        if ranks.is_first:
            names = sorted(path.name for path in folder.checkpoints.glob("step-*"))
            files.write_json(folder.stopped, {"checkpoint": names[-1] if names else None})
        raise
    except TrainingInterrupted:
        raise
    except KeyboardInterrupt as error:
        if not folder.holds_run or folder.is_half_extended:
            raise
        raise TrainingInterrupted(
            f"interrupted; resume with `train --resume {folder.path}`."
        ) from error
    except Exception:
        if ranks.is_first and clears and not (folder.has_checkpoint or folder.has_race):
            with suppress(OSError):  # the next start in the folder tries again
                folder.clear()
                folder.remove(".lock")
                folder.path.rmdir()  # unless somebody else has written into it
        raise


def _train(
    folder: RunFolder,
    config: Config,
    ranks: Processes,
    extras: Extras,
    before: Config | None,
    force: bool,
) -> None:
    """Train the run in a folder that this program holds, from its newest checkpoint if any."""
    on_first_rank(ranks, lambda: folder.stopped.unlink(missing_ok=True))
    if extras.choose is not None:
        config = extras.choose(config, folder, ranks)
    starts = not Checkpoints(folder.checkpoints, ranks).names()
    if starts and not force and on_first_rank(ranks, lambda: folder.last_written):
        again = f"start at epoch 1 with `train --resume {folder.path} --force`"
        raise on_first_rank(ranks, lambda: no_checkpoint(folder, again))
    session = Session(config, folder, ranks)
    progress = begin(session) if starts else session.restore()
    if starts:
        open_keys = [key for key in RESOLVED_KEYS if attrgetter(key)(config) is None]
        values = {key: attrgetter(key)(session.config) for key in open_keys}
        shown = ", ".join(f"{key} {value}" for key, value in values.items() if value != "all")
        if shown:
            say(f"defaults for this graph: {shown}")
    else:
        epochs, name = session.config.train.epochs, name_of(progress)
        step = f" and {progress.step} steps" if progress.step else ""
        if progress.epoch < epochs:
            say(
                f"training goes on from checkpoint {name}, after {progress.epoch} of {epochs} "
                f"epochs{step}"
            )
        else:
            say(f"nothing to train: {name} has {progress.epoch} epochs, train.epochs is {epochs}")
        reason = progress.early_stop(session.config.evaluation)
        if reason and before is not None and epochs > before.train.epochs:
            raise ConfigError(
                f"train.epochs {epochs}: training ended after epoch {progress.epoch}, and would "
                f"end there again: {reason}. Set evaluation.patience to 0 (no early stop), or "
                "above, as well"
            )
    on_first_rank(ranks, lambda: folder.save_config(session.config))
    _fit(session, progress, extras)


def _fit(session: Session, progress: TrainState, extras: Extras) -> None:
    """Train a session to its end, and write the results."""
    from kge_torchrec.training.trainer import Trainer  # imported late: a trained run needs none

    ranks, folder = session.processes, session.folder
    notes = _notes_of(session)
    for note in notes if extras.rank_test else ():
        say(f"note: {note}")
    layout = session.backend.layout
    say(str(layout))
    plan = folder.path / "plan.txt"
    on_first_rank(ranks, lambda: plan.write_text(f"{layout}\n", encoding="utf-8"))

    def open_log() -> MetricsLog | None:
        step = progress.global_step
        return MetricsLog(folder, session.config, step) if ranks.is_first else None

    log = on_all_ranks(ranks, open_log)
    if folder.copier is not None:
        folder.copier.follow(session.checkpoints)
    try:
        trainer = Trainer(session, progress, log, extras.callbacks)
        progress = trainer.run()
        results = _results(session, progress, extras.rank_test) | {"notes": notes}

        def write() -> None:
            assert log is not None  # on the first rank
            log.write("test", progress.global_step, results)
            extended = {}
            if folder.extension.is_file():  # by ``extend``
                changes = changes_of(session.store)
                extended = {"extended": folder.load_extension() | changes}
            files.write_json(folder.results, results | extended)

        on_first_rank(ranks, write)
    finally:
        if log is not None:
            log.close()
        if session.disk is not None:
            session.disk.close()


def _notes_of(session: Session) -> list[str]:
    """Return notes about the data, including leaks as `data check` counts them.  Collective."""
    store, ranks = session.store, session.processes
    notes = on_first_rank(ranks, lambda: [*data_notes(store), *leak_notes(store)])
    if session.disk is not None:
        layout = session.disk.layout
        notes.append(
            f"entities.placement disk: {layout.places} of {layout.parts} parts of the table are in "
            "memory at a time, and candidates are entities of these parts; "
            "entities.placement_options changes it"
        )
    dtype = session.config.entities.exchange.dtype
    if dtype != "fp32" and ranks.world_size == 1:
        notes.append(f"entities.exchange.dtype {dtype} has no effect: one rank sends nothing")
    return notes


def _results(session: Session, progress: TrainState, rank_test: bool) -> dict[str, Any]:
    """Rank test with the best parameters, and return what results.json has.  Collective."""
    ranked = progress  # progress of the current parameters
    if rank_test and progress.best_checkpoint not in (None, name_of(progress)):
        ranked = session.restore_parameters()
    train: dict[str, Any] = {
        "triples_per_second": progress.triples / max(progress.seconds, 1e-9),
        "seconds": progress.seconds,
        "peak_memory_bytes": int(session.processes.largest([peak_resident_bytes()])[0]),
        "epochs": progress.epoch,
        "world_size": session.processes.world_size,
    }
    evaluation, epochs = session.config.evaluation, session.config.train.epochs
    reason = progress.early_stop(evaluation)
    if reason and progress.epoch < epochs:
        train["stopped_early"] = {"epoch": progress.epoch, "of": epochs, "reason": reason}
    valid = {"metric": evaluation.metric, "best": progress.best_metric}
    if evaluation.candidates not in (None, "all"):
        valid["restricted_candidates"] = evaluation.candidates
    return {
        "test": session.rank("test") if rank_test and len(session.store.test) else None,
        "valid": valid,
        "train": train,
        "checkpoint": {"name": name_of(ranked), "epoch": ranked.epoch},  # the ranked one
    }
