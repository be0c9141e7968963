"""The parts of docs/extend.md, which lie in another package: they do what ours do, where ours do.

Their code is that of the page, so that there is one copy of it.
"""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import oracle_scorers
import pyarrow as pa
import pytest
import scorer_cases
import torch
from models import test_scorers
from planned_runs import workload
from test_documentation import ROOT, blocks_of
from training_runs import config_of, fit, largest_difference, parameters, random_triples, tiny_store
from worlds import run_world

from kge_torchrec import (
    DataError,
    EntityDraw,
    Loss,
    QueryScorer,
    Reader,
    RowOptimizer,
    Scorer,
    State,
    api,
    load_model,
    register,
)
from kge_torchrec.config import ConfigError, LossConfig, registry
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.config.sparse_options import FBGEMM
from kge_torchrec.data.negatives import NegativeSampler
from kge_torchrec.data.prepare import prepare, prepare_triples
from kge_torchrec.data.readers import make_reader
from kge_torchrec.data.store import TripleStore
from kge_torchrec.embeddings.all_to_all.sparse_optimizer import SparseOptimizer
from kge_torchrec.embeddings.foreign_optimizer import DenseRows
from kge_torchrec.embeddings.optimizers import Adam, TableOptimizer
from kge_torchrec.embeddings.pending import RowGradients
from kge_torchrec.embeddings.torchrec.cpu_table import CpuFusedTable
from kge_torchrec.errors import ExportError
from kge_torchrec.models.losses import BlockAnswers
from kge_torchrec.parts import listing, options_table
from kge_torchrec.planning import command as plan_command
from kge_torchrec.training.assembly import (
    build_backend,
    build_batches,
    build_loss,
    build_regularizers,
    dense_optimizer,
)

ROTE, SQUARED, LP = "my_parts.rote:RotE", "my_parts.squared:SquaredError", "my_parts.lp:Lp"
MIXED, LION, JSON_LINES = (
    "my_parts.mixed:MixedDraw",
    "my_parts.lion:Lion",
    "my_parts.jsonlines:JsonLines",
)
HERE = __name__  # parts below are of this module
ENGINES = ("torchrec", "handrolled")
# One run of all of them; Adagrad, since Lion's signs make much of a last bit.
ALL = {
    "model__scorer": ROTE,
    "loss__name": SQUARED,
    "loss__options": {"rest": 0.2},
    "loss__regularizers": {LP: {"weight": 0.01, "p": 1.5}},
    "negatives__sampling": MIXED,
    "negatives__options": {"share": 0.25},
    "negatives__chunk_size": 8,
    "train__epochs": 2,
}


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Whether another test had a module of that name before or not."""
    forget = lambda: [sys.modules.pop(n) for n in list(sys.modules) if n.startswith("my_parts")]  # noqa: E731
    forget()
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        forget()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """Where the page's modules lie."""
    folder = tmp_path_factory.mktemp("extend")
    page = ROOT / "docs" / "extend.md"
    for block in blocks_of(page.read_text(encoding="utf-8"), page.name):
        if block.markers.get("file", "").startswith("my_parts/"):
            path = folder / block.markers["file"]
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
    with importable(folder):
        yield folder


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tiny_store(tmp_path_factory.mktemp("graph") / "store").path


def part(kind: str, name: str):
    return registry.resolve(kind, name)


# The scorer


def rote(scorer, parameters, h, r, t):
    """One complex number after another."""
    half, total = len(h) // 2, 0.0
    moves = r[half:] if scorer.options.moves else np.zeros(len(h))
    for k in range(half):
        turned = complex(h[2 * k], h[2 * k + 1]) * complex(math.cos(r[k]), math.sin(r[k]))
        there = turned + complex(moves[2 * k], moves[2 * k + 1])
        total += abs(there - complex(t[2 * k], t[2 * k + 1])) ** 2
    return -total


