"""Mistakes in parts of other packages that training would not notice are errors at its start."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from training_runs import config_of
from worlds import run_world

from kge_torchrec import (
    DataError,
    Loss,
    NegativeSampler,
    Reader,
    Scorer,
    api,
)
from kge_torchrec.config import ConfigError
from kge_torchrec.data.prepare import prepare
from kge_torchrec.distributed.processes import processes
from kge_torchrec.kernels.comparisons import Comparison
from kge_torchrec.models.over_all import OverAll
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


class Mean(Loss):
    def forward(self, positive, query, negative, mask):
        return ((negative * mask).mean(1) - positive).mean()


class ForEachAnswer(Loss):
    """Correct for one answer; it forgets to sum over a query's answers."""

    def forward(self, positive, query, negative, mask):
        others = (negative * mask).mean(1)
        return (others if query is None else others[query]) - positive


class OneAnswer(Loss):
    def forward(self, positive, query, negative, mask):
        return (negative * mask).mean(1) - positive


class NoMask(Loss):
    def forward(self, positive, query, negative, mask):
        return negative.mean(1) - positive


class _Closed(OverAll):
    def partial_statistics(self, scores, answers):
        statistics = scores.new_zeros(3, len(scores))
        statistics[0] = scores.square().sum(1)
        return statistics

    def loss(self, statistics):
        return statistics[0]

    def backward(self, scores, statistics, answers, weight):
        scores.mul_(2 * weight[:, None])


class Total(_Closed):
    def loss(self, statistics):
        return statistics[0].sum()


class Closed(ForEachAnswer):
    def over_all(self, num_entities):
        return _Closed()


class ClosedTotal(ForEachAnswer):
    def over_all(self, num_entities):
        return Total()


@pytest.mark.parametrize(
    "name, regime, words",
    [
        ("Mean", "sampled", r"forward returns shape \(\) where \(3,\) is due"),
        ("ForEachAnswer", "kvssample", r"forward returns shape \(4,\) where \(3,\) is due"),
        ("OneAnswer", "kvssample", r"forward\(.*\) fails: .* mean_over_answers may compute it"),
        ("NoMask", "sampled", "forward ignores mask: .* multiply each candidate's part of"),
        ("ClosedTotal", "kvsall", r"loss returns shape \(\) where \(3,\) is due"),
    ],
)
def test_loss_that_breaks_its_contract_is_refused(store, name, regime, words):
    with pytest.raises(ConfigError, match=rf"loss.name: \S+:{name}: {words}"):
        start(store, loss__name=f"{HERE}:{name}", negatives__regime=regime)


def test_only_the_form_of_the_regime_is_checked(store):
    start(store, loss__name=f"{HERE}:ForEachAnswer")
    start(store, loss__name=f"{HERE}:Closed", negatives__regime="kvsall")


# Scorers


class ByProducts(Comparison):
    """9 - |query - row|^2, of a chunk by products, which round differently."""

    def pairs(self, query, rows):
        return 9 - (query - rows).square().sum(-1)

    def matrix(self, query, rows, index=None, exact=True):
        rows = rows if index is None else rows[index]
        squares = query.square().sum(-1)[..., None] + rows.square().sum(-1)[:, None]
        return 9 - squares + 2 * query @ rows.mT


class Sum(ByProducts):
    """Sums over all queries."""

    def pairs(self, query, rows):
        return 9 - (query - rows).square().sum()


class Shift(ByProducts):
    """Two formulas."""

    def matrix(self, query, rows, index=None, exact=True):
        return super().matrix(query, rows, index, exact) + 1


class Distance(Scorer):
    comparison = ByProducts()

    def query(self, anchor, relation, side):
        return anchor + relation if side == "tail" else anchor - relation


class Summed(Distance):
    comparison = Sum()


class TwoFormulas(Distance):
    comparison = Shift()


class OneSide(Distance):
    """The head query is not t - r."""

    def query(self, anchor, relation, side):
        return anchor + relation


class Wide(Distance):
    """Takes two vectors from a relation row that has the elements of one."""

    def query(self, anchor, relation, side):
        scale, move = relation.split(self.dim, -1)
        return anchor * scale + move


