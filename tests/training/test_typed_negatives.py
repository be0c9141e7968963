"""Negatives among entities that suit: draws by definition; test_exact trains with them."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle_batches import suits
from training_runs import (
    config_of,
    random_triples,
    shared_folder,
)

from kge_torchrec.config import NegativesConfig
from kge_torchrec.data.negatives import (
    Chunks,
    UniformSampler,
)
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.typed_negatives import typed_sampler
from kge_torchrec.errors import DataError


@functools.cache
def the_store() -> Path:
    """Relations of some entities each, and types for four entities of five."""
    folder = shared_folder()
    random = np.random.default_rng(5)
    relation = random.integers(5, size=100)
    ends = (6 * relation + random.integers(11, size=(2, 100))) % 31
    rows = zip(ends[0], relation, ends[1], strict=True)
    triples = [(f"e{h}", f"r{r}", f"e{t}") for h, r, t in rows] + random_triples(31, 1, 31)
    triples.append(("e3", "alone", "e4"))
    triples = list(dict.fromkeys(triples))
    lines = [f"e{i}\tt{(i * k) % 9}\n" for i in range(31) for k in (1, 3) if i % 5]
    (folder / "types.tsv").write_text("".join([*lines, "e0\tonly this one\n", "e1\tt1\n"]))
    data = {"types": str(folder / "types.tsv")}
    return prepare({"train": triples}, folder / "store", data).path


@pytest.mark.parametrize("side", ["head", "tail"])
@pytest.mark.parametrize("among", ["seen", "types"])
def test_draws_have_the_type_and_cover_all_such_entities(side, among):
    store = TripleStore.open(the_store())
    config = config_of(store.path, negatives__among=among)
    rows = torch.from_numpy(store.train.astype(np.int64))
    sampler = typed_sampler(UniformSampler(store.num_entities), config.negatives, store)
    size = store.num_entities
    every = (torch.arange(size) + torch.arange(len(rows))[:, None]) % size  # in another order each
    right = suits(config, store, rows, side, every)
    unit = (torch.arange(997) + 0.5).double() / 997
    chunks = Chunks(side, unit.expand(len(rows), -1), lambda: rows[:, None])
    assert torch.equal(~sampler.excluded(chunks, rows, every), right)
    for drawn, own, allowed in zip(sampler.sample(chunks), every, right, strict=True):
        assert set(drawn.tolist()) == set(own[allowed].tolist())
    any_suits = right.all(1).sum()
    assert 0 < any_suits < len(rows)
    shared = (~right.all(1)).nonzero()[::25, 0]  # the triples of one chunk
    drawn = sampler.sample(Chunks(side, unit[None], lambda: rows[None, shared]))[0]
    assert set(drawn.tolist()) == set(every[shared][right[shared]].tolist())


def test_share_of_negatives_is_typed_and_others_do_not_change():
    store = TripleStore.open(the_store())
    others = UniformSampler(store.num_entities)
    config = NegativesConfig(among="seen", among_share=0.3)
    sampler = typed_sampler(others, config, store)
    rows = torch.from_numpy(store.train[:20].astype(np.int64))
    numbers = torch.from_numpy(np.random.default_rng(0).random((4, 10)))
    chunks = Chunks("tail", numbers, lambda: rows.view(4, 5, 3))
    ids, before = sampler.sample(chunks), others.sample(chunks)
    assert (ids[:, 3:] == before[:, 3:]).all() and (ids[:, :3] != before[:, :3]).any()
    assert not sampler.excluded(chunks, rows, ids)[:, 3:].any()


def test_missing_types_are_reported(tmp_path):
    store = prepare({"train": [("a", "r", "b")]}, tmp_path / "store")
    others = UniformSampler(store.num_entities)
    with pytest.raises(
        DataError, match=r"has no types of entities: prepare it again with data.types"
    ):
        typed_sampler(others, NegativesConfig(among="types"), store)
