"""A loaded export answers as its run does, and nothing damaged is loaded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from training_runs import config_of

from kge_torchrec import api, load_model
from kge_torchrec.config import SCORER_NAMES, ModelConfig
from kge_torchrec.errors import ExportError
from kge_torchrec.export.description import describe
from kge_torchrec.export.plain_model import load_scorer
from kge_torchrec.models.scorers import build_scorer

N, R, D = 37, 3, 8


@pytest.fixture(scope="module")
def loaded(export):
    return load_model(export)


def test_biases_are_stored_in_the_rows(tmp_path, run):
    settings = {"model__scorer": "complex", "model__biases": True, "model__dim": 10}
    config = config_of(run.config.data.path, tmp_path / "run", train__epochs=1, **settings)
    with api.train(config) as trained:
        model = load_model(trained.export(tmp_path / "out"))
        rows, scorer = trained.model.shard.rows, trained.model.scorer
        assert rows[:, -2:].abs().max() > 0
        assert np.array_equal(model.entities, rows)
        vector = torch.tensor([1.0] * 8 + [0, 0])
        with torch.no_grad():
            single = scorer.score(rows[3] * vector, torch.tensor(1), rows[5] * vector)
        expected = single + rows[3, -2] + rows[5, -1]
        assert model.score([(3, 1, 5)]) == pytest.approx([expected.item()], rel=1e-4)
    description = model.description
    assert description["entities"]["row"].startswith("4 complex numbers, stored as re, im, re")
    assert description["entities"]["row"].endswith("the biases as a head and as a tail")
    assert description["entities"]["layout"].endswith("D is 8.")
    assert description["parameters"]["score"].endswith(
        "plus b_h + c_t, the biases of head and tail."
    )


@pytest.mark.parametrize("name", SCORER_NAMES)
def test_every_scorer_round_trips(tmp_path, name):
    config = ModelConfig(scorer=name, dim=48, normalization="layer")
    scorer = build_scorer(config, R)
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.normal_()
    safetensors.torch.save_file(scorer.state_dict(), tmp_path / "scorer.safetensors")
    description = describe(config, N, R, "safetensors")
    assert ": " in description["parameters"]["score"] and description["entities"]["layout"]
    source = description["parameters"]["score"].split(" (")[0]
    assert source and source in type(scorer).__name__  # its own, not that of the class it extends
    loaded = load_scorer(tmp_path, json.loads(json.dumps(description)))
    assert type(loaded) is type(scorer) and not loaded.training
    rows, relation = torch.randn(2, 4, 48), torch.arange(4) % R
    expected = scorer.eval().score(rows[0], relation, rows[1])
    assert torch.equal(loaded.score(rows[0], relation, rows[1]), expected)


def test_table_is_memory_mapped_and_works_as_a_layer(run, loaded):
    assert isinstance(loaded.entities, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        loaded.entities[0] = 0
    with pytest.raises(TypeError, match="integers or labels"):
        loaded.score([(0.5, 0, 0)])
    layer = loaded.embedding()
    assert isinstance(layer, torch.nn.Embedding) and not layer.weight.requires_grad
    assert np.array_equal(layer(torch.tensor([4, 2])).numpy(), run.table[[4, 2]])
    trained = loaded.embedding(freeze=False)
    trained(torch.tensor([4])).sum().backward()
    with torch.no_grad():
        trained.weight += 1
    assert np.array_equal(loaded.entities, run.table)  # its own copy


WITHOUT_TORCHREC = """
import sys
for name in ("torchrec", "fbgemm_gpu"):
    sys.modules[name] = None  # importing it fails, as where it is not installed
import torch.distributed, kge_torchrec
model = kge_torchrec.load_model(sys.argv[1])
print(model.score([("e1", "r0", "e2")])[0], model.embedding().weight.shape[0])
assert len(model.predict(head="e1", relation="r0", k=3)) == 3
assert not torch.distributed.is_initialized()
"""


@pytest.mark.slow
def test_loading_needs_no_torchrec(loaded, export):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCHREC, str(export)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    score, count = done.stdout.split()
    assert float(score) == pytest.approx(loaded.score([("e1", "r0", "e2")])[0]) and count == str(N)


@pytest.fixture
def copy(export, tmp_path):
    return shutil.copytree(export, tmp_path / "copy")


def change(path, **changes):
    """Changes keys of config.json."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewrite(path, edit):
    """Changes the scorer's parameters, with a config.json that fits their size."""
    file = path / "scorer.safetensors"
    parameters = safetensors.torch.load_file(file)
    edit(parameters)
    safetensors.torch.save_file(parameters, file)
    sizes = json.loads((path / "config.json").read_text())["files"]
    change(path, files=sizes | {file.name: file.stat().st_size})


def model(path):
    return json.loads((path / "config.json").read_text())["model"]


DAMAGES = {  # more are in tests/bad_inputs.tsv
    "missing key": (lambda path: rewrite(path, lambda x: x.update(other=x.pop("relations"))),
                    r'Missing key.*"relations".*Unexpected key.*"other"'),
    "unexpected key": (lambda path: rewrite(path, lambda x: x.update(other=torch.zeros(2))),
                       r'Unexpected key\(s\) in state_dict: "other"'),
    "shape": (lambda path: rewrite(path, lambda x: x.update(relations=torch.zeros(R, D))),
              r"size mismatch for relations.*\[3, 8\].*\[6, 8\]"),
    "no safetensors": (lambda path: (path / "scorer.safetensors").write_bytes(
                           b"\xff" * (path / "scorer.safetensors").stat().st_size),
                       "scorer.safetensors is no readable safetensors file"),
    "no json": (
        lambda path: (path / "config.json").unlink(),
        "is no export: it has no config.json",
    ),
    "option": (lambda path: change(path, model=model(path) | {"x": 1}), "unknown key model.x"),
    "no model": (lambda path: change(path, model=None), "config.json has no model"),
    "dim": (lambda path: change(path, model=model(path) | {"dim": 6}), "instead of"),
    "layout": (lambda path: change(path, layout="x"), "is an export in the format x"),
    "no files": (lambda path: change(path, files={}), "does not list entities.safetensors"),
    "no folder": (shutil.rmtree, "no such folder"),
}  # fmt: skip


@pytest.mark.parametrize("damage, words", DAMAGES.values(), ids=DAMAGES)
def test_damaged_export_is_rejected(copy, damage, words):
    damage(copy)
    with pytest.raises(ExportError, match=words):
        load_model(copy)
