"""Models to export for other programs, and readers of those exports by the other programs' rules.

The readers and formulas are written from the sources of PyKEEN 1.11, LibKGE (commit 9bca31f) and
DGL-KE (0.1.2 and commit e00bccf), without their code.  ``tests/export/test_foreign_programs.py``
runs the programs themselves.

Shapes: N entities, R relations, n triples, D elements per row.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import torch
import yaml
from scorer_cases import case_of
from torch import Tensor

from kge_torchrec.config import ModelConfig
from kge_torchrec.data.store import Vocabulary
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.export import pykeen
from kge_torchrec.export.description import ExportFolder
from kge_torchrec.export.foreign import DGLKE, LIBKGE, Contents, ForeignFormat
from kge_torchrec.models.scorers import build_scorer
from kge_torchrec.trained_model import TrainedModel

N, R, COUNT = 40, 3, 1000
AWKWARD = [
    "", " ", '"quoted"@en', 'say "hi"', '"', '""', "'", "a\tb", '"\t', "new\nline", "end\r\n",
    "\rx", "a, b; c", "#x", "back\\slash\\n", "NULL", "12", "Österreich", "日本", "\u2028",
    "\x1c", "e\u0301",
]  # fmt: skip


def vocabulary(labels: list[str], kind: str = "entity") -> Vocabulary:
    return Vocabulary(pa.array(labels, pa.large_string()), kind)


def model_of(
    name: str | None,
    reciprocal: bool,
    normalization: str = "none",
    biases: bool = False,
    case: Any = None,
    entities: list[str] | None = None,
    relations: list[str] | None = None,
) -> Contents:
    """A model with random parameters; N entities and R relations unless labels are given."""
    name, dim, options = case or case_of(name)
    entities = entities or [f"e{i}" for i in range(N)]
    relations = relations or [f"r{i}" for i in range(R)]
    config = ModelConfig(
        name, dim + 2 * biases, reciprocal, normalization=normalization, biases=biases,
        options=options,
    )  # fmt: skip
    scorer = build_scorer(config, len(relations)).eval()
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    rows = torch.randn(len(entities), config.dim)
    labels = SimpleNamespace(
        entities=vocabulary(entities), relations=vocabulary(relations, "relation")
    )
    whole = EntityShard(rows, 0, len(rows), replicated=True)
    return Contents(TrainedModel(scorer, whole, labels), config, "graph")


def triples() -> tuple[Tensor, Tensor, Tensor]:
    random = np.random.default_rng(0)
    return tuple(torch.from_numpy(random.integers(0, n, COUNT)) for n in (N, R, N))


def our_scores(content: Contents, side: str) -> Tensor:
    """Scores of ``triples()`` (n,), in float64."""
    head, relation, tail = triples()
    model = content.model
    rows, scorer = model.shard.rows.double(), model.scorer.double()
    anchor, target = (head, tail) if side == "tail" else (tail, head)
    with torch.no_grad():
        return scorer.score_triples(rows[anchor], relation, rows[target], side)


def written(path: Path, of: ForeignFormat, content: Contents) -> tuple[Path, str]:
    """The folder of an export, and the text that says how to load it."""
    of.check(content.config)
    folder = ExportFolder(path / "out")
    folder.begin()
    text = of.write(folder, content)
    folder.finish({})
    return folder.path, text


def same(results: Tensor, content: Contents, side: str) -> None:
    torch.testing.assert_close(results.double(), our_scores(content, side), rtol=1e-6, atol=1e-6)


def one_line_each(labels: list[str]) -> list[str]:
    """Labels for files that have one per line."""
    return [label.replace("\n", " ").replace("\r", " ") for label in labels]


Formula = Callable[[Any, Any, Any], Tensor]  # of the rows of heads, relations and tails


@dataclass
class Read:
    """The contents of an export as another program reads them.

    entities, relations: its labels, in order of id.
    tables: the rows of entity ids, and of relation ids.
    formula: its score of such rows.
    inverse: the id of a relation's inverse, None if head queries have the same formula.
    """

    entities: list[str]
    relations: list[str]
    rows: Callable[[Tensor], Any]
    relation_rows: Callable[[Tensor], Any]
    formula: Formula
    forward: Callable[[Tensor], Tensor] = lambda relation: relation
    inverse: Callable[[Tensor], Tensor] | None = None

    def scores(self, head: Tensor, relation: Tensor, tail: Tensor, side: str) -> Tensor:
        """(n,) float64"""
        number = self.forward(relation)
        if side == "head" and self.inverse:
            head, number, tail = tail, self.inverse(relation), head
        return self.formula(self.rows(head), self.relation_rows(number), self.rows(tail))


# PyKEEN


def read_pykeen(folder: Path) -> Read:
    settings = json.loads((folder / "pykeen.json").read_text("utf-8"))
    ids = json.loads((folder / "ids.json").read_text("utf-8"))
    state = torch.load(folder / "state_dict.pt", weights_only=True)

    def tables(side: str) -> list[Tensor]:
        results = []
        for place, part in enumerate(settings[f"{side}_representations_kwargs"]):
            rows = state.pop(f"{side}_representations.{place}._embeddings.weight").double()
            if part["dtype"] == "cfloat":
                rows = torch.view_as_complex(rows.unflatten(1, (-1, 2)))
            results.append(rows.reshape(len(rows), *part["shape"]))
        return results

    entities, relations = tables("entity"), tables("relation")
    name, options = settings["interaction"], settings["interaction_kwargs"]
    core = state.pop("interaction.core_tensor", torch.empty(0)).double()
    assert not state
    labels = [sorted(names, key=names.get) for names in (ids["entities"], ids["relations"])]
    assert [len(names) for names in ids.values()] == [len(names) for names in labels]
    inverses = settings["create_inverse_triples"]
    assert len(relations[0]) == (1 + inverses) * len(labels[1])
    return Read(
        *labels,
        lambda number: [table[number] for table in entities],
        lambda number: [table[number] for table in relations],
        lambda h, r, t: _pykeen_scores(name, options, core, h, r, t),
        (lambda r: 2 * r) if inverses else (lambda r: r),
        (lambda r: 2 * r + 1) if inverses else None,
    )


def _pykeen_scores(
    name: str, options: dict, core: Tensor, h: list[Tensor], r: list[Tensor], t: list[Tensor]
) -> Tensor:
    def distance(difference: Tensor) -> Tensor:
        lengths = torch.linalg.vector_norm(difference, ord=options["p"], dim=-1)
        return -(lengths ** options["p"] if options.get("power_norm") else lengths)

    if name == "TransE":
        return distance(h[0] + r[0] - t[0])
    if name == "TransH":  # projections on the hyperplane of a unit vector
        normal, shift = r
        onto = lambda x: x - (x * normal).sum(-1, keepdim=True) * normal  # noqa: E731
        return distance(onto(h[0]) + shift - onto(t[0]))
    if name == "MuRE":  # biases as a head, and as a tail
        return distance(h[0] * r[1] + r[0] - t[0]) + h[1] + t[2]
    if name == "PairRE":
        return distance(h[0] * r[0] - t[0] * r[1])
    if name == "RotatE":
        return -torch.linalg.vector_norm(h[0] * r[0] - t[0], dim=-1)
    if name == "CP":  # every entity has a table as a head, and another as a tail
        return torch.einsum("nkd,nkd,nkd->n", h[0], r[0], t[1])
    if name == "TuckER":
        return torch.einsum("hrt,nh,nr,nt->n", core, h[0], r[0], t[0])
    if name == "RESCAL":
        return torch.einsum("nd,nde,ne->n", h[0], r[0], t[0])
    assert name in ("DistMult", "ComplEx")
    return (h[0] * r[0] * t[0].conj()).sum(-1).real


# LibKGE


class _LibKgeConfig:
    """LibKGE's class of options: ``set`` changes an option that is there, and adds none."""

    def set(self, key: str, value: Any) -> None:
        *path, last = key.split(".")
        options = self.options
        for name in path:
            options = options[name]
        if last not in options:
            raise KeyError(key)
        options[last] = value


