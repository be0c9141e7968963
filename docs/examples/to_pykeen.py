"""Turn an export into a PyKEEN model that gives the same scores.

    kge-torchrec export RUN -o EXPORT
    pip install pykeen
    python docs/examples/to_pykeen.py EXPORT OUT    # OUT/trained_model.pkl, OUT/training_triples

The model is PyKEEN's ``ERModel`` with one of its interactions. PyKEEN's own model classes
(``pykeen.models.RotatE`` and others) add constraints and penalties that ours was not trained with.
Two interactions have another formula than our scorer of that name:

- PyKEEN's RotatE takes the Euclidean norm of all differences, as our rotate_l2 does. Our rotate
  sums the moduli (Sun et al. 2019), which is PyKEEN's PairRE with complex numbers.
- PyKEEN's SimplE (1.11) multiplies a head's vector as a head with a tail's vector as a head. Our
  simple (Kazemi and Poole 2018) is PyKEEN's CP with vectors twice as long.

PyKEEN numbers relation r as 2 r and its inverse as 2 r + 1. PyKEEN and TorchRec cannot be imported
into one process, since both register an optimizer of the same name; this script needs no TorchRec.

Shapes: N entities, R relations (inverses included, all of them last), D elements per entity row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kge_torchrec import load_model


class Interaction(NamedTuple):
    """PyKEEN's name and options of a formula, with the tables that it takes."""

    name: str
    entities: list[Tensor]  # (N, ...) each, real or complex
    relations: list[Tensor]  # (R, ...) each, in our order
    options: dict[str, Any] = {}  # noqa: RUF012
    parameters: dict[str, Tensor] = {}  # noqa: RUF012


def complex_numbers(rows: Tensor) -> Tensor:
    """Return rows of re, im, re, im, ... as complex numbers: (n, D) -> (n, D/2)."""
    return torch.view_as_complex(rows.unflatten(-1, (-1, 2)).contiguous())


def rotations(phases: Tensor) -> Tensor:
    """Return e^(i phase) for phases (R, D/2)."""
    return torch.polar(torch.ones_like(phases), phases)


def rotate(entities: Tensor, phases: Tensor) -> Interaction:
    turns = rotations(phases)
    tables = [turns, torch.ones_like(turns)]
    return Interaction("PairRE", [complex_numbers(entities)], tables, {"p": 1})


def simple(entities: Tensor, relations: Tensor) -> Interaction:
    swapped = torch.cat(entities.chunk(2, -1)[::-1], -1)
    tables = [entities[:, None], swapped[:, None]]  # as a head, as a tail
    return Interaction("CP", tables, [relations[:, None] / 2])


def transh(entities: Tensor, relations: Tensor) -> Interaction:
    normal, shift = relations.chunk(2, -1)
    normal = torch.nn.functional.normalize(normal, dim=-1)
    shift = shift - normal * (normal * shift).sum(-1, keepdim=True)
    return Interaction("TransH", [entities], [normal, shift], {"p": 2, "power_norm": True})


def mure(entities: Tensor, relations: Tensor) -> Interaction:
    vector, as_head, as_tail = entities.split([entities.shape[1] - 2, 1, 1], -1)
    diagonal, shift = relations.chunk(2, -1)
    tables = [vector, as_head[:, 0], as_tail[:, 0]]
    return Interaction("MuRE", tables, [-shift, diagonal], {"p": 2, "power_norm": True})


def tucker(entities: Tensor, relations: Tensor, core: Tensor) -> Interaction:
    options = {"embedding_dim": entities.shape[1], "relation_dim": relations.shape[1],
               "apply_batch_normalization": False, "head_dropout": 0.0, "relation_dropout": 0.0,
               "head_relation_dropout": 0.0}  # fmt: skip
    core = core.transpose(0, 1).contiguous()  # to the order head, relation, tail
    return Interaction("TuckER", [entities], [relations], options, {"core_tensor": core})


