"""Batches of the dense oracle: the triples of a step, their negatives and which of them count.

Only the order of the triples and the random numbers are the package's, as they define the run.

Shapes: B triples per step, K negatives, C chunks, T training triples.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.config import Config
from kge_torchrec.data.batches.staged import StagedBatches
from kge_torchrec.data.negatives import (
    Chunks,
    NegativeSampler,
    UniformSampler,
    random_numbers,
    typed_sampler,
)
from kge_torchrec.data.parts import PartLayout
from kge_torchrec.data.shuffle import EpochShuffle
from kge_torchrec.data.store import TripleStore


def global_batch(
    config: Config,
    store: TripleStore,
    epoch: int,
    step: int,
    staged: StagedBatches | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The batch's triples (B, 3) and, by side, each one's negatives (B, K)."""
    size, options = config.train.batch_size, config.negatives
    sampler: NegativeSampler = UniformSampler(store.num_entities)
    rows = store.train[drawn_triples(config, store, epoch, step, staged)]
    if staged is not None:
        buffer = staged.buffer_at(epoch, step)
        sampler = OfBuffer(staged.layout, buffer)
    if options.sampling == "degree":
        degrees = np.bincount(store.train[:, [0, 2]].reshape(-1), minlength=store.num_entities)
        sums = np.cumsum(
            np.where(degrees > 0, degrees.clip(1) ** options.options_in("options").degree_power, 0)
        )
        sampler = ByWeight(sums)
    chunk = np.arange(len(rows)) // (options.chunk_size or size)
    negatives = {}
    for side in ("head", "tail") if options.sides == "both" else (options.sides,):
        count = (options.head_count if side == "head" else None) or options.count
        place, chunks = (epoch, step, side), range(int(chunk[-1]) + 1)
        numbers = random_numbers(config.seed, place, chunks, count)
        of_chunks = torch.from_numpy(whole_chunks(rows, chunk, options.chunk_size or size))
        restricts = options.among in ("seen", "types")
        typed = typed_sampler(sampler, options, store) if restricts else sampler
        drawn = typed.sample(Chunks(side, numbers, lambda of_chunks=of_chunks: of_chunks)).numpy()
        drawn = drawn[chunk]
        if options.in_batch:
            drawn = np.concatenate([drawn, answers_of_chunks(rows, side, chunk, config)], 1)
        negatives[side] = torch.from_numpy(drawn)
    return torch.from_numpy(rows.astype(np.int64)), negatives


def whole_chunks(rows: np.ndarray, chunk: np.ndarray, size: int) -> np.ndarray:
    """(C, size, 3) the triples of each chunk, repeated where the batch cuts it short."""
    parts = [rows[chunk == number] for number in range(chunk[-1] + 1)]
    return np.stack([np.resize(part, (size, 3)) for part in parts]).astype(np.int64)


def suits(
    config: Config, store: TripleStore, rows: Tensor, side: str, candidates: Tensor
) -> Tensor:
    """(B, K) bool: by the definition, which candidates are of the kind that negatives are to be."""
    options, column = config.negatives, 0 if side == "head" else 2
    train, label = store.train.tolist(), store.entities.labels(range(store.num_entities))
    types: dict[str, set] = {}
    if options.among == "types":
        for line in Path(store.report["types"]["source"]).read_text("utf-8").splitlines():
            entity, of = line.split("\t")
            types.setdefault(entity, set()).add(of)
    of_all = Counter(of for name in label for of in types.get(name, ()))
    good = torch.ones(candidates.shape, dtype=torch.bool)
    count = (options.head_count if side == "head" else None) or options.count
    held = candidates.shape[1]
    if options.among_share < 1:
        held = max(1, round(options.among_share * count))
    for i, row in enumerate(rows.tolist()):
        right = set(range(store.num_entities))
        if options.among == "seen":
            right = {triple[column] for triple in train if triple[1] == row[1]}
        elif options.among == "types":
            own = [of for of in types.get(label[row[column]], ()) if of_all[of] > 1]
            rarest = min(sorted(own, reverse=True), key=of_all.get, default=None)
            right = {e for e in right if rarest in types.get(label[e], ())}
        if len(right) > 1:
            good[i, :held] = torch.tensor([e in right for e in candidates[i, :held].tolist()])
    return good


