"""Six parts of another package together, in each kind of training, on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from extended import JSON_LINES, LION, LP, MIXED, REFE, SQUARED, rank_trains
from training_runs import config_of, random_triples
from worlds import run_world

from kge_torchrec.data.prepare import prepare

PARTS = {
    "model__scorer": REFE,
    "loss__name": SQUARED,
    "loss__regularizers": {LP: {"weight": 0.01, "p": 1.5}},
    "train__optimizer": LION,
    "train__lr": 0.01,
    "entities__engine": "handrolled",
}
TRAININGS = {
    "shared candidates": {"negatives__sampling": MIXED},
    "candidates of each triple": {"negatives__sampling": MIXED, "negatives__chunk_size": 1},
    "1vsall": {"negatives__regime": "1vsall"},
    "kvsall": {"negatives__regime": "kvsall"},
    "kvssample": {"negatives__regime": "kvssample", "negatives__sampling": MIXED},
}


@pytest.fixture(scope="module")
def graph(folder, tmp_path_factory) -> Path:
    """A store of triples that the reader of the examples has read."""
    here = tmp_path_factory.mktemp("read")
    names = "head", "relation", "tail"
    triples = random_triples(37, 3, 150)
    splits = {"train": triples[:130], "valid": triples[130:140], "test": triples[140:]}
    for split, part in splits.items():
        lines = [json.dumps(dict(zip(names, triple, strict=True))) + "\n" for triple in part]
        (here / f"{split}.jsonl").write_text("".join(lines))
    return prepare(here, here / "store", {"reader": JSON_LINES}, progress=False).path


@pytest.fixture(scope="module")
def trained(folder, graph, tmp_path_factory) -> dict[int, dict[str, dict]]:
    """Parameters of every training, by number of ranks."""
    results = {}
    for world in (1, 2):
        runs = tmp_path_factory.mktemp("runs")
        configs = [
            config_of(graph, runs / str(i), **PARTS, **changes)
            for i, changes in enumerate(TRAININGS.values())
        ]
        first = run_world(world, rank_trains, folder, configs)[0]
        results[world] = {name: pair[0] for name, pair in zip(TRAININGS, first, strict=True)}
    return results


@pytest.mark.parametrize("name", TRAININGS)
def test_parts_train_the_same_on_one_rank_and_on_two(trained, name):
    """Up to steps of Lion whose direction hangs on the last bit of a sum."""
    one, two = trained[1][name], trained[2][name]
    for key, values in one.items():
        apart = (values - two[key]).abs() > 1e-5
        assert apart.float().mean() < 0.01, key
    entities = {other: trained[1][other]["entities"] for other in TRAININGS}
    assert all(not torch.equal(one["entities"], x) for k, x in entities.items() if k != name)
