"""README and docs are run as a reader would: each page in a folder of its own, from top to bottom.

Blocks of ``sh`` and ``python`` are run, all others (``text``, ``yaml``) are not.  What a reader
has lies in the folder under the name that the pages have for it: DIRECTORY (files of triples),
CONFIG (a YAML file), RUN (a trained run) and the repository's ``scripts`` and ``docs/examples``.
Comments before a block, which readers do not see, say what is done otherwise:

    <!-- not run: needs two hosts -->    the reason is required
    <!-- slow -->                        in the second tier only (make slow)
    <!-- run with: --train.epochs=1 -->  keys of the config are added to its commands that take
                                         them, or to kge_torchrec.train of a Python block; other
                                         options to its last command
    <!-- file: devices.yaml -->          the block is the content of that file
"""

from __future__ import annotations

import functools
import gc
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

import kge_torchrec
from kge_torchrec.cli import main
from kge_torchrec.config import all_keys
from kge_torchrec.config.parser import as_config, config_from_dict
from kge_torchrec.data.datasets import embedded_files

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("sh", "python", "yaml", "text")
MARKERS = ("not run", "slow", "run with", "file")
TAKES_KEYS = ("train", "plan", "compare", "tune")
NOT_RUN = {
    "make": "its targets change the checkout or run these tests; that they exist is checked",
    "pip": "changes the environment",
    "git": "changes the checkout",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int  # of the opening fence
    language: str
    text: str
    markers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of a block of sh."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]

    @property
    def why_not_run(self) -> str | None:
        if "not run" in self.markers:
            return self.markers["not run"]
        if self.language == "sh":
            reasons = [NOT_RUN.get(split_command(words)[1]) for words in self.commands]
            return "; ".join(sorted(set(reasons))) if all(reasons) else None
        return None if self.language == "python" or "file" in self.markers else "nothing to run"

    def problem(self) -> str | None:
        """Return the mistakes in the form of the block."""
        if self.language not in LANGUAGES:
            return f"says {self.language!r} after the fence, not one of {', '.join(LANGUAGES)}"
        for name, value in self.markers.items():
            if name not in MARKERS:
                return f"has an unknown comment: {name}"
            if (name == "slow") != (value == ""):
                return f"has a comment without its content, or slow with one: {name}: {value}"
        if "not run" in self.markers and len(self.markers["not run"].split()) < 2:
            return "is not run, for no reason that one could read"
        if "run with" in self.markers and self.language not in ("sh", "python"):
            return "is not run, with arguments"
        return None


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """The fenced blocks of a page, with the comments that stand right before each."""
    markers: dict[str, str] = {}
    inside: list[str] | None = None
    opened, language = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.fullmatch(r"```(\w*)", line)
        if inside is not None and line == "```":
            yield Block(page, opened, language, "\n".join(inside) + "\n", markers)
            inside, markers = None, {}
        elif inside is not None:
            inside.append(line)
        elif fence:
            inside, opened, language = [], number, fence[1]
        elif comment := re.fullmatch(r"<!-- ([\w ]+?)(?:: *(.*?))? *-->", line):
            markers[comment[1]] = comment[2] or ""
        elif line.strip():
            markers = {}
    assert inside is None, f"{page}:{opened}: the fence has no end"


def split_command(words: list[str]) -> tuple[dict[str, str], str, list[str]]:
    """["A=b", "bin/python", "-m", "pip", "list"] -> ({"A": "b"}, "pip", ["list"])"""
    settings: dict[str, str] = {}
    while re.match(r"[A-Z_]+=", words[0]):
        settings |= [words[0].split("=", 1)]
        words = words[1:]
    if words[1:2] == ["-m"] and words[2] in NOT_RUN:
        words = words[2:]
    return settings, Path(words[0]).name, words[1:]


BLOCKS = [
    block for path in PAGES
    for block in blocks_of(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
]  # fmt: skip


class Page:
    """A page's folder and Python names, as far as its blocks have been run."""

    def __init__(self, folder: Path):
        self.folder, self.names, self.begun = folder, {}, set()

    def run_through(self, block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
        """Runs a block after those before it on which it may build."""
        before = [b for b in BLOCKS if b.page == block.page and b.line < block.line]
        for each in [*before, block]:
            unwanted = "slow" in each.markers and "slow" not in block.markers
            if str(each) in self.begun or each.why_not_run or unwanted:
                continue
            self.begun.add(str(each))
            with monkeypatch.context() as patch:
                patch.chdir(self.folder)
                patch.syspath_prepend(self.folder)
                self._run(each, patch)

    def _run(self, block: Block, patch: pytest.MonkeyPatch) -> None:
        extra = shlex.split(block.markers.get("run with", ""))
        if "file" in block.markers:
            path = self.folder / block.markers["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            if extra:
                patch.setattr(kge_torchrec, "train", _train_with(extra))
            code = compile("\n" * block.line + block.text, block.page, "exec")
            exec(code, self.names)
        else:
            for number, words in enumerate(block.commands, 1):
                run_command(words, extra, is_last=number == len(block.commands))


def _train_with(extra: list[str]):
    train = kge_torchrec.train
    return lambda config=None, *rest, **named: train(
        config_from_dict(as_config(config).to_dict(), [_new_run(), *extra]), *rest, **named
    )


def run_command(words: list[str], extra: list[str], is_last: bool = True) -> None:
    """Runs a command in the working directory with what is added to it; fails if it does."""
    settings, name, arguments = split_command(words)
    if name in NOT_RUN:
        return
    if name not in ("kge-torchrec", "python", "torchrun"):
        pytest.fail(f"no way to run {name}; say `<!-- not run: REASON -->` before the block")
    trains = name == "torchrun" or arguments[0] in TAKES_KEYS
    for option in _options(extra):
        if trains if "." in option[0] else is_last:
            arguments += option
    if name == "kge-torchrec" and arguments[0] == "train" and not _names_its_run(arguments):
        arguments.append(_new_run())
    if name == "kge-torchrec":
        with mock.patch.dict(os.environ, settings):
            code = _run_here(arguments)
    else:
        start = ["-m", "torch.distributed.run"] if name == "torchrun" else []
        code = _run_python([*start, *arguments], settings)
    assert code == 0, f"exit code {code}: {shlex.join([name, *arguments])}"


def _run_here(arguments: list[str]) -> int | str | None:
    """The exit code of kge-torchrec, without another process."""
    try:
        return main(arguments)
    except SystemExit as ended:  # --help, --version
        return ended.code


def _run_python(arguments: list[str], settings: dict[str, str]) -> int:
    """The exit code of a new process that has the same packages."""
    environment = os.environ | settings
    places = os.pathsep.join([environment.get("PYTHONPATH", ""), str(ROOT)])
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment | {"PYTHONPATH": places}, timeout=600, check=False,
    ).returncode  # fmt: skip


def _names_its_run(arguments: list[str]) -> bool:
    return any(word.startswith(("--run.dir", "--resume", "--help")) for word in arguments)


def _new_run() -> str:
    """A folder for a run, since the default is named by the second and these take less."""
    return f"--run.dir=runs/{len(list(Path('runs').glob('*')))}"


def _options(extra: list[str]) -> list[list[str]]:
    """["--steps", "2", "--train.lr=1"] -> [["--steps", "2"], ["--train.lr=1"]]"""
    results: list[list[str]] = []
    for word in extra:
        if word.startswith("--"):
            results.append([])
        results[-1].append(word)
    return results


@pytest.fixture(scope="module")
def readers_things(tmp_path_factory) -> Path:
    """DIRECTORY, CONFIG, RUN, scripts and docs/examples."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "DIRECTORY").mkdir()
    for split, (path,) in embedded_files().items():
        shutil.copy(path, folder / "DIRECTORY" / f"{split}.tsv")
    (folder / "CONFIG").write_text("data: {path: DIRECTORY}\nmodel: {dim: 16}\n")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / "docs").mkdir()
    (folder / "docs" / "examples").symlink_to(ROOT / "docs" / "examples")
    run = ["train", "demo", "--train.epochs=1", f"--run.dir={folder / 'RUN'}"]
    assert main(run) == 0
    return folder


@pytest.fixture(scope="module")
def pages(readers_things, tmp_path_factory) -> Iterator[dict[str, Page]]:
    threads, results = torch.get_num_threads(), {}
    for name in sorted({block.page for block in BLOCKS}):
        folder = tmp_path_factory.mktemp(Path(name).stem) / "here"
        results[name] = Page(shutil.copytree(readers_things, folder, symlinks=True))
    yield results
    torch.set_num_threads(threads)
    for page in results.values():
        page.names.clear()  # runs that were left open, with their process group
    gc.collect()


def _cases() -> Iterator:
    for block in BLOCKS:
        if block.language in ("sh", "python") or block.why_not_run is None:
            marks = [pytest.mark.skip(reason=block.why_not_run)] if block.why_not_run else []
            marks += [pytest.mark.slow] if "slow" in block.markers else []
            yield pytest.param(block, marks=marks, id=str(block))


@pytest.mark.parametrize("block", list(_cases()))
def test_code_blocks_run_as_documented(block, pages, monkeypatch):
    pages[block.page].run_through(block, monkeypatch)


def test_code_blocks_declare_their_kind():
    problems = {str(block): block.problem() for block in BLOCKS}
    assert {place: what for place, what in problems.items() if what} == {}
    lines = [line for path in PAGES for line in prose(path).splitlines() if "<!--" in line]
    assert len(lines) == sum(len(block.markers) for block in BLOCKS)  # none stands astray


def test_yaml_blocks_of_sections_load_as_configs():
    sections, loaded = {key.split(".")[0] for key in all_keys()}, 0
    for block in BLOCKS:
        if block.language == "yaml" and "file" not in block.markers:
            values = yaml.safe_load(block.text)
            if values.keys() <= sections:
                config_from_dict(values)
                loaded += 1
    assert loaded >= 4


def test_documented_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for block in BLOCKS if block.language == "sh"
             for words in block.commands if words[0] == "make"
             for word in words[1:] if "=" not in word}  # fmt: skip
    for path in PAGES:
        named |= set(re.findall(r"`make ([a-z-]+)", path.read_text(encoding="utf-8")))
    assert named and named <= targets


OF_RUNS_AND_STUDIES = ("config.yaml", "best.yaml", "space.yaml", "report.html")


def _exists(name: str) -> bool:
    """Return whether a file of the repository or a run exists, below the root, package or docs."""
    homes = (ROOT, ROOT / "kge_torchrec", ROOT / "docs")
    if any((home / name).is_file() for home in homes):
        return True
    inside = (path.name for home in ("docs", "kge_torchrec", "scripts", "tests", "configs")
              for path in (ROOT / home).rglob(name))  # fmt: skip
    return name in OF_RUNS_AND_STUDIES or ("/" not in name and any(inside))


@functools.cache
def _sources() -> str:
    """All code of the package: a class that a page names is defined or used there."""
    return "".join(path.read_text() for path in (ROOT / "kge_torchrec").rglob("*.py"))


def prose(path: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_files_and_keys_on_pages_exist(path):
    """Commands are fenced; links lead to files; files and keys that it names are there."""
    text = prose(path)
    assert re.findall(r"^ +```.*|^~~~.*", text, re.M) == []  # would not be seen
    assert re.findall(r"^    (?:\$|kge-torchrec|python|pip|make|torchrun)\b.*", text, re.M) == []
    links = re.findall(r"\]\(([^)#\s]+)", text)
    assert [to for to in links if "://" not in to and not (path.parent / to).is_file()] == []
    spans = re.findall(r"`([^`\n]+)`", text)
    files = re.findall(r"[\w./-]*\b[\w-]+\.(?:py|md|yaml)\b", "\n".join(spans))
    assert [name for name in files if not _exists(name)] == []
    classes = re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", "\n".join(spans))
    assert [name for name in classes if name not in _sources()] == []
    keys = {".".join(key.split(".")[:2]) for key in all_keys()}
    groups = "|".join({key.split(".")[0] for key in keys if "." in key})
    named = re.findall(rf"^(?:.* )?(?:--)?((?:{groups})\.[a-z_]\w*)\b", "\n".join(spans), re.M)
    files = r"\.(json|npy|parquet|safetensors|tsv|txt|vec)$"
    assert [key for key in named if key not in keys and not re.search(files, key)] == []


def test_contributing_links_to_an_example_of_every_part():
    """The name in each link is that of something in the linked file."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = re.findall(r"^\| (\w+[\w ]*) \|(.*)$", text, re.MULTILINE)
    parts = {name for name, _ in rows}
    assert parts >= {"scorer", "loss", "optimizer", "reader", "verb", "kernel", "config key"}
    for part, cells in rows[1:]:
        links = re.findall(r"\[`(\w+)`\]\(([^)]+)\)", cells)
        assert links, part
        for name, file in links:
            defined = rf"^(class|def) {name}\b|^{name}\b.* = |^    def {name}\b"
            assert re.search(defined, (ROOT / file).read_text("utf-8"), re.MULTILINE), (name, file)


def test_page_of_the_python_interface_matches_the_package():
    page = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))["api_page"]()
    written = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    assert written == page, "write it anew: python scripts/docs_site.py"
    assert all(f"| `{name}` | " in page for name in kge_torchrec.__all__)


def test_every_page_is_on_the_site():
    nav = (
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1].split("\nhooks:")[0]
    )
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r"[\w/-]+\.md", nav)) == pages