def read_libkge(folder: Path) -> Read:
    config_class = type("Config", (_LibKgeConfig,), {"__module__": "kge.config"})
    modules = {name: mock.MagicMock(__name__=name) for name in ("kge", "kge.config")}
    modules["kge.config"].Config = config_class
    safe = torch.serialization.safe_globals([config_class])  # the README.md says to allow it
    with mock.patch.dict("sys.modules", modules), safe:
        checkpoint = torch.load(folder / "checkpoint_best.pt")
    checkpoint["config"].set("job.device", "cpu")
    options, counts = checkpoint["config"].options, checkpoint["dataset"]
    assert checkpoint["type"] == "package" and checkpoint["epoch"] >= 0
    described = yaml.safe_load((folder / "dataset" / "dataset.yaml").read_text())["dataset"]
    labels = []
    for kind, count in (("entity_ids", "num_entities"), ("relation_ids", "num_relations")):
        file = described["files"][kind]
        assert file["type"] == "map"
        lines = _libkge_map(folder / "dataset" / file["filename"])
        assert sorted(lines) == list(range(described[count]))
        assert counts[count] == counts[f"dataset.{count}"] == described[count]
        assert options["dataset"][count] == described[count]
        meta = counts["meta"][kind]
        assert counts["dataset.meta"][kind] == meta
        assert [lines[i] for i in range(len(lines))] == one_line_each(meta)
        labels.append(meta)
    assert options["dataset"]["name"] == described["name"]
    name, state = options["model"], dict(checkpoint["model"][0])
    reciprocal = name == "reciprocal_relations_model"
    if reciprocal:
        assert name in options["import"]
        name = options[name]["base_model"]["type"]
    tables = []
    for side, count in (
        ("entity", len(labels[0])),
        ("relation", (1 + reciprocal) * len(labels[1])),
    ):
        table = state.pop(f"_{side}_embedder._embeddings.weight")
        assert table.shape == (count, options[name][f"{side}_embedder"]["dim"])
        if reciprocal:
            assert torch.equal(state.pop(f"_base_model._{side}_embedder._embeddings.weight"), table)
        tables.append(table.double())
    assert not state and name in options["import"]
    return Read(
        *labels,
        tables[0].__getitem__,
        tables[1].__getitem__,
        lambda s, p, o: _libkge_scores(name, options[name], s, p, o),
        inverse=(lambda r: r + len(labels[1])) if reciprocal else None,
    )


