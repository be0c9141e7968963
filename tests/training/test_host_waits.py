"""A step waits for the device only where TorchRec reads the sizes of the ids it sends."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from host_waits import host_waits
from training_runs import config_of, tiny_store
from worlds import run_world

from kge_torchrec.config import Config
from kge_torchrec.data.batches import LOOKUP_BAGS
from kge_torchrec.distributed.processes import Processes, processes
from kge_torchrec.embeddings.torchrec import sharder
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer

TORCHREC = tuple(map(int, metadata.version("torchrec").split(".")[:2]))
# What stays on the host on a GPU too, or is of the CPU's own table.
ON_THE_HOST = {
    "keyed.step", "__init__.step",  # number of the dense optimizer's step, which torch keeps there
    "loader.batch", "queries.batch",  # threads that build batches ahead
    "side_rows.summed_weights",  # which a GPU does not call
    "table.make_route", "table.starts",  # where ids of such a batch go, by a group on the host
    "rows.update_rows", "rows._two_dimensional", "score_gradients.normalizers",
    "score_gradients.gradients", "score_gradients._array",
    "triple_products._arrays", "triple_products.forward", "triple_products.encoded",
}  # fmt: skip
# Of the sizes of what is sent and received, which the collectives need as numbers.
OF_DIRECT_TRAVEL = {"tolist in sharder._wait_impl": 2, "tensor in sharder._wait_impl": 1}
OF_TRAVEL = {"tensor in runtime_forwards.__call__": 3, "tensor in dist_data._get_recat": 1} | (
    {
        "tolist in dist_data._wait_impl": 1,
        "tolist in jagged_tensor._maybe_compute_length_per_key": 2,
    }
    if TORCHREC < (1, 7)
    else {
        "tolist in dist_data._safe_tolist_2d": 2,
        "tolist in jagged_tensor._safe_tolist": 5,
    }
)
CARRIED_BY_TORCHREC = "sampled, carried by TorchRec"  # as on GPUs
CASES = {
    "sampled": ({}, {}),
    CARRIED_BY_TORCHREC: ({"train__pipeline": "sparse_dist"}, {}),
    "by the hand-rolled engine": ({"entities__engine": "handrolled"}, {}),
    "with all that a triple can have": (
        {
            "negatives__filtered": True,
            "negatives__hardest": 3,
            "loss__n3": 0.1,
            "loss__relation_weight": 0.1,
            "model__reciprocal": True,
        },
        {},
    ),
    "kvssample": ({"negatives__regime": "kvssample", "loss__n3": 0.1}, {}),
    "clipped": (
        {"train__clip__norm": 1.0, "train__clip__value": 1.0},
        {"unique in row_gradients._summed": 1, "_unique2 in row_gradients._summed": 1},
    ),
    "fp16": (
        {"train__precision": "fp16"},  # whether it overflowed
        {"__bool__ in step.unscale": 1, "_local_scalar_dense in step.unscale": 1},
    ),
    "1vsall": ({"negatives__regime": "1vsall"}, {}),
    "1vsall by a loss without a closed form": (
        {"negatives__regime": "1vsall", "loss__name": "margin"},
        {},
    ),
    "1vsall, summed and clipped": (
        {
            "negatives__regime": "1vsall",
            "train__accumulation": 2,
            "train__clip__norm": 1.0,
            "train__clip__value": 1.0,
        },
        {},
    ),
}


def torchrecs_exchange():
    """A context in which TorchRec exchanges ids and rows on CPUs too, as on GPUs."""
    return patch.object(sharder._RowWiseSharding, "_goes_directly", lambda *_: False)


def waits_of_a_step(name: str, config: Config, ranks: Processes) -> Counter[str]:
    session = Session(config, RunFolder(config.run.dir), ranks)
    loop = Trainer(session, session.restore(), None)
    for part in vars(next(loop.batches.epoch(0))).values():
        # What lies otherwise is copied to a GPU by way of memory that is not pinned.
        assert not torch.is_tensor(part) or part.is_contiguous(), name
    batches = loop.batches.epoch(0)
    for _ in range(2):  # the first one sets things up
        loop.pipeline.progress(batches)
    with host_waits() as waits:
        loop.pipeline.progress(batches)
    return waits


def rank_counts(store: Path, run: Path) -> dict[str, dict[str, int]]:
    results = {}
    with patch.dict(LOOKUP_BAGS, cpu=LOOKUP_BAGS["cuda"]), processes("cpu") as ranks:
        for name, (changes, _) in CASES.items():
            with torchrecs_exchange() if name == CARRIED_BY_TORCHREC else nullcontext():
                waits = waits_of_a_step(name, config_of(store, run, **changes), ranks)
            results[name] = {
                what: times
                for what, times in waits.items()
                if what.partition(" in ")[2] not in ON_THE_HOST
            }
    return results


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_step_waits_only_for_the_sizes_of_sent_ids(tmp_path, world_size):
    store = tiny_store(tmp_path / "store").path
    actual = run_world(world_size, rank_counts, store, tmp_path / "run")[0]
    for name, (changes, own) in CASES.items():
        expected = dict(own)
        by_torchrec = {"1vsall", "handrolled"}.isdisjoint(changes.values())
        if world_size > 1 and by_torchrec:
            expected |= OF_TRAVEL if name == CARRIED_BY_TORCHREC else OF_DIRECT_TRAVEL
        assert actual[name] == expected, name


def test_waits_are_counted():
    x = torch.arange(3)
    with host_waits() as waits:
        if x.sum() > 2:
            x[x > 1].tolist()
        torch.tensor([x[0].item()])
    times = {what.partition(" in ")[0]: count for what, count in waits.items()}
    assert times == {
        "__bool__": 1, "boolean index": 1, "tolist": 1, "item": 1, "tensor": 1,
        "_local_scalar_dense": 2,
    }  # fmt: skip
