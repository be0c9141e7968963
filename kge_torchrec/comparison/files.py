"""JSON files that are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Replaces the file; a number that is not finite becomes null, which JSON has in its place."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(_finite(value), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_json(path: Path) -> Any:
    """What ``write_json`` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
