"""Every verb says what is wrong with bad input: an exit code and a sentence, never a traceback.

Beside the inputs of a table there are random configs and command lines over the same folder, in
which ``train``, ``tune``, ``compare``, ``extend`` and ``serve`` end where their work would begin.
``bad_inputs.tsv`` holds a case per line: exit code, command and the first line of the message,
which ends with an ellipsis where another library, or a version of Python, words the rest. The
commands run in a folder with the broken files, stores, runs and exports that are made here.  A new
case needs the first two columns; the failing test prints the third.
"""

from __future__ import annotations

import csv
import json
import os
import random
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from grown_runs import base_config
from training_runs import tiny_store

from kge_torchrec import api
from kge_torchrec.cli import VERBS, VerbParser, main
from kge_torchrec.config import Config, all_keys
from kge_torchrec.config.checks import members
from kge_torchrec.config.keys import declared
from kge_torchrec.config.registry import KINDS
from kge_torchrec.errors import KGEError

pytestmark = pytest.mark.slow

FILES = {
    # Triples
    "empty.tsv": b"",
    "blank.tsv": b"\n\n\n",
    "one.tsv": b"a\tr\tb\n",
    "good.tsv": b"".join(b"a%d\tr\tb%d\n" % (i, i) for i in range(30)),
    "more.tsv": b"e1\tr0\tx1\nx1\tr1\te2\n",
    "known.tsv": b"e0\tr0\te1\n",
    "unnamed": b"a\tr\tb\n",
    "words.doc": b"a\tr\tb\n",
    "fields2.tsv": b"a\tr\tb\na\tr\n",
    "fields5.tsv": b"a\tr\tb\nc\tr\td\te\tf\n",
    "empty_label.tsv": b"a\tr\tb\n\tr\tb\n",
    "blank_label.tsv": b"a\tr\tb\n \tr\tb\n",
    "nul.tsv": b"a\tr\tb\na\x00b\tr\tb\n",
    "long.tsv": b"a\tr\tb\n" + b"x" * 70_000 + b"\tr\tb\n",
    "latin1.tsv": b"a\tr\tb\ncaf\xe9\tr\tb\n",
    "utf16.tsv": "a\tr\tb\n".encode("utf-16"),
    "surrogate.tsv": b"a\tr\tb\n\xed\xa0\x80\tr\tb\n",
    "open_quote.csv": b'a,r,b\n"c,r,d\n',
    "after_quote.csv": b'a,r,b\n"c"d,r,e\n',
    "header_only.tsv": b"head\trelation\ttail\n",
    "unknown_header.tsv": b"from\tvia\tto\tsince\na\tr\tb\t3\n",
    "header.tsv": b"head\trelation\ttail\na\tr\tb\nb\tr\tc\n",
    "weight_word.tsv": b"head\trelation\ttail\tweight\na\tr\tb\theavy\n",
    "weight_zero.tsv": b"head\trelation\ttail\tweight\na\tr\tb\t0\n",
    "weight_nan.tsv": b"head\trelation\ttail\tweight\na\tr\tb\tnan\n",
    "not.gz": b"a\tr\tb\n",
    "not.tsv.gz": b"a\tr\tb\n",
    "cut.tsv.gz": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03KT(R",
    "not.tsv.zst": b"a\tr\tb\n",
    "not.tsv.bz2": b"a\tr\tb\n",
    "not.parquet": b"a\tr\tb\n",
    "words.nt": b"a r b\n",
    "no_dot.nt": b"<a:b> <a:r> <a:c>\n",
    "literal.nt": b'<a:b> <a:r> "c" .\n',
    "escape.nt": b"<a:b> <a:r> <a:\\q> .\n",
    "code.nt": b"<a:b> <a:r> <a:\\uD800> .\n",
    "open.nt": b'<a:b> <a:r> "c .\n',
    "broken.ttl": b"@prefix x: <a:> .\nx:a x:r x:b\n",
    "broken.rdf": b"<rdf><a></rdf>",
    # Queries
    "asked.tsv": b"e1\tr0\t?\n",
    "asked_empty.tsv": b"",
    "asked_comments.tsv": b"\n\n",
    "asked_two.tsv": b"e1\tr0\n",
    "asked_nothing.tsv": b"e1\tr0\te2\n",
    "asked_all.tsv": b"?\tr0\t?\n",
    "asked_unknown.tsv": b"nobody\tr0\t?\n",
    "asked_latin1.tsv": b"caf\xe9\tr0\t?\n",
    "asked_list.tsv": b'["e1", "r0"]\n',
    "asked_unicode.tsv": "e1\u202e\tr0\t?\n".encode(),
    "scored.tsv": b"e1\tr0\te2\n",
    "scored_open.tsv": b"e1\tr0\t?\n",
    "scored_unknown.tsv": b"e1\tr0\te2\ne1\tr9\te2\n",
    # Types
    "types_three.tsv": b"e1\tt\tu\n",
    "types_unknown.tsv": b"nobody\tt\n",
    "types_empty.tsv": b"",
    # Configs
    "c.yaml": b"data: {path: store}\nmodel: {dim: 8}\ntrain: {epochs: 1}\n",
    "c_empty.yaml": b"",
    "c_tab.yaml": b"data:\n\tpath: store\n",
    "c_open.yaml": b"data: {path: [store\n",
    "c_list.yaml": b"- data\n",
    "c_word.yaml": b"store\n",
    "c_latin1.yaml": b"data: {path: caf\xe9}\n",
    "c_nul.yaml": b"data: {path: \x00}\n",
    "c_unknown.yaml": b"data: {path: store}\nmodle: {dim: 8}\n",
    "c_unknown_inner.yaml": b"data: {path: store}\nmodel: {dims: 8}\n",
    "c_type.yaml": b"data: {path: store}\nmodel: {dim: eight}\n",
    "c_section.yaml": b"data: store\n",
    "c_null.yaml": b"data: null\n",
    "c_two.yaml": b"data: {path: store}\n---\nmodel: {dim: 8}\n",
    "c_tag.yaml": b"data: {path: !!python/object:os.system x}\n",
    "c_alias.yaml": b"data: {path: *nowhere}\n",
    "c_store.yaml": b"data: {path: nowhere}\n",
    # Spaces of tune
    "space_empty.yaml": b"",
    "space_list.yaml": b"- train.lr\n",
    "space_unknown.yaml": b"train.learning: [0.01, 0.1]\n",
    "space_word.yaml": b"train.lr: fast\n",
    "space_open.yaml": b"train.lr: [0.01\n",
    "space_range.yaml": b"train.lr: {low: 1, high: 0.1}\n",
}


def _tables(folder: Path) -> None:
    """Parquet files, and folders of triples."""
    column = pa.array(["a", "b"])
    pq.write_table(pa.table({"head": column, "tail": column}), folder / "two.parquet")
    pq.write_table(
        pa.table({"head": pa.array(["a", None]), "relation": column, "tail": column}),
        folder / "null.parquet",
    )
    pq.write_table(
        pa.table({"label": ["e1", "e2"], "vector": [[0.1, 0.2], [0.1]]}), folder / "ragged.parquet"
    )
    for name, splits in {
        "splits": {"train": "good.tsv", "valid": "one.tsv", "test": "one.tsv"},
        "no_train": {"valid": "good.tsv", "test": "good.tsv"},
        "new_relation": {"train": "one.tsv", "valid": "more.tsv", "test": "one.tsv"},
        "twice": {"train": "good.tsv"},
    }.items():
        (folder / name).mkdir()
        for split, content in splits.items():
            (folder / name / f"{split}.tsv").write_bytes(FILES[content])
    (folder / "twice" / "train.csv").write_bytes(b"a,r,b\n")
    (folder / "empty_folder").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "notes.txt").write_text("mine")
    (folder / "link").symlink_to("nowhere")


