"""The modules of docs/examples/my_parts, importable as a reader's copy of them would be."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from extended import importable
from test_documentation import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """Folder with a copy of the modules."""
    folder = tmp_path_factory.mktemp("extend")
    shutil.copytree(ROOT / "docs" / "examples" / "my_parts", folder / "my_parts")
    with importable(folder):
        yield folder
