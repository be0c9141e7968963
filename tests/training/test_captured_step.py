"""A step with a CUDA graph trains like the plain one, and starts few operations."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from cached_tables import CACHED, tables_with_a_cache
from fake_streams import FakeCuda
from host_waits import host_waits
from plain_config import PLAIN
from recorded_graphs import Launches, operations_of_cuda, recorded_graphs
from scorer_cases import EVERY
from training_runs import (
    config_of,
    fit,
    kernels_of_cuda,
    largest_difference,
    tiny_store,
    with_duplicates,
)
from triple_batches import ENTITIES, RELATIONS, random_batch
from worlds import run_world

from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.config.registry import KINDS
from kge_torchrec.data.batches import as_feature
from kge_torchrec.data.batches.triples import Batch
from kge_torchrec.distributed.processes import Processes, processes
from kge_torchrec.kernels import operators
from kge_torchrec.training import assembly, captured_step
from kge_torchrec.training.captured_step import NotCaptured
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.trainer import Trainer

FBGEMM = {"train__optimizer": "rowwise_adagrad"}  # steps in backward, by the table that GPUs have
CASES = {
    "adagrad": {},
    "adam, schedule": {"train__optimizer": "adam", "train__schedule": "linear"},
    "fbgemm": FBGEMM,
    "fbgemm, cached": FBGEMM,  # rows in main memory: places of the cache differ in each step
    "fbgemm, clipped": {**FBGEMM, "train__clip__norm": 0.1, "train__clip__value": 0.01},
    "dropout": {"model__dropout__entity": 0.3, "model__dropout__relation": 0.2},
    "penalties": {"loss__n3": 0.1, "loss__relation_weight": 0.5, "loss__regularizers__l2": 0.1},
    "chunks, filtered": {"negatives__chunk_size": 5, "negatives__filtered": True},
    "in batch, log_q": {"negatives__in_batch": True, "negatives__log_q": True},
    "hardest, one side": {"negatives__hardest": 2, "negatives__sides": "tail",
                          "model__reciprocal": False},
    "bf16": {"train__precision": "bf16"},
    "on the device": {"train__batches": "device", "negatives__filtered": True},
}  # fmt: skip
STEPS, EPOCHS = 5, 3  # 130 triples in batches of 32, the last one of 2


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tiny_store(tmp_path_factory.mktemp("graph") / "store").path


def trained(store: Path, folder: Path, pipeline: str, **changes) -> tuple[dict, list[float]]:
    """Return the parameters, and the mean loss of every two steps."""
    losses: list[float] = []

    def watch(loop: Trainer) -> None:
        loop.callbacks.append(lambda kind, x: losses.append(x["loss"]) if kind == "step" else None)

    config = config_of(store, folder / pipeline, train__pipeline=pipeline, train__log_every=2,
                       train__epochs=EPOCHS, **changes)  # fmt: skip
    return fit(config, watch).parameters, losses


@pytest.mark.parametrize("case", CASES)
@pytest.mark.first_tier(
    "penalties",
    "chunks, filtered",
    "on the device",
    "in batch, log_q",
    "adagrad",
    "fbgemm, clipped",
    "dropout",
)
def test_training_is_that_of_the_loop_to_the_bit(store, tmp_path, case):
    changes = {"model__scorer": "complex", **CASES[case]}
    with kernels_of_cuda(case.startswith("fbgemm")):
        with operations_of_cuda(), with_duplicates():
            plain = trained(store, tmp_path, "loop", **changes)
        is_cached = case.endswith("cached")
        with recorded_graphs() as graphs, tables_with_a_cache() if is_cached else nullcontext():
            place = CACHED if is_cached else {}
            graph = trained(store, tmp_path, "graph", **changes, **place)
    assert plain[1] == graph[1]
    assert largest_difference(plain[0], graph[0]) == 0
    # All steps but the first one, and the last one of every epoch.
    assert [recorder.replays for recorder in graphs] == [(STEPS - 1) * EPOCHS - 1]


def test_looking_every_place_up_changes_roundings_only(store, tmp_path):
    """The default looks every entity up once, which no graph can."""
    with operations_of_cuda():
        plain, _ = trained(store, tmp_path, "loop")
    with recorded_graphs():
        graph, _ = trained(store, tmp_path, "graph")
    assert largest_difference(plain, graph) < 1e-5


@pytest.mark.parametrize("case", EVERY)
@pytest.mark.parametrize("loss", ["softmax", "self_adversarial"])
@pytest.mark.covering
def test_every_scorer_has_a_graph(case, loss):
    scorer, dim, options = case
    replays_are_plain_runs(
        {"model.scorer": scorer, "model.dim": dim, "model.options": options, "loss.name": loss}
    )


def test_scores_in_blocks_have_a_graph(monkeypatch):
    """Blocks are computed again in backward."""
    monkeypatch.setitem(operators.BLOCK_ELEMENTS, "cpu", 8)
    replays_are_plain_runs({"model.scorer": "roth", "model.dim": 6})


@pytest.mark.parametrize("loss", KINDS["loss"].ours)
def test_every_loss_has_a_graph(loss):
    replays_are_plain_runs({"model.scorer": "distmult", "model.dim": 8, "loss.name": loss})


@pytest.mark.parametrize("regularizer", KINDS["regularizer"].ours)
def test_every_regularizer_has_a_graph(regularizer):
    weight = {"lambda1" if regularizer == "ivr" else "weight": 0.1}
    config = {"model.scorer": "complex", "model.dim": 8, "loss.n3": 0.1}
    replays_are_plain_runs({**config, "loss.regularizers": {regularizer: weight}})


def replays_are_plain_runs(config: dict) -> None:
    """Compare replays of two batches with plain runs, by the last bit."""
    torch.manual_seed(0)
    objective = assembly.build_objective(config_from_dict({**PLAIN, **config}), RELATIONS).train()
    for parameter in objective.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    parameters = [p for p in objective.parameters() if p.requires_grad]
    (first, rows), *others = (rows_and_batch(objective.scorer.dim) for _ in range(3))
    with recorded_graphs() as graphs:
        graph = captured_step._Graph(objective, rows, first)
        for batch, rows in others:
            leaf = rows.clone().requires_grad_()
            torch.manual_seed(1)
            loss = objective(leaf, batch)
            expected = torch.autograd.grad(loss, [leaf, *parameters], allow_unused=True)
            torch.manual_seed(1)
            results = graph.replay(rows, batch)
            actual = results[1], *(parameter.grad for parameter in parameters)
            assert torch.equal(results[0], loss.detach())
            for one, two in zip(actual, expected, strict=True):
                assert (one is None and two is None) or torch.equal(one, two)
    assert [recorder.replays for recorder in graphs] == [2]


def rows_and_batch(dim: int) -> tuple[Batch, torch.Tensor]:
    """Return a random batch that looks every place up, and its rows (M, D)."""
    made = random_batch(2, 3, 4, known=True)
    batch = Batch(
        as_feature(made.entities), made.entities, made.relation, made.weight.float(),
        made.known_head, made.known_tail, made.sizes, torch.zeros(0), False,
    )  # fmt: skip
    return batch, (torch.randn(ENTITIES, dim) / dim**0.5)[made.entities]


@contextmanager
def looped(store: Path, folder: Path, **changes):
    """Yield the trainer of a run."""
    with processes("cpu") as ranks:
        session = Session(config_of(store, folder, **changes), RunFolder(folder), ranks)
        yield Trainer(session, session.restore(), None)


def counts_of_a_step(store: Path, folder: Path, pipeline: str, **changes) -> tuple[int, set[str]]:
    """Return the operations that a step starts, a replay being one, and where the host waits."""
    changes = {"model__scorer": "complex", "train__pipeline": pipeline, **changes}
    with recorded_graphs() as graphs, looped(store, folder, **changes) as loop:
        stream = loop.batches.epoch(0)
        for _ in range(2):
            loop.pipeline.progress(stream)
        for recorder in graphs:
            recorder.calls.clear()
        with host_waits() as waits:
            loop.pipeline.progress(stream)
        batch = next(stream)
        with Launches() as launches:
            loop.pipeline.progress(iter([batch]))
    places = {what.partition(" in ")[2] for what in waits}
    return launches.count + len(graphs), places - OF_A_CPU


OF_A_CPU = {  # what the table and the optimizer of a CPU read there
    "keyed.step", "__init__.step", "rows.update_rows", "rows._two_dimensional",
    "split_table_batched_embeddings_ops_training.forward",
    "split_table_batched_embeddings_ops_training._generate_vbe_metadata",
}  # fmt: skip


def test_a_captured_step_starts_few_operations_and_waits_for_nothing(store, tmp_path):
    with kernels_of_cuda(True):
        counts = {
            name: counts_of_a_step(store, tmp_path, name, train__batches="device")
            for name in ("loop", "graph")
        }
    assert counts["graph"][0] <= counts["loop"][0] / 5
    assert counts["loop"][1] == {"resident.batch"}
    assert counts["graph"][1] == set()


def rank_counts(store: Path, folder: Path) -> tuple[dict, str, dict]:
    counts = {name: counts_of_a_step(store, folder, name) for name in ("loop", "graph")}
    with recorded_graphs(), looped(store, folder, train__pipeline="graph") as loop:
        batch = next(loop.batches.epoch(0))
        return counts, type(loop.pipeline).__name__, batch.deduplicated


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_ranks_take_the_plain_path(store, tmp_path, world_size):
    for counts, step, deduplicated in run_world(world_size, rank_counts, store, tmp_path):
        assert counts["graph"] == counts["loop"]
        assert step == "SampledStep" and deduplicated


PROBLEMS = {
    "scores of shallom draw model.dropout.hidden again in backward": (
        True, 1, {"model.scorer": "shallom", "model.dropout": {"hidden": 0.1}}),
    "a CUDA graph needs a GPU": (False, 1, {}),
    "2 ranks exchange rows in other numbers each step": (True, 2, {}),
    "entities.engine handrolled reads ids on the host": (
        True, 1, {"entities.engine": "handrolled"}),
    "batches of negatives.regime kvssample differ in size": (
        True, 1, {"negatives.regime": "kvssample"}),
    "batches of negatives.regime 1vsall differ in size": (True, 1, {"negatives.regime": "1vsall"}),
    "train.accumulation sums gradients, which a graph overwrites": (
        True, 1, {"train.accumulation": 2}),
    "train.precision fp16 scales the loss by a number of the host": (
        True, 1, {"train.precision": "fp16"}),
    "dense.wrapper ddp acts within backward": (True, 1, {"dense.wrapper": "ddp"}),
    "": (True, 1, {"dense.compile": True, "train.clip.norm": 1.0, "dense.wrapper": "none"}),
}  # fmt: skip


def test_parts_of_other_packages_have_no_graph():
    name = "tests.foreign_parts:CrossEntropy"
    problem = config_from_dict({"loss.name": name}).capture_problem(True, 1, False)
    assert problem == f"{name} may compute on the host"


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_has_no_graph_is_named(problem):
    on_cuda, world_size, changes = PROBLEMS[problem]
    assert config_from_dict(changes).capture_problem(on_cuda, world_size, False) == problem


def test_a_capture_is_warmed_up_aside_and_lets_other_threads_allocate(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr(captured_step.torch, "cuda", cuda)
    results, replay = captured_step.captured(lambda: cuda.events.append(f"run, {cuda.now}") or [7])
    replay()
    assert results == [7]
    assert cuda.events == [
        "aside waits for main", *["run, aside"] * 3, "main waits for aside",
        "capture, errors thread_local", "run, main", "replay",
    ]  # fmt: skip


def test_scores_that_wait_say_what_to_do(monkeypatch):
    cuda = FakeCuda("the stream is capturing")
    monkeypatch.setattr(captured_step.torch, "cuda", cuda)
    with pytest.raises(NotCaptured, match=r"\(the stream is capturing\); use train.pipeline loop"):
        captured_step.captured(lambda: [])
    assert cuda.events[-1] == "a clone of the generator"


@pytest.mark.parametrize("pipeline", ["auto", "graph"])
@pytest.mark.first_tier("auto")
def test_auto_goes_on_without_a_graph(store, tmp_path, pipeline, monkeypatch, caplog):
    caplog.set_level("INFO", "kge_torchrec")

    def fails(run):
        raise NotCaptured("the stream is capturing\nFor debugging, see the manual")

    with operations_of_cuda(), with_duplicates():
        plain = trained(store, tmp_path, "loop")
    with recorded_graphs():
        monkeypatch.setattr(captured_step, "captured", fails)
        if pipeline == "graph":
            with pytest.raises(NotCaptured):
                trained(store, tmp_path, pipeline)
            return
        auto = trained(store, tmp_path, pipeline)
    assert plain[1] == auto[1] and largest_difference(plain[0], auto[0]) == 0
    assert sum("train.pipeline loop takes the plain path" in x for x in caplog.messages) == 1
    said = [line for line in caplog.messages if line.startswith("train.pipeline auto: ")]
    assert len(said) == 1 and "(the stream is capturing); steps take the plain path" in said[0]


@pytest.mark.parametrize("pipeline, captures", [("auto", True), ("graph", True), ("loop", False)])
def test_auto_takes_a_graph_where_it_can(pipeline, captures):
    config = config_from_dict({"train.pipeline": pipeline})
    assert config.captures(True, 1, False) == captures
    for place in ((False, 1, False), (True, 2, False), (True, 1, True)):
        assert not config.captures(*place)


def test_a_scorer_that_waits_has_no_graph():
    """The stand-in for a graph notices it, as CUDA would."""
    with pytest.raises(AssertionError, match="wait for the device"), recorded_graphs():
        captured_step.captured(lambda: [torch.ones(3).nonzero()])


@pytest.mark.parametrize("features, world, lines", [(None, 1, 1), (object(), 1, 1), (None, 2, 1)])
def test_plain_path_is_announced_once(caplog, features, world, lines):
    config = config_from_dict({"train.pipeline": "graph", "negatives.regime": "sampled"})
    backend = SimpleNamespace(gains_by_pipeline=False)
    with patch.object(assembly, "SampledStep", lambda *_: "plain"):
        for rank in range(world):
            ranks = Processes(rank, world, world, torch.device("cuda"))
            if features is None and world == 1:
                ranks = Processes(0, 1, 1, torch.device("cpu"))
            assert assembly.build_pipeline(config, backend, ranks, features) == "plain"
    said = [line for line in caplog.messages if line.startswith("train.pipeline graph: ")]
    assert len(said) == lines and said[0].endswith("; steps take the plain path")
