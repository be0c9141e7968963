"""Mistakes in parts of other packages that training would not notice are errors at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from foreign_parts import CrossEntropy
from training_runs import config_of
from worlds import run_world

from kge_torchrec import Loss, NegativeSampler, Scorer, api
from kge_torchrec.config import ConfigError
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.kernels.comparisons import InnerProduct
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer

HERE = __name__  # parts below are of this module


def start(store: Path, **changes) -> Trainer:
    """Make everything of a run before its first step."""
    config = config_of(store, "run", **changes)
    with processes("cpu") as ranks:
        session = Session(config, RunFolder("run"), ranks)
        return Trainer(session, session.restore(), None)


# Losses


def loss(form) -> type[Loss]:
    """A loss whose forward is a function."""

    def forward(self, positive, query, negative, mask):
        return form(positive, query, negative, mask)

    return type("Own", (Loss,), {"forward": forward})


Mean = loss(lambda positive, query, negative, mask: ((negative * mask).mean(1) - positive).mean())
OneAnswer = loss(lambda positive, query, negative, mask: (negative * mask).mean(1) - positive)
NoMask = loss(lambda positive, query, negative, mask: negative.mean(1) - positive)


class ForEachAnswer(Loss):
    """Correct for one answer; it forgets to sum over a query's answers."""

    def forward(self, positive, query, negative, mask):
        others = (negative * mask).mean(1)
        return (others if query is None else others[query]) - positive


class Closed(CrossEntropy):
    def over_all(self, num_entities):
        form = super().over_all(num_entities)
        one_by_one = form.loss
        form.loss = lambda statistics: one_by_one(statistics).sum()
        return form


# Scorers


class Summed(InnerProduct):
    """Sums over all queries."""

    def pairs(self, query, rows):
        return super().pairs(query, rows).sum()


class Shifted(InnerProduct):
    """Its two formulas differ."""

    def matrix(self, query, rows, index=None, exact=True):
        return super().matrix(query, rows, index, exact) + 1


class Product(Scorer):
    comparison = InnerProduct()

    def query(self, anchor, relation, side):
        return anchor * relation


class Sum(Product):
    comparison = Summed()


class TwoFormulas(Product):
    comparison = Shifted()


class OneSide(Product):
    """The head query of <h + r, t> is not t + r."""

    def query(self, anchor, relation, side):
        return anchor + relation


class Wide(Product):
    """Takes two vectors from a relation row that has the elements of one."""

    def query(self, anchor, relation, side):
        scale, move = relation.split(self.dim, -1)
        return anchor * scale + move


class Centered(Product):
    """Takes the mean of all anchors away."""

    def query(self, anchor, relation, side):
        return (anchor - anchor.flatten(0, -2).mean(0)) * relation


class Normed(Product):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norm = torch.nn.BatchNorm1d(self.dim)


class NotCompared(Scorer):
    def query(self, anchor, relation, side):
        return anchor + relation


class OfDim(Scorer):
    def __init__(self, dim):
        super().__init__(3, dim)


class Forgets(Product):
    def __init__(self, *args, **kwargs):
        torch.nn.Module.__init__(self)


class InitOfLoss(Mean):
    def __init__(self, weight):
        super().__init__()


# Samplers


class Sampler(NegativeSampler):
    def __init__(self, store, options):
        self.count = store.num_entities


class Excludes(Sampler):
    def sample(self, chunks):
        return (chunks.numbers * self.count).long()

    def excluded(self, chunks, triples, candidates):
        return candidates % 2 == 0  # (C, K), which would be taken for (C, 1, K)


class Counts(Excludes):
    def excluded(self, chunks, triples, candidates):
        return torch.zeros(len(triples), candidates.shape[1], dtype=torch.int64)


@dataclass
class Draw(NegativeSampler):
    """A sampler that breaks one of its promises, or none."""

    store: TripleStore
    options: Draw.Options

    @dataclass(frozen=True)
    class Options:
        how: str = "beyond"

    def sample(self, chunks):
        numbers, how = chunks.numbers, self.options.how
        if how == "own":
            return torch.randint(37, numbers.shape)
        if how == "place":
            return torch.arange(numbers.numel()).view(numbers.shape) % 37
        ids = (numbers * (38 if how == "beyond" else 37)).long()
        others = {"array": ids.numpy(), "type": ids.int(), "shape": ids.ravel()}
        return others.get(how, ids)


class OfTriples(Sampler):
    """Samples among the heads of a chunk."""

    def sample(self, chunks):
        place = (chunks.numbers * chunks.triples.shape[1]).long()
        return chunks.triples[..., 0].gather(1, place)


# The contracts