def _newest(run: Path) -> Path:
    return next((run / "checkpoints").iterdir())


def _data_path(path, value):
    path.write_text(re.sub(r"path: .*store$", f"path: {value}", path.read_text(), flags=re.M))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip(file: Path, byte: int) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 0x55
    file.write_bytes(content)


def _other_store(export: Path) -> None:
    """Replaces the store by another one whose files have the same sizes."""
    sizes = {f"store/{x.name}": x.stat().st_size for x in Path("other_store").iterdir()}
    shutil.rmtree(export / "store")
    shutil.copytree("other_store", export / "store")
    files = json.loads((export / "config.json").read_text())["files"]
    kept = {name: size for name, size in files.items() if not name.startswith("store/")}
    _edit(export / "config.json", files=kept | sizes)


def _edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# How a copy of the run, the store or the export is broken, by the name of the copy.
BROKEN: dict[str, dict[str, Callable[[Path], object]]] = {
    "run": {
        "run_no_config": lambda run: (run / "config.yaml").unlink(),
        "run_cut_config": lambda run: (run / "config.yaml").write_text("model: {dim: [8"),
        "run_other_dim": lambda run: (run / "config.yaml").write_text(
            (run / "config.yaml").read_text().replace("dim: 8", "dim: 16")
        ),
        "run_no_checkpoints": lambda run: shutil.rmtree(run / "checkpoints"),
        "run_no_numbers": lambda run: (_newest(run) / "rank-00000.safetensors").unlink(),
        "run_cut_numbers": lambda run: _cut(_newest(run) / "rank-00000.safetensors"),
        "run_flipped_numbers": lambda run: _flip(_newest(run) / "rank-00000.safetensors", 5000),
        "run_no_manifest": lambda run: (_newest(run) / "manifest.json").unlink(),
        "run_cut_manifest": lambda run: _cut(_newest(run) / "manifest.json"),
        "run_other_store": lambda run: _data_path(run / "config.yaml", "other_store"),
        "run_gone_store": lambda run: _data_path(run / "config.yaml", "gone"),
        "run_bad_calibration": lambda run: (run / "calibration.json").write_text("{}"),
        "run_cut_calibration": lambda run: (run / "calibration.json").write_text("{"),
    },
    "store": {
        "store_no_meta": lambda store: (store / "meta.json").unlink(),
        "store_cut_meta": lambda store: _cut(store / "meta.json"),
        "store_version": lambda store: _edit(store / "meta.json", version=99),
        "store_few_keys": lambda store: (store / "meta.json").write_text(
            '{"format": "kge-torchrec triple store", "version": 3}'
        ),
        "store_count": lambda store: _edit(store / "meta.json", num_entities=36),
        "store_no_train": lambda store: (store / "train.npy").unlink(),
        "store_cut_train": lambda store: _cut(store / "train.npy"),
        "store_flipped_train": lambda store: _flip(store / "train.npy", 512),
        "store_no_files": lambda store: [file.unlink() for file in store.glob("*.arrow")],
        "store_cut_labels": lambda store: _cut(store / "entities.arrow"),
        "store_no_labels": lambda store: (store / "entities.arrow").unlink(),
        "store_cut_known": lambda store: _cut(store / "known-train-head-answers.npy"),
    },
    "export": {
        "export_no_model": lambda export: (export / "config.json").unlink(),
        "export_cut_model": lambda export: _cut(export / "config.json"),
        "export_list_model": lambda export: (export / "config.json").write_text("[]"),
        "export_version": lambda export: _edit(export / "config.json", version=99),
        "export_scorer": lambda export: (export / "config.json").write_text(
            (export / "config.json").read_text().replace('"complex"', '"nothing"')
        ),
        "export_no_table": lambda export: (export / "entities.safetensors").unlink(),
        "export_cut_table": lambda export: _cut(export / "entities.safetensors"),
        "export_no_scorer": lambda export: (export / "scorer.safetensors").unlink(),
        "export_cut_scorer": lambda export: _cut(export / "scorer.safetensors"),
        "export_no_labels": lambda export: (export / "store" / "entities.arrow").unlink(),
        "export_cut_known": lambda export: _cut(export / "store" / "known-train-head-answers.npy"),
        "export_flipped_train": lambda export: _flip(export / "store" / "train.npy", 512),
        "export_other_store": lambda export: _other_store(export),
    },
}  # fmt: skip


