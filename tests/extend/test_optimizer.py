"""A row optimizer of another package steps as its formula, wherever a row or parameter lies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from extended import ENGINES, LION, importable, rank_trains
from training_runs import config_of, fit, largest_difference, parameters
from worlds import run_world

from kge_torchrec import (
    RowOptimizer,
    State,
)
from kge_torchrec.cli import run_verb
from kge_torchrec.config import ConfigError
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.data.store import TripleStore
from kge_torchrec.embeddings.optimizers import make_optimizer
from kge_torchrec.embeddings.row_gradients import DenseRows, RowGradients, TableRows
from kge_torchrec.training.assembly import (
    build_backend,
    dense_optimizer,
)

HERE = __name__  # parts below are of this module


def lion(rows, momentum, ids, grad, lr, beta1=0.9, beta2=0.99, decay=0.1):
    """The step, row by row."""
    for row in sorted(set(ids)):
        total = sum(g for i, g in zip(ids, grad, strict=True) if i == row)
        change = np.sign(beta1 * momentum[row] + (1 - beta1) * total) + decay * rows[row]
        rows[row] -= lr * change
        momentum[row] = beta2 * momentum[row] + (1 - beta2) * total


def test_optimizer_steps_follow_its_formula(folder):
    """Checks the table with summed duplicates, and the dense parameters."""
    random = np.random.default_rng(0)
    optimizer = make_optimizer(LION, lr=0.05, beta1=0.9, beta2=0.99, decay=0.1)
    start = random.normal(size=(9, 4))
    tensor = lambda x: torch.tensor(x, dtype=torch.float32)  # noqa: E731
    table = TableRows(optimizer, tensor(start))
    relations = torch.nn.Parameter(tensor(start))
    dense = DenseRows([relations], 0.05, optimizer)
    rows, momentum, relation_rows, relation_momentum = (
        start.copy(),
        0 * start,
        start.copy(),
        0 * start,
    )
    for _ in range(4):
        ids, grad = random.integers(0, 8, 12), random.normal(size=(12, 4))
        lion(rows, momentum, ids, grad, 0.05)
        table.count(True)
        table.step_part(RowGradients(torch.from_numpy(ids), tensor(grad)))
        all_gradients = random.normal(size=(9, 4))
        lion(relation_rows, relation_momentum, range(9), all_gradients, 0.05)
        relations.grad = tensor(all_gradients)
        dense.step()
    np.testing.assert_allclose(table.rows.numpy(), rows, rtol=1e-5, atol=1e-6)
    assert torch.equal(table.rows[8], tensor(start)[8])  # never touched
    np.testing.assert_allclose(relations.detach().numpy(), relation_rows, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(table.states["momentum1"].numpy(), momentum, rtol=1e-5, atol=1e-6)


class WithAdam(RowOptimizer):
    """Has a torch optimizer for dense parameters."""

    def step(self, rows, grad, states, lr, step):
        rows.sub_(lr * grad)

    def dense(self, parameters, lr):
        return torch.optim.Adam(parameters, lr=lr)


def test_dense_parameters_use_the_same_optimizer_or_one_of_torch(folder):
    parameters = [torch.nn.Parameter(torch.ones(2, 3))]
    for name, kind in ((LION, DenseRows), (f"{HERE}:WithAdam", torch.optim.Adam)):
        keys = {"train.optimizer": name, "train.lr": 0.1, "train.relation_lr": 0.03}
        optimizer = dense_optimizer(config_from_dict(keys).train)(parameters)
        assert type(optimizer) is kind and optimizer.param_groups[0]["lr"] == 0.03


def test_parameter_without_dimensions_steps_as_one_element(folder):
    scalar, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((), (1,)))
    keys = {"train.optimizer": LION, "train.lr": 0.1}
    optimizer = dense_optimizer(config_from_dict(keys).train)([scalar, vector])
    for parameter in (scalar, vector):
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    assert scalar.item() == vector.item() < 1


def rank_steps(folder: Path, runs: list) -> list[tuple[dict, dict]]:
    """Parameters before and after the only step of each run."""
    results = []
    with importable(folder):
        for config in runs:
            start = []
            end = fit(config, lambda loop, start=start: start.append(parameters(loop.session)))
            results.append((start[0], end.parameters))
    return results


def test_step_of_a_run_uses_the_optimizer(folder, store, tmp_path):
    """The first step has the length of the learning rate and the sign of the gradient."""
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
    """w -= lr (m + g) / (1 + steps); m is the last gradient, steps is counted per row."""

    states = (State("last"), State("seen", by_row=True))

    def step(self, rows, grad, states, lr, step):
        last, num_steps = states["last"], states["seen"]
        num_steps.add_(grad.square().mean(1, keepdim=True))
        rows.sub_(lr / step**0.5 * (last + grad) / (1 + num_steps))
        last.copy_(grad)


@pytest.fixture(scope="module")
def averaged(store, tmp_path_factory) -> tuple[dict, dict]:
    """The keys of a run with states of both kinds, and where it ends on one rank."""
    changes = {"train__optimizer": f"{HERE}:Averaged", "train__lr": 0.2, "train__epochs": 2}
    return changes, fit(config_of(store, tmp_path_factory.mktemp("run"), **changes)).parameters


def test_states_resume_in_the_other_engine(averaged, folder, store, tmp_path):
    (changes, expected), (one, other) = averaged, ENGINES
    stopped = {**changes, "train__epochs": 1, "entities__engine": one}
    fit(config_of(store, tmp_path / "run", **stopped))
    config = config_of(store, tmp_path / "run", entities__engine=other, **changes)
    ((actual, _),) = run_world(2, rank_trains, folder, [config])[0]
    assert largest_difference(actual, expected) < 1e-5


def test_sharded_dense_parameters_step_alike(averaged, folder, store, tmp_path):
    changes, expected = averaged
    config = config_of(store, tmp_path / "run", **changes, dense__wrapper="fsdp")
    ((actual, _),) = run_world(2, rank_trains, folder, [config])[0]
    assert largest_difference(actual, expected) < 1e-5


def test_micro_batches_and_clipping_use_the_summed_gradient(averaged, store, tmp_path):
    changes = {**averaged[0], "entities__engine": "handrolled", "train__clip__norm": 0.2}
    one, other = (fit(config_of(store, tmp_path / f"{n}", train__accumulation=n, **changes))
                  for n in (1, 3))  # fmt: skip
    assert largest_difference(one.parameters, other.parameters) < 1e-5
    assert largest_difference(one.parameters, averaged[1]) > 1e-3


def test_fbgemm_kernel_rejects_other_optimizers(folder, store):
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(ConfigError, match=f"{LION}: on GPUs .* set entities.engine handrolled"):
        build_backend(config_of(store, train__optimizer=LION), TripleStore.open(store), on_gpu)
    arguments = ["--entities=1M", "--relations=10", "--triples=1M", "--devices", "1xH200"]
    arguments += ["--train.optimizer", LION]
    with pytest.raises(ConfigError, match=r"set entities\.engine handrolled"):
        run_verb("plan", arguments)
    assert run_verb("plan", [*arguments, "--entities.engine=handrolled"]) == 0
