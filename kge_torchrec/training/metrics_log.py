"""metrics.jsonl and TensorBoard: what a run says of itself while it trains."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

from kge_torchrec.training.run_folder import RunFolder


class MetricsLog:
    """Both logs of a run.  Only rank 0 has one."""

    def __init__(self, folder: RunFolder, tensorboard: bool, resumed_at: int | None = None):
        if resumed_at is not None:
            _drop_after(folder.metrics, resumed_at)
        self._file = folder.metrics.open("a", encoding="utf-8")
        self._board = _board(folder, resumed_at) if tensorboard else None

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Appends one line {"kind": ..., "step": ..., ...} and flushes it."""
        line = {"kind": kind, "step": step, **values}
        self._file.write(json.dumps(_finite(line)) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _scalars(values):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Closes both; every line was written when it came."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._board is not None:
            self._board.close()


def _board(folder: RunFolder, resumed_at: int | None):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder.path / "tensorboard"), purge_step=resumed_at)


def _drop_after(file: Path, step: int) -> None:
    """Drops what a resumed run writes again, and a line that a kill cut short."""
    if not file.is_file():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
            again = values["step"] > step or values["kind"] == "test"
        except (ValueError, KeyError):
            continue
        if not again:
            kept.append(line)
    partial = file.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(partial, file)


def _scalars(values: dict[str, Any], prefix: str = ""):
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + key, value


def _finite(value: Any) -> Any:
    """JSON has no NaN: null instead."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