def make_world(folder: Path) -> None:
    """Writes all of them; the working directory is this folder."""
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    _tables(folder)
    tiny_store(Path("store"))
    tiny_store(Path("other_store"), entities=30)
    run = api.train(base_config(Path("store"), Path("run")))
    run.export("export")
    run.close()
    for source, copies in BROKEN.items():
        for name, damage in copies.items():
            copy = shutil.copytree(folder / source, folder / name)
            damage(copy)


with (Path(__file__).parent / "bad_inputs.tsv").open(encoding="utf-8", newline="") as _file:
    CASES = list(csv.reader(_file, delimiter="\t", quoting=csv.QUOTE_NONE))
IN_TABLE = list(dict.fromkeys(command.partition(" ")[0] for _, command, _ in CASES))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world").resolve()
    before = Path.cwd()
    os.chdir(folder)
    try:
        make_world(folder)
        yield folder
    finally:
        os.chdir(before)


def outcome(words: list[str], capsys: pytest.CaptureFixture) -> tuple[str, str]:
    """Its exit code, and the first line of its message."""
    try:
        code = main(words)
    except SystemExit as end:  # argparse
        code = end.code
    except BaseException as error:  # what a user would see a traceback of
        code = repr(error)
    lines = capsys.readouterr().err.splitlines() or [""]
    message = next((line for line in lines if line.startswith("kge-torchrec")), lines[0])
    return str(code), message.replace(f"{Path.cwd()}/", "")


