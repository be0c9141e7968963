"""The two engines side by side: the same parameters, the same checkpoints, the same verbs."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
from training_runs import config_of, fit, largest_difference, shared_folder, tiny_store
from worlds import run_world

from kge_torchrec import api
from kge_torchrec.config import OPTIMIZER_NAMES, ConfigError


@functools.cache
def the_store() -> Path:
    return tiny_store(shared_folder() / "store").path


def changes_of(optimizer: str) -> dict:
    """A run of 20 steps; each optimizer with another scorer and other options."""
    number = OPTIMIZER_NAMES.index(optimizer)
    return {
        "train__optimizer": optimizer,
        "train__epochs": 4,
        "train__lr": (0.01, 0.01, 0.05, 0.05, 0.5)[number],
        "train__optimizer_options__eps": 1e-3,
        "train__optimizer_options__weight_decay": None if optimizer in ("adagrad", "sgd") else 0.02,
        "train__schedule": ("constant", "linear", "cosine", "constant", "exponential")[number],
        "model__scorer": ("complex", "distmult", "transe_l2", "rotate", "complex")[number],
        "loss__name": ("softmax", "bce", "self_adversarial", "softmax", "bce")[number],
        "loss__n3": (0.01, 0.0, 0.0, 0.0, 0.0)[number],
        "negatives__chunk_size": (0, 8, 1, 0, 8)[number],
        "checkpoint__every__epochs": 0,
    }


def trains(folder: Path, changes: dict) -> dict:
    """Return the parameters after training, or after resuming the run of the folder."""
    return fit(config_of(the_store_path(folder), folder / "run", **changes)).parameters


def the_store_path(folder: Path) -> Path:
    return Path((folder / "store").read_text())


@functools.cache
def trained(world_size: int, engine: str, optimizer: str, **more) -> dict:
    return train_in(world_size, changes_of(optimizer) | {"entities__engine": engine} | more)


def train_in(world_size: int, changes: dict, folder: Path | None = None) -> dict:
    """Rank 0's parameters; all ranks have the same."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        (folder / "store").write_text(str(the_store()))
        results = run_world(world_size, trains, folder, changes)
    assert all(largest_difference(results[0], other) == 0 for other in results)
    return results[0]


@pytest.mark.parametrize(
    "optimizer, world_size",
    [
        ("adam", 2),
        ("rowwise_adagrad", 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("adam", 1),
                ("adam", 4),
                ("rowwise_adam", 2),
                ("adagrad", 2),
                ("rowwise_adagrad", 2),
                ("sgd", 2),
            )
        ),
    ],
)
@pytest.mark.first_tier("rowwise_adagrad-4")
def test_engines_have_the_same_parameters_after_twenty_steps(optimizer, world_size):
    ours = trained(world_size, "handrolled", optimizer)
    assert largest_difference(ours, trained(world_size, "torchrec", optimizer)) < 1e-5
    assert largest_difference(ours, trained(1, "handrolled", optimizer)) < 1e-5


@pytest.mark.parametrize(
    "optimizer, first, then",
    [
        ("rowwise_adagrad", ("handrolled", 2), ("torchrec", 1)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("adam", ("torchrec", 1), ("handrolled", 2)),
                ("adam", ("handrolled", 2), ("torchrec", 4)),
                ("rowwise_adam", ("handrolled", 4), ("torchrec", 1)),
                ("rowwise_adagrad", ("torchrec", 2), ("handrolled", 4)),
                ("adagrad", ("handrolled", 1), ("torchrec", 2)),
                ("sgd", ("torchrec", 4), ("handrolled", 1)),
                ("rowwise_adam", ("handrolled", 1), ("handrolled", 4)),
            )
        ),
    ],
)
def test_checkpoint_of_one_engine_resumes_in_the_other(tmp_path, optimizer, first, then):
    half = {"train__epochs": 2, "train__schedule": "constant"}
    whole = {"train__schedule": "constant"}
    for (engine, world_size), more in ((first, half), (then, whole)):
        changes = changes_of(optimizer) | {"entities__engine": engine} | more
        actual = train_in(world_size, changes, tmp_path)
    expected = trained(1, "torchrec", optimizer, **whole)
    assert largest_difference(actual, expected) < 1e-5


