"""Every option of training, on 1, 2 and 4 ranks, against plain dense torch in float64.

A row of ``RUNS`` is a run: what differs from ``BASE``.  A new option of training gets a row.
"""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import oracle_full_candidates
import oracle_training
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from disk_runs import DISK
from oracle_rows import composition
from training_runs import (
    config_of,
    fit,
    kernels_of_cuda,
    largest_difference,
    parameters,
    random_triples,
    shared_folder,
    tiny_store,
)
from worlds import run_world

from kge_torchrec.config import OPTIMIZER_NAMES, Config
from kge_torchrec.data.batches import Delivery
from kge_torchrec.data.batches.staged import StagedBatches
from kge_torchrec.data.parts import PartLayout
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.training.assembly import batch_plan
from kge_torchrec.training.session import Session

EPS = "train__optimizer_options__eps"
BASE = {EPS: 1e-3, "train__lr": 0.05, "train__epochs": 1, "train__log_every": 1}
FULL = {"negatives__regime": "1vsall", "train__batch_size": 22}
KVS = {"negatives__regime": "kvsall", "train__batch_size": 24}
SAMPLE = {**KVS, "negatives__regime": "kvssample"}
ONE = {"model__reciprocal": False}
FSDP = {"dense__wrapper": "fsdp"}
GRAD_OP = {**FSDP, "dense__options__sharding": "grad_op"}
HYBRID = {"dense__wrapper": "hybrid", "dense__options__replicas": 2}
BIASED = {"model__biases": True, "model__dim": 10, "model__init": "uniform"}
DURA = {"loss__regularizers": {"dura": 0.05}}
IVR = {"loss__regularizers": {"ivr": {"alpha": 2.25, "lambda1": 0.02, "lambda2": 0.05}}}
SMOOTH = {"loss__options": {"label_smoothing": 0.1, "smoothing": "libkge"}}
FOREIGN = {"loss__name": "foreign_parts:MeanGap"}
TYPED = {"negatives__among": "types"}
RATES = {"adam": 0.02, "rowwise_adam": 0.02, "adagrad": 0.05, "rowwise_adagrad": 0.05, "sgd": 0.5}
SGD = {"train__optimizer": "sgd", "train__lr": 0.5}
ADAM = {"train__optimizer": "adam", "train__lr": 0.02}
PIPED = {"entities__engine": "torchrec", "train__pipeline": "sparse_dist"}
ANY = {"negatives__among": "all"}  # of graphs with types
TABLES = {**ANY, "entities__tables": {
    "author": {"optimizer": "sgd", "lr": 0.5, "init": "uniform", "init_scale": 0.2},
    "place": {"optimizer": "adam", "lr": 0.02, "optimizer_options": {"weight_decay": 0.02}},
    "user": {"optimizer": "rowwise_adagrad", "lr": 0.05},
}}  # fmt: skip
OF_FEATURES = {
    **ANY,
    "entities__tables": {
        "user": {"optimizer": "adam", "lr": 0.02},
        "features": {"optimizer": "sgd", "lr": 0.5},
    },
}
FROZEN = {
    **ANY,
    "model__init_from": "{here}/given.parquet",
    "model__init_options": {"frozen": True},
}
GIVEN = ["place:0", "place:1", "place:2", "user:3", "place:new"]  # one of them has no triple
TWICE = {**DISK, "train__epochs": 2}


def optimizer_runs() -> dict[str, tuple[str, dict]]:
    """Every optimizer with the lookup of sampled triples, and with steps against all entities."""
    scorers = itertools.cycle((("transe_l1", "keci"), ("rotate", "transe_l2"),
                               ("complex", "distmult")))  # fmt: skip
    runs = {}
    for name, (sampled, full) in zip(OPTIMIZER_NAMES, scorers, strict=False):
        keys = {"train__optimizer": name, "train__lr": RATES[name], "train__epochs": 2}
        if name not in ("adagrad", "sgd"):
            keys["train__optimizer_options__weight_decay"] = 0.02
        runs[name] = "plain", {**keys, "model__scorer": sampled, "train__schedule": "cosine"}
        runs[f"1vsall {name}"] = "plain", {**keys, **FULL, "model__scorer": full, "loss__n3": 0.01}
    return runs