@pytest.mark.parametrize("verb", IN_TABLE, ids=lambda verb: verb or "no verb")
def test_bad_input_is_rejected_with_a_message(world, capsys, verb):
    wrong, files = [], set(world.rglob("*"))
    for code, command, expected in CASES:
        if command.partition(" ")[0] != verb:
            continue
        actual, message = outcome(shlex.split(command), capsys)
        start = expected.removesuffix("…")
        alike = message.startswith(start) if start != expected else message == expected
        if (actual, alike) != (code, True):
            wrong.append(f"{actual}\t{command}\t{message}")
        made = set(world.rglob("*")) - files
        if made:
            wrong.append(f"{command} has made {sorted(str(x.relative_to(world)) for x in made)}")
            files |= made
    assert not wrong, "\n".join(wrong)


def test_table_has_300_cases_and_every_verb():
    assert len(CASES) >= 300 and all(code in "12" for code, _, _ in CASES)
    assert len({command for _, command, _ in CASES}) == len(CASES)
    assert set(VERBS) <= set(IN_TABLE)


# Random input

ODD = [
    None, True, False, 0, 1, -1, 2, 3, 8, 0.5, -0.5, 1e-9, 1e30, 10**30, -(10**30), float("nan"),
    float("inf"), "", " ", "a", "null", "~", "1e3", "0x10", "é", "\U0001f600", "a\nb", "../..", "/",
    "-1", "--", "[", "{", "*a", "&a", "!!python/object:os.system", "m:C", "kge_torchrec:train",
    "foreign_parts:Words", ":", ".", "2024-01-01", "2024-99-99", [], [1], [1, 2, 3], [[]], {},
    {"a": 1}, {"p": 1, "q": 1}, {"weight": -1}, {"n3": 0.1}, {"dura": None}, {"l2": {"p": 0}},
    "x" * 5000, b"\xff\x00",
]  # fmt: skip
NAMES = [name for kind in KINDS.values() for name in kind.ours]
NAMES += [
    name
    for key in declared(Config).values()
    for kind in members(key.type)
    for name in get_args(kind)
    if isinstance(name, str)
]
BEGUN = "here work would begin"


