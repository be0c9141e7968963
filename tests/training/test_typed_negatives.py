"""Negatives among entities that suit: draws by definition; test_exact trains with them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import numpy as np
import pytest
from oracle_batches import suits
from training_runs import (
    config_of,
    random_triples,
    shared_folder,
)

from kge_torchrec.config import Config, ConfigError, NegativesConfig
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.data.negatives import Chunks, UniformSampler
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.entity_types import EntityTypes
from kge_torchrec.data.typed_negatives import (
    FileSampler,
    SeenSampler,
    TypeSampler,
    read_negatives,
    typed_sampler,
)
from kge_torchrec.errors import DataError

VARIANTS = {
    "each its own": {"among": "seen", "chunk_size": 1},
    "types": {"among": "types", "among_options": {"types": "{here}/types.tsv"}},
}


@functools.cache
def the_store() -> Path:
    """Relations of some entities each, types for four entities of five; and wrong triples."""
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
    wrong = [(h, r, f"e{random.integers(31)}") for h, r, _ in triples[:60]]
    lines = ["\t".join(row) + "\n" for row in [*wrong, triples[0], ("e1", "r1", "stranger")]]
    (folder / "wrong.tsv").write_text("".join(lines))
    return prepare({"train": triples}, folder / "store").path


def variant(name: str) -> Config:
    values = repr(VARIANTS[name]).replace("{here}", str(the_store().parent))
    keys = {f"negatives__{key}": value for key, value in ast.literal_eval(values).items()}
    return config_of(the_store(), **keys)


@pytest.mark.parametrize("side", ["head", "tail"])
@pytest.mark.parametrize("name", ["each its own", "types"])
def test_draws_have_the_type_and_cover_all_such_entities(side, name):
    store, config = TripleStore.open(the_store()), variant(name)
    rows = np.asarray(store.train, np.int64)
    types = config.negatives.restriction.types
    others = UniformSampler(store.num_entities)
    sampler = SeenSampler(others, 1.0, store)
    if types is not None:
        sampler = TypeSampler(others, 1.0, EntityTypes.read(types, store))
    unit = (np.arange(997) + 0.5) / 997
    all_entities = np.arange(store.num_entities)[None].repeat(len(rows), 0)
    import torch

    right = suits(
        config, store, torch.from_numpy(rows), side, torch.from_numpy(all_entities)
    ).numpy()
    assert (sampler.fits(side, rows, all_entities) == right).all()
    nothing = 0
    for row, allowed in zip(rows, right, strict=True):
        drawn = sampler.choose(side, np.repeat(row[None], 997, 0), unit)
        if (drawn < 0).any():
            assert (drawn < 0).all() and allowed.all()  # then any entity suits
            nothing += 1
        else:
            assert set(drawn) == set(np.flatnonzero(allowed))
    assert 0 < nothing < len(rows)


def test_own_negatives_belong_to_their_query(caplog):
    """Neither training triples nor strangers; and -1 for a query without any."""
    store = TripleStore.open(the_store())
    path = the_store().parent / "wrong.tsv"
    others, rows = UniformSampler(store.num_entities), np.asarray(store.train, np.int64)
    own = FileSampler(others, 1.0, read_negatives(path, store), store)
    assert "1 triples have labels that are not in the graph" in caplog.text
    assert "own negatives are training triples; left out" in caplog.text
    lines = [tuple(line.split("\t")) for line in path.read_text().splitlines()]
    entity, relation = store.entities.array.to_pylist(), store.relations.array.to_pylist()
    true = {(entity[h], relation[r], entity[t]) for h, r, t in rows.tolist()}
    unit = (np.arange(200) + 0.5) / 200
    for h, r, t in rows.tolist():
        for side, at in (("tail", 2), ("head", 0)):
            drawn = own.choose(side, np.array([[h, r, t]] * 200), unit)
            ends = (entity[h], relation[r], entity[t])
            wrong = {
                line[at] for line in set(lines) - true
                if line[1] == ends[1] and line[2 - at] == ends[2 - at] and line[at] in entity
            }  # fmt: skip
            assert {entity[i] for i in drawn if i >= 0} == wrong
            assert (drawn < 0).all() == (not wrong)


def test_share_of_negatives_is_typed_and_others_do_not_change():
    store = TripleStore.open(the_store())
    others = UniformSampler(store.num_entities)
    config = NegativesConfig(among="seen", among_options={"share": 0.3})
    sampler = typed_sampler(others, config, store)
    random, rows = np.random.default_rng(0), np.asarray(store.train[:20], np.int64)
    chunks = Chunks("tail", random.random((4, 10)), lambda: rows.reshape(4, 5, 3))
    ids, before = sampler.sample(chunks), others.sample(chunks)
    assert (ids[:, 3:] == before[:, 3:]).all() and (ids[:, :3] != before[:, :3]).any()
    assert not sampler.excluded(chunks, rows, ids)[:, 3:].any()


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"regime": "kvsall"}, "takes every entity, or with types every entity of a type, as a"),
        ({"regime": "kvssample"}, "draws for all queries of a batch together; use sampled"),
        ({"log_q": True}, "negatives.log_q: with negatives.among seen"),
        ({"sampling": "degree"}, "draws uniformly; set uniform, or negatives.among_options.sh"),
        ({"among": "own"}, "negatives.among own needs negatives.among_options.file"),
        ({"among": "none"}, "negatives.among must be one of"),
        ({"among_options": {"share": 0.0}}, "negatives.among_options.share"),
    ],
)
def test_invalid_combinations_are_rejected(keys, said):
    settings = {f"negatives.{key}": value for key, value in {"among": "seen", **keys}.items()}
    loss = {"loss.name": "softmax"}
    with pytest.raises(ConfigError) as caught:
        config_from_dict({**loss, **settings})
    assert said in str(caught.value)


def test_missing_types_and_files_are_reported(tmp_path):
    store = TripleStore.open(the_store())
    others = UniformSampler(store.num_entities)
    with pytest.raises(DataError, match="has no types of entities: prepare it again with --types"):
        typed_sampler(others, NegativesConfig(among="types"), store)
    (tmp_path / "x.tsv").write_text("no\tsuch\tlabel\n")
    config = NegativesConfig(among="own", among_options={"file": str(tmp_path / "x.tsv")})
    with pytest.raises(DataError, match="none of its 1 triples is of labels in the graph"):
        typed_sampler(others, config, store)
