"""What other programs read scores 1,000 triples as we do, to 1e-6.

The formulas of LibKGE and DGL-KE are written down here from their sources; PyKEEN's own code and
DGL-KE's run where they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from scorer_cases import CASES, case_of, identify

from kge_torchrec.config import ConfigError, ModelConfig
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.errors import ExportError
from kge_torchrec.export import dglke, libkge, program, pykeen
from kge_torchrec.export.description import ExportFolder
from kge_torchrec.export.foreign import WholeModel
from kge_torchrec.models.scorers import build_scorer

N, R, COUNT = 40, 3, 1000


def vocabulary(letter, count):
    return Vocabulary(pa.array([f"{letter}{i}" for i in range(count)], pa.large_string()), "entity")


def model_of(name, reciprocal, normalization="none", biases=False, case=None):
    name, dim, options = case or case_of(name)
    config = ModelConfig(
        name, dim + 2 * biases, reciprocal, normalization=normalization, biases=biases,
        options=options,
    )  # fmt: skip
    scorer = build_scorer(config, R).eval()
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    rows = torch.randn(N, config.dim)
    return WholeModel(config, scorer, rows, vocabulary("e", N), vocabulary("r", R), "graph")


def triples(seed=0):
    random = np.random.default_rng(seed)
    return tuple(torch.from_numpy(random.integers(0, n, COUNT)) for n in (N, R, N))


def our_scores(model, side):
    """In float64."""
    head, relation, tail = triples()
    rows, scorer = model.rows.double(), model.scorer.double()
    anchor, target = (head, tail) if side == "tail" else (tail, head)
    with torch.no_grad():
        return scorer.score_triples(rows[anchor], relation, rows[target], side)


def written(tmp_path, of, model):
    """The folder, and what it says about loading."""
    of.check(model.config)
    folder = ExportFolder(tmp_path / "out")
    folder.begin()
    text = of.write(folder, model)
    folder.finish({})
    return folder.path, text


def same(found, model, side):
    torch.testing.assert_close(found.double(), our_scores(model, side), rtol=1e-6, atol=1e-6)


EVERY_SIDE = [("tail", False), ("head", False), ("tail", True), ("head", True)]


# PyKEEN


# In a process of its own: where TorchRec is loaded PyKEEN fails to load, as it finds two optimizers
# of one name.
PYKEEN = r"""
import re, sys
from pathlib import Path
import torch

for folder in map(Path, sys.argv[1:]):
    names = {}
    code = re.findall(r"```python\n(.*?)```", (folder / "LOADING").read_text(), re.DOTALL)
    exec(code[0].replace('load(".")', f"load({str(folder)!r})"), names)
    model, factory = names["model"].double(), names["factory"]
    assert factory.entity_to_id["e7"] == 7
    head, relation, tail = torch.load(folder / "triples")
    with torch.no_grad():
        tails = model.predict_hrt(torch.stack([head, relation, tail], 1))[:, 0]
        heads = model.predict_h(torch.stack([relation, tail], 1)).gather(1, head[:, None])[:, 0]
    torch.save((factory.create_inverse_triples, tails, heads), folder / "found")
