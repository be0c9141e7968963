"""Recommend tails of a relation to heads: predict among candidates, without the head itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from kge_torchrec.answers.predictions import Choice, Prediction, predictions
from kge_torchrec.data.streams import lines
from kge_torchrec.distributed.processes import on_first_rank
from kge_torchrec.errors import DataError
from kge_torchrec.ranking.candidates import Candidates, ListedCandidates
from kge_torchrec.trained_model import Label, TrainedModel

KINDS = ("seen", "all")


def choice(
    model: TrainedModel,
    k: int = 10,
    exclude_known: bool = False,
    candidates: str | Path | None = None,
) -> Choice:
    """Return the answers to recommend; see ``Answering.recommend``. Collective."""
    kind = default_candidates(model) if candidates is None else candidates
    only = model.candidates(str(kind)) if kind in KINDS else _listed(model, Path(kind))
    return Choice(k, not exclude_known, only=only, itself=False)


def recommend(
    model: TrainedModel, head: Label, relation: Label, chosen: Choice
) -> list[Prediction]:
    """Return the tails of one head, best first; see ``Answering.recommend``. Collective."""
    ids = torch.stack([model.entity_ids(head), model.relation_ids(relation), torch.tensor(0)])
    return predictions(model, "tail", ids[None], chosen)[0]


def default_candidates(model: TrainedModel) -> str:
    """Return "seen", or "all" for an export, which does not know what was seen."""
    return "all" if model.store is None else "seen"


def about(model: TrainedModel, candidates: str | Path | None) -> str:
    """Return a description of the candidates, for people."""
    kind = default_candidates(model) if candidates is None else str(candidates)
    what = {"all": "all entities", "seen": "tails of the relation in train"}
    return what.get(kind, f"the entities of {kind}")


def _listed(model: TrainedModel, path: Path) -> Candidates:
    """Return the entities that a file of labels names, one per line. Collective."""

    def ids() -> np.ndarray:
        if not path.is_file():
            raise DataError(f"candidates must be seen, all or a file of labels: no file {path}")
        numbered = [(line, raw.decode("utf-8", "replace")) for line, raw in lines(path) if raw]
        entities = model.entity_labels.search([label for _, label in numbered])
        for (line, label), entity in zip(numbered, entities.tolist(), strict=True):
            if entity < 0:
                raise DataError(f"{path}:{line}: {model.entity_labels.unknown(label)}")
        if not numbered:
            raise DataError(f"{path} is empty: write lines of one label each")
        return entities

    return ListedCandidates(on_first_rank(model.processes, ids))
