"""README and docs are run as a reader would: each page in a folder of its own, from top to bottom.

Blocks of ``sh`` and ``python`` are run, all others (``text``, ``yaml``) are not.  What a reader
has lies in the folder under the name that the pages have for it: DIRECTORY (files of triples),
CONFIG (a YAML file), RUN (a trained run) and the repository's ``scripts`` and ``docs/examples``.
Comments before a block, which readers do not see, say what is done otherwise:

    <!-- not run: needs two hosts -->    the reason is required
    <!-- slow -->                        in make slow only
    <!-- run with: --train.epochs=1 -->  keys of the config are added to its commands that take
                                         them, or to kge_torchrec.train of a Python block; other
                                         options to its last command
    <!-- file: devices.yaml -->          the block is the content of that file
    <!-- needs: faiss, kuzu -->          it is run where these packages are installed
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

import kge_torchrec
from kge_torchrec.cli import VERBS, main
from kge_torchrec.config import all_keys
from kge_torchrec.config.keys import declared
from kge_torchrec.config.parser import as_config, config_from_dict
from kge_torchrec.config.registry import KINDS, resolve
from kge_torchrec.data.datasets import embedded_files

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("sh", "python", "yaml", "text")
MARKERS = {"not run", "slow", "run with", "file", "needs"}
NOT_RUN = ("make", "pip", "git")  # they change the checkout or the environment
TAKES_KEYS = ("train", "plan", "compare", "tune")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int  # of the opening fence
    language: str
    text: str
    markers: dict[str, str]

    @property
    def lacks(self) -> list[str]:
        """The packages that the block needs and that are not installed."""
        names = re.findall(r"\w+", self.markers.get("needs", ""))
        return [name for name in names if importlib.util.find_spec(name) is None]

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of a block of sh."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """The fenced blocks of a page, with the comments that stand right before each."""
    markers: dict[str, str] = {}
    inside: list[str] | None = None
    opened, language = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.fullmatch(r"```(\w*)", line)
        if inside is not None and line == "```":
            assert language in LANGUAGES, f"{page}:{opened}: no language after the fence"
            assert markers.keys() <= MARKERS and markers.get("not run", "why"), f"{page}:{opened}"
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


BLOCKS = [
    block for path in PAGES
    for block in blocks_of(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
]  # fmt: skip
LATER = {"slow", "needs"}
RUN = [b for b in BLOCKS if "not run" not in b.markers and b.language in ("sh", "python")]
PLAIN = [b for b in RUN if not b.markers.keys() & LATER]


@pytest.fixture(scope="module")
def readers_things(tmp_path_factory) -> Path:
    """DIRECTORY, CONFIG, RUN, scripts and docs/examples."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "DIRECTORY").mkdir()
    for split, path in embedded_files().items():
        shutil.copy(path, folder / "DIRECTORY" / f"{split}.tsv")
    (folder / "CONFIG").write_text("data: {path: DIRECTORY}\nmodel: {dim: 16}\n")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / "docs").mkdir()
    (folder / "docs" / "examples").symlink_to(ROOT / "docs" / "examples")
    run = ["train", "demo", "--train.epochs=1", f"--run.dir={folder / 'RUN'}"]
    assert main(run) == 0
    return folder


@pytest.fixture
def folder(readers_things, tmp_path, monkeypatch) -> Iterator[Path]:
    """The working folder of a page; runs that its code leaves open end with the test."""
    threads, here = torch.get_num_threads(), tmp_path / "here"
    shutil.copytree(readers_things, here, symlinks=True)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    yield here
    gc.collect()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", sorted({b.page for b in PLAIN}))
def test_blocks_of_the_page_run(page, folder):
    run_page([b for b in BLOCKS if b.page == page and not b.markers.keys() & LATER])


OTHERS = [b for b in RUN if "needs" in b.markers]


@pytest.mark.slow
@pytest.mark.parametrize("block", OTHERS, ids=lambda b: f"{b.page}:{b.markers['needs']}")
def test_block_of_other_packages_runs(block, folder):
    if block.lacks:
        pytest.skip(f"{', '.join(block.lacks)} not installed")
    before = [b for b in BLOCKS if b.page == block.page and b.line < block.line]
    run_page([*(b for b in before if "needs" not in b.markers), block])


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({b.page for b in RUN if "slow" in b.markers}))
def test_slow_blocks_of_the_page_run(page, folder):
    run_page([b for b in BLOCKS if b.page == page and "needs" not in b.markers])


def run_page(blocks: list[Block]) -> None:
    names: dict = {}
    for block in blocks:
        extra = shlex.split(block.markers.get("run with", ""))
        try:
            if "not run" in block.markers:
                continue
            if "file" in block.markers:
                path = Path(block.markers["file"])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                code = compile("\n" * block.line + block.text, block.page, "exec")
                with mock.patch.object(kge_torchrec, "train", train_with(extra)):
                    exec(code, names)
            elif block.language == "sh":
                commands = block.commands
                for words in commands:
                    run_command(words, extra, is_last=words is commands[-1])
        except BaseException as error:
            raise AssertionError(f"{block.page}:{block.line}: {error}") from error
    names.clear()