# name: (graph, keys)
RUNS = {
    **optimizer_runs(),
    # sampled candidates and their losses
    "softmax": ("plain", {"loss__options__label_smoothing": 0.1, "negatives__chunk_size": 8,
                          "negatives__in_batch": True, "negatives__log_q": True}),
    "bce by degree": ("plain", {"loss__name": "bce", "negatives__sampling": "degree",
                                "negatives__head_count": 5, "train__warmup_steps": 3}),
    "bce of tails": ("plain", {"loss__name": "bce", "loss__options__reduction": "mean", **ONE,
                               "train__lr": 0.2, "negatives__sides": "tail"}),
    "margin": ("plain", {"loss__name": "margin", "loss__options__margin": 2.0,
                         "negatives__filtered": True}),
    "self_adversarial": ("plain", {"loss__name": "self_adversarial", "negatives__chunk_size": 1,
                                   "loss__options": {"margin": 2.0, "temperature": 0.6}}),
    "log_q by degree": ("plain", {"negatives__log_q": True, "negatives__sampling": "degree",
                                  "negatives__in_batch": True, "loss__regularizers__l2": 0.02}),
    "a loss of one's own": ("plain", FOREIGN),
    "kvssample": ("small", {**SAMPLE, "negatives__max_answers": 2, "loss__n3": 0.02}),
    "kvssample bce": ("small", {**SAMPLE, "loss__name": "bce", "negatives__count": 40, **SMOOTH}),
    "kvssample bpr": ("small", {**SAMPLE, "loss__name": "bpr"}),
    # all entities
    "1vsall relations": ("small", {**FULL, "loss__relation_weight": 0.5, "loss__n3": 0.01}),
    "kvsall bce": ("small", {**KVS, **ONE, "loss__name": "bce", "model__scorer": "keci"}),
    "kvsall smoothed": ("small", {**KVS, **SMOOTH}),
    "allvsall": ("small", {**KVS, "negatives__regime": "allvsall", "loss__name": "bce",
                           "loss__regularizers__l2": 0.02}),
    # penalties and biases
    "rote": ("small", {"model__scorer": "rote", **ONE, **BIASED, "loss__regularizers__l2": 0.02}),
    "roth": ("small", {**BIASED, "model__scorer": "roth", "loss__regularizers":
                       {"l2": {"weight": 0.02, "relation_weight": 0.05}}}),
    "dura of heads": ("small", {**BIASED, **ONE, **DURA, "negatives__sides": "head",
                                "negatives__filtered": True}),
    "1vsall dura": ("small", {**FULL, **BIASED, **DURA}),
    "ivr": ("small", {**BIASED, **ONE, **IVR}),
    "1vsall ivr": ("small", {**FULL, **BIASED, **IVR}),
    "1vsall roth": ("small", {**FULL, **BIASED, "model__scorer": "roth", "loss__n3": 0.02}),
    # steps in parts, clipping, wrappers
    "in three parts": ("plain", {"train__accumulation": 3, "negatives__chunk_size": 8}),
    "in eight parts": ("plain", {**SGD, "train__accumulation": 8, "train__lr": 0.05}),
    "FBGEMM in parts": ("plain", {"train__accumulation": 3, "train__clip__norm": 0.03,
                                  "train__optimizer": "rowwise_adagrad"}),
    "norm": ("plain", {**SGD, "train__clip__norm": 0.05}),
    "norm that no gradient has": ("small", {**SGD, "train__clip__norm": 1000.0}),
    "value": ("plain", {"train__clip__value": 0.004, "train__optimizer": "rowwise_adagrad",
                        "train__accumulation": 3, "entities__engine": "handrolled"}),
    "1vsall in parts": ("small", {**FULL, **SGD, "train__accumulation": 3,
                                  "train__clip__norm": 0.1}),
    "kvsall value": ("small", {**KVS, **ONE, "train__clip__value": 0.004, "loss__name": "bce",
                               "train__optimizer": "rowwise_adagrad"}),
    "fsdp": ("plain", {**FSDP, "train__optimizer": "adam", "train__accumulation": 2}),
    "offload": ("plain", {**FSDP, "dense__options__cpu_offload": True,
                          "train__clip__norm": 0.05}),
    "1vsall fsdp": ("small", {**FULL, **FSDP, "train__clip__norm": 0.1,
                              "train__accumulation": 2, "loss__relation_weight": 0.5}),
    "hybrid": ("plain", {**HYBRID, "train__optimizer": "rowwise_adam", "train__lr": 0.02}),
    "1vsall hybrid": ("small", {**FULL, "dense__wrapper": "hybrid", "train__accumulation": 2,
                                "dense__options": {"replicas": 2, "sharding": "grad_op"}}),
    "grad_op": ("plain", {**GRAD_OP, "train__optimizer": "rowwise_adagrad"}),
    # fewer triples than ranks, or fewer rows
    "two triples a step": ("few", {"train__batch_size": 2, "negatives__chunk_size": 1}),
    "1vsall few": ("few", {**FULL, "train__optimizer": "rowwise_adam"}),
    # weights
    "weighted loss": ("weighted", {"data__weights": "loss", "negatives__chunk_size": 8,
                                   "loss__n3": 0.02, "negatives__in_batch": True,
                                   "train__accumulation": 3}),
    "1vsall weighted": ("weighted", {**FULL, "data__weights": "loss", "loss__n3": 0.02,
                                     "loss__relation_weight": 0.5, "train__accumulation": 3}),
    "weighted bpr": ("weighted", {"data__weights": "loss", "loss__name": "bpr",
                                  "negatives__filtered": True, "negatives__chunk_size": 8,
                                  "negatives__in_batch": "same_relation"}),
    # kinds of candidates
    "seen": ("kinds", {"negatives__among": "seen", "negatives__chunk_size": 8,
                       "negatives__in_batch": True, "negatives__filtered": True}),
    "types": ("kinds", TYPED),
    "a share of types": ("kinds", {**TYPED, "negatives__among_share": 0.5,
                                   "negatives__chunk_size": 8, "negatives__in_batch": True,
                                   "negatives__sampling": "degree", "negatives__head_count": 9}),
    "kvsall typed": ("typed", {**KVS, **ONE, **TYPED, "model__scorer": "distmult",
                               "negatives__sides": "tail", "loss__options__answers": "sum"}),
    "1vsall typed": ("typed", {**FULL, **TYPED, "loss__relation_weight": 0.5}),
    "allvsall typed": ("typed", {**KVS, **TYPED, "negatives__regime": "allvsall",
                                 "loss__name": "bce", "model__scorer": "transe_l2"}),
    # a table for each type of entities, each of one run of ids or of several
    "tables": ("typed", {**TABLES, **PIPED}),
    "tables clipped": ("typed", {**TABLES, "train__clip__norm": 0.05, "train__accumulation": 2}),
    "1vsall tables": ("typed", {**FULL, **TABLES, "entities__engine": "handrolled"}),
    "tables in runs": ("typed", {**TABLES, "entities__engine": "handrolled"}),
    "1vsall tables in runs": ("typed", {**FULL, **TABLES, **TYPED}),
    # rows of features beside those of entities, some of which are only the sums of theirs
    "features": ("features", {**ANY, **PIPED}),
    "features by adam": ("features", {**ANY, **ADAM, "train__batches": "device"}),
    "features clipped": ("features", {**ANY, "train__clip__norm": 0.05, "loss__n3": 0.01,
                                      "train__accumulation": 2}),
    "tables of features": ("features", OF_FEATURES),
    "kvssample features": ("features", {**SAMPLE, **ANY}),
    "1vsall features": ("features", {**FULL, **ANY, **ONE, "loss__n3": 0.01,
                                     "loss__relation_weight": 0.5, "negatives__sides": "tail",
                                     "loss__options__label_smoothing": 0.1}),
    "kvsall features": ("features", {**KVS, **TYPED, **ADAM, "loss__name": "bce",
                                     "loss__regularizers__l2": 0.02}),
    "features fp16": ("features", {**FULL, **ANY, "train__precision": "fp16"}),
    "features mean": ("features", {  # other chunks are padded on several ranks
        **ANY, "entities__engine": "handrolled", "negatives__chunk_size": 1,
        "entities__preset": "dgl"}),
    # rows that stay as they are given
    "frozen": ("features", FROZEN),
    "1vsall frozen": ("features", {**FULL, **FROZEN, **ADAM, "train__clip__norm": 0.05}),
    # a table on disk
    "disk": ("plain", {**TWICE, "train__optimizer": "adagrad", "train__schedule": "cosine"}),
    "disk, few parts": ("plain", {**TWICE,  # one that leaves is wanted again by the next stage
                                  "entities__placement_options": {"parts": 3, "buffer": 2}}),
    "disk, passes": ("plain", {**TWICE, "train__optimizer": "rowwise_adagrad",
                               "entities__placement_options": {"parts": 5, "buffer": 3,
                                                               "passes": 3}}),
    "disk, in batch": ("plain", {**TWICE, "negatives__in_batch": True,
                                 "negatives__chunk_size": 8}),
    "disk, filtered": ("plain", {**TWICE, **ADAM, "negatives__filtered": True}),
    "disk, sums": ("plain", {**TWICE, "train__clip__norm": 0.05, "train__accumulation": 2}),
}  # fmt: skip
# On one rank TorchRec's table and whole blocks; on more both engines and small blocks.
ENGINES = {1: ("torchrec",), 2: ("handrolled", "torchrec"), 4: ("torchrec", "handrolled")}
ON_FOUR = ("adam", "1vsall rowwise_adagrad", "softmax", "kvssample", "1vsall relations", "roth",
           "in eight parts", "norm", "1vsall fsdp", "hybrid", "1vsall hybrid", "weighted loss",
           "seen", "kvsall typed", "allvsall", "grad_op", "two triples a step", "1vsall few",
           "tables clipped", "1vsall tables in runs", "features by adam", "kvsall features",
           "frozen", "disk, sums")  # fmt: skip
