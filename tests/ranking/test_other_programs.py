"""Ranks of other programs, which ranked the model of tests/small_model.py, against our own.

Constants are what ``scripts/confirm_evaluation.py`` printed: MRR, mean rank, Hits@1, @3 and @10 for
scores that tie, and for the same scores with differences of less than 1e-5. (Those of
dice-embeddings and AmpliGraph are of the script at commit 1dd3a234.) The table "Compare with
a figure of another program" in docs/how-to/evaluate.md has a row for each test here.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import small_model as small
import torch
from ranking_cases import make_scorer, whole

from kge_torchrec.config import EvaluationConfig
from kge_torchrec.data.prepare import prepare
from kge_torchrec.models.scorers import SIDES
from kge_torchrec.ranking.ranks import Ranks, metrics
from kge_torchrec.trained_model import TrainedModel

COLUMNS = ("mrr", "mr", "hits@1", "hits@3", "hits@10")
Figures = tuple[float, ...]

OGB = {  # ogb 1.3.6, Evaluator("ogbl-wikikg2"); it has no mean rank
    "tied": (0.3229257, None, 0.0, 0.3125, 1.0),
    "untied": (0.3769886, None, 0.125, 0.5, 1.0),
}
PYKEEN = {  # PyKEEN 1.11.1, RankBasedEvaluator: optimistic, realistic, pessimistic
    ("test", "tied"): (
        (0.6382937, 3.4285714, 0.5714286, 0.5714286, 1.0),
        (0.2806839, 5.2142859, 0.0, 0.2857143, 1.0),
        (0.2022676, 7.0, 0.0, 0.2857143, 1.0),
    ),
    ("valid", "tied"): (
        (0.3408333, 5.1, 0.2, 0.2, 1.0),
        (0.1832474, 6.1, 0.0, 0.1, 1.0),
        (0.1544444, 7.1, 0.0, 0.0, 1.0),
    ),
    ("test", "untied"): ((0.3350057, 4.7857143, 0.0714286, 0.4285714, 1.0),) * 3,
    ("valid", "untied"): ((0.2495635, 6.0, 0.1, 0.1, 1.0),) * 3,
}
LIBKGE = {  # LibKGE 9bca31f, EntityRankingJob: best_rank, rounded_mean_rank, worst_rank
    ("test", "filtered"): (
        (0.6741343, 3.625, 0.625, 0.625, 0.9375),
        (0.2042952, 6.5625, 0.0, 0.25, 0.875),
        (0.1634312, 8.9375, 0.0, 0.125, 0.375),
    ),
    ("valid", "filtered"): (
        (0.4335317, 5.25, 0.3333333, 0.3333333, 1.0),
        (0.1781806, 6.8333333, 0.0, 0.1666667, 0.8333333),
        (0.148052, 7.8333333, 0.0, 0.0, 0.75),
    ),
    ("valid", "filtered_with_test"): (
        (0.4376984, 5.1666667, 0.3333333, 0.3333333, 1.0),
        (0.1982203, 6.5833333, 0.0, 0.1666667, 0.8333333),
        (0.1743146, 7.4166667, 0.0, 0.0833333, 0.75),
    ),
}  # the same for untied scores: differences below 1e-5 are ties
DICE = {  # dice-embeddings 0.3.3, Evaluator, NegSample and KvsAll alike; it has no mean rank
    ("test", "tied"): (0.2957183, None, 0.0625, 0.375, 0.75),
    ("valid", "tied"): (0.2147817, None, 0.0, 0.1666667, 1.0),
    ("test", "untied"): (0.2917726, None, 0.125, 0.3125, 0.8125),
    ("valid", "untied"): (0.2599266, None, 0.0833333, 0.25, 0.8333333),
}
AMPLIGRAPH = {  # AmpliGraph 2.2.0, evaluate(use_filter=...), tied and untied scores alike
    "worst": (0.2022676, 7.0, 0.0, 0.2857143, 1.0),
    "worst s+o": (0.114966, 13.0, 0.0, 0.0, 0.2857143),
    "middle": (0.3430556, 4.7857143, 0.1428571, 0.2857143, 1.0),
}

Ours = Callable[..., Ranks]


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Ours:
    """Rank a split, or triples of it as triples of one's own, of one of four models."""

    def model(scores: str, drop_unseen: bool) -> TrainedModel:
        splits = small.splits_of_trained() if drop_unseen else small.SPLITS
        store = prepare(splits, tmp_path_factory.mktemp("graph") / "store")
        scorer = make_scorer("distmult", store.num_relations, small.DIM)
        relations = small.relation_rows(store.relations.array.to_pylist())
        with torch.no_grad():
            for parameter in scorer.parameters():  # as many rows more if there are inverses
                parameter.copy_(torch.from_numpy(relations).repeat(len(parameter) // 3, 1))
        rows = small.entity_rows(store.entities.array.to_pylist(), scores == "untied")
        return TrainedModel(scorer, whole(torch.from_numpy(rows)), store)

    models = {(s, drop): model(s, drop) for s in ("tied", "untied") for drop in (False, True)}

    def rank(split, scores="tied", *, drop_unseen=False, as_triples=False, **evaluation) -> Ranks:
        of = models[scores, drop_unseen]
        name = None if as_triples else split
        return of.ranks_of(of.store.split(split), name, EvaluationConfig(**evaluation))

    return rank


def figures(ranks: Ranks, kind: str) -> Figures:
    of_both = metrics(ranks)["both"][kind]
    return tuple(of_both[column] for column in COLUMNS)


def agree(first: Figures, second: Figures) -> bool:
    """Return whether two figures are equal where both have one."""
    pairs = zip(first, second, strict=True)
    return all(x == pytest.approx(y, abs=1e-6) for x, y in pairs if None not in (x, y))


KINDS = ("optimistic", "realistic", "pessimistic")


def test_ogb(ours, tmp_path):
    """The data set's lists, unfiltered, and the mean of the best and the worst rank."""
    triples = np.array(small.SPLITS["test"])
    lists = {f"{side}_neg": np.array([*map(list, small.CANDIDATES[side])]) for side in SIDES}
    columns = dict(zip(("head", "relation", "tail"), triples.T, strict=True))
    np.savez(tmp_path / "lists.npz", **lists, **columns)
    options = {"candidate_file": str(tmp_path / "lists.npz")}
    for scores, expected in OGB.items():
        among_lists = ours("test", scores, candidates="fixed", **options)
        assert agree(figures(among_lists, "realistic"), expected)
        assert figures(ours("test", scores), "realistic")[0] < expected[0]  # among all entities


@pytest.mark.parametrize(("split", "scores"), PYKEEN)
def test_pykeen(ours, split, scores):
    """It leaves out triples with entities that train lacks; valid is filtered without test."""
    ranks = ours(split, scores, drop_unseen=True)
    for kind, expected in zip(KINDS, PYKEEN[split, scores], strict=True):
        assert agree(figures(ranks, kind), expected)
        assert not agree(figures(ours(split, scores), kind), expected)


@pytest.mark.parametrize(("split", "metric"), LIBKGE)
def test_libkge(ours, split, metric):
    """filtered_with_test, by which LibKGE selects models, has test in the filter for valid too."""
    best, rounded, worst = LIBKGE[split, metric]
    with_test = metric == "filtered_with_test"
    ranks = ours(split, as_triples=with_test)
    assert agree(figures(ranks, "optimistic"), best)
    assert agree(figures(ranks, "pessimistic"), worst)
    up = np.ceil(ranks.values("both", "realistic"))
    assert agree(((1 / up).mean(), up.mean(), *((up <= k).mean() for k in (1, 3, 10))), rounded)
    assert figures(ranks, "realistic")[0] > rounded[0]
    # Small differences are ties for LibKGE, and not for us.
    assert not agree(figures(ours(split, "untied", as_triples=with_test), "optimistic"), best)


@pytest.mark.parametrize(("split", "scores"), DICE)
def test_dice_embeddings(ours, split, scores):
    """Test is in the filter for valid too; the order of a sort decides about ties."""
    expected, ranks = DICE[split, scores], ours(split, scores, as_triples=True)
    best, middle, worst = (figures(ranks, kind) for kind in KINDS)
    if scores == "untied":
        assert agree(middle, expected)
    else:
        assert worst[0] < expected[0] < best[0] and not agree(middle, expected)


def test_ampligraph(ours):
    """Pessimistic ranks without entities that train lacks, of scores in thousandths."""
    ranks = ours("test", drop_unseen=True)
    assert agree(figures(ranks, "pessimistic"), AMPLIGRAPH["worst"])
    assert not agree(figures(ours("test"), "pessimistic"), AMPLIGRAPH["worst"])
    untied = ours("test", "untied", drop_unseen=True)
    assert not agree(figures(untied, "pessimistic"), AMPLIGRAPH["worst"])
    # "s+o" ranks heads and tails in one list. "middle" is better than the mean of best and worst.
    joint = ranks.pessimistic["head"] + ranks.pessimistic["tail"] - 1
    assert AMPLIGRAPH["worst s+o"][:2] == pytest.approx(((1 / joint).mean(), joint.mean()))
    assert AMPLIGRAPH["middle"][0] > figures(ranks, "realistic")[0]


def test_dgl_ke_counts_known_answers(ours):
    """DGL-KE takes 1 from the log-sigmoid of known answers, so some of them still rank higher.

    The rule is read from its source. Its evaluation needs dgl 0.4 and was not run.
    """
    known = {triple for triples in small.SPLITS.values() for triple in triples}
    labels, worse = list(small.ENTITIES), []
    rows = small.entity_rows(labels)
    for side, place in (("head", 0), ("tail", 2)):
        ranks = ours("train").pessimistic[side]
        for triple, rank in zip(small.SPLITS["train"], ranks, strict=True):
            others = [(*triple[:place], label, *triple[place + 1 :]) in known for label in labels]
            query = rows[labels.index(triple[2 - place])] * small.relation_rows([triple[1]])[0]
            scores = -np.logaddexp(0, -(rows @ query))
            true = scores[labels.index(triple[place])]
            worse.append(1 + (scores - others >= true).sum() - rank)
    assert min(worse) == 0 and max(worse) > 0  # and equal to pessimistic ranks elsewhere


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "package"),
    [("ogb", "ogb"), ("pykeen", "pykeen"), ("libkge", "kge")],
)
def test_programs_still_print_the_constants(program, package):
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed; CONTRIBUTING.md says how")
    script = Path(__file__).parents[2] / "scripts" / "confirm_evaluation.py"
    done = subprocess.run(
        [sys.executable, script, program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    for scores in ("tied", "untied"):
        expected, results = constants(program, scores), printed[scores]
        assert results.keys() == expected.keys()
        for name, values in results.items():
            assert agree(tuple(values.get(column) for column in COLUMNS), expected[name]), name


def constants(program: str, scores: str) -> dict[str, Figures]:
    """Return the constants of a program by the names that the script gives them."""
    splits, rules = ("valid", "test"), ("best_rank", "rounded_mean_rank", "worst_rank")
    if program == "ogb":
        return {"test": OGB[scores]}
    names, of_program = (
        (KINDS, {split: PYKEEN[split, scores] for split in splits})
        if program == "pykeen"
        else (rules, {f"{split}_{metric}": of for (split, metric), of in LIBKGE.items()})
    )
    return {
        f"{split} {name}": value
        for split, values in of_program.items()
        for name, value in zip(names, values, strict=True)
    }