def test_the_scorer_has_the_properties_of_ours(folder, monkeypatch):
    monkeypatch.setitem(oracle_scorers.FORMULAS, "rote", rote)
    for options in ({}, {"moves": False}):
        case = (ROTE, 6, options)
        for side, inverses in scorer_cases.directions(case):
            test_scorers.test_triples_score_as_in_the_paper(case, side, inverses)
            test_scorers.test_all_calls_agree(case, side, inverses)
            test_scorers.test_scores_of_relations(case, side, inverses)
        for normalization in ("unit", "layer"):
            test_scorers.test_normalized_triples_score_as_in_the_paper(case, normalization)
        for shape in ((), (5,), (2, 4)):
            test_scorers.test_shape_and_type_of_scores(case, shape)
        test_scorers.test_nothing_to_score(case)
        test_scorers.test_bits_depend_on_the_query_and_the_row_alone(case)
    test_scorers.test_small_distances_between_long_rows_keep_their_digits(ROTE)


def rank_trains(folder: Path, runs: list) -> list[tuple[dict, dict]]:
    """Parameters and metrics of some runs, one after another."""
    with importable(folder):
        sessions = (fit(config) for config in runs)
        return [(s.parameters, s.rank("test")["both"]["realistic"]) for s in sessions]


@pytest.fixture(scope="module")
def worlds(folder, store, tmp_path_factory) -> dict[int, list[tuple[dict, dict]]]:
    """By number of ranks: both engines with sampled negatives, then queries with all answers."""
    found = {}
    for world in (1, 2, 4):
        runs = tmp_path_factory.mktemp("runs")
        configs = [config_of(store, runs / e, entities__engine=e, **ALL) for e in ENGINES]
        full = {**ALL, "negatives__regime": "kvsall", "negatives__chunk_size": 0}
        configs.append(config_of(store, runs / "kvsall", **full))
        answers = {**full, "negatives__regime": "kvssample"}
        configs.append(config_of(store, runs / "kvssample", **answers))
        # What is sent for sampled candidates of queries is what is sent for those of triples.
        found[world] = run_world(world, rank_trains, folder, configs[: 3 if world == 4 else 4])[0]
    return found


def test_every_world_and_engine_ends_in_the_same_place(worlds):
    (first, _), (_, _), (full, _), (answers, _) = worlds[1]
    for of_world in worlds.values():
        for found, expected in zip(of_world, (first, first, full, answers), strict=False):
            assert largest_difference(found[0], expected) < 1e-5
    for one, other in itertools.combinations((first, full, answers), 2):
        assert largest_difference(one, other) > 1e-2
    assert first["relations"].shape == (6, 4 + 8)


def test_ranks_are_those_of_the_definition(worlds, store):
    """By numpy alone, in float64, from the parameters."""
    graph = TripleStore.open(store)
    known = {
        tuple(row) for name in ("train", "valid", "test") for row in graph.split(name).tolist()
    }
    for found, ranked in (of_world[0] for of_world in worlds.values()):
        table, relations = (found[k].double().numpy() for k in ("entities", "relations"))
        numbers = table[:, 0::2] + 1j * table[:, 1::2]
        ranks = []
        for head, relation, tail in graph.test.tolist():
            for anchor, row, answer, triple in (
                (head, relation, tail, lambda e, h=head, r=relation: (h, r, e)),
                (tail, relation + 3, head, lambda e, t=tail, r=relation: (e, r, t)),
            ):
                phase, move = relations[row, :4], relations[row, 4:]
                point = numbers[anchor] * np.exp(1j * phase) + move[0::2] + 1j * move[1::2]
                scores = -(abs(point - numbers) ** 2).sum(1)
                others = [e for e in range(len(table)) if triple(e) not in known]
                ranks.append(1 + sum(scores[e] > scores[answer] for e in others))
        ranks = np.array(ranks)
        assert ranked["mrr"] == pytest.approx((1 / ranks).mean(), abs=1e-6)
        assert ranked["mr"] == pytest.approx(ranks.mean(), abs=1e-6)
        assert ranked["hits@10"] == pytest.approx((ranks <= 10).mean(), abs=1e-6)


