"""Rows and gradients that travel in fewer bytes: what arrives, and what training makes of it."""

from __future__ import annotations

import json
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from training_runs import config_of, fit, largest_difference, tiny_store
from worlds import run_world

from kge_torchrec import api, environment
from kge_torchrec.distributed.traffic import Traffic
from kge_torchrec.embeddings.exchange import (
    GRADIENT_SCALE,
    exchanged,
    packed,
    travel_bytes,
    unpacked,
)
from kge_torchrec.embeddings.torchrec import exchange_codecs


@example(count=2, columns=3, seed=0, size=1e6, gradients=False)
@settings(max_examples=40)
@given(
    count=st.integers(0, 4), columns=st.integers(1, 9), seed=st.integers(0, 99),
    size=st.sampled_from([1e-7, 1e-3, 1.0, 1e6]), gradients=st.booleans(),
)  # fmt: skip
def test_rows_arrive_rounded_once(count, columns, seed, size, gradients):
    rows = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed)) * size
    rows[:, 0] = 0
    there = {
        dtype: unpacked(packed(rows, dtype, gradients), dtype, columns, gradients)
        for dtype in ("fp16", "bf16", "int8")
    }
    assert all(x.shape == rows.shape and x.dtype == torch.float32 for x in there.values())
    assert torch.equal(there["bf16"], rows.bfloat16().float())
    scale = GRADIENT_SCALE if gradients else 1.0
    large = torch.finfo(torch.float16).max
    assert torch.equal(there["fp16"], (rows * scale).clamp(-large, large).half().float() / scale)
    if count:
        width = rows.clamp(min=0).amax(1) - rows.clamp(max=0).amin(1)
        added = 1e-8 / scale  # by FBGEMM, to the range
        assert ((there["int8"] - rows).abs() <= (width[:, None] / 255 + added)).all()


def test_small_gradients_do_not_vanish():
    small = torch.full((1, 4), 3e-8)
    assert (unpacked(packed(small, "fp16"), "fp16", 4) != small).all()
    arrived = unpacked(packed(small, "fp16", gradients=True), "fp16", 4, gradients=True)
    assert torch.allclose(arrived, small, rtol=2e-3)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
def test_bytes_are_those_that_travel(dtype):
    rows = torch.zeros(5, 8)
    data = rows if dtype == "fp32" else packed(rows, dtype)
    assert travel_bytes(dtype, 5, 40) == data.numel() * data.element_size()


HANDROLLED, PIPELINE = {"entities__engine": "handrolled"}, {"train__pipeline": "sparse_dist"}


def trained(store, folder, runs):
    """Return the parameters of each run, {name: (dtype, other settings)}.  Collective."""
    return {
        name: fit(
            config_of(store, folder / name, entities__exchange__dtype=dtype, **changes)
        ).parameters
        for name, (dtype, changes) in runs.items()
    }


def test_both_engines_train_alike_and_near_float32(tmp_path):
    dtypes = ("fp16", "bf16", "int8")
    runs = {"exact": ("fp32", {}), "bf16 pipeline": ("bf16", PIPELINE)}
    for dtype in dtypes:
        runs |= {dtype: (dtype, {}), f"{dtype} handrolled": (dtype, HANDROLLED)}
    store = tiny_store(tmp_path / "store").path
    first, *others = run_world(2, trained, store, tmp_path, runs)
    for name, parameters in first.items():
        assert all(largest_difference(parameters, other[name]) == 0 for other in others)
    for dtype in dtypes:
        assert largest_difference(first[dtype], first[f"{dtype} handrolled"]) <= 1e-6
        limit = 0.01 if dtype == "fp16" else 0.08
        assert 0 < largest_difference(first[dtype], first["exact"]) < limit
    assert largest_difference(first["bf16"], first["bf16 pipeline"]) == 0


def test_one_rank_sends_nothing_and_says_so(tmp_path):
    store, rows = tiny_store(tmp_path / "store").path, []
    for dtype, count in (("fp32", 0), ("int8", 1)):
        run = api.train(config_of(store, tmp_path / dtype, entities__exchange__dtype=dtype))
        rows.append(torch.tensor(np.array(run.entities)))
        run.close()
        notes = json.loads((tmp_path / dtype / "results.json").read_text())["notes"]
        words = f"entities.exchange.dtype {dtype} has no effect"
        assert sum(words in note for note in notes) == count
    assert torch.equal(*rows)


def sent_both_ways():
    """Exchange rows of other numbers; return what arrives by our exchange and by gloo's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    send = [(rank + 2 * other) % 3 for other in range(size)]
    receive = [(other + 2 * rank) % 3 for other in range(size)]
    rows = torch.arange(sum(send) * 2.0).view(-1, 2) + 100 * rank
    theirs = rows.new_empty(sum(receive), 2)
    dist.all_to_all_single(theirs, rows, receive, send)
    with Traffic() as watch:
        ours = exchanged(rows, send, receive, dist.group.WORLD)
    others = sum(send) - send[rank]
    return ours, theirs, watch.sent["rows"] == 8 * others


def test_messages_between_ranks_carry_what_an_all_to_all_does():
    for ours, theirs, is_counted in run_world(4, sent_both_ways):
        assert len(ours) and torch.equal(ours, theirs) and is_counted


def receives_before_it_sends():
    """Return the order in which a rank passes messages to gloo."""
    order, counts = [], [3] * dist.get_world_size()
    isend, irecv = dist.isend, dist.irecv
    with (
        patch.object(dist, "isend", lambda *a, **k: (order.append("send"), isend(*a, **k))[1]),
        patch.object(dist, "irecv", lambda *a, **k: (order.append("receive"), irecv(*a, **k))[1]),
    ):
        exchanged(torch.zeros(sum(counts), 2), counts, counts, dist.group.WORLD)
    return order


def test_ranks_receive_before_they_send():
    """Otherwise two ranks of gloo send one after the other."""
    assert run_world(2, receives_before_it_sends) == [["receive", "send"]] * 2


def rank_starts_without_fbgemm(store, folder):
    config = config_of(store, folder, **HANDROLLED, entities__exchange__dtype="int8")
    with (
        patch.object(environment, "has_torchrec", lambda: False),
        pytest.raises(environment.PackageSetError) as caught,
    ):
        fit(config)
    return str(caught.value)


def test_int8_without_fbgemm_is_refused_at_the_start(tmp_path):
    store = tiny_store(tmp_path / "store").path
    for message in run_world(2, rank_starts_without_fbgemm, store, tmp_path / "run"):
        assert "entities.exchange.dtype int8 needs torchrec and fbgemm" in message


@pytest.mark.parametrize("dtype, sent", [
    ("fp16", torch.float16), ("bf16", torch.bfloat16), ("int8", torch.uint8),
])  # fmt: skip
def test_torchrecs_exchange_on_cuda_has_the_same_formats(dtype, sent):
    """Its codecs are made here; only a GPU runs them."""
    (codecs,) = exchange_codecs(dtype, 8, torch.device("cuda")).values()
    for codec in (codecs.forward, codecs.backward):
        assert codec.quantized_dtype == sent
    assert exchange_codecs("fp32", 8, torch.device("cuda")) is None
