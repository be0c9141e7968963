"""Negatives are in range, have the configured frequency, and follow from their position."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_batches import suits
from training_runs import config_of, random_triples, shared_folder

from kge_torchrec.config import NegativesConfig
from kge_torchrec.data.negatives import (
    Chunks,
    DegreeSampler,
    FilteredSampler,
    UniformSampler,
    random_numbers,
    typed_sampler,
)
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.filter_index import FilterIndex


def sampled(sampler, count=1, chunks=range(1), seed=0, place=(0, 0, "head")):
    """(chunks, count) candidates of chunks of a step."""
    return at(sampler, random_numbers(seed, place, chunks, count))


def at(sampler, numbers):
    """The candidates that numbers (C, K) make."""
    drawn = sampler.sample(Chunks("head", torch.as_tensor(numbers), lambda: None))
    assert drawn.dtype == torch.int64
    return drawn.numpy()


def is_plausible(ids, shares):
    """Whether the chi-square of drawn ids lies within 5 standard deviations of its mean."""
    counts = np.bincount(ids.ravel(), minlength=len(shares))
    assert not counts[shares == 0].any()
    expected, counts = shares[shares > 0] / shares.sum() * ids.size, counts[shares > 0]
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), len(expected) - 1
    return abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


@settings(max_examples=30)
@given(st.integers(1, 100), st.integers(1, 33), st.integers(0, 2**40), st.booleans(), st.data())
def test_any_range_of_chunks_is_a_slice_of_the_whole(entities, count, seed, weighted, data):
    sampler = UniformSampler(entities)
    if weighted:
        sampler = DegreeSampler(np.arange(entities) + 1, 1.0)
    chunks, where = 20, {"seed": seed, "place": (3, 4, "tail")}
    first = data.draw(st.integers(0, chunks))
    some = data.draw(st.integers(0, chunks - first))
    whole = sampled(sampler, count, range(chunks), **where)
    assert whole.shape == (chunks, count)
    assert whole.min() >= 0 and whole.max() < entities
    part = sampled(sampler, count, range(first, first + some), **where)
    np.testing.assert_array_equal(part, whole[first : first + some])


def test_steps_and_chunks_add_no_pattern():
    """One draw each of many chunks, steps and epochs is as uniform as many draws of one."""
    sampler = UniformSampler(20)
    assert is_plausible(sampled(sampler, chunks=range(20_000)), np.ones(20))
    for places in ([(0, i, "head") for i in range(4000)], [(i, 0, "head") for i in range(4000)]):
        ids = np.array([sampled(sampler, place=place) for place in places])
        assert is_plausible(ids, np.ones(20))


@settings(max_examples=30)
@given(data=st.data(), power=st.sampled_from([0.0, 0.5, 0.75, 1.0, 3.0]))
def test_degree_draws_are_places_in_the_sums_of_weights(data, power):
    entities = data.draw(st.integers(1, 200))
    stream = np.random.default_rng(data.draw(st.integers(0, 99)))
    degrees = stream.zipf(1.7, entities) * (stream.random(entities) < 0.5)
    if not degrees.any():
        return
    sums = np.cumsum(np.where(degrees > 0, degrees.clip(1).astype(float) ** power, 0))
    unit = np.concatenate([stream.random(200), [0.0, np.nextafter(1.0, 0.0)]])
    (drawn,) = at(DegreeSampler(degrees, power), unit[None])
    np.testing.assert_array_equal(drawn, np.searchsorted(sums, unit * sums[-1], side="right"))
    assert degrees[drawn].all()  # nobody without a triple
    numbers, ids = torch.zeros(1, 7), torch.arange(entities)[None]
    expected = DegreeSampler(degrees, power).expected(Chunks("head", numbers), ids)
    weights = np.diff(sums, prepend=0)
    np.testing.assert_allclose(expected[0], 7 * weights / sums[-1], rtol=1e-6, atol=1e-9)


def test_filter_leaves_out_facts_and_what_another_sampler_leaves_out():
    facts, nobody = np.array([[0, 0, 1], [0, 0, 2], [3, 0, 4]]), np.zeros((0, 3), np.int64)
    others = UniformSampler(6)
    others.excluded = lambda chunks, triples, candidates: (candidates == 5).expand(len(triples), -1)
    chunks, candidates = Chunks("tail", torch.zeros(1, 6)), torch.arange(6)[None]
    sampler = FilteredSampler(others, FilterIndex.of(facts, nobody))
    excluded = sampler.excluded(chunks, torch.from_numpy(facts[[0, 2]]), candidates)
    assert [row.nonzero().flatten().tolist() for row in excluded] == [[1, 2, 5], [4, 5]]


def test_each_side_step_epoch_chunk_and_seed_draws_differently():
    places = [
        (0, 0, 0, "head", 0), (0, 0, 0, "head", 1), (0, 0, 0, "tail", 0), (0, 0, 1, "head", 0),
        (0, 1, 0, "head", 0), (1, 0, 0, "head", 0), (2**32, 0, 0, "head", 0),
        (0, 2**32, 0, "head", 0), (0, 0, 2**40, "head", 0),
    ]  # fmt: skip
    drawn = []
    for seed, epoch, step, side, chunk in places:
        where = {"chunks": range(chunk, chunk + 1), "seed": seed, "place": (epoch, step, side)}
        drawn.append(sampled(UniformSampler(1000), 40, **where)[0])
        np.testing.assert_array_equal(drawn[-1], sampled(UniformSampler(1000), 40, **where)[0])
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert (one == other).mean() < 0.2  # by chance 1 in 1000


@pytest.mark.parametrize("entities", [2**24 + 3, 2**31 + 11, 2**33 + 7])
def test_many_entities(entities):
    """torch.multinomial ends at 2^24; float32 would skip odd ids from there on."""
    ids = sampled(UniformSampler(entities), 5000, range(2))
    assert 0 <= ids.min() < entities / 100 and 0.99 * entities < ids.max() < entities
    assert 0.45 < (ids % 2).mean() < 0.55
    assert ids.mean() == pytest.approx(entities / 2, rel=0.05)
    assert at(UniformSampler(entities), [[np.nextafter(1.0, 0.0)]]) == entities - 1


def test_rare_entities_of_a_skewed_graph_are_candidates():
    """A weight that rounds to nothing would leave an entity out for ever."""
    degrees = np.array([1, 0, 10**6, 1])
    draw = DegreeSampler(degrees, 3.0)
    assert (draw.sums.diff(prepend=draw.sums[:1] * 0) > 0).tolist() == [True, False, True, True]
    assert set(at(draw, [[0.0, 0.5, np.nextafter(1.0, 0.0)]])[0]) == {0, 2, 3}


def test_numbers_match_their_recorded_values():
    """A resumed run goes on with the candidates that it would have had."""
    numbers = random_numbers(3, (4, 5, "tail"), range(2, 4), 5)
    assert (numbers * 10**6).long().tolist() == [
        [776228, 689281, 310517, 43292, 711452],
        [797208, 710824, 927352, 656973, 205188],
    ]


# Of a type, or seen with the relation


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