"""


@pytest.mark.skipif(not importlib.util.find_spec("pykeen"), reason="PyKEEN is not installed")
def test_pykeen_scores_alike(tmp_path):
    models = {
        tmp_path / f"{name}-{reciprocal}": model_of(name, reciprocal)
        for name in pykeen.INTERACTIONS
        for reciprocal in (False, True)
    }
    folders = []
    for folder, model in models.items():
        path, text = written(folder, pykeen.FORMAT, model)
        (path / "LOADING").write_text(text)
        torch.save(triples(), path / "triples")
        folders.append(path)
    subprocess.run([sys.executable, "-c", PYKEEN, *folders], check=True)
    for path, model in zip(folders, models.values(), strict=True):
        inverses, tails, heads = torch.load(path / "found")
        assert inverses == model.config.reciprocal
        same(tails, model, "tail")
        same(heads, model, "head")


@pytest.mark.parametrize("reciprocal", [False, True])
def test_pykeens_tables(tmp_path, reciprocal):
    model = model_of("rotate", reciprocal)
    path, _ = written(tmp_path, pykeen.FORMAT, model)
    settings = json.loads((path / "pykeen.json").read_text())
    assert settings["create_inverse_triples"] == reciprocal
    state = torch.load(path / "state_dict.pt", weights_only=True)
    turns = state["relation_representations.0._embeddings.weight"].view(-1, 3, 2)
    phases = model.scorer.relations.detach()
    if reciprocal:  # theirs is the inverse after its relation
        phases = phases[[0, 3, 1, 4, 2, 5]]
    torch.testing.assert_close(turns, torch.stack([phases.cos(), phases.sin()], -1))
    assert torch.equal(state["entity_representations.0._embeddings.weight"], model.rows)


# LibKGE


def libkge_scores(name, options, s, p, o):
    if name == "transe":
        return -torch.linalg.vector_norm(s + p - o, ord=options["l_norm"], dim=1)
    if name == "distmult":
        return (s * p * o).sum(1)
    if name == "rescal":
        matrix = p.view(len(p), s.shape[1], s.shape[1])
        return (s.unsqueeze(1).bmm(matrix)[:, 0] * o).sum(1)
    (s1, s2), (o1, o2) = s.chunk(2, 1), o.chunk(2, 1)
    if name == "rotate":
        re, im = p.cos(), p.sin()
        moduli = torch.hypot(s1 * re - s2 * im - o1, s1 * im + s2 * re - o2)
        return -torch.linalg.vector_norm(moduli, ord=options["l_norm"], dim=1)
    p1, p2 = p.chunk(2, 1)
    if name == "simple":
        return ((s1 * p1 * o2).sum(1) + (s2 * p2 * o1).sum(1)) / 2
    assert name == "complex"
    return (s1 * o1 * p1 + s2 * o2 * p1 + s1 * o2 * p2 - s2 * o1 * p2).sum(1)


def libkge_checkpoint(path, monkeypatch):
    """As a process with LibKGE loads it, by a class of its name."""
    package, module = ModuleType("kge"), ModuleType("kge.config")
    module.Config = type("Config", (SimpleNamespace,), {"__module__": "kge.config"})
    monkeypatch.setitem(sys.modules, "kge", package)
    monkeypatch.setitem(sys.modules, "kge.config", module)
    return torch.load(path / "checkpoint_best.pt", weights_only=False)


@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("name", libkge.MODELS)
def test_libkges_formula_scores_alike(tmp_path, monkeypatch, name, reciprocal):
    model = model_of(name, reciprocal)
    path, _ = written(tmp_path, libkge.FORMAT, model)
    assert "kge" not in sys.modules
    checkpoint = libkge_checkpoint(path, monkeypatch)
    state, options = checkpoint["model"][0], checkpoint["config"].options
    entities = state["_entity_embedder._embeddings.weight"].double()
    relations = state["_relation_embedder._embeddings.weight"].double()
    theirs = options["model"]
    if reciprocal:
        assert theirs == "reciprocal_relations_model" and theirs in options["import"]
        theirs = options[theirs]["base_model"]["type"]
        for key in ("entity", "relation"):
            base = state[f"_base_model._{key}_embedder._embeddings.weight"]
            assert base is not None and len(state) == 4
    widths = [options[theirs][f"{key}_embedder"]["dim"] for key in ("entity", "relation")]
    assert widths == [entities.shape[1], relations.shape[1]]
    head, relation, tail = triples()
    found = libkge_scores(
        theirs, options[theirs], entities[head], relations[relation], entities[tail]
    )
    same(found, model, "tail")
    if reciprocal:  # LibKGE asks (o, p + number of relations, ?)
        swapped = entities[tail], relations[relation + R], entities[head]
        same(libkge_scores(theirs, options[theirs], *swapped), model, "head")


def test_libkges_labels_and_dataset(tmp_path, monkeypatch):
    path, text = written(tmp_path, libkge.FORMAT, model_of("complex", True))
    dataset = libkge_checkpoint(path, monkeypatch)["dataset"]
    assert dataset["dataset.num_entities"] == dataset["num_entities"] == N
    assert dataset["dataset.meta"]["relation_ids"] == ["r0", "r1", "r2"]
    described = yaml.safe_load((path / "dataset" / "dataset.yaml").read_text())["dataset"]
    assert described["num_relations"] == R and described["name"] == "graph"
    file = path / "dataset" / described["files"]["entity_ids"]["filename"]
    assert file.read_text().splitlines()[7] == "7\te7"
    assert "KgeModel.create_from" in text and "{data}" not in text


# DGL-KE


def dglke_formula(config, entities, relations, h, r, t):
    name = config["model"]
    h, r, t = entities[h], relations[r], entities[t]
    if name.startswith("TransE"):
        return config["gamma"] - (h + r - t).norm(p=int(name[-1]), dim=-1)
    if name == "DistMult":
        return (h * r * t).sum(-1)
    if name == "RESCAL":
        return (h * (r.view(len(r), *[h.shape[1]] * 2) @ t[..., None])[..., 0]).sum(-1)
    (h1, h2), (t1, t2) = h.chunk(2, -1), t.chunk(2, -1)
    if name == "ComplEx":
        r1, r2 = r.chunk(2, -1)
        return (h1 * t1 * r1 + h2 * t2 * r1 + h1 * t2 * r2 - h2 * t1 * r2).sum(-1)
    assert name == "RotatE" and config["double_ent"]
    phase = r / ((config["gamma"] + 2.0) / config["emb_size"] / np.pi)
    re, im = phase.cos(), phase.sin()
    parts = torch.stack([h1 * re - h2 * im - t1, h1 * im + h2 * re - t2])
    return config["gamma"] - parts.norm(dim=0).sum(-1)


def dglke_code():
    """DGL-KE's score functions without DGL, which the package loads; None where it is missing."""
    found = importlib.util.find_spec("dglke")
    for place in (found and found.submodule_search_locations) or []:
        file = Path(place) / "models" / "pytorch" / "score_fun.py"
        spec = importlib.util.spec_from_file_location("dglke_score_fun", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return None


def dglke_own(config, entities, relations, h, r, t):
    code, size = dglke_code(), config["emb_size"]
    made = {
        "TransE_l1": lambda: code.TransEScore(config["gamma"], "l1"),
        "TransE_l2": lambda: code.TransEScore(config["gamma"], "l2"),
        "DistMult": lambda: code.DistMultScore(),
        "ComplEx": lambda: code.ComplExScore(),
        "RESCAL": lambda: code.RESCALScore(size, size),
        "RotatE": lambda: code.RotatEScore(config["gamma"], (config["gamma"] + 2.0) / size),
    }
    rows = [{"emb": x} for x in (entities[h], relations[r], entities[t])]
    edges = SimpleNamespace(src=rows[0], data=rows[1], dst=rows[2])
    return made[config["model"]]().edge_func(edges)["score"]


@pytest.mark.parametrize("scores", [dglke_formula, dglke_own])
@pytest.mark.parametrize("name", dglke.MODELS)
def test_dglkes_formula_scores_alike(tmp_path, name, scores):
    if scores is dglke_own and dglke_code() is None:
        pytest.skip("DGL-KE is not installed")
    model = model_of(name, False)
    path, text = written(tmp_path, dglke.FORMAT, model)
    config = json.loads((path / "config.json").read_text())
    stem = f"{config['dataset']}_{config['model']}"
    tables = [np.load(path / f"{stem}_{kind}.npy") for kind in ("entity", "relation")]
    assert all(table.dtype == np.float32 for table in tables) and f"{stem}_entity.npy" in text
    found = scores(config, *(torch.from_numpy(x).double() for x in tables), *triples())
    same(found, model, "tail")
    same(found, model, "head")
    assert (path / "relations.tsv").read_text().splitlines() == ["0\tr0", "1\tr1", "2\tr2"]


# torch.export


def of_torch(tmp_path, model):
    """Its scores of both sides, traced in float64."""
    model.scorer.double()
    twice = WholeModel(
        model.config, model.scorer, model.rows.double(), model.entity_labels,
        model.relation_labels, "graph",
    )  # fmt: skip
    path, text = written(tmp_path, program.FORMAT, twice)
    scores = torch.export.load(path / "scores.pt2").module()
    head, relation, tail = triples()
    same(scores(head, relation, tail), model, "tail")
    if model.config.reciprocal:
        assert f"r + {R}, h" in text
        same(scores(tail, relation + R, head), model, "head")


@pytest.mark.parametrize("name", ["complex", "rotate"])
def test_a_program_scores_alike(tmp_path, name):
    of_torch(tmp_path, model_of(name, True, biases=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=identify(case)) for case in CASES])