def train_with(extra: list[str], train=kge_torchrec.train):
    return lambda config=None, *rest, **named: train(
        config_from_dict(as_config(config).to_dict(), [new_run(), *extra]) if extra else config,
        *rest, **named,
    )  # fmt: skip


def run_command(words: list[str], extra: list[str], is_last: bool) -> None:
    """Run a command with what is added to it, in this process if it is ours."""
    settings: dict[str, str] = {}
    while re.match(r"[A-Z_]+=", words[0]):
        settings |= [words[0].split("=", 1)]
        words = words[1:]
    name, arguments = Path(words[0]).name, words[1:]
    if name in NOT_RUN or arguments[:2] == ["-m", "pip"]:
        return
    assert name in ("cp", "kge-torchrec", "python", "torchrun"), f"no way to run {name}"
    takes_keys = name == "torchrun" or arguments[0] in TAKES_KEYS
    for option in re.split(r" (?=--)", shlex.join(extra)) if extra else ():
        if takes_keys if "." in option.split()[0].split("=")[0] else is_last:
            arguments += shlex.split(option)
    runs = name == "kge-torchrec" and arguments[0] in ("train", "compare")
    if runs and not any(word.startswith(("--run.dir", "--resume", "--help")) for word in arguments):
        arguments.append(new_run())
    if name in ("kge-torchrec", "python"):
        with mock.patch.dict(os.environ, settings), mock.patch.object(sys, "argv", arguments):
            try:
                code = main(arguments) if name == "kge-torchrec" else program(arguments[0])
            except SystemExit as ended:  # --help, --version, the end of a program
                code = ended.code or 0
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        places = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])
        environment = {**os.environ, **settings, "PYTHONPATH": places}
        command = [*(torchrun if name == "torchrun" else [name]), *arguments]
        code = subprocess.run(command, env=environment, timeout=600, check=False).returncode
    assert code == 0, f"exit code {code}: {shlex.join([name, *arguments])}"


def program(path: str) -> int:
    """Run a program of docs/examples in this process: another one would import torch again."""
    runpy.run_path(path, run_name="__main__")
    return 0


def new_run() -> str:
    """A folder for a run, since the default is named by the second and these take less."""
    return f"--run.dir=runs/{len(list(Path('runs').glob('*')))}"


@pytest.mark.slow
def test_notebook_runs(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    plot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs" / "notebooks" / "your_triples.ipynb").read_text("utf-8"))
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    names: dict = {}
    with plot.rc_context({"backend": "agg"}):
        for number, source in enumerate(cells):
            exec(compile(source, f"your_triples.ipynb, code cell {number}", "exec"), names)
        plot.close("all")
    assert len(cells) > 5 and 0.3 < names["test"]["both"]["realistic"]["mrr"] < 1


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


@functools.cache
def sources() -> str:
    """All code of the package: a class that a page names is defined or used there."""
    return "".join(path.read_text() for path in (ROOT / "kge_torchrec").rglob("*.py"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_files_and_keys_on_pages_exist(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.M)
    links = re.findall(r"\]\(([^)#\s]+)", text)
    assert [to for to in links if "://" not in to and not (path.parent / to).is_file()] == []
    spans = "\n".join(re.findall(r"`([^`\n]+)`", text))
    files = re.findall(r"[\w./-]*/[\w-]+\.(?:py|md|yaml)\b", spans)
    homes = ROOT, ROOT / "kge_torchrec", ROOT / "docs"
    assert [name for name in files if not any((home / name).is_file() for home in homes)] == []
    classes = re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", spans)
    assert [name for name in classes if name not in sources()] == []
    keys = {".".join(key.split(".")[:2]) for key in all_keys()}
    groups = "|".join({key.split(".")[0] for key in keys if "." in key})
    named = re.findall(rf"^(?:.* )?(?:--)?((?:{groups})\.[a-z_]\w*)\b", spans, re.M)
    files = r"\.(json|npy|parquet|safetensors|tsv|txt|vec)$"
    assert [key for key in named if key not in keys and not re.search(files, key)] == []


def test_site_has_every_key_verb_public_name_and_option_of_a_scorer():
    on_page_markdown = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))["on_page_markdown"]

    def rows(page):
        text = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
        text = on_page_markdown(text, mock.Mock(**{"file.src_uri": f"reference/{page}"}))
        assert "<!-- generated" not in text
        return [re.findall(r"`(.*?)`", row) for row in re.findall(r"^\| `.*", text, re.M)], text

    options = {f"model.options.{option}" for name in KINDS["scorer"].ours
               for option in declared(resolve("scorer", name).Options)}  # fmt: skip
    assert {row[0] for row in rows("keys.md")[0]} >= {*all_keys(), *options}
    assert {row[0] for row in rows("verbs.md")[0]} >= set(VERBS)
    names, text = rows("api.md")
    assert {row[0] for row in names} >= set(kge_torchrec.__all__)
    assert text.count("\n::: ") == len(kge_torchrec.__all__)


def test_every_page_is_on_the_site():
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1].split("\nhooks:")[0]
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r"[\w/-]+\.md", nav)) == pages