LOSS, SCORER, SAMPLING = "loss.name", "model.scorer", "negatives.sampling"
KEYS = {SCORER: {"model__reciprocal": False}}
SHARED = {"negatives__regime": "kvssample"}
DUE = r"where torch.int64 \(4, 16\) is due"


def drawn(how: str) -> dict:
    return {"negatives__options": {"how": how}}


MISTAKES = [
    (LOSS, "Mean", {}, r"forward returns shape \(\) where \(3,\) is due"),
    (LOSS, "ForEachAnswer", SHARED, r"forward returns shape \(4,\) where \(3,\) is due"),
    (LOSS, "OneAnswer", SHARED, r"forward\(.*\) fails: .* mean_over_answers may compute it"),
    (LOSS, "NoMask", {}, "forward ignores mask: .* multiply each candidate's part of"),
    (LOSS, "Closed", {"negatives__regime": "kvsall"},
     r"loss returns shape \(\) where \(3,\) is due"),
    (LOSS, "InitOfLoss", {}, "cannot be constructed: missing .*'weight'; .* Options"),
    (SCORER, "Sum", {}, r"pairs returns shape \(\) where \(2, 12\) is due"),
    (SCORER, "TwoFormulas", {}, "matrix and pairs of its comparison give one pair different"),
    (SCORER, "OneSide", {}, "query gives a triple the score .* on side tail and .* on side head"),
    (SCORER, "Wide", {}, r"query fails for .* relation rows \(2, 3, 8\) .* from relation_dim"),
    (SCORER, "Centered", {}, "score of a triple depends on the others of its batch"),
    (SCORER, "Normed", {}, "depends on the others of its batch.* LayerNorm in place of BatchNorm"),
    (SCORER, "NotCompared", {}, "has no comparison of queries with rows; give its class one"),
    (SCORER, "OfDim", {}, r"OfDim cannot be constructed: .*\*args, \*\*kwargs"),
    (SCORER, "Forgets", {}, "Forgets has no relations; let its __init__ call super"),
    (SAMPLING, "Sampler", {}, "Sampler samples nothing; give it a method"),
    (SAMPLING, "Excludes", {}, r"excluded returns torch.bool \(4, 16\) where torch.bool \(8, 16\)"),
    (SAMPLING, "Counts", {}, r"excluded returns torch.int64 \(8, 16\) where torch.bool \(8, 16\)"),
    (SAMPLING, "Excludes", SHARED, r"looks at triples.*use negatives\.regime sampled"),
    (SAMPLING, "OfTriples", SHARED, r"looks at triples.*use negatives\.regime sampled"),
    (SAMPLING, "Draw", drawn("beyond"), r"outside \[0, 37\)"),
    (SAMPLING, "Draw", drawn("own"), "ranks would not agree"),
    (SAMPLING, "Draw", drawn("place"), "ranks would not agree"),
    (SAMPLING, "Draw", drawn("type"), rf"torch.int32 \(4, 16\) {DUE}"),
    (SAMPLING, "Draw", drawn("shape"), rf"torch.int64 \(64,\) {DUE}"),
    (SAMPLING, "Draw", drawn("array"), rf"ndarray {DUE}"),
]  # fmt: skip
RIGHT = [  # only the form of the regime is checked
    (LOSS, "ForEachAnswer", {}),
    (SCORER, "Product", {}),
    (SCORER, "OneSide", {"model__reciprocal": True}),
    (SAMPLING, "OfTriples", {}),
]


@pytest.mark.parametrize(("key", "name", "changes", "words"), MISTAKES)
def test_part_that_breaks_its_contract_is_refused(store, key, name, changes, words):
    changes = {key.replace(".", "__"): f"{HERE}:{name}", **KEYS.get(key, {}), **changes}
    with pytest.raises(ConfigError, match=f"{key}: .*{words}"):
        start(store, **changes)


@pytest.mark.parametrize(("key", "name", "changes"), RIGHT)
def test_part_that_keeps_its_contract_is_accepted(store, key, name, changes):
    start(store, **{key.replace(".", "__"): f"{HERE}:{name}", **KEYS.get(key, {}), **changes})


def test_sampler_that_keeps_its_promises_is_used(store):
    keys = {"negatives__sampling": f"{HERE}:Draw", **drawn("right")}
    mine, ours = (next(start(store, **x).batches.epoch(0)) for x in (keys, {}))
    assert torch.equal(mine.ids.values(), ours.ids.values())


# Ranks


def rank_is_refused(store: Path, run: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        api.train(config_of(store, run, loss__name=f"{HERE}:Mean"))
    return str(caught.value)


def test_every_rank_refuses_and_nothing_is_left(store, tmp_path):
    one, other = run_world(2, rank_is_refused, store, tmp_path / "run")
    assert one == other and "forward returns shape" in one
    assert not (tmp_path / "run").exists()
