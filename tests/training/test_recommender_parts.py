"""Parts of recommender systems: presets, and the correction of in-batch negatives."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from training_runs import fit, largest_difference, parameters, small_store
from worlds import run_world

from kge_torchrec.config.parser import load_config
from kge_torchrec.data.negatives import Chunks, InBatchSampler, UniformSampler
from kge_torchrec.models.losses import SoftmaxLoss

PRESETS = ("twhin", "gigl")
SMALL = {"device": "cpu", "threads": 1, "model.dim": 8, "negatives.count": 6,
         "negatives.chunk_size": 8, "train.batch_size": 32, "train.epochs": 6,
         "train.log_every": 1, "evaluation.every": 0,
         "run.progress": False, "run.trackers.tensorboard": False}  # fmt: skip


def rank_trains(store: Path, folder: Path) -> dict:
    out = {}
    for name in PRESETS:
        values = {"data.path": str(store), "run.dir": str(folder / name), **SMALL}
        config, starts = load_config(name, values), []

        def remember_start(loop, starts=starts) -> None:
            starts.append(parameters(loop.session))
            loop._save = lambda ends=False: None

        session = fit(config, remember_start)
        lines = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
        losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
        out[name] = starts[0], session.parameters, losses
    return out


@functools.cache
def trained(world_size: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        return run_world(world_size, rank_trains, small_store(), Path(folder))[0]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_train_alike_on_one_and_two_ranks(name):
    start, end, losses = trained(1)[name]
    assert all(largest_difference({k: start[k]}, {k: end[k]}) > 1e-3 for k in start)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert largest_difference(end, trained(2)[name][1]) < 1e-5


# log_q


def degrees_of(tails: np.ndarray, entities: int) -> dict[str, np.ndarray]:
    return dict.fromkeys(("head", "tail"), np.bincount(tails, minlength=entities))


@pytest.mark.parametrize(("corrected", "count"), [(True, 0), (True, 3), (False, 3)])
def test_the_corrected_sum_of_a_batch_is_that_of_all_entities_on_average(count, corrected):
    """For a query of the batch, over 20,000 batches without replacement; a popular item has more.

    With uniform candidates besides, the two are one mixture, so items of no triple count too.
    """
    random, entities, size = np.random.default_rng(0), 6, 4
    tails = np.repeat(np.arange(5), [1, 2, 3, 5, 9])  # entity 5 has no triple
    triples = torch.from_numpy(np.stack([tails, 0 * tails, tails], 1))
    sampler = InBatchSampler(UniformSampler(entities), degrees_of(tails, entities))
    weight, own, total = np.exp(random.normal(size=entities)), 4, []
    others = np.flatnonzero(np.arange(len(tails)) != len(tails) - 1)  # the query has the last
    for _ in range(20_000):
        drawn = np.append(random.permutation(others)[: size - 1], len(tails) - 1)
        numbers = torch.from_numpy(random.random((1, count)))
        chunks = Chunks("tail", numbers, lambda drawn=drawn: triples[drawn][None])
        ids = sampler.sample(chunks)
        expected = sampler.expected(chunks, ids) if corrected else torch.ones(ids.shape)
        ids, expected = ids.numpy(), expected.numpy()
        total.append((weight[ids] / expected * (ids != own)).sum())
    exact = weight[[0, 1, 2, 3] if count == 0 else [0, 1, 2, 3, 5]].sum()
    error = abs(np.mean(total) - exact) / exact
    assert error < 0.02 if corrected else error > 0.1


def test_gradient_of_a_large_corrected_batch_is_that_of_the_full_softmax():
    torch.manual_seed(0)
    random, entities = np.random.default_rng(0), 8
    tails = random.choice(entities, 4000, p=np.arange(1, 9) / 36)
    triples = torch.from_numpy(np.stack([tails] * 3, 1))[None]
    chunks = Chunks("tail", torch.empty(1, 0), lambda: triples)
    sampler = InBatchSampler(UniformSampler(entities), degrees_of(tails, entities))
    (ids,) = sampler.sample(chunks)
    (log_q,) = sampler.expected(chunks, ids[None]).log()
    answer = 2

    def gradient(candidates, corrections):
        scores = torch.linspace(-1, 1, entities, dtype=torch.float64, requires_grad=True)
        negative, mask = (scores[candidates] - corrections)[None], (candidates != answer)[None]
        SoftmaxLoss()(scores[answer][None], None, negative, mask).sum().backward()
        return scores.grad

    full = gradient(torch.arange(entities), 0)
    torch.testing.assert_close(gradient(ids, log_q), full, rtol=1e-3, atol=1e-3)
    assert (gradient(ids, 0) - full).abs().max() > 0.05
