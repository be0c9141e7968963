"""The folder of an export, and what describes its contents: config.json and the model card.

config.json is for programs; Hugging Face counts downloads and searches by it. The card, README.md,
is for people; Hugging Face reads its YAML front matter.
"""

from __future__ import annotations

import inspect
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from kge_torchrec import files
from kge_torchrec.config import ConfigError, ModelConfig
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.config.registry import check_imports, resolve
from kge_torchrec.data.store import META
from kge_torchrec.environment import installed
from kge_torchrec.errors import ExportError
from kge_torchrec.export.table_files import Parquet, Safetensors
from kge_torchrec.models.scorers.base import BIASES, with_biases

FORMAT = "kge-torchrec export"
FORMAT_VERSION = 2
DESCRIPTION = "config.json"
PARAMETERS = "scorer.safetensors"
ENTITIES, RELATIONS = "entities.txt", "relations.txt"
STORE = "store"  # the folder of the triple store
CARD = "README.md"  # people may edit it, so its size is not recorded
_PACKAGES = ("kge-torchrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")


def describe(
    model: ModelConfig, num_entities: int, num_relations: int, format: str
) -> dict[str, Any]:
    """Return the contents of config.json except ``files``, which is added at the end."""
    scorer = resolve("scorer", model.scorer)
    description: dict[str, Any] = {
        "model_type": "kge-torchrec",
        "architectures": [model.scorer],
        "torch_dtype": "float32",
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "layout": format,
        "scorer": model.scorer,
        "dim": model.dim,
        "reciprocal": model.reciprocal,
        "num_entities": num_entities,
        "num_relations": num_relations,
        "parameters": {"score": with_biases(scorer.formula) if model.biases else scorer.formula},
        "model": asdict(model),
        "packages": installed(_PACKAGES),
    }
    if format not in ("safetensors", "parquet"):
        return description
    has_biases = model.biases or scorer.has_biases
    count = model.dim - (BIASES if has_biases else 0)
    row = f"{count} real numbers"
    if scorer.is_complex:
        row = f"{count // 2} complex numbers, stored as re, im, re, im, ..."
    layout = " ".join((inspect.getdoc(scorer) or "").split())
    description["entities"] = {
        "file": Parquet.name if format == "parquet" else Safetensors.name,
        "dtype": "float32",
        "shape": [num_entities, model.dim],
        "row": f"{row}; after them the biases as a head and as a tail" if has_biases else row,
        "layout": f"{layout} D is {count}." if has_biases else layout,
    }
    inverses = f"; head queries (?, r, t) are scored as (t, r + {num_relations}, ?)"
    description["parameters"] |= {
        "file": PARAMETERS,
        "relations": f"row r is relation r{inverses if model.reciprocal else ''}",
    }
    description["labels"] = {
        "entities": ENTITIES,
        "relations": RELATIONS,
        "meaning": "one per line in order of id, UTF-8; \\\\, \\n and \\r stand for a backslash, "
        "a newline and a carriage return",
    }
    return description


def read_description(path: Path) -> dict[str, Any]:
    """Read config.json and check that the export is complete.

    Raises:
        ExportError: There is no export, it has another version, or a file is missing or differs in
            size from what was written.
    """
    if not path.is_dir():
        raise ExportError(f"{path}: no such folder; write an export with `kge-torchrec export`")
    try:
        description = json.loads((path / DESCRIPTION).read_text("utf-8"))
    except FileNotFoundError:
        raise ExportError(
            f"{path} is no export: it has no {DESCRIPTION}; write one with `kge-torchrec export`"
        ) from None
    except ValueError as error:
        raise damaged(path, f"{DESCRIPTION}: {error}") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise ExportError(
            f"{path} is no export: another program wrote its {DESCRIPTION}; "
            "export a run with `kge-torchrec export`"
        )
    if description.get("version") != FORMAT_VERSION:
        raise ExportError(
            f"{path} is an export of format version {description.get('version')}, this program "
            f"reads version {FORMAT_VERSION}; export the run again"
        )
    if description.get("layout") != "safetensors":
        raise ExportError(
            f"{path} is an export in the format {description.get('layout')}; export the run in the "
            "format safetensors to read it here"
        )
    kinds = {"model": dict, "num_entities": int, "num_relations": int, "files": dict}
    for key, kind in kinds.items():
        if not isinstance(description.get(key), kind):
            raise damaged(path, f"{DESCRIPTION} has no {key}")
    named = {Safetensors.name, PARAMETERS, f"{STORE}/{META}"}
    if unnamed := sorted(named - description["files"].keys()):
        raise damaged(path, f"{DESCRIPTION} does not list {', '.join(unnamed)}")
    for name, size in description["files"].items():
        file = path / name
        if not file.is_file():
            raise damaged(path, f"{name} is missing")
        if file.stat().st_size != size:
            raise damaged(path, f"{name} has {file.stat().st_size:,} bytes instead of {size:,}")
    return description


