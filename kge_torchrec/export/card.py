"""README.md of an export: a model card in the form of a Hugging Face repository.

What Hugging Face reads (library, licence, metrics, tags) is YAML between two lines of dashes at the
top; the rest is for people.  config.json is what its programs count and search by.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import yaml

from kge_torchrec.config import ModelConfig

CARD, HUB_CONFIG = "README.md", "config.json"
UNKNOWN = "unknown"  # a licence that Hugging Face knows by this name
NATIVE_LOADING = """\
```python
import kge_torchrec

model = kge_torchrec.load_model(".")  # the folder of this file
model.entities.shape  # a row an entity, in the order of entities.txt
```

`model.score(heads, relations, tails)` and `model.predict(head=..., relation=...)` take labels or
ids. `model.json` says what the numbers of a row mean.
"""
_PROTOCOL = (
    "Test triples, ranked exactly among all entities, known answers filtered out; ties count as "
    "the middle of their ranks."
)
_METRICS = {"mrr": "MRR", "hits@1": "Hits@1", "hits@3": "Hits@3", "hits@10": "Hits@10", "mr": "MR"}


@dataclass(frozen=True)
class Licences:
    """Of what an export holds, by the names of https://hf.co/docs/hub/repositories-licenses."""

    model: str = UNKNOWN
    data: str = UNKNOWN


@dataclass(frozen=True)
class Facts:
    """What a card tells.

    model: the config's section, of the model that is described.
    description: what model.json says, with the results if they are of this model.
    data: name of the graph; triples: their number in each split.
    loading: how to load the files, as Markdown.
    """

    model: ModelConfig
    description: dict[str, Any]
    data: str
    triples: dict[str, int]
    licences: Licences
    loading: str


def card(facts: Facts) -> str:
    """The text of README.md."""
    head = yaml.safe_dump(_front_matter(facts), sort_keys=False, allow_unicode=True)
    parts = [
        f"# {_title(facts)}",
        _about(facts),
        f"## How to load\n\n{facts.loading.strip()}",
        f"## Results\n\n{_results(facts)}",
        f"## Data\n\n{_data(facts)}",
        f"## Training\n\n{_training(facts)}",
        f"## Licence\n\n{_licence(facts.licences)}",
    ]
    return f"---\n{head}---\n\n" + "\n\n".join(parts) + "\n"


def hub_config(facts: Facts) -> str:
    """The text of config.json."""
    found = facts.description
    config = {
        "model_type": "kge-torchrec",
        "architectures": [found["scorer"]],
        **{key: found[key] for key in ("dim", "reciprocal", "num_entities", "num_relations")},
        "options": facts.model.options,
        "torch_dtype": "float32",
    }
    return json.dumps(config, indent=1) + "\n"


def _title(facts: Facts) -> str:
    return f"{facts.description['scorer']}, {facts.model.dim} numbers an entity, of {facts.data}"


def _front_matter(facts: Facts) -> dict[str, Any]:
    tags = ["knowledge-graph-embeddings", "link-prediction", facts.description["scorer"]]
    front: dict[str, Any] = {
        "library_name": "kge-torchrec",
        "license": facts.licences.model,
        "pipeline_tag": "graph-ml",
        "tags": tags,
    }
    metrics = _measured(facts)
    if metrics:
        front["metrics"] = list(metrics)
        result = {
            "task": {"type": "graph-ml", "name": "Link prediction"},
            "dataset": {"name": facts.data, "type": facts.data, "split": "test"},
            "metrics": [
                {"type": key, "name": _METRICS[key], "value": value}
                for key, value in metrics.items()
            ],
        }
        front["model-index"] = [{"name": _title(facts), "results": [result]}]
    return front


def _measured(facts: Facts) -> dict[str, float]:
    test = (facts.description.get("results") or {}).get("test")
    found = test["both"]["realistic"] if test else {}
    return {key: round(found[key], 6) for key in _METRICS if key in found}


def _about(facts: Facts) -> str:
    found = facts.description
    numbers = f"{found['num_entities']:,} entities, {found['num_relations']:,} relations"
    lines = [
        f"Embeddings of a knowledge graph of {numbers}, which answer (head, relation, ?) and "
        "(?, relation, tail).",
        f"{found['parameters']['score']}",
    ]
    if facts.model.reciprocal:
        lines.append("Head queries are asked as tail queries of inverse relations.")
    return "\n\n".join(lines)


def _results(facts: Facts) -> str:
    test = (facts.description.get("results") or {}).get("test")
    if not test:
        return "Not measured for this checkpoint."
    names = list(_METRICS)
    rows = [f"| queries | {' | '.join(_METRICS[key] for key in names)} |", "|---" * 6 + "|"]
    about = {"tail": "(head, relation, ?)", "head": "(?, relation, tail)", "both": "both"}
    for side, text in about.items():
        numbers = test[side]["realistic"]
        cells = (f"{numbers[key]:.1f}" if key == "mr" else f"{numbers[key]:.4f}" for key in names)
        rows.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", _PROTOCOL])


def _data(facts: Facts) -> str:
    counts = ", ".join(f"{count:,} {split}" for split, count in facts.triples.items())
    return (
        f"{facts.data}: {counts} triples. The triples are no part of these files; labels of "
        "entities and relations are."
    )


def _training(facts: Facts) -> str:
    checkpoint = facts.description["checkpoint"]
    versions = ", ".join(f"{n} {v}" for n, v in facts.description["packages"].items())
    return (
        f"Checkpoint {checkpoint['name']} (epoch {checkpoint['epoch']}, step "
        f"{checkpoint['step']:,}), trained by kge_torchrec. {versions}."
    )


def _licence(licences: Licences) -> str:
    text = f"Model: {licences.model}. Data: {licences.data}."
    if UNKNOWN in (licences.model, licences.data):
        text += (
            " Fill in what is unknown before you publish this, here and in the lines at the top."
        )
    return text
