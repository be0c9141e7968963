import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kge_torchrec.data import SIDES
from kge_torchrec.data import sort as ordering
from kge_torchrec.data.store.filter_index import (
    Answers,
    FilterIndex,
    anchors_of,
    build_side,
    relations_of,
)

SPLITS = 2


@st.composite
def worlds(draw):
    """Sizes, and two splits of distinct triples, possibly empty."""
    num_entities, num_relations = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    triple = st.tuples(
        st.integers(0, num_entities - 1),
        st.integers(0, num_relations - 1),
        st.integers(0, num_entities - 1),
    )
    splits = [
        np.array(sorted(draw(st.sets(triple, max_size=40))), np.int32).reshape(-1, 3)
        for _ in range(SPLITS)
    ]
    return num_entities, num_relations, splits


def true_answers(splits, side, anchor, relation) -> list[int]:
    """By going through all triples; repeated where several splits hold the triple."""
    results = []
    for head, r, tail in np.concatenate(splits).tolist():
        if r == relation and (head if side == "tail" else tail) == anchor:
            results.append(tail if side == "tail" else head)
    return sorted(results)


@given(world=worlds(), side=st.sampled_from(SIDES))
def test_equal_to_brute_force(world, side):
    num_entities, num_relations, splits = world
    known = FilterIndex.of(*splits)
    anchors, relations = (ids.ravel() for ids in np.mgrid[:num_entities, :num_relations])
    expected = [true_answers(splits, side, a, r) for a, r in zip(anchors, relations, strict=True)]
    answers = known.answers(side, anchors, relations)
    query, entity = answers.all()
    assert query.dtype == entity.dtype == np.int64
    assert (np.diff(query) >= 0).all()
    assert [sorted(entity[query == i].tolist()) for i in range(len(anchors))] == expected
    assert answers.counts.tolist() == [len(own) for own in expected]

    shared = np.arange(-1, num_entities + 1)
    marks = np.array([[e in answers for e in shared] for answers in expected])
    assert (known.contains(side, anchors, relations, shared) == marks).all()
    own = np.broadcast_to(shared, marks.shape)[:, ::-1]
    assert (known.contains(side, anchors, relations, own) == marks[:, ::-1]).all()


@given(world=worlds(), side=st.sampled_from(SIDES), data=st.data())
def test_an_index_lists_every_query_once_with_its_answers(world, side, data):
    num_entities, _num_relations, (rows, _) = world
    index = build_side(side, rows)
    column = 0 if side == "tail" else 2
    expected = sorted({(row[column], row[1]) for row in rows.tolist()})
    queries = [*zip(anchors_of(index.queries), relations_of(index.queries), strict=True)]
    assert queries == expected and len(index.starts) == len(expected) + 1
    for query, start, stop in zip(queries, index.starts[:-1], index.starts[1:], strict=True):
        assert index.answers[start:stop].tolist() == true_answers([rows], side, *query)
    first, stop = sorted(data.draw(st.tuples(*[st.integers(0, num_entities)] * 2)))
    assert queries[index.between(first, stop)] == [q for q in expected if first <= q[0] < stop]


@given(world=worlds())
def test_relations_between_two_entities(world):
    num_entities, _num_relations, splits = world
    known = FilterIndex.of(*splits)
    for head, tail in np.ndindex(num_entities, num_entities):
        expected = [r for h, r, t in np.concatenate(splits).tolist() if (h, t) == (head, tail)]
        assert sorted(known.relations_between(head, tail).tolist()) == sorted(expected)