def test_a_run_goes_on_with_more_ranks(folder, store, worlds, tmp_path):
    start = config_of(store, tmp_path / "run", **{**ALL, "train__epochs": 1})
    fit(start)
    end = config_of(store, tmp_path / "run", **ALL)
    ((found, _),) = run_world(2, rank_trains, folder, [end])[0]
    assert largest_difference(found, worlds[1][0][0]) < 1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_goes_on_with_the_states_of_another_optimizer(folder, store, tmp_path, engine):
    changes = {**ALL, "train__optimizer": LION, "train__lr": 0.01, "entities__engine": engine}
    whole = fit(config_of(store, tmp_path / "whole", **changes)).parameters
    fit(config_of(store, tmp_path / "run", **{**changes, "train__epochs": 1}))
    assert largest_difference(
        fit(config_of(store, tmp_path / "run", **changes)).parameters, whole
    ) == 0  # fmt: skip


@pytest.fixture(scope="module")
def export(folder, store, tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """An export, and the scores of all training triples by its run."""
    here = tmp_path_factory.mktemp("export")
    with api.train(config_of(store, here / "run", **{**ALL, "train__epochs": 1})) as run:
        rows, scorer = run.session.backend.shard().rows, run.session.scorer
        heads, relations, tails = torch.from_numpy(run.session.store.train.astype(np.int64)).T
        with torch.no_grad():
            scores = scorer.score_triples(rows[heads], relations, rows[tails])
        return run.export(here / "out"), scores


def test_an_export_scores_as_its_run(export, store):
    path, scores = export
    model, train = load_model(path), TripleStore.open(store).train.astype(np.int64)
    assert torch.equal(model.score(*train.T), scores)
    description = json.loads((path / "model.json").read_text())
    assert description["parameters"]["score"].startswith("RotE (Chami et al. 2020): score(h, r, t)")
    assert description["entities"]["row"].startswith("4 complex numbers")
    assert "D/2 phases, then D of the move" in description["entities"]["layout"]


def test_an_export_without_its_module_says_what_is_missing(export, folder):
    sys.path.remove(str(folder))
    kept = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("my_parts")
    }
    try:
        with pytest.raises(ExportError, match=f"{ROTE} cannot be imported: No module") as raised:
            load_model(export[0])
        assert "damaged" not in str(raised.value)
    finally:
        sys.path.insert(0, str(folder))
        sys.modules.update(kept)


def test_a_plan_counts_what_the_classes_say(folder, capsys):
    keys = {"model__scorer": ROTE, "model__dim": 8, "model__reciprocal": False}
    work = workload(relations=7, **keys, train__optimizer=LION, negatives__sampling=MIXED)
    assert work.dense_parameters == 7 * (4 + 8) and work.negative_power is None
    bare = workload(relations=7, **keys, model__options={"moves": False})
    assert bare.dense_parameters == 7 * 4
    sizes = ["--entities=1M", "--relations=10", "--triples=1M", "--devices=2xCPU-64GB"]
    assert plan_command.run([*sizes, "--model.scorer", ROTE, "--train.optimizer", LION]) == 0
    said = capsys.readouterr().out
    assert f"(fp32, {LION}), {ROTE} with 10 relations" in said
    sizes = dict(re.findall(r"^  (\w[\w ]+?)  +(\S+ \w+)$", said, re.MULTILINE))
    assert sizes["optimizer state"] == sizes["weights"] == "0.24 GiB"  # one state


# The loss


