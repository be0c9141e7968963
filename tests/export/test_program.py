"""Programs of torch.export score triples as the model does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_models import R, model_of, same, triples
from scorer_cases import CASES, identify

from kge_torchrec import load_model
from kge_torchrec.errors import ExportError
from kge_torchrec.export.program import write_program


def check(tmp_path, model):
    """Compares the scores of a traced program with those of the model, both sides in float64."""
    model.scorer.double()
    twice = replace(model, shard=replace(model.shard, rows=model.shard.rows.double()))
    write_program(tmp_path, twice)
    scores = torch.export.load(tmp_path / "scores.pt2").module()
    head, relation, tail = triples()
    same(scores(head, relation, tail), model, "tail")
    if model.scorer.reciprocal:
        same(scores(tail, relation + R, head), model, "head")


def test_traced_program_scores_match(tmp_path):
    check(tmp_path, model_of("complex", True, biases=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=identify(case)) for case in CASES])
def test_every_scorer_can_be_traced(tmp_path, case):
    check(tmp_path, model_of(None, True, "layer", case=case))


def test_exported_program_scores_match_the_run(run, export, tmp_path):
    path = run.export(tmp_path / "out", "torch")
    assert "`scores(t, r + 3, h)`" in (path / "README.md").read_text()
    scores = torch.export.load(path / "scores.pt2").module()
    triples = torch.from_numpy(np.array(run.model.store.train, dtype=np.int64))
    expected = load_model(export).scores(triples)
    torch.testing.assert_close(scores(*triples.T), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ExportError, match=r"in the format torch; export the run in the format"):
        load_model(path)