@given(world=worlds(), side=st.sampled_from(SIDES), data=st.data())
def test_answers_of_a_block_come_in_pieces(world, side, data):
    num_entities, num_relations, splits = world
    known = FilterIndex.of(*splits)
    anchors, relations = (ids.ravel() for ids in np.mgrid[:num_entities, :num_relations])
    first, stop = sorted(data.draw(st.tuples(*[st.integers(0, num_entities)] * 2)))
    results = known.answers(side, anchors, relations)
    twice = Answers.joined([results, results])
    expected = sorted(
        (place + len(anchors) * time, answer)
        for time in range(2)
        for place, query in enumerate(zip(anchors, relations, strict=True))
        for answer in true_answers(splits, side, *query)
        if first <= answer < stop
    )
    assert sorted(zip(*map(list, twice.between(first, stop)), strict=True)) == expected
    size = data.draw(st.integers(1, 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kge_torchrec.data.store.filter_index.PIECE", size)
        pieces = list(twice.pieces(first, stop))
    assert all(0 < len(query) == len(entity) <= size for query, entity in pieces)
    assert sorted(p for piece in pieces for p in zip(*map(list, piece), strict=True)) == expected


@given(world=worlds())
def test_rows_too_wide_for_one_key_sort_the_same(world):
    num_entities, num_relations, splits = world
    columns, sizes = splits[0].T, (num_entities, num_relations, num_entities)
    wide = (1 << 31, 1 << 31, 1 << 31)
    assert ordering.pack(columns, wide) is None
    for narrow, broad in zip(
        ordering.sorted_rows(columns, sizes), ordering.sorted_rows(columns, wide), strict=True
    ):
        assert narrow.dtype == broad.dtype
        assert (narrow == broad).all()


@pytest.mark.parametrize("sizes", [(50, 3, 50), (1 << 31, 1 << 31, 1 << 31)])
@given(seed=st.integers(0, 99), total=st.integers(0, 3000))
def test_repeats_are_the_later_ones(sizes, seed, total):
    rows = np.random.default_rng(seed).integers(0, (50, 3, 50), (total, 3), np.int32)
    first_at, expected = {}, []
    for position, row in enumerate(map(tuple, rows.tolist())):
        if row in first_at:
            expected.append((position, first_at[row]))
        first_at.setdefault(row, position)
    again, first = ordering.repeats(rows.T, sizes)
    assert list(zip(again.tolist(), first.tolist(), strict=True)) == expected


def test_pack_uses_all_64_bits():
    sizes = (1 << 27, 1 << 10, 1 << 27)
    columns = [np.array([0, size - 1], np.int32) for size in sizes]
    key = ordering.pack(columns, sizes)
    assert key.tolist() == [0, (1 << 64) - 1]
    for column, back in zip(columns, ordering.unpack(key, sizes, np.int32), strict=True):
        assert (column == back).all()


def test_ids_too_large_for_a_32_bit_product():
    rows = np.array([[2_999_999, 1999, 2_999_998], [2_147_483, 1, 5]], np.int32)
    known = FilterIndex.of(rows)
    assert known.answers("tail", [2_999_999], [1999]).all()[1].tolist() == [2_999_998]
    assert known.answers("head", [5], [1]).all()[1].tolist() == [2_147_483]


def test_answers_of_few_queries_end_before_the_block():
    """They are searched by numpy, those of many by a compiled search."""
    rows = np.array([[0, 0, tail] for tail in range(9)], np.int32)
    for count in (1, 20):
        answers = FilterIndex.of(rows).answers("tail", np.zeros(count, int), np.zeros(count, int))
        assert answers.between(3, 6)[1].tolist() == [3, 4, 5] * count


def test_no_splits_and_no_queries():
    rows = np.array([[0, 0, 1]], np.int32)
    assert [len(part) for part in FilterIndex.of().answers("tail", [0], [0]).all()] == [0, 0]
    assert not FilterIndex.of().contains("tail", [0], [0], [1]).any()
    nothing = np.empty(0, np.int64)
    known = FilterIndex.of(rows)
    assert [len(part) for part in known.answers("tail", nothing, nothing).all()] == [0, 0]
    assert known.contains("tail", nothing, nothing, [0, 1]).shape == (0, 2)


def test_ids_that_no_triple_has_are_known_for_nothing():
    known = FilterIndex.of(np.array([[0, 0, 1]], np.int32))
    anchors, relations = [-1, 2, 0, 0], [0, 0, -1, 1]
    assert len(known.answers("tail", anchors, relations).all()[0]) == 0
    assert not known.contains("tail", anchors, relations, [0, 1]).any()