# On one rank blocks are whole and kept, and nothing is exchanged.
ON_ONE = (*optimizer_runs(), "softmax", "margin", "a loss of one's own", "kvssample",
          "1vsall relations", "kvsall smoothed", "rote", "dura of heads", "1vsall ivr",
          "in three parts", "FBGEMM in parts", "1vsall in parts", "fsdp", "weighted loss",
          "kvsall typed", "tables clipped", "1vsall tables", "features clipped", "1vsall features",
          "features fp16", "frozen", "disk", "disk, passes")  # fmt: skip
NAMES = {1: list(ON_ONE), 2: list(RUNS), 4: list(ON_FOUR)}
COUNTS = {"author": 3, "place": 11, "user": 9}
ENDS = {"follows": ("user", "user"), "visits": ("user", "place"), "made": ("author", "place"),
        "likes": ("user", "place")}  # fmt: skip


@functools.cache
def store_of(graph: str) -> Path:
    folder, random = shared_folder(), np.random.default_rng(5)
    if graph == "plain":
        return tiny_store(folder / "store").path
    if graph == "few":
        return tiny_store(folder / "store", entities=3, train=13, held_out=1).path
    if graph == "small":  # 23 entities and 6 relation rows: the last of 4 ranks has few
        return tiny_store(folder / "store", entities=23, train=90, held_out=2).path
    if graph == "weighted":
        weights = (random.random(90) * 2) ** 3 + 0.01
        triples = [(*t, float(w)) for t, w in zip(random_triples(23, 3, 90), weights, strict=True)]
        return prepare({"train": triples}, folder / "store").path
    if graph == "typed":
        return typed_store(folder / "store", random)
    if graph == "features":
        (folder / "features.tsv").write_text(features())
        given = [*random.standard_normal((len(GIVEN), 8)).astype(np.float32)]
        pq.write_table(pa.table({"label": GIVEN, "vector": given}), folder / "given.parquet")
        return typed_store(folder / "store", random, folder / "features.tsv")
    relation = random.integers(5, size=100)  # every relation has entities of its own
    ends = (6 * relation + random.integers(11, size=(2, 100))) % 31
    rows = zip(ends[0], relation, ends[1], strict=True)
    triples = [(f"e{h}", f"r{r}", f"e{t}") for h, r, t in rows] + random_triples(31, 1, 31)
    lines = [f"e{i}\tt{(i * k) % 9}\n" for i in range(31) for k in (1, 3) if i % 5]
    (folder / "types.tsv").write_text("".join([*lines, "e0\tonly this one\n", "e1\tt1\n"]))
    triples = list(dict.fromkeys([*triples, ("e3", "alone", "e4")]))
    data = {"types": str(folder / "types.tsv")}
    return prepare({"train": triples}, folder / "store", data).path


