"""The modules of docs/how-to/write-your-own-parts.md as files: one copy of their code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from extended import importable
from test_documentation import ROOT, blocks_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """Folder with the modules of the page."""
    folder = tmp_path_factory.mktemp("extend")
    page = ROOT / "docs" / "how-to" / "write-your-own-parts.md"
    for block in blocks_of(page.read_text(encoding="utf-8"), page.name):
        if block.markers.get("file", "").startswith("my_parts/"):
            path = folder / block.markers["file"]
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
    with importable(folder):
        yield folder
