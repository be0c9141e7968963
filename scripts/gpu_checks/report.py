"""Print the lines of a check at once, and keep them as JSON."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch

from gpu_checks.oracle import Oracle

PASS, FAIL, NOTE, SKIP = "PASS", "FAIL", "NOTE", "SKIP"


class Report:
    """The results of one part.

    Args:
        device: "cuda", or "cpu" for small sizes without limits of speed.
        folder: Scratch folder, which is removed afterwards.
        lines: File with one JSON object per line, so that results survive a crash or a time-out.
        oracle: Results of a CPU to compare with.
        traces: Folder for the trace and the kernel table of a step; None writes neither.
    """

    def __init__(
        self,
        part: str,
        device: str,
        folder: Path,
        lines: TextIO,
        oracle: Oracle | None = None,
        traces: Path | None = None,
    ):
        self.part, self.folder, self._lines = part, folder, lines
        self.oracle, self.traces = oracle or Oracle(), traces
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.small = device == "cpu"

    def line(
        self, verdict: str, name: str, said: str, value: float | None = None, unit: str = ""
    ) -> None:
        """Print and keep a line."""
        print(f"{verdict}  {self.part:<14} {name}: {said}", flush=True)
        line = {"verdict": verdict, "name": name, "said": said, "value": value, "unit": unit}
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()

    def passes(self, name: str, good: bool, said: str) -> None:
        self.line(PASS if good else FAIL, name, said, float(good))

    def note(self, name: str, value: float, unit: str) -> None:
        """Report a figure without a limit."""
        self.line(NOTE, name, f"{_number(value)} {unit}", value, unit)

    def skip(self, name: str, why: str) -> None:
        self.line(SKIP, name, why)

    def at_most(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """Pass if the value is at most the limit; a NaN fails."""
        said = f"{_number(value)} {unit}".rstrip() + f" (at most {_number(limit)})"
        self.line(PASS if value <= limit else FAIL, name, said, value, unit)

    def speed(self, name: str, value: float, limit: float, unit: str) -> None:
        """Pass if the value is at least the limit; on a CPU only report it."""
        if self.small:
            return self.note(name, value, unit)
        said = f"{_number(value)} {unit} (at least {_number(limit)})"
        return self.line(PASS if value >= limit else FAIL, name, said, value, unit)

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Turn an exception into a failed line and continue the part."""
        try:
            yield
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            first = str(error).strip().split("\n")[0]
            self.line(FAIL, name, f"{type(error).__name__}: {first}"[:300])
            if self.device.type == "cuda" and "CUDA error" in str(error):
                raise  # the CUDA context is lost, so later results would mean nothing


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.3g}"