def test_the_forms_of_the_loss_are_one_loss(folder):
    """By hand, and over all entities in blocks: values, and the gradients that autograd has."""
    torch.manual_seed(0)
    loss = build_loss(LossConfig(name=SQUARED, options={"rest": 0.3}))
    scores = torch.randn(3, 7, requires_grad=True)
    answers = torch.zeros(3, 7, dtype=torch.bool)
    answers[[0, 1, 1, 2], [2, 0, 6, 3]] = True
    expected = torch.where(answers, (1 - scores) ** 2, 0.3 * scores**2).sum(1)
    query, column = answers.nonzero().T
    positive, others = scores[answers], ~answers
    torch.testing.assert_close(loss.over_answers()(positive, query, scores, others), expected)
    alone = [0, 2]  # queries with one answer
    one = loss(scores[answers][[0, 3]], scores[alone], others[alone])
    torch.testing.assert_close(one, expected[alone])
    (gradient,) = torch.autograd.grad(0.5 * expected.sum(), scores)
    full, parts = loss.over_all(7), []
    for start, stop in ((0, 4), (4, 7)):
        here = (column >= start) & (column < stop)
        share = 1 / answers.sum(1)[query[here]]
        block = BlockAnswers(query[here], column[here] - start, share)
        slopes = scores.detach()[:, start:stop].clone()
        top, seen = full.start(slopes, block)
        parts.append((slopes, top, seen, block))
    seen = full.join(torch.stack([part[2] for part in parts]))
    torch.testing.assert_close(full.values(seen), expected.detach())
    for slopes, top, _, block in parts:
        full.finish(slopes, top, seen, block, 0.5)
    torch.testing.assert_close(torch.cat([part[0] for part in parts], 1), gradient)


# The regularizer


def test_the_penalty_is_added(folder):
    rows = torch.tensor([[1.0, -4.0], [0.0, 9.0]])
    of = lambda given: build_regularizers(LossConfig(regularizers={LP: given})).of(rows, True)  # noqa: E731
    torch.testing.assert_close(of(0.5), torch.tensor([2.5, 4.5]))
    torch.testing.assert_close(of({"weight": 0.5, "p": 1.5}), torch.tensor([4.5, 13.5]))


# The draw


def test_the_draw_is_the_mixture_on_any_number_of_ranks(folder, store):
    graph = TripleStore.open(store)
    kind = part("negative_sampler", MIXED)
    sampler = NegativeSampler(37, 500, 3, kind.of(graph, kind.Options(share=0.25)))
    drawn = sampler.draw(1, 2, 0, 0, 400)
    split = [sampler.draw(1, 2, 0, first, 100) for first in (0, 100, 200, 300)]
    assert np.array_equal(np.concatenate(split), drawn)
    ends = np.bincount(np.concatenate([graph.train[:, 0], graph.train[:, 2]]), minlength=37)
    expected = 0.25 * ends / ends.sum() + 0.75 / 37
    found = np.bincount(drawn.ravel(), minlength=37) / drawn.size
    assert abs(found - expected).max() < 5 * math.sqrt(expected.max() / drawn.size)
    assert abs(found - 1 / 37).max() > 10 * math.sqrt(expected.max() / drawn.size)


@dataclass
class Draw(EntityDraw):
    """What a draw may do wrong."""

    store: TripleStore
    options: Draw.Options

    @dataclass(frozen=True)
    class Options:
        how: str = "beyond"

    def __call__(self, unit):
        if self.options.how == "own":
            return np.random.default_rng().integers(0, 37, unit.shape)
        if self.options.how == "place":
            return np.arange(unit.size).reshape(unit.shape) % 37
        ids = (unit * (38 if self.options.how == "beyond" else 37)).astype(np.int64)
        return {"type": ids.astype(np.int32), "shape": ids.ravel()}.get(self.options.how, ids)


@pytest.mark.parametrize(
    "how, problem",
    [("beyond", r"outside \[0, 37\)"), ("own", "ranks would not agree"),
     ("place", "ranks would not agree"), ("type", "int64"), ("shape", "same shape")],
)  # fmt: skip
def test_a_draw_that_breaks_its_promise_is_refused(store, how, problem):
    changes = {"negatives__sampling": f"{HERE}:Draw", "negatives__options": {"how": how}}
    config = config_of(store, **changes)
    ranks = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=f"negatives.sampling: Draw .*{problem}"):
        build_batches(config, TripleStore.open(store), ranks)


# The optimizer


def lion(rows, momentum, ids, grad, lr, beta1=0.9, beta2=0.99, decay=0.1):
    """The step, row by row."""
    for row in sorted(set(ids)):
        total = sum(g for i, g in zip(ids, grad, strict=True) if i == row)
        change = np.sign(beta1 * momentum[row] + (1 - beta1) * total) + decay * rows[row]
        rows[row] -= lr * change
        momentum[row] = beta2 * momentum[row] + (1 - beta2) * total


