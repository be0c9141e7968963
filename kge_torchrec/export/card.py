"""README.md of an export: a model card in the format of Hugging Face repositories.

Hugging Face reads library, license, metrics and tags from the YAML front matter. The rest is for
people. Hugging Face counts downloads and searches by config.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import yaml

from kge_torchrec.pages import render

CARD, HUB_CONFIG = "README.md", "config.json"
UNKNOWN = "unknown"  # a license name that Hugging Face knows
_METRICS = {"mrr": "MRR", "hits@1": "Hits@1", "hits@3": "Hits@3", "hits@10": "Hits@10", "mr": "MR"}


@dataclass(frozen=True)
class Licences:
    """Licenses of an export, as named in https://hf.co/docs/hub/repositories-licenses."""

    model: str = UNKNOWN
    data: str = UNKNOWN


def card(
    description: dict[str, Any],
    data: str,
    triples: dict[str, int],
    licences: Licences,
    loading: str,
) -> str:
    """Return the text of README.md.

    Args:
        description: The contents of model.json, with results if they belong to this model.
        data: The name of the graph.
        triples: The number of triples per split.
        licences: The licenses of model and data.
        loading: How to load the files, as Markdown.
    """
    title = f"{description['scorer']} (dim {description['dim']}) of {data}"
    test = (description.get("results") or {}).get("test")
    front: dict[str, Any] = {
        "library_name": "kge-torchrec",
        "license": licences.model,
        "pipeline_tag": "graph-ml",
        "tags": ["knowledge-graph-embeddings", "link-prediction", description["scorer"]],
    }
    if test:
        values = test["both"]["realistic"]
        result = {
            "task": {"type": "graph-ml", "name": "Link prediction"},
            "dataset": {"name": data, "type": data, "split": "test"},
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
        model=description,
        loading=loading.strip(),
        test=test,
        metrics=_METRICS,
        data=data,
        triples=triples,
        licences=licences,
    )


def hub_config(description: dict[str, Any], options: dict[str, Any]) -> str:
    """Return the text of config.json, from model.json and ``model.options`` of the config."""
    config = {
        "model_type": "kge-torchrec",
        "architectures": [description["scorer"]],
        **{key: description[key] for key in ("dim", "reciprocal", "num_entities", "num_relations")},
        "options": options,
        "torch_dtype": "float32",
    }
    return json.dumps(config, indent=1) + "\n"
