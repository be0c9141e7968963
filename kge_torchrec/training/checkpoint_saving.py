"""One checkpoint on its way to the disk, while training waits or continues.

    none    threads write, and training waits
    copy    a thread writes a copy in main memory

Each rank writes one file and leaves its checksums beside it.  Rank 0 waits for those of all ranks
and completes the checkpoint, without a collective, as training sends its own meanwhile.  The ranks
learn of a failure in ``Saving.settle``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kge_torchrec import files
from kge_torchrec.distributed.processes import Processes, on_first_rank
from kge_torchrec.environment import available_memory
from kge_torchrec.errors import first_line
from kge_torchrec.training.checkpoint_index import in_threads, is_finite, not_finite
from kge_torchrec.training.checkpoint_storage import Piece, RankFailed, SavingPlan
from kge_torchrec.training.checkpoint_writing import (
    Answer,
    answer_of,
    copies_of,
    write_pieces,
)

NONE, COPY, AUTO = "none", "copy", "auto"
SMALL = 64 << 20  # bytes of a rank that are written about as fast as they are copied
KEY = "checkpoint.options.background"
_POLL = 0.02  # seconds between looks for the files of other ranks


def way_of(option: str, plan: SavingPlan, ranks: Processes) -> tuple[str, str]:
    """Return how to write a checkpoint, and what to say about it.  Collective.

    Args:
        option: Value of checkpoint.options.background.
        plan: What this rank writes.
        ranks: The ranks; all get the same answer.
    """
    if option == NONE:
        return NONE, ""
    largest, least_free = ranks.largest([plan.size, -available_memory()])
    size, free = int(largest), -int(least_free)
    if option == AUTO and size < SMALL:
        return NONE, ""
    needed = size * ranks.local_world_size
    if needed > free:
        return NONE, (
            f"training waits while checkpoints are written: a second copy of {_gib(needed)} does "
            f"not fit into {_gib(free)} of free memory ({KEY})"
        )
    return COPY, (
        f"a thread writes checkpoints while training continues, with {_gib(needed)} more memory; "
        f"{KEY} changes it"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"


class Saving:
    """The writing of one checkpoint.

    Args:
        plan: What this rank writes.
        folder: The folder, which is not complete yet.
        ranks: The ranks of the run.
        complete: Completes the checkpoint on rank 0, given the checksums of each file.
    """

    def __init__(
        self,
        plan: SavingPlan,
        folder: Path,
        ranks: Processes,
        complete: Callable[[dict[str, list[int]]], object],
    ):
        self.plan, self.folder, self.ranks, self._complete = plan, folder, ranks, complete
        self.way = NONE
        self._copied = 0  # bytes
        self._answer: Answer | None = None  # of this rank, when it is done
        self._written = threading.Event()  # whether there is an answer
        self._ends = threading.Event()  # whether nobody waits for the checkpoint any more
        self._error: Exception | None = None  # of completing the checkpoint
        self._thread: threading.Thread | None = None
        self._done = threading.Event()  # whether the thread has no more to do for the checkpoint

    def start(self, way: str) -> None:
        """Write the pieces of this rank, or start to."""
        self.way, path = way, self.folder / self.plan.file
        if way == NONE:
            own = self.plan.pieces
            self._answer = answer_of(lambda: write_pieces(path, own, in_threads))
            return
        try:
            copies, self._copied = copies_of(self.plan.pieces), self.plan.size
            self.plan = replace(self.plan, pieces=[])  # no tensor is held for longer
            self._thread = threading.Thread(target=self._run, args=(path, copies), daemon=True)
            self._thread.start()
        except Exception as error:  # such as no memory; other ranks learn of it in ``settle``
            self._thread = None
            self._answer = {"error": first_line(error)}

    def _run(self, path: Path, copies: list[Piece]) -> None:
        """Write the copy; leave the answer for rank 0, or complete the checkpoint on rank 0."""
        try:
            answer = answer_of(lambda: write_pieces(path, copies, ends=self._ends))
            if not self.ranks.is_first:
                files.write_json(self._answer_of(self.plan.file), answer)
        except Exception as error:
            answer = {"error": first_line(error)}
        self._answer = answer
        self._written.set()
        if "crc32" in answer and self.ranks.is_first:
            try:
                self._complete_with(self._answers())
            except Exception as error:
                self._error = error
        self._done.set()

    def _answers(self) -> dict[str, Answer] | None:
        """Return the answers of all ranks by file; None if one failed, or nobody waits for them."""
        assert self._answer is not None
        answers = {self.plan.file: self._answer}
        for rank in range(1, self.ranks.world_size):
            name = self.plan.file.replace("00000", f"{rank:05d}")
            file = self._answer_of(name)
            while not file.is_file():
                if self._ends.wait(_POLL):
                    return None
            answers[name] = json.loads(file.read_text(encoding="utf-8"))
            if "crc32" not in answers[name]:
                return None
            file.unlink()
        return answers

    def _answer_of(self, name: str) -> Path:
        return self.folder / f".{name}.json"

    def _complete_with(self, answers: dict[str, Answer] | None) -> None:
        if answers is not None:
            self._complete({name: answer["crc32"] for name, answer in answers.items()})

    def settle(self, waits: bool) -> dict[str, Any] | None:
        """Return the figures of a complete checkpoint, or None while it is written.  Collective.

        Args:
            waits: Whether to wait until it is complete.

        Raises:
            RankFailed: A rank could not write.
            NonFiniteParameters: A tensor has NaN or infinity.
            OSError: Rank 0 could not complete the checkpoint.
        """
        if waits and self._thread is not None:
            self._written.wait()
        gathered = self.ranks.gather((self.plan.file, self._answer, self._copied))
        answers = {file: answer for file, answer, _ in gathered if answer is not None}
        for rank, (_, answer, _) in enumerate(gathered):
            if answer is not None and "crc32" not in answer:
                self.stop(0)
                self.ranks.barrier()  # rank 0 removes the folder next
                raise _failure(rank, answer)
        if len(answers) < len(gathered):
            return None
        on_first_rank(self.ranks, lambda: self._completed(answers))
        return {
            "seconds": round(max(answer["seconds"] for answer in answers.values()), 3),
            "extra_memory_bytes": sum(copied for _, _, copied in gathered),
        }

    def _completed(self, answers: dict[str, Answer]) -> None:
        if self._thread is None:
            return self._complete_with(answers)
        self._done.wait()
        if self._error is not None:
            raise self._error

    def stop(self, seconds: float | None) -> None:
        """Wait for this rank's part of the checkpoint, and give it up after some seconds."""
        if self._thread is None or self._done.wait(seconds):
            return
        self._ends.set()
        self._done.wait()


def _failure(rank: int, answer: Answer) -> Exception:
    if "nan" in answer:
        return not_finite(answer["nan"], rank)
    return RankFailed(f"rank {rank}: {answer['error']}")


@torch.no_grad()
def check_finite(state: dict[str, Any], ranks: Processes, written: Collection[int]) -> None:
    """Check that a nested state has no NaN or infinity.  Collective.

    It reads this rank's parts once, without temporaries of their size.

    Args:
        state: Nested dictionaries of tensors.
        ranks: The ranks.
        written: Addresses of parts that are checked when they are written.

    Raises:
        NonFiniteParameters: A tensor has NaN or infinity.  Raised on every rank.
    """
    parts = _local_parts(state)
    bad = [n for n, part in parts if part.data_ptr() not in written and not is_finite(part)]
    for rank, names in enumerate(ranks.gather(bad[:1])):
        for name in names:
            raise not_finite(name, rank)


def _local_parts(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's tensors with their dotted names."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _local_parts(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, DTensor):
        local = state.to_local()
        for part in local.local_shards() if hasattr(local, "local_shards") else [local]:
            yield name, part
    elif isinstance(state, Tensor):
        yield name, state