FORMULAS: dict[str, Callable[..., Interaction]] = {
    "transe_l1": lambda e, r: Interaction("TransE", [e], [r], {"p": 1}),
    "transe_l2": lambda e, r: Interaction("TransE", [e], [r], {"p": 2}),
    "transh": transh,
    "distmult": lambda e, r: Interaction("DistMult", [e], [r]),
    "complex": lambda e, r: Interaction("ComplEx", [complex_numbers(e)], [complex_numbers(r)]),
    "rotate": rotate,
    "rotate_l2": lambda e, r: Interaction("RotatE", [complex_numbers(e)], [rotations(r)]),
    "simple": simple,
    "rescal": lambda e, r: Interaction("RESCAL", [e], [r.unflatten(-1, (e.shape[1],) * 2)]),
    "tucker": tucker,
    "mure": mure,
    "pairre": lambda e, r: Interaction("PairRE", [e], list(r.chunk(2, -1)), {"p": 1}),
}


@torch.no_grad()
def interaction_of(model: Any) -> Interaction:
    """Return PyKEEN's interaction for a model from ``load_model``, with float32 tables."""
    settings, scorer = model.description["model"], model.scorer
    if settings["scorer"] not in FORMULAS or settings["biases"]:
        raise SystemExit(f"PyKEEN has only the formulas of {', '.join(FORMULAS)}, without biases")
    entities = scorer.entity(torch.from_numpy(model.entities)).double()  # normalized if trained so
    relations = scorer.relation(torch.arange(scorer.relation_rows), drop=False).double()
    more = {"core": scorer.core.double()} if settings["scorer"] == "tucker" else {}
    made = FORMULAS[settings["scorer"]](entities, relations, **more)

    def single(table: Tensor) -> Tensor:
        return table.to(torch.complex64 if table.is_complex() else torch.float32)

    tables = ([single(table) for table in of] for of in (made.entities, made.relations))
    parameters = {name: single(value) for name, value in made.parameters.items()}
    return Interaction(made.name, *tables, made.options, parameters)


def to_pykeen(model: Any) -> tuple[Any, Any]:
    """Return PyKEEN's ``ERModel`` and ``TriplesFactory`` of a model from ``load_model``."""
    from pykeen.models import ERModel
    from pykeen.triples import TriplesFactory

    made, reciprocal = interaction_of(model), model.description["reciprocal"]
    labels = (of.array.to_pylist() for of in (model.entity_labels, model.relation_labels))
    ids = [{label: i for i, label in enumerate(of)} for of in labels]
    none = torch.empty(0, 3, dtype=torch.long)  # add triples to train on, or to filter by
    factory = TriplesFactory(none, *ids, create_inverse_triples=reciprocal)
    state = {f"interaction.{name}": value for name, value in made.parameters.items()}
    shapes: dict[str, list[dict[str, Any]]] = {}
    for side, tables in (("entity", made.entities), ("relation", made.relations)):
        shapes[side] = [{"shape": tuple(x.shape[1:]), "dtype": x.dtype} for x in tables]
        for place, table in enumerate(tables):
            if side == "relation" and reciprocal:
                table = torch.stack(table.chunk(2), 1).flatten(0, 1)
            weight = torch.view_as_real(table) if table.is_complex() else table
            key = f"{side}_representations.{place}._embeddings.weight"
            state[key] = weight.reshape(len(weight), -1)
    network = ERModel(
        triples_factory=factory, interaction=made.name, interaction_kwargs=made.options,
        entity_representations_kwargs=shapes["entity"],
        relation_representations_kwargs=shapes["relation"],
    )  # fmt: skip
    network.load_state_dict(state)
    return network.eval(), factory


if __name__ == "__main__":
    network, factory = to_pykeen(load_model(sys.argv[1]))
    out = Path(sys.argv[2])
    out.mkdir()
    torch.save(network, out / "trained_model.pkl")
    factory.to_path_binary(out / "training_triples")