def test_the_optimizer_steps_as_its_formula(folder):
    """In the tables of both engines, duplicates summed, and on the dense parameters."""
    random = np.random.default_rng(0)
    options = part("table_optimizer", LION).Options(decay=0.1)
    optimizer = TableOptimizer(LION, lr=0.05, options=options)
    start = random.normal(size=(9, 4))
    tensor = lambda x: torch.tensor(x, dtype=torch.float32)  # noqa: E731
    handrolled = SparseOptimizer(optimizer, FBGEMM, tensor(start))
    fused = CpuFusedTable(9, 4, optimizer)
    fused.rows.copy_(tensor(start))
    relations = torch.nn.Parameter(tensor(start))
    dense = DenseRows([relations], 0.05, optimizer.rule)
    rows, momentum, of_relations, of_momentum = start.copy(), 0 * start, start.copy(), 0 * start
    for _ in range(4):
        ids, grad = random.integers(0, 8, 12), random.normal(size=(12, 4))
        lion(rows, momentum, ids, grad, 0.05)
        handrolled.step(torch.from_numpy(ids), tensor(grad))
        fused.step_rows([RowGradients(torch.from_numpy(ids), tensor(grad))])
        every = random.normal(size=(9, 4))
        lion(of_relations, of_momentum, range(9), every, 0.05)
        relations.grad = tensor(every)
        dense.step()
    for found in (handrolled.rows, fused.rows):
        np.testing.assert_allclose(found.numpy(), rows, rtol=1e-5, atol=1e-6)
        assert torch.equal(found[8], tensor(start)[8])  # never touched
    np.testing.assert_allclose(relations.detach().numpy(), of_relations, rtol=1e-5, atol=1e-6)
    (state,) = fused.get_optimizer_state()
    np.testing.assert_allclose(state["momentum"].numpy(), momentum, rtol=1e-5, atol=1e-6)


class WithAdam(RowOptimizer):
    """Has a torch optimizer for dense parameters."""

    def step(self, rows, grad, states, lr, step):
        rows.sub_(lr * grad)

    @classmethod
    def dense(cls, parameters, lr, of):
        return torch.optim.Adam(parameters, lr=lr)


def test_dense_parameters_step_alike_or_by_an_optimizer_of_torch(folder):
    parameters = [torch.nn.Parameter(torch.ones(2, 3))]
    for name, kind in ((LION, DenseRows), (f"{HERE}:WithAdam", torch.optim.Adam)):
        keys = {"train.optimizer": name, "train.lr": 0.1, "train.relation_lr": 0.03}
        optimizer = dense_optimizer(config_from_dict(keys).train)(parameters)
        assert type(optimizer) is kind and optimizer.param_groups[0]["lr"] == 0.03


def rank_steps(folder: Path, runs: list) -> list[tuple[dict, dict]]:
    """Parameters before and after the only step of each run."""
    found = []
    with importable(folder):
        for config in runs:
            start = []
            end = fit(config, lambda loop, start=start: start.append(parameters(loop.session)))
            found.append((start[0], end.parameters))
    return found


def test_a_step_of_a_run_is_the_optimizers(folder, store, tmp_path):
    """The first one has the length of the learning rate, by the sign of the gradient alone."""
    ends = []
    for world in (1, 2):
        changes = {"train__optimizer": LION, "train__lr": 0.01, "train__relation_lr": 0.03,
                   "train__epochs": 1, "train__batch_size": 130}  # fmt: skip
        runs = [config_of(store, tmp_path / f"{e}{world}", entities__engine=e, **changes)
                for e in ENGINES]  # fmt: skip
        for start, end in run_world(world, rank_steps, folder, runs)[0]:
            ends.append(end)
            for name, rate in (("entities", 0.01), ("relations", 0.03)):
                moved = (end[name] - start[name]).abs()
                torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=0, atol=1e-6)
    assert all(largest_difference(end, ends[0]) < 1e-6 for end in ends)


