"""README.md of an export: a model card in the form of a Hugging Face repository.

Hugging Face reads library, licence, metrics and tags from YAML between two lines of dashes at the
top; the rest is for people. Its programs count and search by config.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import yaml

from kge_torchrec.config import ModelConfig
from kge_torchrec.pages import render

CARD, HUB_CONFIG = "README.md", "config.json"
UNKNOWN = "unknown"  # a licence that Hugging Face knows by this name
_METRICS = {"mrr": "MRR", "hits@1": "Hits@1", "hits@3": "Hits@3", "hits@10": "Hits@10", "mr": "MR"}


@dataclass(frozen=True)
class Licences:
    """Licences of an export, by the names of https://hf.co/docs/hub/repositories-licenses."""

    model: str = UNKNOWN
    data: str = UNKNOWN


@dataclass(frozen=True)
class Facts:
    """The contents of a card.

    Attributes:
        model: The config's section of the model.
        description: The contents of model.json, with the results if they are of this model.
        data: The name of the graph.
        triples: The number of triples of each split.
        licences: The licences of model and data.
        loading: How to load the files, as Markdown.
    """

    model: ModelConfig
    description: dict[str, Any]
    data: str
    triples: dict[str, int]
    licences: Licences
    loading: str


def card(facts: Facts) -> str:
    """Return the text of README.md."""
    found = facts.description
    title = f"{found['scorer']} (dim {found['dim']}) of {facts.data}"
    test = (found.get("results") or {}).get("test")
    front: dict[str, Any] = {
        "library_name": "kge-torchrec",
        "license": facts.licences.model,
        "pipeline_tag": "graph-ml",
        "tags": ["knowledge-graph-embeddings", "link-prediction", found["scorer"]],
    }
    if test:
        values = test["both"]["realistic"]
        result = {
            "task": {"type": "graph-ml", "name": "Link prediction"},
            "dataset": {"name": facts.data, "type": facts.data, "split": "test"},
            "metrics": [
                {"type": metric, "name": name, "value": round(values[metric], 6)}
                for metric, name in _METRICS.items()
            ],
        }
        front["metrics"] = list(_METRICS)
        front["model-index"] = [{"name": title, "results": [result]}]
    return render(
        "card.md",
        head=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        title=title,
        found=found,
        loading=facts.loading.strip(),
        test=test,
        metrics=_METRICS,
        data=facts.data,
        triples=facts.triples,
        licences=facts.licences,
    )


def hub_config(facts: Facts) -> str:
    """Return the text of config.json."""
    found = facts.description
    config = {
        "model_type": "kge-torchrec",
        "architectures": [found["scorer"]],
        **{key: found[key] for key in ("dim", "reciprocal", "num_entities", "num_relations")},
        "options": facts.model.options,
        "torch_dtype": "float32",
    }
    return json.dumps(config, indent=1) + "\n"