def _libkge_map(file: Path) -> dict[int, str]:
    """Lines "id<tab>label"; a label may have tabs of its own."""
    with file.open() as lines:  # "\r" ends a line too
        pairs = [line.split("\t", maxsplit=1) for line in lines]
    return {int(number): label.rstrip("\n") for number, label in pairs}


def _libkge_scores(name: str, options: dict, s: Tensor, p: Tensor, o: Tensor) -> Tensor:
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


# DGL-KE


def read_dglke(folder: Path) -> Read:
    config = json.loads((folder / "config.json").read_text())
    name, size = config["model"], config["emb_size"]  # of 0.1.2
    assert (config["model_name"], config["hidden_dim"]) == (name, size)  # of later commits
    stem = f"{config['dataset']}_{name}"
    entities, relations = (np.load(folder / f"{stem}_{x}.npy") for x in ("entity", "relation"))
    assert entities.dtype == relations.dtype == np.float32
    assert entities.shape[1] == (1 + config["double_ent"]) * size and not config["double_rel"]
    labels = []
    for key, table in (("emap_file", entities), ("rmap_file", relations)):
        with (folder / config[key]).open() as lines:  # csv's quotes, tabs between the fields
            results = {int(row[0]): row[1] for row in csv.reader(lines, delimiter="\t")}
        assert sorted(results) == list(range(len(table)))
        labels.append([results[i] for i in range(len(table))])
    tables = [torch.from_numpy(table).double() for table in (entities, relations)]
    return Read(
        *labels,
        tables[0].__getitem__,
        tables[1].__getitem__,
        lambda h, r, t: _dglke_scores(name, config["gamma"], size, h, r, t),
    )


def _dglke_scores(name: str, gamma: float, size: int, h: Tensor, r: Tensor, t: Tensor) -> Tensor:
    if name.startswith("TransE"):
        return gamma - (h + r - t).norm(p=int(name[-1]), dim=-1)
    if name == "DistMult":
        return (h * r * t).sum(-1)
    if name == "RESCAL":
        return (h * (r.view(len(r), size, size) @ t[..., None])[..., 0]).sum(-1)
    (h1, h2), (t1, t2) = h.chunk(2, -1), t.chunk(2, -1)
    if name == "ComplEx":
        r1, r2 = r.chunk(2, -1)
        return (h1 * t1 * r1 + h2 * t2 * r1 + h1 * t2 * r2 - h2 * t1 * r2).sum(-1)
    assert name == "RotatE"
    phase = r / ((gamma + 2.0) / size / np.pi)
    re, im = phase.cos(), phase.sin()
    parts = torch.stack([h1 * re - h2 * im - t1, h1 * im + h2 * re - t2])
    return gamma - parts.norm(dim=0).sum(-1)


READERS = {"pykeen": (pykeen.FORMAT, read_pykeen), "libkge": (LIBKGE, read_libkge),
           "dglke": (DGLKE, read_dglke)}  # fmt: skip
