"""Imports follow the order in docs/explanation/architecture.md; no two files import each other."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import kge_torchrec

PACKAGE = Path(kge_torchrec.__file__).parent
ROOMS = [
    "kge_torchrec", "errors", "files", "environment", "pages", "config", "kernels",
    "data", "models", "distributed", "embeddings", "ranking", "answers", "training", "planning",
    "export", "comparison", "trained_run", "reports", "api", "growth", "serving", "tuning",
    "commands", "cli", "__main__",
]  # fmt: skip


def modules() -> dict[str, Path]:
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = ["kge_torchrec", *file.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file: Path, known: dict[str, Path]) -> set[str]:
    """Of the package, those inside functions and for type checkers included."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kge_torchrec"):
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                found.add(inner if inner in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {n.name for n in node.names if n.name.startswith("kge_torchrec")}
    return found


def names_of(file: Path) -> set[str]:
    """Names that a module binds outside its functions and classes."""
    found, nodes = set(), list(ast.parse(file.read_text(encoding="utf-8")).body)
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {name.asname or name.name.split(".")[0] for name in node.names}
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            nodes += [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)]
            nodes += [line for part in getattr(node, "handlers", []) for line in part.body]
        else:
            found |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "kge_torchrec"


def test_imports_run_one_way():
    known = modules()
    graph = {module: imports(file, known) - {module} for module, file in known.items()}
    # The root names everything for users, and loads it when it is asked for.
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


def test_every_room_is_described():
    page = PACKAGE.parent / "docs" / "explanation" / "architecture.md"
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
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ImportFrom) or node.module not in known:
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
