"""Find language that our readers should not have to decode: words, long sentences, long paragraphs.

    python scripts/check_language.py            # exit code 1 if there is a finding

In Markdown it checks words, sentences and paragraphs outside code. In Python it checks words in
docstrings, comments and messages (help, errors, log lines, printed lines), the first word of
docstrings, and names. In other files it checks comments. A pattern of WORDS matches only the use
that it replaces: ``starts of tables`` is a finding, ``training starts`` is not.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATHS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs",
    "mkdocs.yml",
    "Makefile",
    ".ci",
    "configs/recipes",
    "configs/portfolio",
    "kge_torchrec",
    "scripts",
    "tests",
)
MAX_WORDS, MAX_LINES, LINE_WIDTH = 30, 5, 128

# Pattern of the words to avoid -> what to write instead.
_UNITS = (
    "ms|bytes?|[KMG]i?B|numbers?|elements?|queries|triples|ids|seconds?|minutes?|scores|threads?|"
    "labels?|process|processes|negatives|entries|line|lookups?|rows?|times"
)
_OWNERS = "row|rank|step|query|entity|triple|relation|line|second|minute|core|epoch|side|batch"
WORDS = {
    rf"\b(?:{_UNITS}) an? (?:{_OWNERS}|host|file|pair|million)\b": "per row, per rank, per step",
    rf"\bonce an? (?:{_OWNERS})\b": "once per step",
    r"\bslopes?\b": "gradients",
    r"\btold\b|\btelling (?:a|the|its) relation|\btells? (?:a|the|its) relation": (
        "reported; relation prediction"
    ),
    r"\basked\b|\basks\b": "query, queries",
    r"\b(?:same|small|wide|own) starts?\b|\bstarts? of (?:a |the |its )?(?:tables?|rows?|entit)": (
        "init, initial values"
    ),
    r"\bsettled\b|\bpicked\b|\bfilled (?:by|from)\b": "resolved, default",
    r"\bsuited\b": "typed (negatives)",
    r"\bpull(?:s|ed|ing)?(?: \w+){0,3} into\b|\b(?:send|sends|sent) home\b|\bgradients home\b": (
        "accumulate, reduce to the owner"
    ),
    r"\b(?:along|beside) (?:a|the|its) (?:normal|hyperplane)s?\b": "projection, rejection",
    r"\balone\b": "only; replicated (of tables)",
    r"\bby turns\b": "alternating",
    r"\bthrough memory\b": "shared memory",
    r"\b(?:go|goes|going|gone|went) on(?! (?:one|all|any|each|every|the)\b)": (
        "resumes, continues"
    ),
    r"\b(?:give|gives|gave|given|giving)(?: \w+)? away\b": "leaks",
    r"\bwhoever\b|\bwhatever\b(?! the\b)|\ball else\b|\bso many\b": "name the subject",
    r"\bcatalogues?\b|\bdivision into splits\b": "datasets, split",
    r"\bof another (?:form|kind)\b|\bare unlike\b": "different",
}
NAMES = {
    "given": "args, inputs, or the thing's name",
    "found": "results, stats",
    "seen": "results, stats",
    "alone": "replicated",
    "catalogues": "datasets",
    "division": "split",
    "files_of_questions": "batch_inference",
}
METHODS = {  # of a class that has several of them: a loss over all entities
    "observe": "partial_statistics",
    "join": "reduce",
    "values": "loss",
    "finish": "backward",
}
OPENINGS = ("Of", "As", "What", "Whoever", "Those", "So")
# Calls whose strings people read, besides those in ``raise``, and keywords of any call.
SAYING = {"print", "exit", "fail", "key", "note", "_say", "warn", "warning", "info", "error",
          "exception"}  # fmt: skip
HELPING = {"help", "description", "epilog", "usage"}


class Finding(NamedTuple):
    """A place to rewrite."""

    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.line}: {self.kind}: {self.text}"


class Block(NamedTuple):
    """A paragraph, list item, heading or table cell, without code."""

    line: int
    text: str
    lines: int = 1


def check_markdown(text: str) -> list[Finding]:
    """Return what to rewrite in a Markdown page."""
    findings = []
    for block in markdown_blocks(text):
        findings += bad_words(block)
        if block.lines > MAX_LINES:
            findings.append(
                Finding(block.line, "long paragraph", f"{block.lines} lines, at most {MAX_LINES}")
            )
        for sentence in sentences(block.text):
            count = len(sentence.split())
            if count > MAX_WORDS:
                start = " ".join(sentence.split()[:8])
                findings.append(Finding(block.line, "long sentence", f"{count} words: {start} ..."))
    return sorted(findings)


def markdown_blocks(text: str) -> Iterator[Block]:
    """Yield the prose of a page; code spans become the word CODE, links their text."""
    lines: list[str] = []
    first, fenced = 1, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        item = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        row = line.startswith("|")
        if lines and (fence or item or row or line.startswith("#") or not line.strip()):
            yield _block(first, lines)
            lines = []
        if fence:
            fenced = not fenced
        elif fenced or line.startswith(("<!--", ":::")):
            continue
        elif row:
            for cell in re.split(r"(?<!\\)\|", line)[1:-1]:
                yield Block(number, _plain(cell).replace("; ", ". "))  # a list
        elif line.strip():
            first = first if lines else number
            lines.append(line)


def _block(first: int, lines: list[str]) -> Block:
    text = re.sub(r"^\s*(?:[-*#]+|\d+\.) ", "", " ".join(line.strip() for line in lines))
    # A line that is too wide to read counts as several.
    height = sum(-(-len(line) // LINE_WIDTH) for line in lines)
    return Block(first, _plain(text), height)


def _plain(text: str) -> str:
    text = re.sub(r"`[^`]+`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"(?:[\w.-]+, ){4,}", "LIST, ", text)  # a long list of names is one word


def sentences(text: str) -> list[str]:
    """Split prose at full stops, question marks and exclamation marks before a space."""
    text = re.sub(r"\b(?:e\.g|i\.e|al|est|vs)\.", lambda m: m[0][:-1], text)
    return [part for part in re.split(r"(?<=[.!?])[\"')*]* +", text) if part.strip()]


def bad_words(block: Block) -> list[Finding]:
    """Return the words to avoid in a block."""
    return [
        Finding(block.line, "word", f"{match[0]!r}: write {instead}")
        for pattern, instead in WORDS.items()
        for match in re.finditer(pattern, block.text, re.IGNORECASE)
    ]


def check_python(text: str) -> list[Finding]:
    """Return what to rewrite in the docstrings, comments and names of a Python file."""
    tree = ast.parse(text)
    findings = [*_docstrings(tree), *_comments(text), *_names(tree), *_messages(tree)]
    return sorted(set(findings))


def _messages(tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Raise) and node.exc:
            parts.append(node.exc)
        elif isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            parts += node.args if name in SAYING else []
            parts += [word.value for word in node.keywords if word.arg in HELPING]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            parts += [node.value] if node.targets[0].id.strip("_").lower() in HELPING else []
        for text in (text for part in parts for text in _strings(part)):
            block = Block(text.line, " ".join(re.sub(r"`[^`]+`", "CODE", text.text).split()))
            for finding in bad_words(block):
                yield finding._replace(kind="message")


def _strings(node: ast.AST) -> Iterator[Block]:
    """Yield the texts of an expression; a value in an f-string becomes the word CODE."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield Block(node.lineno, node.value)
        return
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "CODE" for part in node.values)
        yield Block(node.lineno, "".join(map(str, parts)))
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from _strings(child)