def drawn_triples(
    config: Config, store: TripleStore, epoch: int, step: int, staged: StagedBatches | None
) -> np.ndarray:
    """Return the (B,) indices of the training triples of each step."""
    if staged is not None:
        start, count = staged.positions(epoch, step)
        return staged.order(epoch)(np.arange(start, start + count))
    size, count = config.train.batch_size, len(store.train)
    order = EpochShuffle(count, config.seed, epoch)
    return order(np.arange(step * size, min((step + 1) * size, count)))


class OfBuffer(NegativeSampler):
    """Takes entities of some parts alike, in the order of ids of each part."""

    def __init__(self, layout: PartLayout, buffer: tuple[int, ...]):
        ids = np.arange(layout.num_entities)
        parts = layout.part_of(ids)
        own = [ids[parts == part] for part in sorted(buffer)]
        self.ids = torch.from_numpy(np.concatenate(own))

    def sample(self, chunks: Chunks) -> Tensor:
        return self.ids[(chunks.numbers * len(self.ids)).long()]


def weights_of(
    config: Config, store: TripleStore, epoch: int, step: int, staged: StagedBatches | None
) -> Tensor:
    """(B,) of the triples of a step; over an epoch their mean is 1 / B."""
    index = drawn_triples(config, store, epoch, step, staged)
    weights = torch.ones(len(index), dtype=torch.float64)
    if config.data.weights == "loss":
        all_weights = torch.from_numpy(np.array(store.weights("train"))).double()
        weights = all_weights[index] / all_weights.mean()
    return weights / len(index)


def answers_of_chunks(rows: np.ndarray, side: str, chunk: np.ndarray, config: Config) -> np.ndarray:
    """The answers of each triple's chunk, as often as make a whole one: (B, chunk size)"""
    answers, size = rows[:, 0 if side == "head" else 2], config.negatives.chunk_size
    of_chunk = [answers[chunk == number].tolist() for number in chunk]
    size = size or config.train.batch_size
    return np.array([(result * size)[:size] for result in of_chunk], np.int64)


def same_relation(config: Config, rows: Tensor, drawn: Tensor) -> Tensor:
    """(B, K) bool: drawn, or the answer of a triple of the chunk with the relation of the row."""
    chunk = np.arange(len(rows)) // (config.negatives.chunk_size or len(rows))
    as_answers = rows.numpy()[:, [1, 1, 1]]  # the relation in the place of the answer
    relations = torch.from_numpy(answers_of_chunks(as_answers, "tail", chunk, config))
    mask = torch.ones(drawn.shape, dtype=torch.bool)
    mask[:, -relations.shape[1] :] = relations == rows[:, 1:2]
    return mask


def log_expected(config: Config, store: TripleStore, side: str, entities: Tensor) -> Tensor:
    """Log of how often each of the entities (B, K) is expected among a query's candidates."""
    options, triples, count = config.negatives, store.train, store.num_entities
    ends = np.stack([np.bincount(triples[:, column], minlength=count) for column in (0, 2)])
    chance = np.full(count, 1 / count)
    if options.sampling == "degree":
        weights = np.where(
            ends.sum(0) > 0, ends.sum(0).clip(1) ** options.options_in("options").degree_power, 0
        )
        chance = weights / weights.sum()
    drawn = (options.head_count if side == "head" else None) or options.count
    expected = drawn * chance
    if options.in_batch:
        size = options.chunk_size or config.train.batch_size
        others = (size - 1) / (len(triples) - 1)  # without the triple itself
        expected = expected + others * ends[0 if side == "head" else 1]
    return torch.from_numpy(expected).log()[entities]


class ByWeight(NegativeSampler):
    """Entities by the sums of their weights, all in memory."""

    def __init__(self, sums: np.ndarray):
        self.sums = sums

    def sample(self, chunks: Chunks) -> Tensor:
        targets = chunks.numbers.numpy() * self.sums[-1]
        return torch.from_numpy(np.searchsorted(self.sums, targets, side="right"))
