"""``evaluate``, ``report`` and ``calibrate``: what trained runs are worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from kge_torchrec.commands import Count, File, RunPath, Table, is_first_rank, opened
from kge_torchrec.config import ConfigError
from kge_torchrec.environment import announced, loading_torch

if TYPE_CHECKING:
    from kge_torchrec.answers.calibration import Calibration


def evaluate(
    run: RunPath,
    /,
    *,
    split: Literal["test", "valid", "train"] | None = None,
    triples: File | None = None,
    by: Sequence[Literal["relation", "category", "frequency", "popularity"]] = (),
    recommend: Annotated[Sequence[int], "K"] = (),
    side: Literal["tail", "head"] = "tail",
    candidates: Literal["all", "seen", "types", "fixed"] | None = None,
    types: File | None = None,
    candidate_file: File | None = None,
    format: Table = "table",
) -> int:
    """Rank the triples of a split with a trained run.

    Args:
        run: the folder or URL of a run
        split: the split to rank (default: test)
        triples: rank the triples of a file instead of a split: head, relation and tail with tabs
        by: also report groups: by relation, its category (1-1, 1-N, N-1, N-N), or the frequency
            (popularity) of the answer; writes files to RUN
        recommend: evaluate lists of K recommended tails per (head, relation) instead of ranks:
            recall, NDCG, hit rate, precision, MAP and coverage at each K, and AUC
        side: the side to recommend
        candidates: rank among all entities, entities seen with the relation on that side, entities
            of the same types, or fixed lists per triple (as OGB has them; default: the run's
            evaluation.candidates)
        types: for --candidates types: a file of lines entity, tab, type
        candidate_file: for --candidates fixed: a .npz file with head_neg and tail_neg
    """
    if split is not None and triples is not None:
        raise ConfigError("evaluate ranks --split or --triples, not both; leave one of them out")
    options = {"types": types, "file": candidate_file}
    with opened(run) as trained:
        results = trained.evaluate(
            split or "test",
            by,
            candidates,
            triples=triples,
            candidates_options={name: file for name, file in options.items() if file is not None},
            recommend=recommend,
            side=side,
        )

    if not is_first_rank():
        return 0
    if format == "json":
        print(json.dumps(results))
        return 0
    from kge_torchrec.ranking.ranks import results_table
    from kge_torchrec.ranking.recommendation import recommendation_table

    groups, counts = results.pop("by", {}), results.pop("triples", None)
    print((recommendation_table if recommend else results_table)(results))
    if counts is not None:
        splits = ", ".join(f"{counts[name]:,} in {name}" for name in ("train", "valid", "test"))
        print(f"{counts['count']:,} triples of {triples}; of them {splits}")
    if groups:
        from kge_torchrec.ranking.groups import groups_table

        for name, stats in groups.items():
            print(f"\n{groups_table(name, stats)}")
        written = f"{'triples' if triples is not None else split or 'test'}"
        written += "-recommendations" * bool(recommend)
        if any(trained.path.glob(f"evaluation-{written}-by-*")):  # none in a read-only folder
            print(f"\nfiles: {trained.path}/evaluation-{written}-by-*")
    return 0


def report(
    runs: Annotated[Sequence[RunPath], "RUN"],
    /,
    *,
    output: File | None = None,
    models: bool = True,
) -> int:
    """Write an HTML page about one run or several.

    Args:
        runs: the folders or URLs of runs
        output: file of the page (default: report.html in the first run)
        models: load no model: no examples, no map of entities, and ranks by relation only if
            evaluate --by relation wrote them
    """
    with loading_torch():
        from kge_torchrec.reports.page import report as write_report

    with announced("writing the report"):
        page = write_report(runs, output or f"{runs[0]}/report.html", with_models=models)
    print(page)
    return 0


def calibrate(
    run: RunPath,
    /,
    *,
    top: Count = 10,
    limit: int = 10_000,
    seed: int = 0,
    format: Table = "table",
) -> int:
    """Fit probabilities to a run's scores.

    Args:
        run: the folder or URL of a run
        top: number of listed answers per query
        limit: largest number of queries per split and missing part
        seed: seed of the sample
    """
    with opened(run) as trained:
        with announced("loading the run"):
            _ = trained.model
        made = trained.calibrate(top, limit, seed)
    if is_first_rank():
        print(json.dumps(made.about) if format == "json" else _summary(made))
    return 0


def _summary(made: Calibration) -> str:
    about = made.about
    queries = f"{about['valid_queries']:,} queries of valid"
    lines = [f"{made.method}, fitted to the {about['top']} best answers to {queries}"]
    for part, curve in made.curves.items():
        if made.method == "platt":
            lines.append(f"  {part}: p = sigmoid({curve.slope:.6g} score {curve.intercept:+.6g})")
        else:
            lines.append(f"  {part}: {len(curve.scores):,} points")
    if "test" in about:
        test = about["test"]
        title = f"test: {test['queries']:,} queries, {about['top']} best answers each"
        lines.append(f"{title:<50} sigmoid(score)  calibrated")
        for name, words in (
            ("mean_probability", f"mean probability ({test['true']:.4f} are true)"),
            ("expected_calibration_error", "expected calibration error"),
            ("brier_score", "Brier score"),
        ):
            errors = test[name]
            lines.append(f"  {words:<48} {errors['before']:>14.4f}{errors['after']:>12.4f}")
    return "\n".join(lines)
