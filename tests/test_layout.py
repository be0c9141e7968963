"""The two storeys of docs/explanation/architecture.md: imports, and what works by itself."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kge_torchrec
from kge_torchrec.kernels import jit

PACKAGE = Path(kge_torchrec.__file__).parent
DOCS = PACKAGE.parent / "docs"
BASE = ["errors", "files", "environment", "pages"]  # under both storeys
ENGINE = [
    "config", "kernels", "data", "models", "distributed", "embeddings", "ranking", "trained_model",
    "training",
]  # fmt: skip
SHARED = ["answers", "export", "trained_run"]  # which every application may import
APPLICATIONS = [*SHARED, "planning", "comparison", "reports", "growth", "serving", "tuning"]
TOP = ["api", "commands", "cli", "__main__"]  # may import all
ROOMS = ["kge_torchrec", *BASE, *ENGINE, *APPLICATIONS, *TOP]


def modules() -> dict[str, Path]:
    results = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = ["kge_torchrec", *file.relative_to(PACKAGE).with_suffix("").parts]
        results[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return results


@functools.cache
def import_lines(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports of a file, also those in functions and for type checkers."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports(file: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a file imports."""
    results = set()
    for node in import_lines(file):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kge_torchrec"):
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                results.add(inner if inner in known else node.module)
        else:
            results |= {n.name for n in node.names if n.name.startswith("kge_torchrec")}
    return results


def imported_names(file: Path) -> set[tuple[str, str]]:
    """(module, name) of what a file imports from modules of the package."""
    return {
        (node.module, name.name)
        for node in import_lines(file)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kge_torchrec")
        for name in node.names
    }


def public_names() -> set[tuple[str, str]]:
    """(module, name) of the tables in docs/reference/engine.md."""
    text = (DOCS / "reference" / "engine.md").read_text(encoding="utf-8")
    results = set()
    for module, names in re.findall(r"^\| `([\w.]+)` \| (.+) \|$", text, re.MULTILINE):
        results |= {(module, name) for name in re.findall(r"`(\w+)`", names)}
    return results


def names_of(file: Path) -> set[str]:
    """Names that a module binds outside its functions and classes."""
    names, nodes = set(), list(ast.parse(file.read_text(encoding="utf-8")).body)
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {name.asname or name.name.split(".")[0] for name in node.names}
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            nodes += [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)]
            nodes += [line for part in getattr(node, "handlers", []) for line in part.body]
        else:
            names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return names


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "kge_torchrec"


def test_imports_have_one_direction():
    known = modules()
    graph = {module: imports(file, known) - {module} for module, file in known.items()}
    # The root package names everything for users, and loads a name at its first use.
    graph["kge_torchrec"] = set()
    upwards = [
        f"{module} -> {other}"
        for module, others in graph.items()
        for other in others
        if ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    ]
    assert upwards == []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"files import each other: {' -> '.join(error.args[1])}") from None


def test_engine_imports_no_application_and_applications_import_few():
    wrong = []
    for module, file in modules().items():
        room = room_of(module)
        allowed = {*BASE, *ENGINE, *(SHARED if room in APPLICATIONS else ()), room}
        if room not in ("kge_torchrec", *TOP):
            others = {room_of(other) for other in imports(file, modules())} - {"kge_torchrec"}
            wrong += [f"{module} -> {other}" for other in sorted(others - allowed)]
    assert wrong == []


def test_applications_use_public_names_of_the_engine():
    known, public = modules(), public_names()
    used = {
        (module, name)
        for user, file in known.items()
        if room_of(user) in APPLICATIONS
        for module, name in imported_names(file)
        if room_of(module) in ENGINE
    }
    lines = [f"| `{module}` | `{name}` |" for module, name in sorted(used - public)]
    assert lines == [], "docs/reference/engine.md lacks:\n" + "\n".join(lines)
    missing = [
        f"{module}.{name}"
        for module, name in sorted(public)
        if f"{module}.{name}" not in known
        and (module not in known or name not in names_of(known[module]))
    ]
    assert missing == [], f"docs/reference/engine.md lists what does not exist: {missing}"


def train_without(removed: Iterable[str], rooms: Iterable[str], folder: Path) -> None:
    """Train, rank and predict with a copy of the package that lacks some rooms."""
    copy = folder / "kge_torchrec"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for room in removed:
        path = copy / room
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_CACHE_DIR": str(jit.folder())}
    program = [sys.executable, str(Path(__file__).with_name("storeys.py"))]
    done = subprocess.run([*program, str(folder), ",".join(rooms)], env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_engine_works_without_applications(tmp_path):
    train_without([*APPLICATIONS, *TOP], [*BASE, *ENGINE], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("application", APPLICATIONS)
def test_engine_works_without_any_one_application(application, tmp_path):
    train_without([application], [*BASE, *ENGINE], tmp_path)


def test_every_room_is_described():
    page = DOCS / "explanation" / "architecture.md"
    text = page.read_text(encoding="utf-8")
    rooms = {room_of(module) for module in modules()} - {"kge_torchrec", "__main__"}
    assert rooms <= set(ROOMS)
    assert [room for room in rooms if f"`{room}/`" not in text and f"`{room}.py`" not in text] == []


def test_tests_and_scripts_import_names_that_exist():
    """A script or a test of an optional package fails late otherwise, where nobody runs it."""
    known, missing = modules(), []
    exported = {"kge_torchrec": {*vars(kge_torchrec), *kge_torchrec.__all__}}
    for folder in ("tests", "scripts", "kge_torchrec"):
        for file in sorted((PACKAGE.parent / folder).rglob("*.py")):
            for node in import_lines(file):
                if isinstance(node, ast.Import) or node.module not in known:
                    continue
                if node.module not in exported:
                    exported[node.module] = names_of(known[node.module])
                missing += [
                    f"{file.name}:{node.lineno}: {node.module}.{name.name}"
                    for name in node.names
                    if name.name not in exported[node.module] | {"*"}
                    and f"{node.module}.{name.name}" not in known
                ]
    assert missing == []
