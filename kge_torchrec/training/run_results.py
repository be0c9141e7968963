"""The results of a run: metrics, what training took, and notes about its data."""

from __future__ import annotations

import logging
import sys
from typing import Any

from kge_torchrec.data.report import leak_notes
from kge_torchrec.data.report import notes as data_notes
from kge_torchrec.distributed.processes import on_first_rank
from kge_torchrec.environment import peak_resident_bytes
from kge_torchrec.training.checkpoints import name_of
from kge_torchrec.training.session import Session
from kge_torchrec.training.state import TrainState

log = logging.getLogger(__name__)


def notes_of(session: Session, shows: bool) -> list[str]:
    """Return notes about the data and choices, including leaks as `data check` counts them.

    Collective.

    Args:
        session: The run.
        shows: Whether to print the notes, or log them as warnings if the run shows no progress.
    """
    store, ranks = session.store, session.processes
    notes = on_first_rank(ranks, lambda: [*data_notes(store), *leak_notes(store)])
    if session.buffer is not None:
        layout = session.buffer.layout
        notes.append(
            f"entities.placement disk: {layout.places} of {layout.parts} parts of the table are in "
            "memory at a time, and candidates are entities of these parts; "
            "entities.placement_options changes it"
        )
    dtype = session.config.entities.traffic.dtype
    if dtype != "fp32" and ranks.world_size == 1:
        notes.append(f"entities.exchange.dtype {dtype} has no effect: one rank sends nothing")
    for note in notes if shows and ranks.is_first else ():
        if session.show:
            print(f"note: {note}", file=sys.stderr)
        else:
            log.warning(note)
    return notes


def final_results(session: Session, progress: TrainState, rank_test: bool) -> dict[str, Any]:
    """Rank test with the best parameters, and return the results of a run.  Collective.

    Args:
        session: The run.
        progress: Its progress at the end of training.
        rank_test: Whether to rank test; "test" is None otherwise.

    Returns:
        "test", "valid", "train" and "checkpoint" of results.json.
    """
    ranked = progress  # progress of the current parameters
    if rank_test and progress.best_checkpoint not in (None, name_of(progress)):
        ranked = session.restore_parameters()
    train = {
        "triples_per_second": progress.triples / max(progress.seconds, 1e-9),
        "seconds": progress.seconds,
        "peak_memory_bytes": int(session.processes.largest([peak_resident_bytes()])[0]),
        "epochs": progress.epoch,
        "world_size": session.processes.world_size,
    }
    return {
        "test": session.rank("test") if rank_test and len(session.store.test) else None,
        "valid": _selected(session, progress),
        "train": train,
        "checkpoint": {  # the ranked one
            "name": name_of(ranked),
            "epoch": ranked.epoch,
        },
    }


def _selected(session: Session, progress: TrainState) -> dict[str, Any]:
    evaluation = session.config.evaluation
    selected = {"metric": evaluation.metric, "best": progress.best_metric}
    if evaluation.candidates not in (None, "all"):
        selected["restricted_candidates"] = evaluation.candidates
    return selected