def _docstrings(tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if not isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ) or not (docstring := ast.get_docstring(node)):
            continue
        line = node.body[0].lineno
        opening = re.match(r"\w+", docstring)
        if opening and opening[0] in OPENINGS:
            yield Finding(line, "opening", f"a docstring begins with {opening[0]!r}")
        plain = re.sub(r"``[^`]+``", "CODE", docstring)
        yield from bad_words(Block(line, " ".join(plain.split())))


def _comments(text: str) -> Iterator[Finding]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from bad_words(Block(token.start[0], token.string))


def _names(tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
            yield Finding(node.lineno, "name", f"{node.id}: write {NAMES[node.id]}")
        elif isinstance(node, ast.arg) and node.arg in NAMES:
            yield Finding(node.lineno, "name", f"{node.arg}: write {NAMES[node.arg]}")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            if module == "hypothesis":  # its ``given``
                continue
            for word in {*module.split("."), *(alias.name for alias in node.names)} & {*NAMES}:
                yield Finding(node.lineno, "name", f"{word}: write {NAMES[word]}")
        elif isinstance(node, ast.ClassDef):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name in METHODS]
            for method in methods if len(methods) > 1 else []:
                yield Finding(method.lineno, "name", f"{method.name}: write {METHODS[method.name]}")


def findings_of(path: Path) -> list[Finding]:
    """Return what to rewrite in a file, by its kind."""
    checks = {".py": check_python, ".md": check_markdown}
    return checks.get(path.suffix, check_comments)(path.read_text(encoding="utf-8"))


def check_comments(text: str) -> list[Finding]:
    """Return the words to avoid in the comments of a shell script, a Makefile or a YAML file."""
    lines = (line.partition("#") for line in text.splitlines())
    return sorted(
        finding
        for number, (_, mark, comment) in enumerate(lines, 1)
        for finding in (bad_words(Block(number, comment)) if mark else [])
    )


def files_of(names: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files below some paths: Markdown, Python, YAML and shell scripts."""
    for name in names:
        path = ROOT / name
        yield from (
            [path]
            if path.is_file()
            else sorted(
                file
                for file in path.rglob("*")
                if file.suffix in (".md", ".py", ".yaml", ".yml", "") and file.is_file()
            )
        )


def findings_below(paths: tuple[str, ...]) -> Iterator[tuple[str, Finding]]:
    """Yield the name of the file and the finding, for all findings below some paths."""
    for path in files_of(paths):
        yield from ((str(path.relative_to(ROOT)), finding) for finding in findings_of(path))


def main() -> int:
    """Print the findings in the repository; return 1 if there are any."""
    findings = [*findings_below(PATHS)]
    for name, finding in findings:
        print(f"{name}:{finding}")
    print(f"{len(findings)} findings in {', '.join(PATHS)}")
    return int(len(findings) > 0)


if __name__ == "__main__":
    sys.exit(main())