class Averaged(RowOptimizer):
    """w -= lr (m + g) / (1 + seen), m the last gradient, seen a number a row."""

    states = (State("last"), State("seen", by_row=True))

    def step(self, rows, grad, states, lr, step):
        last, seen = states["last"], states["seen"]
        seen.add_(grad.square().mean(1, keepdim=True))
        rows.sub_(lr / step**0.5 * (last + grad) / (1 + seen))
        last.copy_(grad)


@pytest.fixture(scope="module")
def averaged(store, tmp_path_factory) -> tuple[dict, dict]:
    """The keys of a run with states of both kinds, and where it ends on one rank."""
    changes = {"train__optimizer": f"{HERE}:Averaged", "train__lr": 0.2, "train__epochs": 2}
    return changes, fit(config_of(store, tmp_path_factory.mktemp("run"), **changes)).parameters


@pytest.mark.parametrize("one, other", [ENGINES, ENGINES[::-1]])
def test_states_go_on_in_the_other_engine(averaged, folder, store, tmp_path, one, other):
    changes, expected = averaged
    stopped = {**changes, "train__epochs": 1, "entities__engine": one}
    fit(config_of(store, tmp_path / "run", **stopped))
    config = config_of(store, tmp_path / "run", entities__engine=other, **changes)
    ((found, _),) = run_world(2, rank_trains, folder, [config])[0]
    assert largest_difference(found, expected) < 1e-5


@pytest.mark.parametrize(
    "world, dense",
    [
        (2, {"wrapper": "fsdp"}),
        pytest.param(4, {"wrapper": "hybrid", "replicas": 2}, marks=pytest.mark.slow),
    ],
)
def test_parts_of_dense_parameters_step_alike(averaged, folder, store, tmp_path, world, dense):
    changes, expected = averaged
    keys = {f"dense__{key}": value for key, value in dense.items()}
    config = config_of(store, tmp_path / "run", **changes, **keys)
    ((found, _),) = run_world(world, rank_trains, folder, [config])[0]
    assert largest_difference(found, expected) < 1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_micro_batches_and_clipping_are_of_the_sum(averaged, store, tmp_path, engine):
    changes = {**averaged[0], "entities__engine": engine, "train__clip_norm": 0.2}
    one, other = (fit(config_of(store, tmp_path / f"{n}", train__accumulation=n, **changes))
                  for n in (1, 3))  # fmt: skip
    assert largest_difference(one.parameters, other.parameters) < 1e-5
    assert largest_difference(one.parameters, averaged[1]) > 1e-3


def test_fbgemms_kernel_takes_no_steps_of_others(folder, store):
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(ConfigError, match=f"{LION}: on GPUs .* set entities.engine handrolled"):
        build_backend(config_of(store, train__optimizer=LION), TripleStore.open(store), on_gpu)
    arguments = ["--entities=1M", "--relations=10", "--triples=1M", "--devices", "1xH200"]
    arguments += ["--train.optimizer", LION]
    with pytest.raises(ConfigError, match=r"set entities\.engine handrolled"):
        plan_command.run(arguments)
    assert plan_command.run([*arguments, "--entities.engine=handrolled"]) == 0


# The reader


def test_the_reader_gives_the_triples(folder, tmp_path):
    triples = random_triples(9, 2, 30)
    expected = prepare_triples({"train": triples}, tmp_path / "expected")
    lines = "".join(json.dumps(dict(zip("hrt", triple, strict=True))) + "\n" for triple in triples)
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "train.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    reader = make_reader(JSON_LINES, {"head": "h", "relation": "r", "tail": "t"}, "data")
    found = prepare(tmp_path / "graph", tmp_path / "found", reader=reader, progress=False)
    assert np.array_equal(found.train, expected.train)
    labels = [list(store.entities.labels(np.arange(9))) for store in (found, expected)]
    assert labels[0] == labels[1]
    file = tmp_path / "one.jsonl"
    for line, problem in (('{"h": "a"}', "KeyError"), ("a b c", "JSON"), ("[1]", "TypeError")):
        file.write_text(lines + line)
        with pytest.raises(DataError, match=f"one.jsonl:31: no triple: .*{problem}"):
            prepare(file, tmp_path / "no", reader=reader, progress=False)
    assert not (tmp_path / "no").exists()


