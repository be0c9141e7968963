"""Lines of a check: printed as they are found, and kept as JSON."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch

PASS, FAIL, NOTE, SKIP = "PASS", "FAIL", "NOTE", "SKIP"


class Report:
    """What one part finds.

    device: "cuda", or "cpu", where sizes are small and no speed is asked for.
    folder: to write to; it is removed afterwards.
    lines: a JSON object a line, so that what was found before a crash or a time-out is kept.
    """

    def __init__(self, part: str, device: str, folder: Path, lines: TextIO):
        self.part, self.folder, self._lines = part, folder, lines
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.small = device == "cpu"

    def line(
        self, verdict: str, name: str, said: str, value: float | None = None, unit: str = ""
    ) -> None:
        """Prints and keeps a line."""
        print(f"{verdict}  {self.part:<14} {name}: {said}", flush=True)
        found = {"verdict": verdict, "name": name, "said": said, "value": value, "unit": unit}
        self._lines.write(json.dumps(found) + "\n")
        self._lines.flush()

    def passes(self, name: str, good: bool, said: str) -> None:
        self.line(PASS if good else FAIL, name, said, float(good))

    def note(self, name: str, value: float, unit: str) -> None:
        """A figure of which nothing is asked."""
        self.line(NOTE, name, f"{_number(value)} {unit}", value, unit)

    def skip(self, name: str, why: str) -> None:
        self.line(SKIP, name, why)

    def at_most(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """A NaN fails."""
        said = f"{_number(value)} {unit}".rstrip() + f" (at most {_number(limit)})"
        self.line(PASS if value <= limit else FAIL, name, said, value, unit)

    def speed(self, name: str, value: float, limit: float, unit: str) -> None:
        """At least ``limit`` on a GPU; on a CPU only a figure."""
        if self.small:
            return self.note(name, value, unit)
        said = f"{_number(value)} {unit} (at least {_number(limit)})"
        return self.line(PASS if value >= limit else FAIL, name, said, value, unit)

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """An exception inside fails this line, and the part goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            first = str(error).strip().split("\n")[0]
            self.line(FAIL, name, f"{type(error).__name__}: {first}"[:300])
            if self.device.type == "cuda" and "CUDA error" in str(error):
                raise  # the context is gone, nothing after it would mean anything


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.3g}"
