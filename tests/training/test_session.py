"""A session: the filters and the precision of its rankings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle_ranking import oracle_ranks
from training_runs import config_of, restored, tiny_store

from kge_torchrec.distributed.processes import processes
from kge_torchrec.environment import allow_tf32
from kge_torchrec.models.scorers import SIDES
from kge_torchrec.ranking.blocks import ModelScores, Queries
from kge_torchrec.ranking.ranks import Ranks, metrics
from kge_torchrec.ranking.search import top_k
from kge_torchrec.training.checkpoints import CheckpointError
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session, load_trained

ALL = ("train", "valid", "test")


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Untrained, over a dense graph: most queries have answers in every split."""
    folder = tmp_path_factory.mktemp("session")
    store = tiny_store(folder / "store", entities=9, relations=1, train=30, held_out=12)
    with processes("cpu") as ranks:
        yield Session(config_of(store.path, folder / "run"), RunFolder(folder / "run"), ranks)


def expected(session: Session, split: str, filtered: tuple[str, ...]) -> dict:
    """Metrics by the definition, the triples of the filtered splits being no candidates."""
    known = [tuple(row) for name in filtered for row in session.store.split(name).tolist()]
    triples = torch.from_numpy(session.store.split(split).astype(np.int64))
    table = session.backend.shard().rows.detach()
    ranks = {side: oracle_ranks(session.scorer, table, triples, known, side) for side in SIDES}
    return metrics(Ranks(*({s: np.array(ranks[s][i]) for s in SIDES} for i in (0, 1))))


def ranked(session: Session, split: str) -> dict:
    """What the model reaches, without the baselines beside it."""
    return {side: values for side, values in session.rank(split).items() if side != "baselines"}


def test_test_ranking_filters_all_splits(session):
    assert ranked(session, "test") == expected(session, "test", ALL)
    assert ranked(session, "train") == expected(session, "train", ALL)
    for fewer in (("valid", "test"), ("train", "test"), ("train", "valid")):
        assert ranked(session, "test") != expected(session, "test", fewer)


def test_validation_does_not_filter_test(session):
    right = expected(session, "valid", ("train", "valid"))
    assert session.validate() == ranked(session, "valid") == right
    assert right != expected(session, "valid", ALL)
    assert right != expected(session, "valid", ("train",))


@pytest.fixture
def tf32_in_training():
    """Training in this process uses TF32; says whether products do."""
    with restored():
        allow_tf32(True)
        yield lambda: torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32


def test_ranking_and_prediction_compute_in_float32(session, tf32_in_training, monkeypatch):
    shard, query, used_tf32 = session.backend.shard(), torch.zeros(3, dtype=torch.int64), []
    matrix = session.scorer.matrix
    monkeypatch.setattr(
        session.scorer,
        "matrix",
        lambda *args: used_tf32.append(tf32_in_training()) or matrix(*args),
    )
    session.validate()
    ranked = len(used_tf32)
    top_k(ModelScores(session.scorer, shard), Queries(query, query, "tail"), 2)
    assert 0 < ranked < len(used_tf32) and not any(used_tf32)
    assert tf32_in_training()


@pytest.mark.parametrize("key", [True, False])
def test_reading_a_model_does_not_change_tf32(session, tf32_in_training, key):
    precision = "tf32" if key else "fp32"
    config = replace(session.config, train=replace(session.config.train, precision=precision))
    allow_tf32(not key)
    with pytest.raises(CheckpointError):  # nothing is saved, and the model is built before
        load_trained(config, session.folder, session.processes)
    assert tf32_in_training() == (not key)
    Session(config, session.folder, session.processes)
    assert tf32_in_training() == key