@pytest.fixture
def draw(world, monkeypatch) -> random.Random:
    """Replace long work, and return the source of random input."""

    def stop(*_: Any, **__: Any) -> None:
        raise KGEError(BEGUN)

    for work in ("training.runs.Session", "serving.server.serve", "tuning.study.Study.run",
                 "comparison.run_world", "growth.train_run"):  # fmt: skip
        monkeypatch.setattr(f"kge_torchrec.{work}", stop)
    return random.Random(34)


def odd_config(draw: random.Random) -> Any:
    if draw.random() < 0.03:
        return draw.choice(ODD)
    values: dict[str, Any] = {}
    for key in draw.sample(all_keys(), draw.choice((1, 1, 1, 2, 3, 5))):
        default = declared(Config)[key].default
        value = draw.choice(NAMES if draw.random() < 0.5 else ODD)
        if draw.random() < 0.7:  # of the kind that the key has
            value = draw.choice(NAMES) if isinstance(default, str) else default
            if default is None or isinstance(default, int | float):
                value = draw.choice([0, 1, 2, 4, 0.25, 0.5, not default])
        *group, name = key.split(".")
        if draw.random() < 0.03:
            name = draw.choice([name[:-1], name.upper(), "options", "a.b", ""])
        part = values.setdefault(group[0], {}) if group and draw.random() < 0.9 else values
        if isinstance(part, dict):
            part[name] = value
    return values


def test_thousand_random_configs_are_rejected_or_begin(draw, capsys, tmp_path):
    begun, file = 0, tmp_path / "config.yaml"
    for number in range(1000):
        config = odd_config(draw)
        file.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
        words = ["train", str(file), "--device=cpu", f"--run.dir={tmp_path / str(number)}"]
        code, said = outcome(words, capsys)
        assert code in "12", f"{config}\n{code}"
        begun += BEGUN in said
    assert begun > 50


def odd_line(draw: random.Random, files: list[str], parsers: dict[str, VerbParser]) -> list[str]:
    verb = draw.choice(sorted(parsers))
    parser, words = parsers[verb], [verb]

    def value(action: Any) -> str:
        if action is not None and action.choices and draw.random() < 0.8:
            return str(draw.choice(list(action.choices)))
        if action is not None and action.type in (int, float) and draw.random() < 0.8:
            return draw.choice(["0", "1", "3", "-4", "99999999"])
        kind = draw.random()
        if kind < 0.5:
            return draw.choice([*files, "run", "store", "export", "good.tsv", "nowhere"])
        if kind < 0.8:
            return draw.choice(["e0", "e1", "r0", "r1", "?", "3", "1", "0.5", "table", "2xCPU"])
        return str(draw.choice([*ODD, *NAMES])).replace("\0", "")

    actions = [x for x in parser._actions if x.dest not in ("help", "config")]
    for action in actions:
        if not action.option_strings and (action.nargs != "?" or draw.random() < 0.5):
            is_run = action.dest in parser.runs and draw.random() < 0.7
            words.append("run" if is_run else value(action))
    options = [action for action in actions if action.option_strings]
    for action in draw.sample(options, min(len(options), draw.randint(0, 4))):
        words.append(draw.choice(action.option_strings))
        if action.nargs != 0 and draw.random() < 0.95:
            words.append(value(action))
    if "config" in parser.runs:
        words.insert(1, draw.choice(["demo", "default", "run", *files]))
        for key in draw.sample(all_keys(), draw.randint(0, 3)):
            words += [f"--{key}", value(None)]
    if draw.random() < 0.1:
        draw.shuffle(words)
    return words


def test_thousand_random_command_lines_end_without_traceback(draw, world, capsys, monkeypatch):
    files, codes = sorted(x.name for x in world.iterdir()), list[str]()
    parsers = {verb: VerbParser(verb) for verb in VERBS}
    for _ in range(1000):
        words = odd_line(draw, files, parsers)
        code, said = outcome(words, capsys)
        assert code in ("0", "1", "2", "3"), f"{words}\n{code}"
        assert said or code == "0", words
        codes.append(code)
    assert codes.count("0") > 20 and codes.count("1") > 200 and (world / "store").is_dir()
