"""Parts of a table on disk: which rows they have, and stages in which every triple is trained."""

from __future__ import annotations

import inspect
import mmap
import runpy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kge_torchrec.data import SIDES
from kge_torchrec.data.batches import BatchPlan, Delivery
from kge_torchrec.data.batches.staged import StagedBatches, Stages, sorted_numbers
from kge_torchrec.data.negatives import UniformSampler
from kge_torchrec.data.parts import PAGE, PartLayout, _keeping_stages, stages

SIZES = st.tuples(st.integers(2, 12), st.integers(2, 12)).map(lambda x: (max(x), min(x)))
LAYOUTS = st.builds(
    lambda entities, width, ranks, sizes: PartLayout.of(entities, 4 * width, ranks, *sizes),
    st.integers(1, 5000), st.sampled_from([8, 100, 512, 1024]), st.integers(1, 4), SIZES,
)  # fmt: skip


@given(LAYOUTS)
def test_parts_divide_the_table_into_whole_pages(layout):
    ids = [i for rank in range(layout.world_size) for p in range(layout.parts)
           for i in layout.ids_of(rank, p)]  # fmt: skip
    assert ids == [*range(layout.num_entities)]
    assert layout.sizes.sum() == layout.num_entities
    for part in range(layout.parts):
        assert layout.sizes[part] == (layout.part_of(np.array(ids)) == part).sum()
    for rank in range(layout.world_size):
        own = [i for p in range(layout.parts) for i in layout.ids_of(rank, p)]
        assert own == [*layout.block_of(rank)]


@pytest.mark.parametrize("width", [1, 7, 100, 128, 512, 1000, 1024])
def test_a_part_fills_its_pages(width):
    assert PartLayout.of(12345, 4 * width, 3, 5, 2).part_rows * 4 * width % PAGE == 0


@pytest.mark.parametrize(("of_system", "page"), [(512, 4096), (4096, 4096), (65536, 65536)])
def test_a_page_is_one_that_the_system_can_map(monkeypatch, of_system, page):
    monkeypatch.setattr(mmap, "PAGESIZE", of_system)
    assert runpy.run_path(inspect.getfile(PartLayout))["PAGE"] == page


@given(SIZES)
def test_every_two_parts_meet_and_neighbors_differ_in_one_place(sizes):
    parts, places = sizes
    every = stages(parts, places)
    met = {frozenset((a, b)) for buffer in every for a in buffer for b in buffer}
    assert len(met) == parts * (parts + 1) // 2
    assert all(len(set(buffer)) == places for buffer in every)
    assert all(sum(a != b for a, b in zip(*pair, strict=True)) == 1 for pair in pairwise(every))


