"""Losses without a closed form: they train in every training type, on any number of ranks.

Runs equal the dense oracle, where such a loss is the mean over a query's answers.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import foreign_parts
import numpy as np
import oracle_full_candidates
import oracle_training
import pytest
import torch
from ranking_cases import make_known
from recorded_steps import CPU, ENTITIES, Recorder, objective_of
from torch.distributed.tensor import DTensor
from training_runs import config_of, fit, largest_difference, parameters, shared_folder, tiny_store
from worlds import run_world

from kge_torchrec.config import TrainConfig
from kge_torchrec.data.batches import BatchPlan
from kge_torchrec.data.batches.queries import EveryQuery, QueryBatches, TripleQueries
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.models.full_losses import FullSoftmax
from kge_torchrec.models.losses import Loss, SelfAdversarialLoss, SoftmaxLoss
from kge_torchrec.training.full_candidates import FullCandidates
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session

FOREIGN, SCALED = "foreign_parts:MeanGap", "foreign_parts:Scaled"
# With 5 queries at once, or all of them ("whole").
RUNS = {
    "sampled": {"negatives__regime": "sampled", "negatives__count": 6},
    "kvssample": {"negatives__regime": "kvssample", "negatives__count": 9},
    "kvsall": {"negatives__regime": "kvsall", "loss__n3": 0.01},
    "kvsall whole": {"negatives__regime": "kvsall", "model__reciprocal": False},
    "1vsall": {"negatives__regime": "1vsall", "loss__relation_weight": 0.5},
    "1vsall clipped": {"negatives__regime": "1vsall", "train__clip__norm": 0.1,
                       "train__accumulation": 2, "entities__engine": "handrolled"},
    "bpr kvssample": {"negatives__regime": "kvssample", "loss__name": "bpr"},
    "margin kvsall": {"negatives__regime": "kvsall", "loss__name": "margin"},
    "self_adversarial kvssample": {"negatives__regime": "kvssample",
                                   "loss__name": "self_adversarial"},
}  # fmt: skip
# Not in the oracle: the same on any number of ranks.
MORE = {
    "dropout": {"negatives__regime": "kvsall", "model__dropout__entity": 0.3,
                "model__dropout__hidden": 0.3},
    "dropout of pairs": {"negatives__regime": "1vsall", "model__scorer": "shallom",
                         "model__dropout__hidden": 0.3},
    "learned": {"negatives__regime": "kvsall", "loss__name": SCALED},
    "learned, fsdp": {"negatives__regime": "kvsall", "loss__name": SCALED,
                      "dense__wrapper": "fsdp"},
    "few entities": {"negatives__regime": "1vsall"},
}  # fmt: skip


# One of each regime and way of steps, and a loss with a sharded parameter; the others are slow.
FIRST = ("sampled", "kvssample", "kvsall", "1vsall clipped", "dropout", "learned, fsdp")


def tiered(names) -> list:
    return [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in names]


def variant(store: Path, name: str, folder: Path | None = None):
    shared = {"loss__name": FOREIGN, "train__optimizer": "adagrad", "train__lr": 0.1,
              "train__optimizer_options__eps": 1e-3, "train__batch_size": 26,
              "train__epochs": 2}  # fmt: skip
    return config_of(store, folder, **shared | (RUNS | MORE)[name])


@functools.cache
def the_store(few: bool = False) -> Path:
    size = {"entities": 3, "train": 12, "held_out": 1} if few else {"entities": 23, "train": 90}
    return tiny_store(shared_folder() / f"store{few}", **{"held_out": 2} | size).path


def factor_of(session: Session) -> dict[str, torch.Tensor]:
    """The parameter of the loss, if it has one.  Collective."""
    results = dict(session.backend.unwrapped_model.objective.loss.named_parameters())
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in results.items()
    }


def in_small_blocks(loop) -> None:
    loop._save = lambda: setattr(loop.session, "of_loss", factor_of(loop.session))
    if loop.config.negatives.is_full and loop.config.model.reciprocal:
        loop.pipeline.full.kept_bytes, loop.pipeline.full.block_bytes = 16 * 23 * 5, 200


def rank_trains(stores: list[Path], folder: Path, names: list[str]) -> dict:
    """Parameters at the end of every run."""
    out = {}
    for name in names:
        session = fit(variant(stores["few" in name], name, folder / name), in_small_blocks)
        out[name] = session.parameters | session.of_loss
    return out


@functools.cache
def start_of(name: str) -> dict:
    """Initial parameters, in this process."""
    config = variant(the_store("few" in name), name)
    with tempfile.TemporaryDirectory() as folder, processes("cpu") as ranks:
        session = Session(config, RunFolder(folder), ranks)
        return parameters(session) | factor_of(session)


@functools.cache
def trained(world_size: int, first: bool) -> dict:
    """The ends of the runs of one tier."""
    stores = [the_store(), the_store(True)]
    names = [*MORE] if world_size == 1 else [*RUNS, *MORE]
    names = [name for name in names if (name in FIRST) == first]
    with tempfile.TemporaryDirectory() as folder:
        first, *others = run_world(world_size, rank_trains, stores, Path(folder), names)
    for other in others:
        assert all(largest_difference(first[name], other[name]) == 0 for name in names)
    return first


@functools.cache
def trained_alone() -> dict:
    """The end of RUNS on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        return run_world(1, rank_trains, [the_store(), the_store(True)], Path(folder), [*RUNS])[0]


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", tiered(RUNS))
def test_runs_equal_the_dense_oracle(name, world_size):
    config, start = variant(the_store(), name), start_of(name)
    is_sampled = config.negatives.regime == "sampled"
    oracle = oracle_training if is_sampled else oracle_full_candidates
    expected = oracle.train_dense(config, TripleStore.open(the_store()), start)
    assert largest_difference(start, expected) > 0.02  # it learned
    ends = trained_alone() if world_size == 1 else trained(world_size, name in FIRST)
    assert largest_difference(ends[name], expected) < 1e-5


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", tiered(MORE))
def test_runs_do_not_depend_on_the_ranks(name, world_size):
    first = name in FIRST
    one, start = trained(1, first), start_of(name)
    assert largest_difference(one[name], start) > 0.02
    assert largest_difference(one[name], trained(world_size, first)[name]) < 1e-5
    if "learned" in name:  # parameters of a loss are trained like those of a scorer
        assert abs(one[name]["factor"] - start["factor"]) > 1e-3


