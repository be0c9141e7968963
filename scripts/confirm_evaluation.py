"""Let another program rank the model of tests/small_model.py, and print its metrics.

    python scripts/confirm_evaluation.py PROGRAM     ogb, pykeen or libkge

The constants of tests/ranking/test_other_programs.py come from here. This package need not be
installed; LibKGE is not on PyPI, so set PYTHONPATH to its checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import small_model as small

COLUMNS = ("mrr", "mr", "hits@1", "hits@3", "hits@10")
Results = Mapping[str, Mapping[str, float]]


def ogb(folder: Path, untied: bool) -> Results:
    """Return the means over both sides of the lists that OGB's evaluator returns."""
    import torch
    from ogb.linkproppred import Evaluator

    parts: dict[str, list] = {}
    for side, place in (("head", 0), ("tail", 2)):
        true, others = [], []
        for triple, listed in zip(small.SPLITS["test"], small.CANDIDATES[side], strict=True):
            rows = small.entity_rows([triple[2 - place], triple[place], *listed], untied)
            scores = rows[1:] @ (rows[0] * small.relation_rows([triple[1]])[0])
            true.append(scores[0])
            others.append(scores[1:])
        scores = {"y_pred_pos": np.array(true), "y_pred_neg": np.array(others)}
        tensors = {name: torch.from_numpy(array) for name, array in scores.items()}
        for name, values in Evaluator("ogbl-wikikg2").eval(tensors).items():
            parts.setdefault(name.removesuffix("_list"), []).append(values)
    return {"test": {name: torch.cat(values).mean().item() for name, values in parts.items()}}


def pykeen(folder: Path, untied: bool) -> Results:
    """Filter as the pipeline (test) and the early stopper (valid) do."""
    import torch
    from pykeen.evaluation import RankBasedEvaluator
    from pykeen.models import DistMult
    from pykeen.triples import TriplesFactory

    train = TriplesFactory.from_path(folder / "train.txt")
    ids = {"entity_to_id": train.entity_to_id, "relation_to_id": train.relation_to_id}
    valid, test = (
        TriplesFactory.from_path(folder / f"{split}.txt", **ids) for split in ("valid", "test")
    )
    model = DistMult(triples_factory=train, embedding_dim=small.DIM)
    for table, values in (
        (model.entity_representations[0], small.entity_rows(list(train.entity_to_id), untied)),
        (model.relation_representations[0], small.relation_rows(list(train.relation_to_id))),
    ):
        table._embeddings.weight.data = torch.from_numpy(values)
    results = {}
    for name, split, others in (("test", test, [train, valid]), ("valid", valid, [train])):
        metrics = RankBasedEvaluator().evaluate(
            model=model,
            mapped_triples=split.mapped_triples,
            additional_filter_triples=[other.mapped_triples for other in others],
            use_tqdm=False,
        )
        for kind in ("optimistic", "realistic", "pessimistic"):
            results[f"{name} {kind}"] = {
                column: metrics.get_metric(f"both.{kind}.{column}") for column in COLUMNS
            }
    return results


def libkge(folder: Path, untied: bool) -> Results:
    """Run an EntityRankingJob on each split with each rule for ties."""
    for name in (
        "ax", "ax.modelbridge", "ax.modelbridge.generation_strategy", "ax.service",
        "ax.service.ax_client", "hpbandster", "hpbandster.core", "hpbandster.core.nameserver",
        "hpbandster.core.result", "hpbandster.core.worker", "hpbandster.optimizers", "ConfigSpace",
        "ConfigSpace.hyperparameters", "igraph",
    ):  # fmt: skip
        sys.modules[name] = mock.MagicMock()  # of its searches
    import kge
    import torch
    from kge.job import EvaluationJob
    from kge.model import KgeModel

    preprocess = Path(kge.__file__).parents[1] / "data/preprocess/preprocess_default.py"
    subprocess.run([sys.executable, preprocess, folder], check=True, capture_output=True)
    results = {}
    for split in ("valid", "test"):
        for ties in ("rounded_mean_rank", "best_rank", "worst_rank"):
            config = kge.Config(folder=str(folder / f"{split}-{ties}"))
            Path(config.folder).mkdir()
            config._import("distmult")
            config.set_all(
                {
                    "console.quiet": True,
                    "job.device": "cpu",
                    "model": "distmult",
                    "dataset.name": str(folder),
                    "eval.split": split,
                    "entity_ranking.tie_handling.type": ties,
                    "lookup_embedder.dim": small.DIM,
                }
            )
            dataset = kge.Dataset.create(config, folder=str(folder))
            model = KgeModel.create(config, dataset)
            rows = small.entity_rows(list(dataset.entity_ids()), untied)
            for embedder, values in (
                (model.get_s_embedder(), rows),
                (model.get_p_embedder(), small.relation_rows(list(dataset.relation_ids()))),
            ):
                embedder._embeddings.weight.data = torch.from_numpy(values)
            trace = EvaluationJob.create(config, dataset, model=model).run()
            for filtered in ("_filtered", "_filtered_with_test"):
                if f"mean_rank{filtered}" in trace:
                    results[f"{split}{filtered} {ties}"] = {
                        "mrr": trace[f"mean_reciprocal_rank{filtered}"],
                        "mr": trace[f"mean_rank{filtered}"],
                        **{f"hits@{k}": trace[f"hits_at_{k}{filtered}"] for k in (1, 3, 10)},
                    }
    return results


PROGRAMS = {of.__name__: of for of in (ogb, pykeen, libkge)}


def main() -> None:
    """Print the metrics for tied and for untied scores as JSON, and the program's version."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    name = parser.parse_args().program
    results = {}
    for scores in ("tied", "untied"):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            os.chdir(folder)  # for logs that programs write where they run
            small.write(Path(folder))
            results[scores] = PROGRAMS[name](Path(folder), scores == "untied")
    version = "a checkout" if name == "libkge" else importlib.metadata.version(name)
    print(json.dumps({"program": f"{name} {version}", **results}, indent=1))


if __name__ == "__main__":
    main()