@pytest.mark.parametrize(("parts", "places"), [(8, 4), (16, 4), (32, 8), (128, 16), (16, 2)])
def test_exchanges_are_close_to_the_fewest(parts, places):
    # The first buffer has C (C - 1) / 2 of the P (P - 1) / 2 pairs, an exchange adds at most C - 1.
    missing = (parts * (parts - 1) - places * (places - 1)) // 2
    assert len(stages(parts, places)) - 1 <= 1.2 * -(-missing // (places - 1))


@pytest.mark.parametrize(("parts", "places"), [(8, 4), (32, 16), (32, 20), (128, 64)])
def test_parts_take_turns_where_half_of_them_fit(parts, places):
    every = stages(parts, places)
    assert len(every) == len(_keeping_stages(parts, places))
    assert np.bincount(np.ravel(every)).max() <= places + 2 < len(every)


@given(LAYOUTS, st.integers(0, 2**32 - 1))
def test_rows_of_a_buffer_are_those_of_its_parts(layout, seed):
    random = np.random.default_rng(seed)
    every = layout.buffers(seed, int(random.integers(4)))
    buffer = every[random.integers(len(every))]
    if not layout.sizes[list(buffer)].sum():
        return
    ids = layout.entities_of(random.random(50), buffer)
    assert ids.min() >= 0 and ids.max() < layout.num_entities
    assert set(layout.part_of(ids)) <= set(buffer)
    rows = layout.rows_of(ids, buffer)
    rank, row = np.divmod(rows, layout.buffer_rows)
    for i, r, (place, offset) in zip(
        ids, rank, np.stack(np.divmod(row, layout.part_rows), 1), strict=True
    ):
        assert layout.ids_of(r, buffer[place])[offset] == i


def test_all_entities_of_the_buffer_are_drawn_alike_whatever_their_places():
    layout = PartLayout.of(50, 4096, 2, 5, 3)
    numbers = (np.arange(3000) + 0.5) / 3000
    drawn = layout.entities_of(numbers, (4, 0, 2))
    assert np.array_equal(drawn, layout.entities_of(numbers, (0, 2, 4)))
    _, counts = np.unique(drawn, return_counts=True)
    assert len(counts) == 30 and (counts == 100).all()


class Shown(list):
    """A list of the parts that were to be shown."""

    def __call__(self, parts, following):
        self.append((parts, following))


def batches(triples: np.ndarray, entities: int, rank: int = 0, ranks: int = 1, **plan):
    layout = PartLayout.of(entities, 4096, ranks, 6, 3)
    counts = dict.fromkeys(SIDES, 4)
    plan = BatchPlan(batch_size=8, sampler=UniformSampler(entities), counts=counts, **plan)
    return StagedBatches(triples, plan, Delivery(rank, ranks), None, layout, Shown())


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_entities_of_a_batch_are_in_memory(epoch, accumulation):
    triples = np.random.default_rng(1).integers(0, 40, (200, 3))
    made = batches(triples, 40, accumulation=accumulation)
    every = [*made.epoch(epoch)]
    assert len(every) == made.steps_per_epoch * accumulation == len(made.show)
    for batch in every:
        assert int(batch.ids.max()) < made.layout.buffer_rows
    assert [b.ids.tolist() for b in every[5 * accumulation :]] == [
        b.ids.tolist() for b in made.epoch(epoch, 5)
    ]


def test_an_epoch_begins_with_the_buffer_of_the_one_before():
    made = batches(np.random.default_rng(1).integers(0, 40, (200, 3)), 40)
    for epoch in range(3):
        assert len([*made.epoch(epoch)]) == made.steps_per_epoch
    shown, steps = made.show, made.steps_per_epoch
    changes = [at for at, (a, b) in enumerate(pairwise(shown), 1) if a[0] != b[0]]
    assert not {steps, 2 * steps} & {*changes}
    assert len(changes) == 3 * (len(stages(6, 3)) - 1)
    assert all(shown[at - 1][1] == shown[at][0] for at in changes)
    assert all(sum(a != b for a, b in zip(shown[at - 1][0], shown[at][0], strict=True)) == 1
               for at in changes)  # fmt: skip
    assert shown[steps - 1][1] is None


def test_every_part_is_a_candidate_of_every_triple_in_some_epoch():
    layout = PartLayout.of(40, 4096, 1, 6, 3)
    together = np.zeros((6, 6, 6), bool)
    for epoch in range(12):
        for buffer in layout.buffers(0, epoch):
            together[np.ix_(buffer, buffer, buffer)] = True
    assert together.all()


@given(LAYOUTS, st.integers(1, 4), st.integers(0, 2))
def test_passes_follow_each_other_without_an_exchange_between_them(layout, passes, epoch):
    whole = replace(layout, passes=passes).buffers(7, epoch)
    each = [layout.buffers(7, epoch * passes + number) for number in range(passes)]
    assert whole == [*each[0], *(buffer for own in each[1:] for buffer in own[1:])]
    assert all(before[-1] == after[0] for before, after in pairwise(each))
    assert len(whole) == replace(layout, passes=passes).exchanges + 1


@given(
    st.integers(1, 400), st.integers(1, 60), SIZES, st.tuples(st.integers(0, 3), st.integers(1, 3)),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_stages_share_out_all_triples(count, batch_size, sizes, epoch_and_passes, seed):
    epoch, passes = epoch_and_passes
    layout = replace(PartLayout.of(97, 4096, 1, *sizes), passes=passes)
    triples = np.random.default_rng(seed).integers(0, 97, (count, 3))
    plan = BatchPlan(batch_size, 0, SIDES, UniformSampler(97), dict.fromkeys(SIDES, 4))
    made = StagedBatches(triples, plan, Delivery(), None, layout, Shown())
    order, trained = made.order(epoch), []
    for step in range(made.steps_per_epoch):
        start, size = made.positions(epoch, step)
        assert 0 < size <= batch_size
        index = order(np.arange(start, start + size))
        assert {*layout.part_of(triples[index][:, [0, 2]]).ravel()} <= {
            *made.buffer_at(epoch, step)
        }
        trained += index.tolist()
    assert sorted(trained) == [*range(count)]


def test_numbers_are_sorted_in_chunks(monkeypatch):
    for module in ("data.sort", "data.batches.staged"):
        monkeypatch.setattr(f"kge_torchrec.{module}.CHUNK", 7)
    keys = np.random.default_rng(2).integers(0, 9, 100).astype(np.uint8)
    numbers, counts = sorted_numbers(keys, 9)
    assert numbers.tolist() == np.argsort(keys, kind="stable").tolist()
    assert counts.tolist() == np.bincount(keys, minlength=9).tolist()


def test_a_triple_is_in_each_of_its_stages_alike():
    layout, triples = PartLayout.of(60, 4096, 1, 5, 3), np.tile([[1, 0, 2]], (4000, 1))
    made, counts = Stages(layout, triples, 900, 8, 0, 1), []
    for buffer, size in zip(made.buffers, np.diff(made.first), strict=True):
        assert size == 0 or 0 in buffer
        counts += [size] * (0 in buffer)
    assert sum(counts) == 4000 and len(counts) > 1
    assert max(counts) - min(counts) < 5 * np.sqrt(4000)