@dataclass
class Given(Reader):
    """Gives what it is told to."""

    batches: list = field(default_factory=list)

    def read(self, path, on_bytes=None):
        yield from self.batches


def batch(**columns):
    return pa.record_batch(list(columns.values()), list(columns))


TEXT = pa.array(["a", "b"])


@pytest.mark.parametrize(
    "given, problem",
    [
        (batch(head=TEXT, relation=TEXT, tail=pa.array(["a", None])), "triple whose tail is empty"),
        (batch(head=TEXT, relation=pa.array(["", "r"]), tail=TEXT), "whose relation is empty"),
        (batch(head=TEXT, relation=TEXT), "no record batch of the string columns"),
        (batch(head=TEXT, relation=TEXT, tail=pa.array([["a"], ["b"]])), "no record batch"),
        ([("a", "r", "b")], "no record batch"),
    ],
    ids=["null", "nothing", "two columns", "lists", "no batch"],
)
def test_what_a_reader_gives_is_checked(tmp_path, given, problem):
    (tmp_path / "graph").write_text("")
    with pytest.raises(DataError, match=f"graph: its reader gave .*{problem}"):
        prepare(tmp_path / "graph", tmp_path / "s", reader=Given([given]), progress=False)
    with pytest.raises(DataError, match="its reader has no suffixes; name the files"):
        prepare(tmp_path, tmp_path / "s", reader=Given([given]), progress=False)


# What a config may get wrong


class NoForms(Loss):
    """Sampled candidates only."""


class NoQuery(Scorer):
    """Encodes nothing."""


class Needy(QueryScorer):
    """Has an option without default."""

    @dataclass(frozen=True)
    class Options:
        size: int
        kind: str = "a"


class NoDataclass(QueryScorer):
    class Options:
        pass


class NoStep(RowOptimizer):
    """Gives no step."""


WRONG = [
    ({"model.scorer": "complx"}, "model.scorer must be one of .*did you mean 'complex'"),
    ({"model.scorer": "my_parts.rote.RotE"}, "a name or package.module:Class, got 'my_p"),
    ({"model.scorer": "my_parts.rote:"}, "a name or package.module:Class"),
    ({"model.scorer": ":RotE"}, "a name or package.module:Class"),
    ({"model.scorer": "no_parts.rote:RotE"}, "cannot be imported: No module named 'no_parts'"),
    ({"model.scorer": "my_parts.rote:RotF"}, "my_parts.rote has no RotF; did you mean RotE?"),
    ({"model.scorer": LP}, "model.scorer: .*Lp is no class derived from .*base.Scorer"),
    ({"model.scorer": "my_parts.rote:math"}, "model.scorer: .* is no class derived from"),
    ({"model.scorer": ROTE, "model.options": {"move": True}},
     "model.options.move is no option of rote, which has moves"),
    ({"model.scorer": ROTE, "model.options": {"moves": "far"}},
     "model.options.moves must be true or false, got far"),
    ({"model.scorer": ROTE, "model.dim": 7}, r"even for rote \(two real numbers"),
    ({"model.scorer": ROTE, "model.hidden_dropout": 0.5}, "no meaning for my_parts.rote:RotE"),
    ({"model.scorer": f"{HERE}:Needy"}, "model.options.size: Needy has no default for it; set it"),
    ({"model.scorer": f"{HERE}:NoDataclass"}, "NoDataclass.Options must be a dataclass"),
    ({"model.scorer": f"{HERE}:NoQuery", "negatives.regime": "kvsall"}, "derive it from QueryScor"),
    ({"loss.name": SQUARED, "loss.options": {"rest": 0}}, "loss.options.rest must be > 0, got 0"),
    ({"loss.name": f"{HERE}:NoForms", "negatives.regime": "1vsall"}, "use softmax or bce"),
    ({"loss.name": f"{HERE}:NoForms", "negatives.regime": "kvssample"}, "use softmax or bce"),
    ({"loss.regularizers": {"l3": 1}}, "loss.regularizers must be one of n3, l2"),
    ({"loss.regularizers": {LP: None}}, "has no value; give its weight"),
    ({"loss.regularizers": {LP: {"q": 1}}}, "Lp.q is no option of Lp, which has weight, p"),
    ({"negatives.sampling": "unifrom"}, "did you mean 'uniform'"),
    ({"negatives.sampling": MIXED, "negatives.options": {"share": "half"}},
     "negatives.options.share must be a number, got half"),
    ({"train.optimizer": LION, "train.weight_decay": 0.1}, "settings from train.optimizer_options"),
    ({"train.optimizer": LION, "train.optimizer_options": {"beta3": 1}}, "beta3 is no option of L"),
    ({"train.optimizer": LION, "entities.engine": "handrolled", "entities.duplicates": "mean"},
     "entities.duplicates: .*Lion is not ours and takes its own step"),
    ({"data.reader": "jsonl"}, "data.reader must be a name or package.module:Class, got 'jsonl'"),
    ({"data.reader_options": {"head": "h"}}, "data.reader_options are of data.reader"),
]  # fmt: skip


