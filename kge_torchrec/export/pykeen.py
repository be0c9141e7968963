"""A model that PyKEEN builds and loads: the settings of its ``ERModel`` and a state dict.

``ERModel`` takes PyKEEN's interactions by name. PyKEEN's model classes (``pykeen.models.RotatE``
and others) would add constraints and penalties that this model was not trained with. Two
interactions differ from ours:

- PyKEEN's RotatE uses the Euclidean norm of all differences, as our rotate_l2 does. Sun et al.
  (2019) sum the moduli. That is PyKEEN's PairRE with complex numbers, |h e^(i r) - t 1|_1.
- PyKEEN's SimplE (1.11) multiplies a head's vector as a head with a tail's vector as a head. Our
  SimplE, the paper's, is PyKEEN's CP with vectors twice as long.

PyKEEN numbers relation r as 2 r and its inverse as 2 r + 1.

Shapes: as in ``foreign``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kge_torchrec.data.store import Vocabulary
from kge_torchrec.export.description import ExportFolder
from kge_torchrec.export.foreign import Contents, ForeignFormat, saved
from kge_torchrec.kernels.operators import as_real
from kge_torchrec.models.scorers.bilinear import TuckER
from kge_torchrec.pages import render

SETTINGS, STATE = "pykeen.json", "state_dict.pt"


@dataclass(frozen=True)
class Representation:
    """One of PyKEEN's tables: values (n, ...); complex values are stored re, im, re, im, ..."""

    numbers: Tensor
    shape: tuple[int, ...]  # per row
    dtype: str = "float"

    @property
    def settings(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": self.dtype}

    @property
    def weight(self) -> Tensor:
        """The table as (n, elements per row)."""
        return self.numbers.reshape(len(self.numbers), -1).contiguous()


@dataclass(frozen=True)
class Interaction:
    """PyKEEN's name and settings of a formula, with its tables."""

    name: str
    entities: list[Representation]
    relations: list[Representation]
    settings: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def _real(numbers: Tensor) -> Representation:
    return Representation(numbers, tuple(numbers.shape[1:]))


def _complex(numbers: Tensor) -> Representation:
    return Representation(numbers, (numbers.shape[1] // 2,), "cfloat")


def _plain(name: str, **settings: Any) -> Callable[[Contents], Interaction]:
    """Return a builder for an interaction that uses our entity and relation rows unchanged."""
    return lambda content: Interaction(
        name, [_real(content.entities)], [_real(content.relations)], settings
    )


def _complex_model(content: Contents) -> Interaction:
    return Interaction("ComplEx", [_complex(content.entities)], [_complex(content.relations)])


def _rotate(content: Contents) -> Interaction:
    turns = _turns(content)
    relations = [_complex(as_real(x).float()) for x in (turns, torch.ones_like(turns))]
    return Interaction("PairRE", [_complex(content.entities)], relations, {"p": 1})


def _rotate_l2(content: Contents) -> Interaction:
    turns = _complex(as_real(_turns(content)).float())
    return Interaction("RotatE", [_complex(content.entities)], [turns])


def _turns(content: Contents) -> Tensor:
    """Return rotations as complex numbers: (R, D/2)."""
    phases = content.relations.double()
    return torch.polar(torch.ones_like(phases), phases)


def _simple(content: Contents) -> Interaction:
    swapped = torch.cat(content.entities.chunk(2, -1)[::-1], -1)
    entities = [_real(rows[:, None]) for rows in (content.entities, swapped)]
    return Interaction("CP", entities, [_real(content.relations[:, None] / 2)])


def _rescal(content: Contents) -> Interaction:
    matrices = content.relations.unflatten(-1, (content.config.dim, content.config.dim))
    return Interaction("RESCAL", [_real(content.entities)], [_real(matrices)])


def _tucker(content: Contents) -> Interaction:
    assert isinstance(content.model.scorer, TuckER)
    dim, width = content.config.dim, content.relations.shape[1]
    settings = {"embedding_dim": dim, "relation_dim": width, "apply_batch_normalization": False}
    dropped = dict.fromkeys(("head_dropout", "relation_dropout", "head_relation_dropout"), 0.0)
    core = content.model.scorer.core.detach().transpose(0, 1).contiguous()  # head, relation, tail
    tables = [_real(content.entities)], [_real(content.relations)]
    return Interaction("TuckER", *tables, settings | dropped, {"core_tensor": core})


def _mure(content: Contents) -> Interaction:
    vector, as_head, as_tail = content.entities.split([content.config.dim - 2, 1, 1], -1)
    diagonal, shift = content.relations.chunk(2, -1)
    entities = [_real(vector), _real(as_head[:, 0]), _real(as_tail[:, 0])]
    relations = [_real(-shift), _real(diagonal)]
    return Interaction("MuRE", entities, relations, {"p": 2, "power_norm": True})


def _pairre(content: Contents) -> Interaction:
    relations = [_real(x) for x in content.relations.chunk(2, -1)]
    return Interaction("PairRE", [_real(content.entities)], relations, {"p": 1})


def _transh(content: Contents) -> Interaction:
    normal, shift = content.relations.double().chunk(2, -1)
    normal = nn.functional.normalize(normal, dim=-1)
    shift = shift - normal * (normal * shift).sum(-1, keepdim=True)
    relations = [_real(normal.float()), _real(shift.float())]
    return Interaction("TransH", [_real(content.entities)], relations, {"p": 2, "power_norm": True})


INTERACTIONS: dict[str, Callable[[Contents], Interaction]] = {
    "transe_l1": _plain("TransE", p=1),
    "transe_l2": _plain("TransE", p=2),
    "transh": _transh,
    "distmult": _plain("DistMult"),
    "complex": _complex_model,
    "rotate": _rotate,
    "rotate_l2": _rotate_l2,
    "simple": _simple,
    "rescal": _rescal,
    "tucker": _tucker,
    "mure": _mure,
    "pairre": _pairre,
}


def write(folder: ExportFolder, content: Contents) -> str:
    """Write pykeen.json, ids.json and state_dict.pt; return how to load them, as Markdown."""
    interaction = INTERACTIONS[content.config.scorer](content)
    settings = {
        "create_inverse_triples": content.config.reciprocal,
        "interaction": interaction.name,
        "interaction_kwargs": interaction.settings,
        "entity_representations_kwargs": [x.settings for x in interaction.entities],
        "relation_representations_kwargs": [x.settings for x in interaction.relations],
    }
    folder.append(SETTINGS, [f"{json.dumps(settings, indent=1)}\n".encode()])
    ids = {
        "entities": _ids(content.model.entity_labels),
        "relations": _ids(content.model.relation_labels),
    }
    folder.append("ids.json", [json.dumps(ids, ensure_ascii=False).encode()])
    state = {f"interaction.{name}": values for name, values in interaction.parameters.items()}
    for side, tables in (("entity", interaction.entities), ("relation", interaction.relations)):
        for place, table in enumerate(tables):
            weight = table.weight
            if side == "relation" and content.config.reciprocal:
                weight = torch.stack(weight.chunk(2), 1).flatten(0, 1)
            state[f"{side}_representations.{place}._embeddings.weight"] = weight
    folder.append(STATE, [saved(state)])
    return render("load_pykeen.md", reciprocal=content.config.reciprocal)


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {label: i for i, label in enumerate(vocabulary.array.to_pylist())}


FORMAT = ForeignFormat("PyKEEN", tuple(INTERACTIONS), True, False, write)
