"""Compare ranks, best answers and exports with a CPU; check ties and precision.

Shapes: N entities, D elements per entity row, T triples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from safetensors.torch import load_file

from gpu_checks.oracle import Result
from gpu_checks.report import Report
from gpu_checks.runs import config_of
from kge_torchrec import api, load_model
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.config.registry import resolve
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.models import scorers
from kge_torchrec.ranking.ranks import rank_triples
from kge_torchrec.ranking.search import Queries, RankOptions, top_k

SCORERS = ("complex", "distmult", "transe_l1", "transe_l2", "rotate", "pairre", "transh",
           "rescal", "conve", "roth")  # fmt: skip
SIDES = ("head", "tail")
ON_DISK = {"entities__placement": "disk", "train__batch_size": 64,
           "entities__placement_options": {"parts": 8, "buffer": 4}}  # fmt: skip


def equality(report: Report) -> None:
    """Check ranking, prediction and export."""
    for name in SCORERS:
        with report.check(name):
            _against_cpu(report, name)
        with report.check(f"{name}, ties"):
            _ties(report, name)
    for name, keys in {"a run": {}, "a run on disk": ON_DISK}.items():
        with report.check(name):
            _run(report, name, keys)


def scorer_of(name: str, dim: int, relations: int = 7) -> scorers.Scorer:
    """Return a scorer on the CPU with parameters of about size one."""
    torch.manual_seed(0)
    reciprocal = resolve("scorer", name).needs_reciprocal
    settings = {"model.scorer": name, "model.dim": dim, "model.reciprocal": reciprocal}
    scorer = scorers.build_scorer(config_from_dict(settings).model, relations)
    for parameter in scorer.parameters():
        torch.nn.init.normal_(parameter)
    return scorer


def triples_of(count: int, entities: int, relations: int = 7) -> np.ndarray:
    """Return random triples (T, 3)."""
    stream = np.random.default_rng(1)
    columns = [stream.integers(size, size=count) for size in (entities, relations, entities)]
    return np.stack(columns, 1)


def computations(small: bool = False) -> dict[str, Callable[[], Result]]:
    """Return the rankings of a CPU by name, which has the number of entities."""
    entities = _entities(small)
    return {
        f"ranking, {name}, {entities} entities": partial(_ranked, name, "cpu", entities)
        for name in SCORERS
    }


def _entities(small: bool) -> int:
    return 2000 if small else 50_000


def _ranked(name: str, device: torch.device | str, entities: int) -> Result:
    """Return ranks, and the scores and ids of the ten best answers of 64 queries."""
    scorer, triples = scorer_of(name, 32).to(device), triples_of(300, entities)
    rows = torch.randn(entities, 32, generator=torch.Generator().manual_seed(2))
    shard = EntityShard(rows.to(device), 0, entities)
    ranks = rank_triples(scorer, shard, triples, None).values("both", "realistic")
    queries = Queries(*torch.from_numpy(triples[:64, :2]).T.contiguous(), "tail")
    scores, ids = (best.detach().cpu().numpy() for best in top_k(scorer, shard, queries, 10))
    return {"ranks": ranks, "scores": scores, "ids": ids}


def _against_cpu(report: Report, name: str) -> None:
    """Compare ranks; a different order of sums may swap answers with almost equal scores."""
    entities = _entities(report.small)
    of_cpu = f"ranking, {name}, {entities} entities"
    there = report.oracle(of_cpu, computations(report.small)[of_cpu])
    here = _ranked(name, report.device, entities)
    off = float(np.abs(here["ranks"] - there["ranks"]).max())
    report.at_most(f"{name}, ranks against a CPU, largest change", off, 3, "places")
    mrr, expected = ((1 / side["ranks"]).mean() for side in (here, there))
    report.at_most(f"{name}, MRR", float(abs(mrr - expected)), 1e-4)
    other = float((here["ids"] != there["ids"]).mean())
    report.at_most(f"{name}, top 10, share of other answers", other, 0.01)
    off = np.abs(here["scores"] - there["scores"]).max() / np.abs(here["scores"]).max()
    report.at_most(f"{name}, top 10, scores", float(off), 1e-5)


def _ties(report: Report, name: str) -> None:
    """Check ties: every row occurs twice, far apart, so every true answer has a tie."""
    half, dim = (1500 if report.small else 40_000), 32
    rows = torch.randn(half, dim, generator=torch.Generator().manual_seed(2)).repeat(2, 1)
    device = report.device
    scorer, triples = scorer_of(name, dim).to(device), triples_of(300, 2 * half)
    shard = EntityShard(rows.to(device), 0, 2 * half)
    # blocks of different heights, with a short last block
    for block_bytes in (None, 4 * 512 * 997, 4 * 512 * 4096):
        ranks = rank_triples(scorer, shard, triples, None, RankOptions(block_bytes=block_bytes))
        behind = ranks.values("both", "pessimistic") - ranks.values("both", "optimistic")
        broken = int((behind < 1).sum())
        what = "whole" if block_bytes is None else f"blocks of {block_bytes >> 10:,} KiB"
        report.passes(f"{name}, ties, {what}", broken == 0, f"{broken} of {len(behind)} broken")


def _run(report: Report, name: str, keys: dict) -> None:
    """Check a run of this device: its answers, its export read on a CPU, and TF32."""
    kind, folder = report.device.type, report.folder / name.replace(" ", "-")
    precision = "tf32" if kind == "cuda" else "fp32"
    config = config_of(kind, folder / "run", train__precision=precision, **keys)
    with api.train(config) as run:
        query = {"head": "Austria", "relation": "borders"}
        here = run.predict(**query)
        plain = load_model(run.export(folder / "export"))
        there = plain.predict(**query)
        same = [x.label for x in here] == [x.label for x in there]
        off = max(abs(x.score - y.score) for x, y in zip(here, there, strict=True))
        report.passes(f"{name}: answers of an export on a CPU", same, f"best: {here[0].label}")
        report.at_most(f"{name}: scores of an export on a CPU", off, 1e-4)
        written = load_file(folder / "export" / "entities.safetensors")["entities"]
        good = torch.equal(written, run.model.shard.rows.cpu())
        report.passes(f"{name}: rows of an export", good, "bit for bit")
        _precision_of_scores(report, name, run)


def _precision_of_scores(report: Report, name: str, run: api.Run) -> None:
    """Check that ranking ignores train.precision tf32: TF32 has ten bits and would lose 2^-12."""
    scorer, products = run.model.scorer, []
    matrix = scorer.matrix

    def watched(*arguments, **options):
        number = torch.full((64, 64), 1 + 2**-12, device=report.device)
        product = number @ torch.eye(64, device=report.device)
        products.append(float(product[0, 0]))
        return matrix(*arguments, **options)

    scorer.matrix = watched
    try:
        run.evaluate("test")
    finally:
        del scorer.matrix
    good = bool(products) and set(products) == {1 + 2**-12}
    report.passes(f"{name}: ranking is in float32 with tf32", good, f"{len(products)} products")