MADE_UP = """
<!-- not run: -->
```sh
kge-torchrec --version
```
<!-- run with: --train.epochs=1 -->

```python
x = 1
```
<!-- sometimes -->
```sh
frobnicate RUN \\
    --now  # or later
```
```
make demo
```
"""


def test_mistakes_on_a_page_are_reported():
    no_reason, python, unknown, no_language = blocks_of(MADE_UP, "made up")
    assert "without its content" in no_reason.problem()
    assert python.problem() is None and python.markers == {"run with": "--train.epochs=1"}
    assert "unknown comment: sometimes" in unknown.problem()
    assert unknown.commands == [["frobnicate", "RUN", "--now"]]
    assert "after the fence" in no_language.problem()
    with pytest.raises(pytest.fail.Exception, match="no way to run frobnicate"):
        run_command(unknown.commands[0], [])
    with pytest.raises(AssertionError, match=r"(?m)exit code 1: kge-torchrec evaluate nowhere$"):
        run_command(["kge-torchrec", "evaluate", "nowhere"], ["--train.epochs=1"])
    with pytest.raises(AssertionError, match="exit code 3: python"):
        run_command(["CODE=3", "python", "-c", "import os; os._exit(int(os.environ['CODE']))"], [])
    for words in (["bin/pip", "list"], ["python", "-m", "pip", "list"], ["make", "clean"]):
        run_command(words, [])  # these are not run
    with pytest.raises(AssertionError, match="made up:1: the fence has no end"):
        list(blocks_of("```sh\nmake demo\n", "made up"))