def typed_store(path: Path, random: np.random.Generator, features: Path | None = None) -> Path:
    """Relations between types, of which likes has two at its tail."""
    rows = set()
    while len(rows) < 90:
        relation = str(random.choice(list(ENDS)))
        head, tail = ENDS[relation]
        tail = "user" if relation == "likes" and random.random() < 0.5 else tail
        ends = (f"{kind}:{random.integers(COUNTS[kind])}" for kind in (head, tail))
        rows.add((next(ends), relation, next(ends)))
    train, *others = sorted(rows)[2:], *([row] for row in sorted(rows)[:2])
    splits = dict(zip(("train", "valid", "test"), (train, *others), strict=True))
    data = {"types": "prefix", "features": features}
    return prepare(splits, path, data, log_notes=False).path


def features() -> str:
    """Features of users, of most places, and of two entities that are in no triple."""
    rows = [f"user:{i}\tgroup {i % 4}\t1.0" for i in range(9)]
    rows += [f"place:{i}\ttag {i % 3}\t0.5" for i in range(1, 11)]
    rows += [f"place:{i}\tname {i}\t0.1" for i in range(0, 11, 2)]
    return "\n".join([*rows, "place:new\ttag 1\t2.0", "user:new\tgroup 1\t1.0", ""])


def variant(name: str, engine: str = "torchrec", folder: Path | None = None) -> Config:
    graph, keys = RUNS[name]
    here = str(store_of(graph).parent)
    text = json.dumps({**BASE, "entities__engine": engine, "seed": len(name), **keys})
    keys = json.loads(text.replace("{here}", here))
    if "ada" not in keys.get("train__optimizer", "ada"):
        del keys[EPS]
    return config_of(store_of(graph), folder and folder / name, **keys)


