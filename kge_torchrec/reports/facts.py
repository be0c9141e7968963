"""The facts of a report: what a run's folder says, and what needs the model.

The folder has config, curves, results, layout and times. The model gives example answers, the map
of entities, and ranks by relation.

Shapes: N entities, M of them on the map, D elements per entity.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kge_torchrec.answers.queries import Prediction
from kge_torchrec.config import Config, ConfigError, all_keys
from kge_torchrec.errors import KGEError
from kge_torchrec.trained_run import Run
from kge_torchrec.training.remote_runs import folder_of

log = logging.getLogger(__name__)

# Keys that describe where a run ran, not what it trained.
_PLACE_KEYS = ("run.", "threads", "device")


class ReportError(KGEError):
    """A report cannot be written."""


@dataclass(frozen=True)
class RunFacts:
    """The contents of a run's folder."""

    name: str
    path: Path
    config: Config
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl
    results: dict[str, Any] | None  # None while the run trains, or if results.json is damaged
    layout: str  # plan.txt
    damaged: str = ""  # why results.json cannot be read, if it exists

    @classmethod
    def read(cls, path: str | Path, name: str) -> RunFacts:
        """Read the folder of a run; raise ConfigError if it holds none."""
        folder = folder_of(path)
        config = folder.load_config()
        plan = folder.path / "plan.txt"
        results, damaged = None, ""
        try:
            results = folder.load_results()
        except ConfigError as error:
            if folder.results.is_file():
                damaged = str(error)
                log.warning("the report leaves out the results: %s", error)
        return cls(
            name=name,
            path=folder.path,
            config=config,
            metrics=folder.load_metrics(),
            results=results,
            layout=plan.read_text(encoding="utf-8") if plan.is_file() else "",
            damaged=damaged,
        )

    @property
    def data(self) -> str:
        """The name of the graph."""
        return Path(self.config.data.path).name

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return lines of "step", "epoch" or "valid"; of an epoch trained twice, the last line."""
        return list({line["step"]: line for line in self.metrics if line["kind"] == kind}.values())

    def losses(self) -> tuple[list[float], list[float]]:
        """Return steps and their losses."""
        lines = [line for line in self.of_kind("step") if line["loss"] is not None]
        return [line["step"] for line in lines], [line["loss"] for line in lines]

    def valid_mrr(self) -> tuple[list[float], list[float]]:
        """Return epochs and the realistic filtered MRR of both sides after each."""
        lines = [line for line in self.of_kind("valid") if "both" in line]
        return [x["epoch"] for x in lines], [x["both"]["realistic"]["mrr"] for x in lines]

    def seconds(self) -> dict[str, float]:
        """Return the seconds of training, and of validation if the log has them."""
        return {
            "training": sum(line["seconds"] for line in self.of_kind("epoch")),
            "validation": sum(line.get("seconds", 0.0) for line in self.of_kind("valid")),
        }

    def groups(self, by: str) -> dict[str, Any] | None:
        """Return the file of ``evaluate --by`` on test, or None."""
        file = self.path / f"evaluation-test-by-{by}.json"
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            log.warning("%s is damaged (%s); the report leaves it out", file, error)
            return None


def names_of(paths: list[Path]) -> list[str]:
    """Return a distinct name per folder: as many of its last parts as needed.

    Raises:
        ReportError: A folder is named twice.
    """
    resolved = [path.resolve() for path in paths]
    for path in resolved:
        if resolved.count(path) > 1:
            raise ReportError(f"{path} is named twice; name each run once")
    longest = max(len(path.parts) for path in resolved)
    for length in range(1, longest + 1):
        names = ["/".join(path.parts[-length:]) for path in resolved]
        if len(set(names)) == len(names):
            break
    return names


def differences(runs: list[RunFacts]) -> list[tuple[str, list[Any]]]:
    """Return keys whose values differ among the runs, or from the default for a single run."""
    configs = [run.config for run in runs]
    if len(runs) == 1:
        configs.append(Config())
    changed = []
    for key in all_keys():
        values = [attrgetter(key)(config) for config in configs]
        if not key.startswith(_PLACE_KEYS) and any(value != values[0] for value in values):
            changed.append((key, values))
    return changed


MAX_ON_MAP = 2000  # entities with the most triples
MAX_NAMED = 25  # entities on the map with a label
EXAMPLES = 6
TOP = 5
_MAX_SCORES = 2e9  # up to this number of scores, ranking test takes seconds


@dataclass(frozen=True)
class Example:
    """A test triple, and the model's answers to the query for its tail."""

    head: str
    relation: str
    tail: str
    answers: list[Prediction]


@dataclass(frozen=True)
class EntityMap:
    """The entities with the most triples, on the first two principal axes of their rows."""

    places: np.ndarray  # (M, 2)
    degrees: np.ndarray  # (M,) training triples of each entity
    labels: list[str]  # of M entities, most triples first
    explained: float  # share of the rows' variance along both axes


def examples(run: Run) -> list[Example]:
    """Return answers to some test triples, drawn at random, the same ones every time."""
    store = run.model.known("a report")
    triples = np.asarray(store.test, np.int64)
    drawn = np.random.default_rng(0).permutation(len(triples))[:EXAMPLES]
    results = []
    for head, relation, tail in triples[np.sort(drawn)]:
        head_label, tail_label = store.entities.labels([head, tail])
        (relation_label,) = store.relations.labels([relation])
        answers = run.predict(head=head_label, relation=relation_label, k=TOP)
        results.append(Example(head_label, relation_label, tail_label, answers))
    return results


def entity_map(run: Run) -> EntityMap | None:
    """Return the entity map by principal components; None for fewer than three entities."""
    model = run.model
    store = model.known("a report")
    degrees = store.degrees()
    chosen = np.argsort(-degrees, kind="stable")[:MAX_ON_MAP]
    if len(chosen) < 3:
        return None
    rows = model.rows(torch.from_numpy(chosen)).cpu()
    rows = rows - rows.mean(0)
    # The sign of an axis is arbitrary; choose one that is the same on every machine.
    left, spread, _ = torch.linalg.svd(rows.double(), full_matrices=False)
    places = (left * spread)[:, :2]
    places = places * torch.sign(places.gather(0, places.abs().argmax(0, keepdim=True)))
    explained = float(spread[:2].square().sum() / spread.square().sum().clamp_min(1e-30))
    labels = model.entity_labels.labels(chosen)
    return EntityMap(places.numpy(), degrees[chosen], labels, explained)


def ranks_by_relation(run: Run) -> dict[str, Any] | None:
    """Return the result of ``evaluate --by relation``; None if ranking test would take long."""
    store = run.model.known("a report")
    if not len(store.test) or 2.0 * len(store.test) * store.num_entities > _MAX_SCORES:
        return None
    return run.evaluate("test", by=["relation"])["by"]["relation"]
