"""A loaded export answers as its run does, and nothing damaged is loaded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from training_runs import config_of

from kge_torchrec import api, load_model
from kge_torchrec.answers.queries import Choice, best
from kge_torchrec.config import SCORER_NAMES, ConfigError, ModelConfig
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.errors import ExportError, UnknownLabelError
from kge_torchrec.export.description import describe
from kge_torchrec.export.plain_model import load_scorer
from kge_torchrec.models.scorers import build_scorer

N, R, D = 37, 3, 8


@pytest.fixture(scope="module")
def model(export):
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


def test_equal_scores_sort_by_id_and_nan_last(model, monkeypatch):
    from kge_torchrec.ranking import blocks

    monkeypatch.setattr(blocks, "CPU_BLOCK_BYTES", 1)  # blocks of 64 rows
    table = np.zeros((200, D), np.float32)
    table[[3, 70, 150]], table[[4, 199]] = 1, np.nan
    tied = replace(model, shard=EntityShard(torch.from_numpy(table), 0, 200, replicated=True))
    scores, ids = (x[0] for x in best(tied, "tail", np.array([[3, 0, 0]]), Choice(200)))
    assert scores[0] == scores[1] == scores[2]
    ones, zeros = [3, 70, 150], [i for i in range(200) if i not in (3, 4, 70, 150, 199)]
    order = [*ones, *zeros] if scores[0] > 0 else [*zeros, *ones]
    assert ids.tolist() == [*order, 4, 199]
    assert scores[-2:].tolist() == [-torch.inf] * 2


def test_table_works_as_a_layer(run, model):
    layer = model.embedding()
    assert isinstance(layer, torch.nn.Embedding) and not layer.weight.requires_grad
    assert np.array_equal(layer(torch.tensor([4, 2])).numpy(), run.table[[4, 2]])
    trained = model.embedding(freeze=False)
    trained(torch.tensor([4])).sum().backward()
    with torch.no_grad():
        trained.weight += 1
    assert np.array_equal(model.entities, run.table)  # its own copy


def test_table_is_memory_mapped(model):
    assert isinstance(model.entities, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        model.entities[0] = 0


def test_invalid_queries_are_rejected(model):
    for query in ({"head": "e1"}, {"relation": "r1"}, dict(head="e1", relation="r1", tail="e2")):
        with pytest.raises(ConfigError, match="two of head, relation and tail"):
            model.predict(**query)
    with pytest.raises(ConfigError, match="k must be an integer >= 1, got 0"):
        model.predict(head="e1", relation="r1", k=0)
    with pytest.raises(UnknownLabelError, match=r"unknown entity 'e1x'.*did you mean"):
        model.predict(head="e1x", relation="r1")
    with pytest.raises(UnknownLabelError, match="unknown relation 'r9'"):
        model.score([("e1", "r1", "e2"), ("e1", "r9", "e2")])
    for triple in ((N, 0, 0), (0, R, 0), (0, 0, -1)):
        with pytest.raises(IndexError, match=r"ids must lie in \[0, "):
            model.score([triple])
    with pytest.raises(TypeError, match="integers or labels"):
        model.score([(0.5, 0, 0)])
    with pytest.raises(ValueError, match="side must be one of"):
        model.score([(0, 0, 0)], side="both")


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
def test_loading_needs_no_torchrec(model, export):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCHREC, str(export)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    score, count = done.stdout.split()
    assert float(score) == pytest.approx(model.score([("e1", "r0", "e2")])[0]) and count == str(N)


@pytest.fixture
def copy(export, tmp_path):
    return shutil.copytree(export, tmp_path / "copy")


def change(path, **changes):
    """Changes keys of config.json."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_model(path, **changes):
    """Changes keys of its model section."""
    change(path, model=json.loads((path / "config.json").read_text())["model"] | changes)


def rewrite(path, edit):
    """Changes the scorer's parameters, with a config.json that fits their size."""
    file = path / "scorer.safetensors"
    parameters = safetensors.torch.load_file(file)
    edit(parameters)
    safetensors.torch.save_file(parameters, file)
    sizes = json.loads((path / "config.json").read_text())["files"]
    change(path, files=sizes | {file.name: file.stat().st_size})


def missing_parameter(path):
    rewrite(path, lambda parameters: parameters.update(other=parameters.pop("relations")))


def unexpected_parameter(path):
    rewrite(path, lambda parameters: parameters.update(other=torch.zeros(2)))


def parameter_of_another_shape(path):
    rewrite(path, lambda parameters: parameters.update(relations=torch.zeros(R, D)))


def broken_parameters(path):
    (path / "scorer.safetensors").write_bytes(
        b"\xff" * (path / "scorer.safetensors").stat().st_size
    )


def other_shape_of_the_table(path):
    safetensors.torch.save_file({"entities": torch.zeros(D, N)}, path / "entities.safetensors")
    sizes = json.loads((path / "config.json").read_text())["files"]
    table = path / "entities.safetensors"
    change(path, files=sizes | {table.name: table.stat().st_size})


DAMAGES = {  # more are in tests/bad_inputs.tsv
    "missing key": (missing_parameter, r'Missing key.*"relations".*Unexpected key.*"other"'),
    "unexpected key": (unexpected_parameter, r'Unexpected key\(s\) in state_dict: "other"'),
    "shape": (parameter_of_another_shape, r"size mismatch for relations.*\[3, 8\].*\[6, 8\]"),
    "no safetensors": (broken_parameters, "scorer.safetensors is no readable safetensors file"),
    "table shape": (other_shape_of_the_table, r"shape \(8, 37\) instead of F32 \(37, 8\)"),
    "no json": (
        lambda path: (path / "config.json").unlink(),
        "is no export: it has no config.json",
    ),
    "option": (lambda path: change_model(path, x=1), "unknown key model.x"),
    "no model": (lambda path: change(path, model=None), "config.json has no model"),
    "dim": (lambda path: change_model(path, dim=6), "instead of"),
    "layout": (lambda path: change(path, layout="x"), "is an export in the format x"),
    "no files": (lambda path: change(path, files={}), "does not list entities.safetensors"),
}


@pytest.mark.parametrize("damage, words", DAMAGES.values(), ids=DAMAGES)
def test_damaged_export_is_rejected(copy, damage, words):
    damage(copy)
    with pytest.raises(ExportError, match=words):
        load_model(copy)


def test_missing_export_is_rejected(tmp_path):
    with pytest.raises(ExportError, match="no such folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ExportError, match="is no export"):
        load_model(tmp_path)