@pytest.mark.slow
def test_more_ranks_than_entities_resume_in_the_other(tmp_path):
    store = tiny_store(tmp_path / "few", entities=3, relations=4, train=6, held_out=1).path
    changes = {"train__batch_size": 2, "train__optimizer": "rowwise_adam"}
    results = {}
    for engine in ("handrolled", "torchrec"):
        folder = tmp_path / engine
        folder.mkdir()
        (folder / "store").write_text(str(store))
        other = {"torchrec": "handrolled", "handrolled": "torchrec"}[engine]
        halves = [(engine, 2), (other, 4)]
        for name, epochs in halves:
            more = changes | {"entities__engine": name, "train__epochs": epochs}
            results[engine] = run_world(4, trains, folder, more)[0]
    assert largest_difference(results["handrolled"], results["torchrec"]) < 1e-5


@pytest.mark.parametrize(
    "preset, world_size",
    [
        ("dicee", 2),
        pytest.param("dgl", 1, marks=pytest.mark.slow),
        pytest.param("dicee", 1, marks=pytest.mark.slow),
        pytest.param("dgl", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_presets_learn_and_resume_bitwise(tmp_path, preset, world_size):
    changes = {"entities__engine": "handrolled", "entities__preset": preset,
               "train__optimizer": "adam", "train__lr": 0.02, "train__epochs": 4}  # fmt: skip
    uninterrupted = train_in(world_size, changes)
    train_in(world_size, changes | {"train__epochs": 2}, tmp_path)
    assert largest_difference(uninterrupted, train_in(world_size, changes, tmp_path)) == 0
    start = train_in(world_size, changes | {"train__epochs": 1})
    assert largest_difference(uninterrupted, start) > 0.05


def test_presets_differ_from_each_other():
    keys = {"entities__engine": "handrolled", "train__optimizer": "adam", "train__lr": 0.02}
    presets = ("fbgemm", "dicee", "dgl")
    runs = [train_in(1, keys | {"entities__preset": name}) for name in presets]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert largest_difference(runs[one], runs[other]) > 1e-3


@pytest.mark.slow
def test_run_of_each_engine_can_be_evaluated_queried_and_resumed(tmp_path):
    keys = {"train__epochs": 3, "train__optimizer": "adam"}
    both = {
        engine: api.train(
            config_of(the_store(), tmp_path / engine, entities__engine=engine, **keys)
        )
        for engine in ("torchrec", "handrolled")
    }
    ours, theirs = both["handrolled"], both["torchrec"]
    assert ours.results["test"] == theirs.results["test"]
    assert ours.evaluate("valid") == theirs.evaluate("valid")
    query = {"head": "e0", "relation": "r1", "k": 5}
    actual, expected = ours.predict(**query), theirs.predict(**query)
    assert [p.label for p in actual] == [p.label for p in expected]
    assert "hand-rolled" in (ours.path / "plan.txt").read_text()
    moved = api.resume(ours.path, {"entities.engine": "torchrec", "train.epochs": 4})
    stayed = api.resume(theirs.path, {"train.epochs": 4})
    assert moved.results["test"] == stayed.results["test"]
    assert moved.config.entities.engine == "torchrec"
    for run in (ours, theirs, moved, stayed):
        run.close()


def test_preset_cannot_change(tmp_path):
    """It defines what the states in a checkpoint mean."""
    keys = {"train__epochs": 1, "train__optimizer": "adam", "entities__engine": "handrolled"}
    run = api.train(config_of(the_store(), tmp_path / "run", **keys))
    with pytest.raises(ConfigError, match=r"entities\.preset is .* in this run and cannot change"):
        api.resume(run.path, {"entities.preset": "dgl"})
    run.close()


def test_error_in_the_thread_ends_training(tmp_path, monkeypatch):
    from kge_torchrec.embeddings.all_to_all.sparse_optimizer import SparseOptimizer

    def fail(*_):
        raise MemoryError("the table's step found no memory")

    monkeypatch.setattr(SparseOptimizer, "step", fail)
    config = config_of(the_store(), tmp_path / "run", entities__engine="handrolled",
                       entities__preset="dicee", train__optimizer="adam")  # fmt: skip
    with pytest.raises(MemoryError, match="found no memory"):
        api.train(config)