def rows_and_dense(session: Session) -> dict[str, torch.Tensor]:
    """The rows of entities and features, and the other parameters.  Collective."""
    values = parameters(session)
    if session.store.has_features:
        shard = session.backend.shard()
        values["entities"] = shard.fetch(torch.arange(shard.num_entities))
    return values


def rank_trains(configs: dict[str, Config], world: int) -> dict[str, tuple]:
    """By run: the parameters at its start and end, the entities' vectors, the table's steps."""
    results = {}
    for name, config in configs.items():
        start, end = dict[str, torch.Tensor](), dict[str, torch.Tensor]()

        def prepare_fit(loop, start=start, end=end) -> None:
            start.update(rows_and_dense(loop.session))
            loop._save = lambda ends=False: end.update(rows_and_dense(loop.session))
            if world > 1 and loop.config.negatives.is_full:
                loop.pipeline.kept_bytes, loop.pipeline.block_bytes = 0, 200

        with kernels_of_cuda("FBGEMM" in name):
            session = fit(config, prepare_fit)
        steps = session.backend.table.steps
        results[name] = start, end, session.parameters["entities"], steps
    return results


@functools.cache
def trained(world: int) -> tuple[dict[str, tuple], dict[str, list[float]]]:
    """Return the runs of rank 0, and the losses of their steps; all ranks have the same."""
    with tempfile.TemporaryDirectory() as name:
        folder, names = Path(name), NAMES[world]
        configs = {
            run: variant(run, engine, folder)
            for run, engine in zip(names, itertools.cycle(ENGINES[world]), strict=False)
        }
        first, *others = run_world(world, rank_trains, configs, world, timeout=300)
        for run in names:
            assert all(largest_difference(first[run][1], other[run][1]) == 0 for other in others)
        lines = {run: (folder / run / "metrics.jsonl").read_text().splitlines() for run in names}
    metrics = {run: map(json.loads, of) for run, of in lines.items()}
    return first, {r: [x["loss"] for x in of if x["kind"] == "step"] for r, of in metrics.items()}


@functools.cache
def dense(name: str, world: int) -> tuple[dict, list[float]]:
    """The parameters and losses of the oracle; where the table lies on disk, ranks change them."""
    config, store = variant(name), TripleStore.open(store_of(RUNS[name][0]))
    start, losses, more = trained(2)[0][name][0], list[float](), {}
    if config.model.init_options.frozen:
        more["frozen"] = store.entities.ids(GIVEN).tolist()
    if config.entities.on_disk:
        layout = PartLayout.of_config(config, store.num_entities, world)
        plan, no_buffer = batch_plan(config, store, None), lambda parts, following: None
        more["staged"] = StagedBatches(store.train, plan, Delivery(), None, layout, no_buffer)
    sampled = config.negatives.regime == "sampled"
    oracle = oracle_training if sampled else oracle_full_candidates
    return oracle.train_dense(config, store, start, losses, **more), losses


@pytest.mark.parametrize(
    ("name", "world"), [(name, world) for world, names in NAMES.items() for name in names]
)
def test_runs_equal_the_dense_oracle(name, world):
    graph, keys = RUNS[name]
    runs, losses = trained(world)
    start, end, vectors, steps = runs[name]
    expected, expected_losses = dense(name, world if "placement" in str(keys) else 2)
    tolerance = 0.03 if "fp16" in name else 1e-5
    assert largest_difference(start, trained(2)[0][name][0]) == 0
    assert all(largest_difference({k: start[k]}, {k: expected[k]}) > 5e-3 for k in expected)
    assert largest_difference(end, expected) < tolerance
    assert losses[name] == pytest.approx(expected_losses, rel=1e-5 if tolerance < 0.01 else 0.03)
    assert steps == len(expected_losses)  # micro-batches are none
    composing = composition(TripleStore.open(store_of(graph)))
    if composing is not None:
        composed = composing @ expected["entities"]
        assert (vectors - composed).abs().max() < 2 * tolerance
    if keys.get("model__biases"):
        assert not start["entities"][:, -2:].any() and end["entities"][:, -2:].any(0).all()