def model_config(path: Path, description: dict[str, Any]) -> ModelConfig:
    """Return the model section of the config.

    Raises:
        ExportError: The scorer cannot be found, or this version does not support the model.
    """
    try:
        scorer = str(description["model"].get("scorer"))
        check_imports({"model.scorer": scorer}, path)
        resolve("scorer", scorer)
    except ConfigError as error:
        raise ExportError(f"{path}: {error}") from error
    try:
        return config_from_dict({"model": description["model"]}).model
    except ConfigError as error:
        raise damaged(path, f"{DESCRIPTION}: {error}") from error


def is_export(path: Path) -> bool:
    """Return whether a folder is an export of any version, complete or damaged."""
    try:
        description = json.loads((path / DESCRIPTION).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(description, dict) and description.get("format") == FORMAT


def damaged(path: Path, problem: str) -> ExportError:
    """Return the error of an export that cannot be used."""
    return ExportError(f"{path}: damaged export: {problem}; export the run again")


class ExportFolder:
    """A new export that is being written to ``path``. Only rank 0 uses it.

    The folder is written under a hidden name and renamed when it is complete. An export that is
    killed leaves the hidden folder.
    """

    def __init__(self, path: str | Path, overwrite: bool = False):
        self.path, self.overwrite = Path(path), overwrite
        # Keep a symbolic link: write the export to its target.
        self._target = self.path.resolve()
        self.partial = files.partial_of(self._target)

    def check(self) -> None:
        """Raise ExportError unless an export may be written to ``path``."""
        if not self._target.exists():
            return
        if not self.overwrite:
            raise ExportError(
                f"{self.path} exists already; name another folder, or replace it with --overwrite "
                "(overwrite=True)"
            )
        empty = self._target.is_dir() and not any(self._target.iterdir())
        if not empty and not is_export(self._target):
            raise ExportError(
                f"{self.path} holds something else than an export and is not overwritten; "
                "name another folder"
            )

    def begin(self) -> None:
        """Create the hidden folder."""
        self.check()
        self.partial.mkdir(parents=True)

    def finish(self, description: dict[str, Any]) -> None:
        """Write config.json with the size of every file, then rename the folder.

        Of two exports that are written at the same time, the one that finishes later replaces the
        first one whole (``overwrite``), or is refused.
        """
        written = sorted(path for path in self.partial.rglob("*") if path.is_file())
        sizes = {
            str(file.relative_to(self.partial)): file.stat().st_size
            for file in written
            if file.name != CARD
        }
        text = json.dumps(description | {"files": sizes}, indent=1, ensure_ascii=False)
        (self.partial / DESCRIPTION).write_text(f"{text}\n", encoding="utf-8")
        for file in self.partial.rglob("*"):
            files.sync(file)
        self.check()  # another process may have written one meanwhile
        files.put_in_place(self.partial, self._target, self.overwrite)

    def discard(self) -> None:
        """Remove the unfinished export."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def free(self) -> str:
        """Return the free space on the disk of the export, as text."""
        return files.free_space(self._target)


_METRICS = {"mrr": "MRR", "hits@1": "Hits@1", "hits@3": "Hits@3", "hits@10": "Hits@10", "mr": "MR"}


def card_text(
    description: dict[str, Any],
    data: str,
    triples: dict[str, int],
    features: int,
) -> str:
    """Return the text of README.md.

    Args:
        description: The contents of config.json, with results if they belong to this model.
        data: The name of the graph.
        triples: The number of triples per split.
        features: The number of features whose vectors are summed into those of entities.
    """
    from kge_torchrec.pages import render  # loads Jinja2

    title = f"{description['scorer']} (dim {description['dim']}) of {data}"
    test = (description.get("results") or {}).get("test")
    front: dict[str, Any] = {
        "library_name": "kge-torchrec",
        "license": "unknown",  # a name that Hugging Face knows
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
        test=test,
        metrics=_METRICS,
        data=data,
        triples=triples,
        features=features,
    )
