"""A thousand configs and a thousand command lines of nonsense: sentences, never a traceback.

All in this process. ``train``, ``tune``, ``compare`` and ``extend`` end where a session would be
made, ``serve`` where it would listen; every other verb does its work on a tiny run.
"""

from __future__ import annotations

import contextlib
import io
import random
import traceback
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from training_runs import config_of, random_triples, tiny_store

from kge_torchrec import api, cli
from kge_torchrec.cli import VERBS, parser_of
from kge_torchrec.config import Config, all_keys
from kge_torchrec.config.keys import declared
from kge_torchrec.config.options import members
from kge_torchrec.config.registry import KINDS
from kge_torchrec.errors import KGEError

pytestmark = pytest.mark.slow
CONFIGS = LINES = 1000
SEED = 34
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


class Stopped(KGEError):
    """The point where work would begin."""


def stop(*_: Any, **__: Any) -> None:
    raise Stopped("here work would begin")


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """Paths by what is there: runs, exports, stores, good files and bad ones."""
    here = tmp_path_factory.mktemp("fuzz")
    store = tiny_store(here / "store").path
    with api.train(config_of(store, here / "run", train__epochs=1)) as run:
        run.export(here / "export")
    lines = ["\t".join(triple) for triple in random_triples(9, 2, 20)]
    texts = {
        "triples.tsv": "\n".join(lines) + "\n",
        "queries.tsv": "e0\tr0\t?\n?\tr1\te1\nx\n",
        "deep.json": '{"and": [' * 3000,
        "empty": "",
        "bad.yaml": "a: &a [*a]\n",
        "space.yaml": "train.lr: {low: 0.01, high: 0.1}\n",
    }
    for name, text in texts.items():
        (here / name).write_text(text)
    (here / "binary").write_bytes(bytes(range(256)))
    (here / "half").mkdir()
    (here / "half" / "config.yaml").write_text("train: {epochs: 1")
    there = {name: str(here / name) for name in (*texts, "binary", "half", "store", "run")}
    return there | {"export": str(here / "export"), "nowhere": str(here / "nowhere")}


@pytest.fixture
def stopped(monkeypatch, tmp_path):
    """Replace long work, and keep files out of the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kge_torchrec.training.runs.Session", stop)
    monkeypatch.setattr("kge_torchrec.serving.server.serve", stop)
    monkeypatch.setattr("kge_torchrec.tuning.study.Study.run", stop)
    monkeypatch.setattr("kge_torchrec.comparison.run_world", stop)
    monkeypatch.setattr("kge_torchrec.growth.train_run", stop)


def outcome(words: list[str]) -> tuple[str, str]:
    """Return ("error", "usage", "done" or "traceback", what was said)."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            code = cli.main(words)
        except SystemExit as error:
            return ("done" if error.code == 0 else "usage"), said.getvalue()
        except Exception:
            return "traceback", traceback.format_exc()
    return ("error" if code else "done"), said.getvalue()


def likely(draw: random.Random, key: str) -> Any:
    """Return a value of the kind that a key has."""
    default = declared(Config)[key].default
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float) or default is None:
        return draw.choice([0, 1, 2, 4, 0.25, 0.5])
    return default if isinstance(default, tuple | dict) else draw.choice(NAMES)


def odd_config(draw: random.Random) -> Any:
    if draw.random() < 0.03:
        return draw.choice(ODD)
    values: dict[str, Any] = {}
    for key in draw.sample(all_keys(), draw.choice((1, 1, 1, 2, 3, 5))):
        value = draw.choice(NAMES if draw.random() < 0.5 else ODD)
        if draw.random() < 0.7:
            value = likely(draw, key)
        *group, name = key.split(".")
        if draw.random() < 0.03:
            name = draw.choice([name[:-1], name.upper(), "options", "a.b", ""])
        part = values.setdefault(group[0], {}) if group and draw.random() < 0.9 else values
        if isinstance(part, dict):
            part[name] = value
    return values


def test_thousand_random_configs_end_without_traceback(places, stopped, tmp_path):
    draw, ended = random.Random(SEED + 1), dict.fromkeys(("error", "usage", "done", "traceback"), 0)
    begun = 0
    for number in range(CONFIGS):
        file = tmp_path / "config.yaml"
        config = odd_config(draw)
        file.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
        words = ["train", str(file), "--device=cpu", f"--run.dir={tmp_path / str(number)}"]
        how, said = outcome(words)
        assert how != "traceback", f"{config}\n{said}"
        ended[how] += 1
        begun += "here work would begin" in said
    print(ended, begun)
    assert ended["error"] + ended["usage"] == CONFIGS and begun > 50


def odd_line(draw: random.Random, places: dict[str, str], verbs: dict[str, Any]) -> list[str]:
    verb = draw.choice(sorted(verbs))
    words, actions = [verb], [a for a in verbs[verb]._actions if a.dest != "help"]

    def value(action: Any) -> str:
        if action is not None and action.choices and draw.random() < 0.8:
            return str(draw.choice(list(action.choices)))
        if action is not None and action.type in (int, float) and draw.random() < 0.8:
            return draw.choice(["0", "1", "3", "-4", "99999999"])
        kind = draw.random()
        if kind < 0.5:
            return places[draw.choice(sorted(places))]
        if kind < 0.8:
            return draw.choice(["e0", "e1", "r0", "r1", "?", "3", "1", "0.5", "table", "2xCPU"])
        return str(draw.choice([*ODD, *NAMES])).replace("\0", "")

    for action in actions:
        if action.dest == "config":
            continue  # below
        if not action.option_strings and (action.nargs != "?" or draw.random() < 0.5):
            likely = action.dest in verbs[verb].runs and draw.random() < 0.7
            words.append(places["run"] if likely else value(action))
    options = [action for action in actions if action.option_strings]
    for action in draw.sample(options, min(len(options), draw.randint(0, 4))):
        words.append(draw.choice(action.option_strings))
        if action.nargs != 0 and draw.random() < 0.95:
            words.append(value(action))
    if "config" in verbs[verb].runs:
        words.insert(1, draw.choice(["demo", "default", *places.values()]))
        for key in draw.sample(all_keys(), draw.randint(0, 3)):
            words += [f"--{key}", value(None)]
    if draw.random() < 0.1:
        draw.shuffle(words)
    return words


def test_thousand_random_command_lines_end_without_traceback(places, stopped, capsys):
    draw, ended = random.Random(SEED), dict.fromkeys(("error", "usage", "done", "traceback"), 0)
    verbs = {name: parser_of(name) for name in VERBS}
    store = Path(places["store"])
    for _ in range(LINES):
        words = odd_line(draw, places, verbs)
        how, said = outcome(words)
        assert how != "traceback", f"{words}\n{said}"
        assert how == "done" or said.strip(), words
        ended[how] += 1
    print(ended)
    assert ended["done"] > 20 and ended["error"] > 200 and store.is_dir()