@pytest.mark.parametrize("keys, message", WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_names_and_options_are_told(folder, keys, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(keys)


def test_an_optimizer_without_a_step_is_told():
    with pytest.raises(ConfigError, match="NoStep has no step"):
        TableOptimizer(f"{HERE}:NoStep")
    with pytest.raises(ConfigError, match="has no step"):  # its kernels go by name
        TableOptimizer(f"{Adam.__module__}:Adam")


# Names


@pytest.fixture
def registered(monkeypatch):
    """What a test registers is forgotten."""
    monkeypatch.setattr(registry, "_registered", {})


def test_a_registered_name_is_a_name(folder, registered):
    register("scorer", "Rot-E", ROTE)
    kind = part("scorer", ROTE)
    register("scorer", "rot_e", kind)  # the same class
    assert config_from_dict({"model.scorer": "ROT-E"}).model.scorer == "rot_e"
    assert part("scorer", "rot_e") is kind and "rot_e" in registry.names_of("scorer")
    assert "moves (true or false, default true): Whether a relation" in listing("scorer", "rot_e")
    register("loss", "rot_e", SQUARED)  # names are of a kind
    for arguments, message in (
        (("scorer", "rot_e", LP), "'rot_e' exists already"),
        (("scorer", "ComplEx", ROTE), "'complex' exists already"),
        (("scorers", "x", ROTE), "kind must be one of scorer, loss"),
        (("scorer", "x", "my_parts.rote.RotE"), "a class or package.module:Class"),
        (("scorer", "my:x", ROTE), "leave the colon out"),
    ):
        with pytest.raises(ValueError, match=message):
            register(*arguments)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs packages with entry points, {name: text of entry_points.txt}."""

    def install(**packages: str) -> None:
        for name, text in packages.items():
            info = tmp_path / f"{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        registry._installed.cache_clear()

    yield install
    monkeypatch.undo()
    registry._installed.cache_clear()


def test_an_entry_point_is_a_name(folder, installed, registered, caplog):
    installed(
        one=f"[kge_torchrec.scorer]\nRot-E = {ROTE}\ntwice = {ROTE}\ncomplex = {ROTE}\n",
        other=f"[kge_torchrec.scorer]\ntwice = {LP}\n\n[kge_torchrec.loss]\nsquared = {SQUARED}\n",
    )
    assert part("scorer", "rot_e") is part("scorer", ROTE)
    assert part("loss", "squared") is part("loss", SQUARED)
    assert config_from_dict({"model.scorer": "rot_e", "loss.name": "squared"}).loss.name
    assert part("scorer", "complex").name == "complex" and "as one of ours" in caplog.text
    with pytest.raises(ConfigError, match=f"the name twice to {LP} and to {ROTE}"):
        config_from_dict({"model.scorer": "twice"})
    with pytest.raises(ValueError, match="'squared' exists already"):
        register("loss", "squared", LP)
    register("loss", "squared", SQUARED)


def test_the_table_of_options_is_that_of_the_classes():
    page = (ROOT / "docs" / "scorers.md").read_text(encoding="utf-8")
    assert f"\n\n{options_table('scorer')}\n\n" in page
