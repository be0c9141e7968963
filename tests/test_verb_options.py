"""Options of verbs: an option without effect is rejected, and the error says when it acts.

A new option fails here until a table lists it: ``ALWAYS`` if it acts with any other options,
otherwise ``WITHOUT_EFFECT``, with the rule ``acts_with`` beside its ``add_argument``.
"""

from __future__ import annotations

import argparse
import shlex

import pytest
from training_runs import tiny_store

from kge_torchrec import cli
from kge_torchrec.commands import VERBS, check_options, parser_of, rules_of
from kge_torchrec.config import ConfigError

ALWAYS = {
    "prepare": "output overwrite no-progress has-header split-by literals columns weights "
    "types-from types features reader allow-unseen-relations spread memory",  # some need some data
    "data": "output threshold format has-header split-by literals columns weights "
    "types-from types features reader",
    "extend": "output delete epochs checkpoint allow-unseen-relations features set",
    "evaluate": "split triples by candidates format",
    "predict": "head relation tail queries top new format output",
    "recommend": "head heads relation top exclude-known candidates format output",
    "score": "side format output",
    "nearest": "top format output",
    "calibrate": "top limit seed format",
    "export": "output checkpoint format overwrite",
    "report": "output no-models",
    "serve": "host port max-k max-body allow-host max-connections timeout access-log",
    "list": "name",
    "train": "resume plan",  # the others are keys of the config
    "plan": "devices hosts host-memory within-host between-hosts "
    "reserve entities relations triples skew all format",
    "compare": "engines world-sizes repeats",
    "tune": "trials study space resume",
}
# (verb, option): (without effect, with effect), as typed after the verb
WITHOUT_EFFECT = {
    ("prepare", "type-triples"): ("a -o s --type-triples keep", "--types-from is"),
    ("prepare", "reader-options"): ("a -o s --reader-options {a: 1}", "--reader m:C"),
    ("prepare", "ratio"): ("a -o s --ratio 0.8 0.1 0.1 --split-by last", "--split-by time"),
    ("prepare", "count"): ("a -o s --count 2", "--split-by last"),
    ("prepare", "time-column"): ("a -o s --time-column t", "--split-by time"),
    ("prepare", "seed"): ("a -o s --seed 2 --split-by time", "--split-by last"),
    ("data", "ratio"): ("check a --ratio 0.8 0.1 0.1 --split-by last", "--split-by head"),
    ("data", "count"): ("check a --count 2", "--split-by last"),
    ("data", "time-column"): ("check a --time-column t", "--split-by last"),
    ("data", "seed"): ("check a --seed 2 --split-by time", "--split-by random"),
    ("data", "type-triples"): ("check a --type-triples keep", "--types-from is"),
    ("data", "reader-options"): ("check a --reader-options {a: 1}", "--reader m:C"),
    ("extend", "freeze"): ("R a -o S --freeze --epochs 0", "--epochs 1"),
    ("evaluate", "types"): ("R --types f --candidates seen", "--candidates types"),
    ("evaluate", "recommend"): ("R --recommend 5 --triples f", None),
    ("evaluate", "side"): ("R --side head", "--recommend 5"),
    ("evaluate", "candidate-file"): ("R --candidate-file f --candidates all", "--candidates fixed"),
    ("predict", "candidates"): ("R --head a --relation r --candidates seen", None),
    ("predict", "loops"): ("R --head a --relation r --loops", None),
    ("export", "relation"): ("R -o D --relation r", "--format vectors"),
    ("train", "force"): ("--force", "--resume R"),
    ("plan", "sharding"): ("--devices 2xCPU --sharding table_wise --all", None),
    ("compare", "steps"): ("--steps 3 --repeats 0", "--repeats 1"),
    ("tune", "halving"): ("--halving none --resume S", None),
}
INSTEAD = {  # with an effect, where an option must be left out for that
    ("evaluate", "recommend"): "R --recommend 5",
    ("predict", "candidates"): "R --relation r --candidates seen",
    ("predict", "loops"): "R --relation r --loops",
    ("tune", "halving"): "--halving none",
}


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb by its name."""
    return {name: parser_of(name) for name in VERBS}


def test_tables_have_every_option():
    for verb, parser in parsers().items():
        optional = [a for a in parser._actions if a.option_strings or a.nargs == "?"]
        there = {action.dest.replace("_", "-") for action in optional} - {"help"}
        conditional = {name.replace("_", "-") for name in rules_of(parser)}
        assert there - conditional == set(ALWAYS[verb].split()), verb
        assert conditional == {option for of, option in WITHOUT_EFFECT if of == verb}, verb


@pytest.mark.parametrize("verb, option", WITHOUT_EFFECT)
def test_option_without_effect_is_rejected(verb, option):
    parser, (off, more) = parsers()[verb], WITHOUT_EFFECT[verb, option]
    words = shlex.split(off.replace("{a: 1}", "'{a: 1}'"))
    with pytest.raises(ConfigError) as caught:
        check_options(parser, parser.parse_args(words))
    said = str(caught.value)
    assert said.startswith(f"--{option} has no effect here: it acts only with ")
    if more is not None:
        check_options(parser, parser.parse_args([*words, *shlex.split(more)]))
    elif (verb, option) in INSTEAD:
        check_options(parser, parser.parse_args(shlex.split(INSTEAD[verb, option])))
    else:
        without = [word for word in words if word != "--all"]
        check_options(parser, parser.parse_args(without))


def test_command_line_rejects_options_before_reading(capsys):
    for words in (
        "predict RUN --head a --relation r --candidates seen",
        "prepare x -o y --reader-options '{a: 1}'",
    ):
        assert cli.main(shlex.split(words)) == 1
        assert "has no effect here: it acts only with --" in capsys.readouterr().err


def test_options_of_reading_without_effect_on_the_files_are_rejected(tmp_path, capsys):
    (tmp_path / "one.tsv").write_text("a\tr\tb\nb\tr\tc\nc\tr\ta\n")
    (tmp_path / "one.nt").write_text("<x:a> <x:r> <x:b> .\n<x:b> <x:r> <x:a> .\n")
    (tmp_path / "train.tsv").write_text("a\tr\tb\n")
    (tmp_path / "valid.tsv").write_text("b\tr\ta\n")
    store = tiny_store(tmp_path / "store").path
    splits = f"{tmp_path / 'train.tsv'} {tmp_path / 'valid.tsv'}"
    for sources, options, acts_on in (
        (tmp_path / "one.tsv", "--literals keep", "RDF files"),
        (tmp_path / "one.nt", "--has-header", "text files"),
        (splits, "--ratio 0.8 0.1 0.1", "triples without splits"),
        (splits, "--seed 3", "triples without splits"),
        (splits, "--split-by last", "triples without splits"),
        ("countries", "--has-header", "text files"),
        (store, "--types-from is", "triples that are no store yet"),
    ):
        verb = "data check" if sources == store else "prepare"
        out = "" if sources == store else f"-o {tmp_path / 'made'}"
        assert cli.main(f"{verb} {sources} {out} {options}".split()) == 1
        assert f"has no effect here: it acts only on {acts_on}" in capsys.readouterr().err
    for sources, options in (
        (tmp_path / "one.tsv", "--ratio 0.8 0.1 0.1 --seed 3 --no-has-header"),
        (tmp_path / "one.nt", "--literals keep"),
    ):
        out = f"-o {tmp_path / 'made'} --overwrite --no-progress"
        assert cli.main(f"prepare {sources} {out} {options}".split()) == 0
