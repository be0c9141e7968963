"""Extended runs against a dense oracle: old rows and their state, new rows, what stays."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from grown_runs import (
    FIRST,
    OLD_ENTITIES,
    TABLE,
    TOLERANCE,
    base_config,
    base_run,
    featured_run,
    new_triples,
    tensors,
)
from oracle_rows import composition, table_optimizer, with_features
from oracle_table import DenseTable
from oracle_training import batch_loss, relation_optimizer
from torch import Tensor
from training_runs import fit, parameters, random_triples
from worlds import run_world

from kge_torchrec import api, extend
from kge_torchrec import growth as extending
from kge_torchrec.config import Config
from kge_torchrec.data.batches.order import EpochShuffle
from kge_torchrec.data.negatives import UniformSampler, random_numbers
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.errors import KGEError
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session


@pytest.mark.parametrize(
    "changes",
    [
        {"train__optimizer": "adam"},
        {"train__optimizer": "adam", "entities__engine": "handrolled",
         "entities__preset": "dgl", "model__reciprocal": False},
        {"train__optimizer": "adagrad", "model__scorer": "tucker", "model__dim": 4},
    ],
    ids=["adam", "row steps", "tucker"],
)  # fmt: skip
@pytest.mark.first_tier("row steps", "tucker")
def test_extension_keeps_old_rows_and_draws_new_ones_like_a_new_run(tmp_path, changes):
    run = base_run(**changes)
    made = extend(run, new_triples(), tmp_path / "run", epochs=0)
    before, after = tensors(run), tensors(made.path, FIRST)
    config = base_config(tmp_path / "run" / "store", tmp_path / "other", **changes)
    with processes("cpu") as ranks:
        fresh = parameters(Session(config, RunFolder(tmp_path / "other"), ranks))
    assert before.keys() == after.keys()
    for key, old in before.items():
        new, is_state = after[key], "optimizer" in key
        if "entity" in key:
            assert torch.equal(new[:OLD_ENTITIES], old)
            expected = torch.zeros_like(new) if is_state else fresh["entities"]
            assert len(new) == OLD_ENTITIES + 9
            assert torch.equal(new[OLD_ENTITIES:], expected[OLD_ENTITIES:])
        elif ".relations" in key and new.dim():
            blocks = 2 if config.model.reciprocal else 1
            for block in range(blocks):  # relations, then inverses
                rows = new.view(blocks, 5, -1)[block]
                assert torch.equal(rows[:3], old.view(blocks, 3, -1)[block])
                start = torch.zeros_like(new) if is_state else fresh["relations"]
                assert torch.equal(rows[3:], start.view(blocks, 5, -1)[block, 3:])
        else:
            assert torch.equal(new, old)
    assert made.results["extended"]["new"]["relations"] == 2


def train_on_dense(config: Config, store: TripleStore, start: dict[str, Tensor]) -> dict:
    """Training on as plain torch in float64: rows, states and order of triples written anew."""
    train, base = config.train, store.base
    table = DenseTable(start[TABLE], table_optimizer(config))
    state = "engine.optimizer.state."
    table.squares = start[f"{state}entities.embeddings.entity.weight.entity.momentum1"].double()
    name = "engine.model.objective.scorer.relations"
    relations = start[name].double().requires_grad_()
    optimizer = relation_optimizer(config, relations)
    optimizer.state[relations]["sum"] = start[f"{state}objective.scorer.relations.sum"].double()
    ids, composing = torch.arange(store.num_rows), composition(store)
    is_new = (ids >= base.entities) & (ids < store.num_entities)
    is_new |= ids >= store.num_entities + base.features
    old_relations = (torch.arange(2 * store.num_relations) % store.num_relations) < base.relations
    freezes, size = train.extended.freeze == "old", train.batch_size
    for epoch in range(train.epochs):
        order = EpochShuffle(len(store.train), config.seed, epoch)
        for step in range(-(-order.size // size)):
            places = np.arange(step * size, min((step + 1) * size, order.size))
            rows = torch.from_numpy(store.train[order(places)].astype(np.int64))
            sampler, zeros = UniformSampler(store.num_entities), np.zeros(len(places), int)
            negatives = {}
            for side in ("head", "tail"):
                place, count = (epoch, step, side), config.negatives.count
                numbers = random_numbers(config.seed, place, range(1), count)
                negatives[side] = torch.from_numpy(sampler(numbers)[zeros])
            entities = table.weights.clone().requires_grad_()
            shares = torch.full((len(rows),), 1 / len(rows), dtype=torch.float64)
            vectors = entities if composing is None else composing @ entities
            loss = batch_loss(config, store, vectors, relations, rows, negatives, set(), shares)
            optimizer.zero_grad()
            loss.backward()
            gradients = entities.grad, relations.grad
            if freezes:
                entities.grad[~is_new], relations.grad[old_relations] = 0, 0
            if train.clips:
                norm = sum(g.square().sum() for g in gradients).sqrt()
                for gradient in gradients:
                    gradient.mul_(min(1, train.clipping.norm / (norm + 1e-6)))
            optimizer.step()
            ids = [rows[:, 0], rows[:, 2], *(drawn.reshape(-1) for drawn in negatives.values())]
            touched = with_features(composing, torch.cat(ids).unique())
            if freezes:
                touched = touched[is_new[touched]]
            table.step(touched, entities.grad[touched])
    return {TABLE: table.weights, name: relations.detach()}


VARIANTS = {
    "all": {},
    "freeze": {"freeze": True},
    "clipped": {"freeze": True, "overrides": {"train.clip.norm": 0.01}},
}


def rank_extends(run: Path, folder: Path, engines: dict[str, str], **more) -> None:
    for name, engine in engines.items():
        inputs = {**VARIANTS[name], **more}
        overrides = {"entities.engine": engine, **inputs.pop("overrides", {})}
        extend(run, new_triples(), folder / name, epochs=2, overrides=overrides, **inputs)


ENGINES = ("torchrec", "handrolled")


@pytest.mark.parametrize(
    "world_size, turn",
    [
        (2, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0), (2, 0), (4, 0), (4, 1))),
    ],
)
def test_continued_training_matches_dense_oracle(tmp_path, world_size, turn):
    engines = {name: ENGINES[(turn + i) % 2] for i, name in enumerate(VARIANTS)}
    run_world(world_size, rank_extends, base_run(), tmp_path, engines)
    for name in VARIANTS:
        check_training(tmp_path / name, name)


def rank_extends_features(run: Path, folder: Path, engines: dict[str, str]) -> None:
    rank_extends(run, folder, engines, features=run.parent / "new.tsv")


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(w, marks=pytest.mark.slow) for w in (1, 4))]
)
@pytest.mark.slow
def test_training_of_features_goes_on_like_the_dense_oracle(tmp_path, world_size):
    engines = {name: ENGINES[i % 2] for i, name in enumerate(VARIANTS)}
    run_world(world_size, rank_extends_features, featured_run(), tmp_path, engines)
    for name in VARIANTS:
        check_training(tmp_path / name, name)


def check_training(run: Path, name: str) -> None:
    start, end = tensors(run, FIRST), tensors(run)
    store = TripleStore.open(run / "store")
    frozen = [
        slice(0, store.base.entities),
        slice(store.num_entities, store.num_entities + store.base.features),
    ]
    expected = train_on_dense(RunFolder(run).load_config(), store, start)
    for key, values in expected.items():
        assert (values - start[key]).abs().max() > 0.02  # it has learnt something
        assert (values - end[key]).abs().max() < TOLERANCE, name
    if VARIANTS[name].get("freeze"):
        for key, old in start.items():
            if "entity" in key:  # and their state
                assert all(torch.equal(end[key][rows], old[rows]) for rows in frozen)
            elif ".relations" in key and old.dim():
                assert torch.equal(end[key].view(2, 5, -1)[:, :3], old.view(2, 5, -1)[:, :3])


@pytest.mark.parametrize(
    "changes",
    [{"negatives__regime": "kvsall", "entities__engine": "handrolled"},
     {"negatives__regime": "1vsall"}, {"negatives__regime": "kvssample"},
     {"train__optimizer": "adam", "model__scorer": "conve", "model__dim": 12},
     {"train__accumulation": 2, "train__precision": "fp16"}],
    ids=str,
)  # fmt: skip
@pytest.mark.first_tier(
    "{'negatives__regime': 'kvsall', 'entities__engine': 'handrolled'}",
    "{'train__accumulation': 2, 'train__precision': 'fp16'}",
)
def test_frozen_rows_stay_bitwise_equal(tmp_path, changes):
    run = base_run(**changes)
    made = extend(run, new_triples(), tmp_path / "run", epochs=1, freeze=True)
    start, end = tensors(made.path, FIRST), tensors(made.path)
    moved = 0
    for key, old in start.items():
        new = end[key]
        if "entity" in key and new.dim():
            assert torch.equal(new[:OLD_ENTITIES], old[:OLD_ENTITIES])
            moved += int((new[OLD_ENTITIES:] != old[OLD_ENTITIES:]).sum())
        elif "objective" in key and new.dim():
            by_relation = len(new) == 10
            new, old = (x.view(2, 5, -1)[:, :3] if by_relation else x for x in (new, old))
            assert torch.equal(new, old)
    assert moved


@pytest.mark.slow
def test_sharded_dense_parameters_can_be_frozen(tmp_path):
    run = base_run(train__optimizer="adam")
    run_world(2, rank_freezes_parts, run, tmp_path)
    start, end = tensors(tmp_path / "fsdp", FIRST), tensors(tmp_path / "fsdp")
    for key in start:
        if ".relations" in key and start[key].dim():
            new, old = (x[key].view(2, 5, -1) for x in (end, start))
            assert torch.equal(new[:, :3], old[:, :3])
            assert not torch.equal(new[:, 3:], old[:, 3:])


def rank_freezes_parts(run: Path, folder: Path) -> None:
    inputs = {"dense.wrapper": "fsdp", "train.optimizer_options.weight_decay": 0.1}
    extend(run, new_triples(), folder / "fsdp", epochs=1, freeze=True, overrides=inputs)


def test_extended_run_supports_all_verbs(tmp_path):
    made = extend(base_run(), new_triples(), tmp_path / "run", epochs=1)
    assert made.results["extended"]["new"]["entities"] == 9
    assert (tmp_path / "run" / "plan.txt").is_file()
    (tmp_path / "run").rename(tmp_path / "moved")  # its store is its own
    on = api.resume(tmp_path / "moved", {"train.epochs": 2})
    assert on.results["train"]["epochs"] == 2
    assert len(on.predict(head="n0", relation="new0", k=3)) == 3
    again = extend(on.path, {"train": [("n0", "r0", "z")]}, tmp_path / "again", epochs=0)
    assert again.model.store.base.entities == OLD_ENTITIES + 9


def test_rejected_extension_leaves_no_files(tmp_path):
    run = base_run()

    def refused(match: str, triples=None, out="run", **inputs) -> None:
        with pytest.raises(KGEError, match=match):
            extend(run, triples or new_triples(), tmp_path / out, **inputs)

    refused("no checkpoint 'step-9'", checkpoint="step-9")
    refused(
        "none of the triples is new", {"train": [("e0", "r0", random_triples(37, 3, 150)[0][2])]}
    )
    refused("model.dim is 8 in this run", overrides={"model.dim": 16})
    refused("data.. and run.dir", overrides={"data.path": "x"})
    assert not (tmp_path / "run").exists()
    with pytest.raises(KGEError, match="is no run folder"):
        extend(tmp_path / "nowhere", new_triples(), tmp_path / "run")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("train: {epochs: null}")  # in a race
    with pytest.raises(KGEError, match="no checkpoint yet: train it first"):
        extend(tmp_path / "old", new_triples(), tmp_path / "run")
    with pytest.raises(KGEError, match=r"train.extension.freeze old: .* is no extended store"):
        fit(base_config(run.parent / "store", tmp_path / "x", train__extension__freeze="old"))


def test_extension_inherits_settings(tmp_path):
    """A tenth of the epochs, rounded up, and values that were null."""
    run = base_run(train__batch_size=None)
    made = extend(run, new_triples(), tmp_path / "run")
    assert made.config.train.epochs == made.results["train"]["epochs"] == 1
    assert made.config.train.batch_size == RunFolder(run).load_config().train.batch_size
    for epochs, expected in ((1, 1), (10, 1), (11, 2), (20, 2)):
        before = base_config(run, None, train__epochs=epochs)
        config = extending._config_of(before, RunFolder(tmp_path), extending.Changes())
        assert config.train.epochs == expected


def test_nonfinite_initial_rows_are_rejected(tmp_path, monkeypatch):
    run = shutil.copytree(base_run(), tmp_path / "base")
    spoil(run)
    with pytest.raises(KGEError, match=r"entity.weight holds NaN or infinity and cannot"):
        extend(run, new_triples(), tmp_path / "run")
    diverge = lambda self, shard: shard.rows.fill_(float("nan"))  # noqa: E731
    monkeypatch.setattr(extending._Extension, "_fill", diverge)
    with pytest.raises(KGEError, match=r"new rows hold NaN or infinity"):
        extend(base_run(), new_triples(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def spoil(run: Path) -> None:
    """Writes a NaN into the newest checkpoint's table, with right checksums."""
    checkpoint = sorted((run / "checkpoints").iterdir())[-1]
    index = json.loads((checkpoint / "index.json").read_text())
    (piece,) = index["tensors"][TABLE]["pieces"]
    file = checkpoint / piece["file"]
    content = bytearray(file.read_bytes())
    content[piece["start"] : piece["start"] + 4] = struct.pack("f", float("nan"))
    file.write_bytes(content)
    size = 4 * piece["size"][0] * piece["size"][1]
    piece["crc32"] = zlib.crc32(content[piece["start"] : piece["start"] + size])
    text, manifest = json.dumps(index), json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "index.json").write_text(text)
    manifest["crc32"]["index.json"] = zlib.crc32(text.encode())
    manifest["files"]["index.json"] = len(text)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