def test_a_program_of_every_scorer(tmp_path, case):
    of_torch(tmp_path, model_of(None, True, "layer", case=case))


# What a layout can hold


@pytest.mark.parametrize("of", [pykeen.FORMAT, libkge.FORMAT, dglke.FORMAT])
def test_normalised_rows_are_written_as_they_score(tmp_path, of):
    for normalization in ("unit", "layer"):
        model = model_of("distmult", False, normalization)
        path, _ = written(tmp_path / normalization, of, model)
        if of is dglke.FORMAT:
            entities, relations = (
                torch.from_numpy(np.load(path / f"graph_DistMult_{kind}.npy")).double()
                for kind in ("entity", "relation")
            )
            h, r, t = triples()
            same((entities[h] * relations[r] * entities[t]).sum(-1), model, "tail")


@pytest.mark.parametrize(
    "of, config, words",
    [
        (pykeen.FORMAT, {"scorer": "conve", "reciprocal": True}, "PyKEEN has no model with the"),
        (libkge.FORMAT, {"scorer": "tucker"}, "LibKGE has no model with the formula of tucker"),
        (dglke.FORMAT, {"scorer": "simple"}, "only those of transe_l1, transe_l2, distmult"),
        (dglke.FORMAT, {"scorer": "complex", "reciprocal": True}, "DGL-KE has no inverse relation"),
        (pykeen.FORMAT, {"scorer": "complex", "biases": True}, "no place for the biases"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(of, config, words):
    with pytest.raises(ExportError, match=words):
        of.check(ModelConfig(**{"dim": 16, "reciprocal": False, **config}))


@pytest.mark.parametrize("name", ["pykeen", "libkge", "dglke", "torch"])
def test_ours_does_not_read_them(run, tmp_path, name):
    from kge_torchrec import load_model

    if name == "dglke":
        with pytest.raises(ExportError, match="no inverse relations"):
            run.export(tmp_path / "out", name)
    else:
        path = run.export(tmp_path / "out", name)
        assert "## How to load" in (path / "README.md").read_text()
        run.export(path, name, overwrite=True)
        with pytest.raises(ExportError, match=r"is an export for .*export the run to npy"):
            load_model(path)
        (tmp_path / "out").rename(tmp_path / "moved")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="huggingface, pykeen, libkge, dglke, torch, got 'csv'"):
        run.export(tmp_path / "out", "csv")
