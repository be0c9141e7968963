"""``evaluate``, ``report`` and ``calibrate``: what trained runs are worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from kge_torchrec.commands import Count, File, RunPath, Table, is_first_rank, opened
from kge_torchrec.config import ConfigError
from kge_torchrec.environment import loading_torch
from kge_torchrec.tables import Cell, Format, table

if TYPE_CHECKING:
    from kge_torchrec.answers.calibration import Calibration
    from kge_torchrec.seeds import SeedRuns

SIDES = ("head", "tail", "both")
TITLES = {"most popular": "the most popular unseen items"}
MEAN_RANK = {"mr": ".1f"}  # how its column is written
_KINDS = {"sigmoid": "sigmoid(score)", "common": "one curve", "calibrated": "calibrated"}


def evaluate(
    runs: Annotated[Sequence[RunPath], "RUN"],
    *,
    split: Literal["test", "valid", "train"] | None = None,
    triples: File | None = None,
    by: Sequence[Literal["relation", "category", "frequency", "popularity"]] = (),
    recommend: Annotated[Sequence[int], "K"] = (),
    side: Literal["tail", "head"] = "tail",
    novelty: Annotated[float, "X"] = 0.0,
    candidates: Literal["all", "seen", "types", "fixed"] | None = None,
    candidate_file: File | None = None,
    seeds: Annotated[str | None, "N|N,N,..."] = None,
    ties: bool = False,
    format: Format = "table",
) -> int:
    """Rank the triples of a split with a trained run.

    Of a folder of train --seeds it shows the mean and standard deviation over its runs. A second
    folder is compared with the first, by a paired test over the seeds that both have.

    Examples:
      kge-torchrec evaluate RUN --split valid --by relation
      kge-torchrec evaluate runs/umls-complex runs/umls-rotate --format latex

    Args:
        runs: the folder of a run, or folders of train --seeds
        split: the split to rank (default: test)
        triples: rank the triples of a file instead of a split: head, relation and tail with tabs
        by: also report groups: by relation, its category (1-1, 1-N, N-1, N-N), or the frequency
            (popularity) of the answer; --format json has all groups
        recommend: evaluate lists of K recommended tails per (head, relation) instead of ranks:
            recall, NDCG, hit rate, precision, MAP and coverage at each K, and AUC
        side: the side to recommend
        novelty: rank lists by score - X log(1 + training triples of the answer), which moves rare
            and new answers up
        candidates: rank among all entities, entities seen with the relation on that side, entities
            of the same types, or fixed lists per triple (as OGB has them; default: the run's
            evaluation.candidates)
        candidate_file: for --candidates fixed: a .npz file with head_neg and tail_neg
        seeds: the seeds of the folders to use (default: all)
        ties: also show the optimistic and pessimistic ranks of equal scores
    """
    from kge_torchrec.seeds import SeedRuns, is_seeds, parse_seeds

    several = len(runs) > 1 or is_seeds(runs[0])
    single = next((run for run in runs if not is_seeds(run)), "")
    for holds, problem in (
        (split is not None and triples is not None,
         "evaluate ranks --split or --triples, not both; leave one of them out"),
        ((recommend or by) and several,
         "--by and --recommend evaluate one run, such as FOLDER/seed-0"),
        ((recommend or by) and format in ("latex", "csv"),
         f"--format {format} is for ranks: leave --by and --recommend out"),
        (several and single,
         f"evaluate compares folders of train --seeds, and {single} is none; evaluate one run at "
         "a time"),
        (seeds is not None and not several,
         f"--seeds: {single} is no folder of train --seeds; leave it out"),
    ):  # fmt: skip
        if holds:
            raise ConfigError(problem)
    chosen: dict[str, Any] = {
        "split": split or "test",
        "candidates": candidates,
        "triples": triples,
        "candidate_file": candidate_file,
    }
    if several:
        numbers = () if seeds is None else parse_seeds(seeds)
        return _evaluate_seeds({run: SeedRuns(run) for run in runs}, numbers, chosen, format)
    with opened(runs[0]) as trained:
        results = trained.evaluate(by=by, recommend=recommend, side=side, novelty=novelty, **chosen)

    if not is_first_rank():
        return 0
    if format == "json":
        print(json.dumps(results))
        return 0
    groups, counts = results.pop("by", {}), results.pop("triples", None)
    if recommend:
        from kge_torchrec.ranking.recommendation import recommendation_table

        print(recommendation_table(results))
    else:
        print(results_table(results, format, ties))
    if format != "table":
        return 0
    print_unbeaten(results)
    if trained.folder.results.exists():
        print(selection(trained.results))
    if counts is not None:
        splits = ", ".join(f"{counts[name]:,} in {name}" for name in ("train", "valid", "test"))
        print(f"{counts['count']:,} triples of {triples}; of them {splits}")
    if groups:
        from kge_torchrec.ranking.groups import groups_table

        for name, stats in groups.items():
            print(f"\n{groups_table(name, stats)}")
    return 0


def _evaluate_seeds(
    runs: dict[str, SeedRuns], seeds: Sequence[int], chosen: dict[str, Any], format: Format
) -> int:
    """Print mean and deviation of each folder of seeds, and paired tests with the first."""
    from kge_torchrec.seeds import list_spread, paired_test, spread

    results: dict[str, dict[int, dict[str, Any]]] = {}
    for name, several in runs.items():
        recorded = several.results(seeds)
        results[name] = {seed: x["test"] for seed, x in recorded.items()}
        others = {key: value for key, value in chosen.items() if key != "split"}
        if chosen["split"] != "test" or any(others.values()) or None in results[name].values():
            for seed in recorded:
                with opened(str(several.folder(seed).path)) as trained:
                    results[name][seed] = trained.evaluate(**chosen)
    first, *others_of = results
    spreads = {name: spread(x) for name, x in results.items()}
    tests = {name: paired_test(results[first], results[name]) for name in others_of}
    if not is_first_rank():
        return 0
    if format == "json":
        stats = {
            name: {
                "seeds": results[name],
                "mean": {side: {k: x[0] for k, x in row.items()} for side, row in rows.items()},
                "std": {side: {k: x[1] for k, x in row.items()} for side, row in rows.items()},
            }
            for name, rows in spreads.items()
        }
        print(json.dumps({"runs": stats, "paired": {"first": first, "with": tests}}))
        return 0
    rows: list[dict[str, Cell]] = [
        {"run": name, "seeds": str(len(results[name])), "side": side, **row}
        for name, sides in spreads.items()
        for side, row in sides.items()
    ]
    print(table(rows, format, MEAN_RANK))
    if format != "table":
        return 0
    lists: list[dict[str, Cell]] = [
        {"run": name, "by": by, **row}
        for name, x in results.items()
        for by, row in list_spread(x).items()
    ]
    if lists:
        print(f"\nrecommendations\n{table(lists)}")
    for name, test in tests.items():
        shared = sorted(results[first].keys() & results[name].keys())
        print(
            f"\npaired t-test of {name} against {first}, both sides, "
            f"seeds {', '.join(map(str, shared))}"
        )
        shown = {"difference": "+.4f", "t": "+.2f"}
        tested: list[dict[str, Cell]] = [{"metric": metric, **x} for metric, x in test.items()]
        print(table(tested, shown=shown))
    return 0


def results_table(results: dict[str, Any], format: Format = "table", ties: bool = False) -> str:
    """Return the result of ``metrics`` as a table, one line per side, in any format but JSON."""
    rows: list[dict[str, Cell]] = []
    shown = {side: results[side] for side in SIDES if side in results}
    shown |= {name: x["both"] for name, x in results.get("baselines", {}).items()}
    for side, kinds in shown.items():
        for kind, row in kinds.items():
            if ties or kind == "realistic":
                rows.append({"side": side, **({"ties": kind} if ties else {}), **row})
    text = table(rows, format, MEAN_RANK)
    if format == "table" and "candidates" in results:
        from kge_torchrec.ranking.ranks import ranked_among

        text = f"{ranked_among(results)}\n{text}"
    return text


def print_unbeaten(results: dict[str, Any]) -> None:
    """Print in which baselines are as good as the model, if there are any."""
    for sentence in unbeaten(results):
        print(sentence)


def unbeaten(results: dict[str, Any]) -> list[str]:
    """Return a sentence for each kind of results in which a baseline is as good as the model."""
    sentences = []
    if "baselines" in results:
        own, other = (
            x["both"]["realistic"]["mrr"] for x in (results, results["baselines"]["most frequent"])
        )
        if other >= own:
            sentences.append(
                "The model does not beat the most frequent heads and tails of each relation: MRR "
                f"{own:.4f} against {other:.4f}."
            )
    stats = results.get("recommendation", {})
    names = [name for name in stats if name.startswith(("recall@", "ndcg@"))]
    for baseline, values in results.get("recommendation_baselines", {}).items():
        lost = [name for name in names if values is not None and values[name] >= stats[name]]
        if lost:
            shown = ", ".join(f"{x} {stats[x]:.4f} against {values[x]:.4f}" for x in lost[-2:])
            sentences.append(f"The model does not beat {TITLES.get(baseline, baseline)}: {shown}.")
    return sentences


def selection(results: dict[str, Any]) -> str:
    """Return by which metric a run chose the checkpoint whose results.json this is."""
    valid, epoch = results.get("valid") or {}, (results.get("checkpoint") or {}).get("epoch")
    if valid.get("best") is None:
        return f"checkpoint of epoch {epoch}, the last one: nothing was validated"
    return f"checkpoint of epoch {epoch}, selected by valid {valid['metric']} {valid['best']:.4f}"


def report(
    runs: Annotated[Sequence[RunPath], "RUN"],
    *,
    output: File | None = None,
    models: bool = True,
) -> int:
    """Write an HTML page about one run or several; a run may still train.

    Args:
        runs: the folders of runs
        output: file of the page (default: report.html in the first run)
        models: load no model: no ranks by relation, no map of entities and no examples
    """
    with loading_torch():
        from kge_torchrec.reports.page import report as write_report

    print(write_report(runs, output, with_models=models))
    return 0


def calibrate(
    run: RunPath,
    *,
    top: Count = 10,
    limit: Annotated[int, "N", "positive"] = 10_000,
    format: Table = "table",
) -> int:
    """Fit probabilities to a run's scores.

    Args:
        run: the folder of a run
        top: number of listed answers per query
        limit: largest number of queries per split and missing part; more are sampled
    """
    with opened(run) as trained:
        made = trained.calibrate(top, limit)
    if is_first_rank():
        print(json.dumps(made.about) if format == "json" else _summary(made))
    return 0


def _summary(made: Calibration) -> str:
    about = made.about
    queries = f"{about['valid_queries']:,} queries of valid"
    lines = [f"fitted to the {about['top']} best answers to {queries}"]
    for part, curve in made.curves.items():
        shape = f"isotonic, {len(curve.scores):,} points"
        if not curve.scores:
            shape = f"p = sigmoid({curve.slope:.6g} score {curve.intercept:+.6g})"
        own = len(made.own.get(part, ()))
        lines.append(f"  {part}: {shape}{f'; {own:,} relations have their own' if own else ''}")
    if "test" not in about:
        return "\n".join([*lines, "there are no test triples, so the errors are unknown"])
    test = about["test"]
    rows: list[dict[str, Cell]] = [
        {
            "probability": name,
            "mean": test[kind]["mean_probability"],
            "error": test[kind]["expected_calibration_error"],
            "Brier score": test[kind]["brier_score"],
            "log loss": test[kind]["log_loss"],
        }
        for kind, name in _KINDS.items()
    ]
    lines += [
        "",
        f"{test['answers']:,} answers to {test['queries']:,} queries of test, {test['true']:,} "
        "true (error: expected calibration error)",
        table(rows),
    ]
    return "\n".join(lines)
