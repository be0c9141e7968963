"""Names that the tests and scripts import, some of which only run where an optional package is."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import kge_torchrec

PACKAGE = Path(kge_torchrec.__file__).parent


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


def test_tests_and_scripts_import_names_that_exist():
    """A script or a test of an optional package fails late otherwise, where nobody runs it."""
    known, missing = modules(), []
    exported = {"kge_torchrec": {*vars(kge_torchrec), *kge_torchrec.__all__}}
    for folder in ("tests", "scripts"):  # mypy reads the package
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