class NotCompared(Scorer):
    def query(self, anchor, relation, side):
        return anchor + relation


class OfDim(Scorer):
    def __init__(self, dim):
        super().__init__(3, dim)


class Forgets(Distance):
    def __init__(self, *args, **kwargs):
        torch.nn.Module.__init__(self)


@pytest.mark.parametrize(
    "name, words",
    [
        ("Summed", r"pairs returns shape \(\) where \(2, 12\) is due"),
        ("TwoFormulas", "matrix and pairs of its comparison give one pair different scores"),
        ("OneSide", "query gives a triple the score .* on side tail and .* on side head; let it"),
        ("Wide", r"query fails for .* relation rows \(2, 3, 8\) .* from relation_dim"),
        ("NotCompared", "has no comparison of queries with rows; give its class one, such as"),
        ("OfDim", r"OfDim cannot be constructed: .*\*args, \*\*kwargs"),
        ("Forgets", "Forgets has no relations; let its __init__ call super"),
    ],
)
def test_scorer_that_breaks_its_contract_is_refused(store, name, words):
    with pytest.raises(ConfigError, match=f"model.scorer: .*{words}"):
        start(store, model__scorer=f"{HERE}:{name}", model__reciprocal=False)


def test_scorer_that_keeps_its_contract_is_accepted(store):
    start(store, model__scorer=f"{HERE}:Distance", model__reciprocal=False)
    start(store, model__scorer=f"{HERE}:OneSide", model__reciprocal=True)


class InitOfLoss(Mean):
    def __init__(self, weight):
        super().__init__()


def test_part_with_another_init_is_refused(store):
    words = r"loss.name: \S+:InitOfLoss cannot be constructed: missing .*'weight'; .* Options"
    with pytest.raises(ConfigError, match=words):
        start(store, loss__name=f"{HERE}:InitOfLoss")


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


def test_sampler_with_another_mask_is_refused(store):
    for name, mask in (("Excludes", r"torch.bool \(4, 16\)"), ("Counts", r"torch.int64 \(8, 16\)")):
        words = rf"{name} returns {mask} from excluded, where a bool tensor \(8, 16\) is due"
        with pytest.raises(ConfigError, match=words):
            start(store, negatives__sampling=f"{HERE}:{name}")


def test_sampler_without_a_method_is_refused(store):
    with pytest.raises(ConfigError, match="Sampler samples nothing; give it a method"):
        start(store, negatives__sampling=f"{HERE}:Sampler")


# Readers


class Ids(Reader):
    def __init__(self, kind=pa.int64()):  # noqa: B008
        self.kind = kind

    def read(self, path):
        ids = pa.array([0, 1], pa.int32()).cast(self.kind)
        yield pa.record_batch([ids, pa.array(["r", "r"]), ids], ["head", "relation", "tail"])


@pytest.mark.parametrize("kind", [pa.int64(), pa.float32(), pa.decimal128(12)])
def test_reader_of_numbers_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("kge_torchrec.data.reading.make_reader", lambda *_: Ids(kind))
    (tmp_path / "graph").write_text("")
    words = re.escape(f"graph: its reader gave the column head as {kind}") + ".*look up the labels"
    with pytest.raises(DataError, match=words):
        prepare(tmp_path / "graph", tmp_path / "s", progress=False)


def test_reader_of_categories_is_accepted(tmp_path, monkeypatch):
    (tmp_path / "graph").write_text("")

    class Categories(Reader):
        def read(self, path):
            column = pa.array(["a", "b"]).dictionary_encode()
            yield pa.record_batch([column] * 3, ["head", "relation", "tail"])

    monkeypatch.setattr("kge_torchrec.data.reading.make_reader", lambda *_: Categories())
    prepare(tmp_path / "graph", tmp_path / "s", {"split.ratio": (1, 0, 0)}, progress=False)


# Ranks


def rank_is_refused(store: Path, run: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        api.train(config_of(store, run, loss__name=f"{HERE}:Mean"))
    return str(caught.value)


def test_every_rank_refuses_and_nothing_is_left(store, tmp_path):
    one, other = run_world(2, rank_is_refused, store, tmp_path / "run")
    assert one == other and "forward returns shape" in one
    assert not (tmp_path / "run").exists()
