"""Scorers with small options and random parameters, for their tests."""

from __future__ import annotations

import pytest
import torch

from kge_torchrec.config.registry import KINDS, resolve
from kge_torchrec.models.scorers import SIDES

SCORERS = {name: resolve("scorer", name) for name in KINDS["scorer"].ours}
RELATIONS = 3
SMALL_MAPS = {"channels": 2, "kernel_size": 3}
# Every scorer, some with several options: (scorer, dim, options).
CASES = [
    ("transe_l1", 6, {}),
    ("transe_l2", 6, {}),
    ("transh", 6, {}),
    ("distmult", 6, {}),
    ("complex", 6, {}),
    ("rotate", 6, {}),
    ("rotate_l2", 6, {}),
    ("simple", 6, {}),
    ("rescal", 4, {}),
    ("tucker", 4, {}),
    ("tucker", 4, {"relation_dim": 3}),
    ("qmult", 8, {}),
    ("quate", 8, {}),
    ("omult", 16, {}),
    ("duale", 16, {}),
    *(("keci", 2 * (1 + p + q), {"p": p, "q": q})
      for p, q in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (2, 3))),
    *(("ckeci", 2 * (1 + p + q), {"p": p, "q": q}) for p, q in ((0, 1), (1, 2))),
    *(("decal", 2 * (1 + p + q + r), {"p": p, "q": q, "r": r})
      for p, q, r in ((1, 1, 1), (0, 0, 2), (2, 1, 2))),
    ("mure", 6, {}),
    ("pairre", 6, {}),
    ("house", 8, {}),
    ("house", 6, {"block": 3, "projections": 0}),
    ("house", 6, {"block": 2, "projections": 2, "reflections": 1}),
    ("pyke", 6, {}),
    ("conve", 12, {"channels": 2}),
    ("conve", 10, {"channels": 2, "height": 2, "kernel_size": 2}),
    ("conex", 8, SMALL_MAPS),
    ("aconex", 8, SMALL_MAPS),
    ("convq", 8, SMALL_MAPS),
    ("convo", 16, {"channels": 2, "kernel_size": 1}),
    ("coke", 8, {"layers": 2, "heads": 2, "feed_forward_dim": 5}),
    ("lfmult", 4, {}),
    ("lfmult", 6, {"degree": 2}),
    ("rote", 6, {}),
    ("roth", 6, {}),
    ("meim", 6, {"partitions": 2}),
    ("meim", 6, {"partitions": 3, "relation_dim": 3}),
    ("operator", 6, {}),
    ("operator", 6, {"comparator": "cosine", "temperature": 0.2}),
    *(("operator", 4, {"head": head, "tail": tail, "comparator": comparator,
                       "temperature": temperature})
      for head, tail, comparator, temperature in (
          ("translation", "identity", "dot", 1.0), ("translation", "diagonal", "dot", 0.5),
          ("complex", "translation", "dot", 0.5), ("linear", "linear", "dot", 1.0),
          ("identity", "diagonal", "dot", 1.0), ("translation", "identity", "cosine", 0.5),
          ("diagonal", "translation", "cosine", 1.0), ("identity", "linear", "cosine", 0.5),
          ("translation", "translation", "l2", 0.5), ("identity", "complex", "l2", 1.0),
          ("linear", "identity", "l2", 1.0))),
]  # fmt: skip


def identify(case):
    name, _, options = case
    return "-".join([name, *(f"{key}{value}" for key, value in options.items())])


def case_of(name):
    """The first of a scorer's cases."""
    return next(case for case in CASES if case[0] == name)


def directions(case):
    """(side, reciprocal) that a scorer can answer; inverses are nothing to other tail queries."""
    if resolve("scorer", case[0]).needs_reciprocal:
        return [(side, True) for side in SIDES]
    return [("head", False), ("head", True), ("tail", False)]


EVERY = [pytest.param(case, id=identify(case)) for case in CASES]
ONE_EACH = [pytest.param(case_of(name), id=name) for name in SCORERS]
every_case = pytest.mark.parametrize("case", EVERY)
every_scorer = pytest.mark.parametrize("case", ONE_EACH)


def make(case, reciprocal=True, dtype=torch.float64, **shared):
    """A scorer with random parameters, in evaluation mode; biases are part of a case's dim."""
    name, dim, options = case
    torch.manual_seed(0)
    kind = resolve("scorer", name)
    scorer = kind(RELATIONS, dim - 2 * kind.has_biases, reciprocal, **options, **shared)
    scorer = scorer.to(dtype).eval()
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.normal_()
    return scorer


def candidate_scores(scorer, anchor, relation, candidates, side):
    """Scores (C, b, K) of queries against the candidates (C, K, E) of their chunk."""
    return scorer.matrix(scorer.encode(anchor, relation, side), candidates)


def contrast(scorer, anchor, relation, target, candidates, side):
    """Scores of triples (C, b) and of candidates (C, b, K), as a loss gets them."""
    query = scorer.encode(anchor, relation, side)
    return scorer.pairs(query, target), scorer.matrix(query, candidates, exact=False)


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)
