"""Negatives among entities that suit: draws by definition; test_exact trains with them."""

from __future__ import annotations

import ast
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

from kge_torchrec.config import Config, NegativesConfig
from kge_torchrec.data.negatives import (
    Chunks,
    SeenSampler,
    TypeSampler,
    UniformSampler,
    typed_sampler,
)
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.types import EntityTypes
from kge_torchrec.errors import DataError

VARIANTS = {
    "each its own": {"among": "seen", "chunk_size": 1},
    "types": {"among": "types", "among_options": {"types": "{here}/types.tsv"}},
}


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
    return prepare({"train": triples}, folder / "store").path


def variant(name: str) -> Config:
    values = repr(VARIANTS[name]).replace("{here}", str(the_store().parent))
    keys = {f"negatives__{key}": value for key, value in ast.literal_eval(values).items()}
    return config_of(the_store(), **keys)


@pytest.mark.parametrize("side", ["head", "tail"])
@pytest.mark.parametrize("name", ["each its own", "types"])
def test_draws_have_the_type_and_cover_all_such_entities(side, name):
    store, config = TripleStore.open(the_store()), variant(name)
    rows = torch.from_numpy(store.train.astype(np.int64))
    types = config.negatives.restriction.types
    others = UniformSampler(store.num_entities)
    sampler = SeenSampler(others, 1.0, store)
    if types is not None:
        sampler = TypeSampler(others, 1.0, EntityTypes.read(types, store.entities.array))
    unit = (torch.arange(997) + 0.5).double() / 997
    all_entities = torch.arange(store.num_entities).expand(len(rows), -1)
    right = suits(config, store, rows, side, all_entities)
    owner = sampler.owner(side, rows)
    assert torch.equal(sampler.fits(owner, all_entities.contiguous()), right)
    nothing = 0
    for own, allowed in zip(owner, right, strict=True):
        drawn = sampler.choose(own.repeat(997), unit)
        if (drawn < 0).any():
            assert (drawn < 0).all() and allowed.all()  # then any entity suits
            nothing += 1
        else:
            assert set(drawn.tolist()) == set(allowed.nonzero()[:, 0].tolist())
    assert 0 < nothing < len(rows)


def test_share_of_negatives_is_typed_and_others_do_not_change():
    store = TripleStore.open(the_store())
    others = UniformSampler(store.num_entities)
    config = NegativesConfig(among="seen", among_options={"share": 0.3})
    sampler = typed_sampler(others, config, store)
    rows = torch.from_numpy(store.train[:20].astype(np.int64))
    numbers = torch.from_numpy(np.random.default_rng(0).random((4, 10)))
    chunks = Chunks("tail", numbers, lambda: rows.view(4, 5, 3))
    ids, before = sampler.sample(chunks), others.sample(chunks)
    assert (ids[:, 3:] == before[:, 3:]).all() and (ids[:, :3] != before[:, :3]).any()
    assert not sampler.excluded(chunks, rows, ids)[:, 3:].any()


def test_missing_types_are_reported():
    store = TripleStore.open(the_store())
    others = UniformSampler(store.num_entities)
    with pytest.raises(
        DataError, match=r"has no types of entities: prepare it again with data.types"
    ):
        typed_sampler(others, NegativesConfig(among="types"), store)
