"""PyKEEN, LibKGE and DGL-KE load exports by what each README.md says, and score them as we do.

Second tier, skipped where a program is missing; docs/explanation/testing.md says how to install
them.  Each runs in a process of its own: PyKEEN does not load where TorchRec is loaded, as it finds
two optimizers of one name.  ``-s`` shows the largest differences.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from foreign_exports import AWKWARD, READERS, N, R, model_of, our_scores, triples, written

pytestmark = pytest.mark.slow

# Runs the code of README.md in the export's folder, then reads scores and labels.
_FIRST = r"""
import os, re, sys
from pathlib import Path
from unittest import mock
import torch

def each():
    for folder in map(Path, sys.argv[1:]):
        code = re.findall(r"```python\n(.*?)```", (folder / "LOADING").read_text(), re.DOTALL)
        os.chdir(folder)
        names = {}
        yield folder, torch.load(folder / "triples"), lambda: exec(code[0], names) or names
"""
_PYKEEN = r"""
import pykeen
for folder, (head, relation, tail), load in each():
    names = load()
    model, factory = names["model"].double(), names["factory"]
    with torch.no_grad():
        tails = model.predict_hrt(torch.stack([head, relation, tail], 1))[:, 0]
        heads = model.predict_h(torch.stack([relation, tail], 1)).gather(1, head[:, None])[:, 0]
    labels = [list(map(ids.get, range(len(ids)))) for ids in (
        factory.entity_id_to_label, factory.relation_id_to_label)]
    torch.save((tails, heads, labels), folder / "found")
"""
# LibKGE loads its searches as well, whose packages are not needed here.
_LIBKGE = r"""
for name in ("ax", "ax.modelbridge", "ax.modelbridge.generation_strategy", "ax.service",
             "ax.service.ax_client", "hpbandster", "hpbandster.core", "hpbandster.core.nameserver",
             "hpbandster.core.result", "hpbandster.core.worker", "hpbandster.optimizers",
             "ConfigSpace",
             "ConfigSpace.hyperparameters", "igraph"):
    sys.modules[name] = mock.MagicMock()
for folder, (head, relation, tail), load in each():
    names = load()
    model, dataset = names["model"].double(), names["dataset"]
    with torch.no_grad():
        tails = model.score_sp(head, relation).gather(1, tail[:, None])[:, 0]
        heads = model.score_po(relation, tail).gather(1, head[:, None])[:, 0]
    fresh = names["Dataset"].create(dataset.config, preload_data=False, folder="dataset")
    labels = [dataset.entity_ids(), dataset.relation_ids()]
    in_files = [fresh.entity_ids(), fresh.relation_ids()]
    assert in_files == [[x.replace("\n", " ").replace("\r", " ") for x in of] for of in labels]
    torch.save((tails, heads, labels), folder / "found")
"""
_DGLKE = r"""
import json
from dglke.models.infer import ScoreInfer
from dglke.utils import load_model_config, load_raw_triplet_data
for folder, (head, relation, tail), load in each():
    load()  # reads the two tables
    config = load_model_config(str(folder / "config.json"))
    program = ScoreInfer(-1, config, str(folder))
    program.load_model()
    for emb in (program.model.entity_emb, program.model.relation_emb):
        emb.emb = emb.emb.double()
    scores = program.model.score(head, relation, tail, triplet_wise=True)
    maps = str(folder / "entities.tsv"), str(folder / "relations.tsv")
    *_, entities, relations = load_raw_triplet_data(emap_f=maps[0], rmap_f=maps[1])
    labels = [[of[i] for i in range(len(of))] for of in (entities, relations)]
    for of, file, place in ((entities, "e", 0), (relations, "r", 1)):
        Path(file).write_text("".join(f"{of[i]}\n" for i in range(len(of))), newline="\n")
    raw = load_raw_triplet_data("e", "r", None, *maps)
    assert [x.tolist() for x in raw[:2]] == [list(range(len(of))) for of in (entities, relations)]
    torch.save((scores, scores, labels), folder / "found")
"""
PROGRAMS = {
    "pykeen": ("pykeen", _PYKEEN),
    "libkge": ("kge", _LIBKGE),
    "dglke": ("dglke", _DGLKE),
}


def run(code: str, folders: list) -> None:
    environment = os.environ | {"DGLBACKEND": "pytorch"}
    done = subprocess.run(
        [sys.executable, "-c", _FIRST + code, *folders],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_foreign_program_scores_match(tmp_path, name):
    package, code = PROGRAMS[name]
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed; docs/explanation/testing.md says how")
    of, read = READERS[name]
    torch.manual_seed(0)
    entities = AWKWARD + [f"e{i}" for i in range(N - len(AWKWARD))]
    models = {}
    for scorer in of.scorers:
        for reciprocal in (False, True)[: 1 + of.holds_inverses]:
            model = model_of(scorer, reciprocal, entities=entities, relations=AWKWARD[-R:])
            path, text = written(tmp_path / f"{scorer}-{reciprocal}", of, model)
            (path / "LOADING").write_text(text)
            torch.save(triples(), path / "triples")
            models[path] = model
    run(code, list(models))
    print()
    for path, model in models.items():
        tails, heads, labels = torch.load(path / "found")
        of_sides = (tails, our_scores(model, "tail")), (heads, our_scores(model, "head"))
        largest = max(((x - y).abs() / (1 + y.abs())).max().item() for x, y in of_sides)
        print(f"{name} {path.parent.name}: {largest:.1e}")
        assert largest < 1e-6
        by_rules = read(path)
        assert labels == [by_rules.entities, by_rules.relations]
