"""Exports for other programs, read by their rules: 1,000 triples score as ours do, to 1e-6.

``foreign_exports`` has the rules; ``test_foreign_programs.py`` runs the programs themselves.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from foreign_exports import (
    AWKWARD,
    READERS,
    R,
    model_of,
    one_line_each,
    same,
    triples,
    written,
)
from scorer_cases import CASES, identify

from kge_torchrec import load_model
from kge_torchrec.config import ConfigError, ModelConfig
from kge_torchrec.errors import ExportError
from kge_torchrec.export import pykeen
from kge_torchrec.export.foreign import DGLKE, LIBKGE, PROGRAM_FORMAT

MODELS = [
    pytest.param(name, scorer, reciprocal, id=f"{name}-{scorer}{'-reciprocal' * reciprocal}")
    for name, (of, _) in READERS.items()
    for scorer in of.scorers
    for reciprocal in (False, True)
    if of.holds_inverses or not reciprocal
]


@pytest.mark.parametrize("name, scorer, reciprocal", MODELS)
def test_foreign_format_reads_the_same_scores(tmp_path, name, scorer, reciprocal):
    of, read = READERS[name]
    model = model_of(scorer, reciprocal)
    path, _ = written(tmp_path, of, model)
    assert "kge" not in sys.modules  # a stand-in for LibKGE, while its export is written
    results = read(path)
    for side in ("tail", "head"):
        same(results.scores(*triples(), side), model, side)


@pytest.mark.parametrize("normalization", ["unit", "layer"])
@pytest.mark.parametrize("name", READERS)
def test_normalized_rows_are_exported(tmp_path, name, normalization):
    of, read = READERS[name]
    model = model_of("distmult", False, normalization)
    path, _ = written(tmp_path, of, model)
    same(read(path).scores(*triples(), "tail"), model, "tail")


# Labels


@pytest.mark.parametrize("name", READERS)
def test_foreign_format_reads_the_same_labels(tmp_path, name):
    of, read = READERS[name]
    path, _ = written(
        tmp_path, of, model_of("distmult", False, entities=AWKWARD, relations=AWKWARD[::-1])
    )
    results = read(path)
    expected = one_line_each(AWKWARD) if of is DGLKE else AWKWARD
    assert results.entities == expected and results.relations == expected[::-1]


@pytest.mark.parametrize("of", [LIBKGE, DGLKE])
def test_labels_that_collide_in_one_line_are_rejected(tmp_path, of):
    with pytest.raises(ExportError, match=r"'a\\rb' and 'a b' would both be 'a b'.*pykeen"):
        written(tmp_path, of, model_of("distmult", False, entities=["a\rb", "c", "a b"]))


# torch.export


def of_torch(tmp_path, content):
    """Compares the scores of a traced program with those of the model, both sides in float64."""
    content.model.scorer.double()
    shard = content.model.shard
    whole = replace(content.model, shard=replace(shard, rows=shard.rows.double()))
    twice = replace(content, model=whole)
    path, text = written(tmp_path, PROGRAM_FORMAT, twice)
    scores = torch.export.load(path / "scores.pt2").module()
    head, relation, tail = triples()
    same(scores(head, relation, tail), content, "tail")
    if content.config.reciprocal:
        assert f"r + {R}, h" in text
        same(scores(tail, relation + R, head), content, "head")


@pytest.mark.parametrize("name", ["complex", "rotate"])
@pytest.mark.first_tier("complex")
def test_traced_program_scores_match(tmp_path, name):
    of_torch(tmp_path, model_of(name, True, biases=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=identify(case)) for case in CASES])
def test_every_scorer_can_be_traced(tmp_path, case):
    of_torch(tmp_path, model_of(None, True, "layer", case=case))


# What a layout can hold


@pytest.mark.parametrize(
    "of, config, words",
    [
        (pykeen.FORMAT, {"scorer": "conve", "reciprocal": True}, "PyKEEN has no model with the"),
        (LIBKGE, {"scorer": "tucker"}, "LibKGE has no model with the formula of tucker"),
        (DGLKE, {"scorer": "simple"}, "only those of transe_l1, transe_l2, distmult"),
        (DGLKE, {"scorer": "complex", "reciprocal": True}, "DGL-KE has no inverse relation"),
        (pykeen.FORMAT, {"scorer": "complex", "biases": True}, "cannot hold biases"),
    ],
)
def test_unsupported_models_are_rejected_by_format(of, config, words):
    with pytest.raises(ExportError, match=words):
        of.check(ModelConfig(**{"dim": 16, "reciprocal": False, **config}))


@pytest.mark.parametrize("name", ["pykeen", "libkge", "dglke", "torch"])
def test_foreign_formats_are_rejected_by_load_model(run, tmp_path, name):
    if name == "dglke":
        with pytest.raises(ExportError, match="no inverse relations"):
            run.export(tmp_path / "out", name)
    else:
        path = run.export(tmp_path / "out", name)
        assert "## How to load" in (path / "README.md").read_text()
        run.export(path, name, overwrite=True)
        with pytest.raises(ExportError, match=r"is an export for .*export the run to npy"):
            load_model(path)
        (tmp_path / "out").rename(tmp_path / "moved")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="dglke, torch, vectors, vectors-parquet, got 'csv'"):
        run.export(tmp_path / "out", "csv")
