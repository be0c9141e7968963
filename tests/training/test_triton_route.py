"""The Triton kernels where ranking and training on CUDA call them, forced on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ranking_cases import make_scorer
from training_runs import config_of, fit, largest_difference, tiny_store

from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.kernels import operators
from kge_torchrec.ranking.blocks import ModelScores
from kge_torchrec.ranking.ranks import rank_triples
from kge_torchrec.ranking.search import RankOptions

pytest.importorskip("triton", reason="not on this system")
from kge_torchrec.kernels import triton_pairs, triton_scores

if torch.cuda.is_available():
    pytest.skip("Triton's interpreter is off", allow_module_level=True)


@contextmanager
def kernels_of_triton() -> Iterator[Counter[str]]:
    """Use them as on CUDA, and count the calls of each."""
    calls: Counter[str] = Counter()

    def counted(module, name: str) -> None:
        kernel = getattr(module, name)

        def call(*arguments):
            calls[name] += 1
            return kernel(*arguments)

        held.enter_context(patch.object(module, name, call))

    usual = operators.IMPLEMENTATION["distances"]
    replaced = {
        "pairs": lambda x: usual(x) if torch.is_grad_enabled() else "torch",
        "distances": lambda x: usual(x) if torch.is_grad_enabled() else "triton",
        "products": lambda x: "torch" if torch.is_grad_enabled() else "triton",
        "full_scores": lambda x: "triton",
    }
    with ExitStack() as held:
        counted(triton_pairs, "distances")
        counted(triton_pairs, "products")
        counted(triton_scores, "normalizers")
        counted(triton_scores, "gradients")
        held.enter_context(patch.dict(operators.IMPLEMENTATION, replaced))
        yield calls


@pytest.mark.parametrize("name", ["transe_l1", "mure"])
def test_ranking_finds_the_same_ranks_and_ties(name):
    """Every row occurs twice, far apart."""
    half, stream = 600, np.random.default_rng(1)
    scorer = make_scorer(name, 3, 8)
    rows = torch.randn(half, scorer.row_dim, generator=torch.Generator().manual_seed(2)).repeat(
        2, 1
    )
    if scorer.bias_columns:
        rows[half:, -2:] = rows[:half, -2:]
    triples = np.stack([stream.integers(size, size=25) for size in (2 * half, 3, 2 * half)], 1)
    shard = EntityShard(rows, 0, 2 * half)
    usual = rank_triples(ModelScores(scorer, shard), triples, None)
    for block_bytes in (None, 4 * 64 * 700):
        with kernels_of_triton() as calls:
            ranks = rank_triples(
                ModelScores(scorer, shard), triples, None, RankOptions(block_bytes=block_bytes)
            )
        assert calls["distances"] >= 2
        for kind in ("optimistic", "pessimistic"):
            assert np.array_equal(ranks.values("both", kind), usual.values("both", kind))
        behind = ranks.values("both", "pessimistic") - ranks.values("both", "optimistic")
        assert (behind >= 1).all()


def test_ranking_by_products_takes_their_kernel():
    """In the interpreter numpy multiplies, so last bits, and a place, may differ."""
    stream, scorer = np.random.default_rng(1), make_scorer("complex", 3, 8)
    triples = np.stack([stream.integers(size, size=25) for size in (600, 3, 600)], 1)
    shard = EntityShard(torch.randn(600, 8), 0, 600)
    usual = rank_triples(ModelScores(scorer, shard), triples, None).values("both", "realistic")
    with kernels_of_triton() as calls:
        ranks = rank_triples(ModelScores(scorer, shard), triples, None).values("both", "realistic")
    assert calls["products"] >= 4 and np.abs(ranks - usual).max() <= 1


@pytest.mark.parametrize(("loss", "kept"), [("bce", True), ("softmax", False)])
def test_training_against_all_entities_is_the_same(tmp_path, loss, kept):
    """Scores that are not kept are computed twice by softmax: first by tiles."""
    store = tiny_store(tmp_path / "store", entities=13, train=20, held_out=2).path
    options = {"negatives__regime": "1vsall" if loss == "softmax" else "kvsall",
               "loss__name": loss, "model__scorer": "transe_l1", "train__epochs": 1}  # fmt: skip

    def in_blocks(loop):
        loop.pipeline.block_bytes = 4 * 32 * 4
        loop.pipeline.kept_bytes *= kept

    usual = fit(config_of(store, tmp_path / "usual", **options), in_blocks)
    with kernels_of_triton() as calls:
        forced = fit(config_of(store, tmp_path / "forced", **options), in_blocks)
    assert largest_difference(usual.parameters, forced.parameters) < 1e-5
    assert calls["normalizers"] == calls["gradients"] > 3
    assert (calls["distances"] > 0) == (loss == "softmax" and not kept)