def gradients_of(loss, batches, kept_bytes: int = 1 << 20) -> dict[str, torch.Tensor]:
    objective = objective_of(("complex", 6, {}), True)
    torch.manual_seed(1)
    engine = Recorder(objective, torch.randn(ENTITIES, 6))
    step = FullCandidates(engine, loss, TrainConfig(), CPU)
    step.full.kept_bytes, step.full.block_bytes = kept_bytes, 150
    results = {"loss": step.progress(batches.epoch(0))}
    return (
        results | {"entities": engine.grad} | {k: p.grad for k, p in objective.named_parameters()}
    )


def some_queries() -> QueryBatches:
    """All queries of a small graph: without answers, with one and with many."""
    triples = np.random.default_rng(0).integers((ENTITIES, 3, ENTITIES), size=(30, 3))
    triples[:6, :2] = 0
    known = make_known(triples, ENTITIES, 3)
    return QueryBatches(EveryQuery(known, ("head", "tail")), BatchPlan(2 * 3 * ENTITIES))


def test_queries_without_answers_add_nothing():
    """Their mean over answers is 0, not NaN; query by query or all at once, in the same order."""
    whole = gradients_of(foreign_parts.MeanGap(), some_queries())
    assert all(value.isfinite().all() for value in whole.values())
    single = gradients_of(foreign_parts.MeanGap(), some_queries(), 1)
    assert largest_difference(whole, single) < 1e-6


def test_autograd_and_closed_forms_compute_the_same_loss():
    """Softmax of one answer, by autograd of ``forward``, equals its closed form."""
    triples = np.random.default_rng(0).integers((ENTITIES, 3, ENTITIES), size=(30, 3))
    batches = QueryBatches(TripleQueries(triples, ("head", "tail")), BatchPlan(30))
    expected = gradients_of(FullSoftmax(ENTITIES), batches)
    assert largest_difference(gradients_of(SoftmaxLoss(), batches), expected) < 1e-6


def test_split_queries_have_their_own_random_numbers():
    (batch,) = some_queries().epoch(0)
    engine = Recorder(objective_of(("complex", 6, {}), True), torch.randn(ENTITIES, 6))
    kept_bytes = 16 * ENTITIES * 7
    step = FullCandidates(engine, foreign_parts.MeanGap(), TrainConfig(), CPU)
    step.full.kept_bytes = kept_bytes
    parts = list(step._parts(batch))
    assert [part.queries for part in parts] == [7] * 9 + [3]
    assert len({part.seed for part in parts}) == 10 and parts[0].seed == batch.seed


def test_several_answers_are_averaged():
    loss, scores = SelfAdversarialLoss(1.0), torch.randn(4, 9, dtype=torch.float64)
    answers = torch.tensor([[1, 1, 0], [0] * 3, [0, 1, 0], [1, 1, 1]], dtype=torch.bool)
    known = torch.nn.functional.pad(answers, (0, 6))
    query, column = known.nonzero().T
    actual = loss.over_answers()(scores[query, column], query, scores, ~known)
    for number, own in enumerate(actual):
        each = [
            loss(scores[number, i].view(1, 1), scores[number][~known[number]][None, None], None)
            for i in known[number].nonzero()[:, 0]
        ]
        expected = torch.stack(each).mean() if each else torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(own, expected)


def test_loss_declares_whether_it_learns_without_answers():
    assert not Loss.learns_without_answers() and not SoftmaxLoss.learns_without_answers()
