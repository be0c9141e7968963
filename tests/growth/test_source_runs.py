"""No verb writes to a file of the run or store that it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from grown_runs import FIRST, OLD_ENTITIES, TABLE, base_config, tensors
from starlette.testclient import TestClient
from training_runs import tiny_store

from kge_torchrec import api
from kge_torchrec.cli import main
from kge_torchrec.serving.app import create_app
from kge_torchrec.serving.server import opened_model


def content(*folders: Path) -> dict[Path, tuple[bytes, int]]:
    """Every file, its bytes, and when it was written last."""
    return {
        file: (file.read_bytes(), file.stat().st_mtime_ns)
        for folder in folders
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A store, a run of it, triples for two extensions, and questions."""
    folder = tmp_path_factory.mktemp("world")
    store = tiny_store(folder / "store").path
    api.train(base_config(store, folder / "run", train__epochs=1)).close()
    (folder / "a.tsv").write_text("n0\tr0\te1\ne2\tnew0\tn0\nn1\tr1\te3\n")
    (folder / "b.tsv").write_text("m0\tr0\tn1\nm0\tnew1\te4\nn0\tnew0\tm1\n")
    (folder / "asked.tsv").write_text("e1\tr0\t?\n")
    (folder / "scored.tsv").write_text("e1\tr0\te2\n")
    return folder


def test_extending_an_extended_run_does_not_change_sources(world, tmp_path):
    chain = [world / "run", *(tmp_path / f"extended{n}" for n in range(3))]
    for before, after, name in zip(chain, chain[1:], ("a.tsv", "b.tsv", "c.tsv"), strict=False):
        (tmp_path / "c.tsv").write_text("k0\tr1\tm0\nk0\tnew2\tn1\n")
        new = tmp_path / name if name == "c.tsv" else world / name
        held = content(*chain[: chain.index(after)], world / "store")
        assert main(["extend", str(before), str(new), "-o", str(after), "--epochs", "0"]) == 0
        assert content(*chain[: chain.index(after)], world / "store") == held
    one, two, three = (tensors(run, FIRST)[TABLE] for run in chain[1:])
    assert [len(x) - OLD_ENTITIES for x in (one, two, three)] == [2, 4, 5]
    assert torch.equal(two[: len(one)], one) and torch.equal(three[: len(two)], two)
    assert main(["evaluate", str(chain[1])]) == 0  # the first one is whole


# Those that write; RUN, STORE and OUT are replaced.  A verb may add the files named after it.
VERBS = {
    "extend": ("extend STEP0 WORLD/b.tsv -o OUT/x --epochs 1", ()),
    "predict a file": ("predict RUN --queries WORLD/asked.tsv -o OUT/x.tsv --format tsv", ()),
    "calibrate": ("calibrate RUN", ("calibration.json",)),
    "export": ("export RUN -o OUT/x", ()),
    "report in the run": ("report RUN --no-models", ("report.html",)),
    "data check": ("data check STORE", ()),
    "train from its rows": ("train OUT/config.yaml --model.init_from RUN --run.dir OUT/x", ()),
    "tune": ("tune OUT/config.yaml --trials 1 --study OUT/x --run.dir null", ()),
}  # fmt: skip


@pytest.fixture(scope="module")
def step0(world, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("step0") / "run"
    assert main(["extend", str(world / "run"), str(world / "a.tsv"), "-o", str(run),
                 "--epochs", "0"]) == 0  # fmt: skip
    return run


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_do_not_write_to_source_runs(world, step0, tmp_path, verb):
    run, store = world / "run", world / "store"
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    words, added = VERBS[verb]
    places = {"RUN": run, "STEP0": step0, "STORE": store, "WORLD": world, "OUT": tmp_path}
    for name, place in places.items():
        words = words.replace(name, str(place))
    held = content(run, store, step0)
    assert main(words.split()) == 0
    after = content(run, store, step0)
    assert {file.name for file in after.keys() - held.keys()} <= set(added)
    assert {file: after.get(file) for file in held} == held
    for name in added:
        (run / name).unlink(missing_ok=True)


def test_serving_does_not_change_the_run(world, step0):
    held = content(world / "run", world / "store", step0)
    for run in (world / "run", step0):
        with TestClient(create_app(opened_model(run), "run")) as client:
            for path in ("/entities", "/", "/metrics"):
                assert client.get(path).status_code == 200
            for path, body in (
                ("/predict", {"head": "e1", "relation": "r0"}), ("/nearest", {"entity": "e1"}),
            ):  # fmt: skip
                assert client.post(path, json=body).status_code == 200
    assert content(world / "run", world / "store", step0) == held
