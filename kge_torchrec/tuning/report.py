"""The page of a study: its best config, how much each key matters, and all trials.

Writes report.md, history.png, importance.png, trials.json, and best.yaml, which ``train`` takes.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from optuna.trial import FrozenTrial, TrialState

from kge_torchrec import files
from kge_torchrec.charts import chart_label
from kge_torchrec.tuning.space import with_values
from kge_torchrec.tuning.study import Study, seconds_of

COLOURS = {"complete": "#0072B2", "pruned": "#999999"}  # Okabe and Ito
FEWEST = 6  # trials from which on the importance of a key says anything


def write_report(study: Study) -> dict[str, Any]:
    """Writes all files; returns what trials.json holds."""
    trials, best = study.ended(), study.best()
    importance = importances(study, trials)
    found = {
        "metric": study.settings.metric,
        "halving": study.settings.halving,
        "best": None if best is None else _described(study, best),
        "importance": importance,
        "trials": [_described(study, trial) for trial in trials],
    }
    with study.locked():
        if best is not None:
            files.write_text(study.path / "best.yaml", _best_yaml(study, best))
        files.write_json(study.path / "trials.json", found)
        _draw_history(study, trials, study.path / "history.png")
        if importance:
            _draw_importance(importance, study.path / "importance.png")
        files.write_text(study.path / "report.md", _page(study, found))
    return found


def importances(study: Study, trials: list[FrozenTrial]) -> dict[str, float]:
    """The share of each parameter in what makes a trial one of the best fifth, largest first.

    PED-ANOVA (Watanabe et al. 2023), over all trials by their metric at the first point where they
    were compared, which poor ones reached as well.  Empty for few trials.
    """
    if study.settings.halving == "none":
        values = {t.number: t.value for t in trials if t.state is TrialState.COMPLETE}
    else:
        values = {
            t.number: t.intermediate_values[min(t.intermediate_values)]
            for t in trials
            if t.intermediate_values
        }
    seen = [trial for trial in trials if values.get(trial.number) is not None and trial.params]
    if len(seen) < FEWEST:
        return {}
    sign = 1.0 if study.settings.metric == "mr" else -1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        again = optuna.create_study()  # PED-ANOVA takes less for better
        again.add_trials(
            [
                optuna.create_trial(
                    params=trial.params,
                    distributions=trial.distributions,
                    value=sign * values[trial.number],  # type: ignore[operator]
                )
                for trial in seen
            ]
        )
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.2)
        found = optuna.importance.get_param_importances(again, evaluator=evaluator)
    return {name: float(share) for name, share in found.items()}


def _described(study: Study, trial: FrozenTrial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "value": trial.value if trial.state is TrialState.COMPLETE else None,
        "last": list(trial.intermediate_values.values())[-1] if trial.intermediate_values else None,
        "reached": trial.last_step,
        "seconds": seconds_of(trial),
        "values": study.values_of(trial),
        **{name: trial.user_attrs[name] for name in ("error", "again") if name in trial.user_attrs},
    }


def _best_yaml(study: Study, best: FrozenTrial) -> str:
    config = with_values(study.config, study.values_of(best)).to_dict()
    config["data"]["path"] = _from_anywhere(config["data"]["path"])
    head = (
        f"# Trial {best.number} of {study.path.name}: valid {study.settings.metric} "
        f"{best.value:.4f}.\n# kge-torchrec train {study.path / 'best.yaml'}\n"
    )
    return head + yaml.safe_dump(config, sort_keys=False)


def _from_anywhere(path: str) -> str:
    """As an absolute path, unless it is the name of the embedded graph."""
    return os.path.abspath(path) if Path(path).exists() else path


def _page(study: Study, found: dict[str, Any]) -> str:
    metric, best = found["metric"], found["best"]
    counts: dict[str, int] = {}
    for trial in found["trials"]:
        counts[trial["state"]] = counts.get(trial["state"], 0) + 1
    states = ", ".join(f"{count} {_WORDS[state]}" for state, count in counts.items())
    lines = [
        f"# {study.path.name}",
        "",
        f"{len(found['trials'])} trials ({states}) of {study.config.model.scorer} on "
        f"{study.config.data.path}, compared by valid {metric} (both sides, realistic); test was "
        f"not looked at. Poor trials were dropped by: {study.settings.halving}.",
    ]
    if study.config.evaluation.max_triples:
        lines.append(f"At most {study.config.evaluation.max_triples:,} valid triples were ranked.")
    if study.config.evaluation.candidates != "all":
        lines.append(f"RESTRICTED candidates: {study.config.evaluation.candidates}.")
    if found["halving"] == "subgraphs":
        lines.append(
            "Values of dropped trials are of a core of the graph, with fewer candidates (at 1: a "
            "ninth of the cost, at 3: a third): they compare with each other, not with completed "
            "ones."
        )
    if best is None:
        return "\n".join([*lines, "", "No trial was completed.", "", *_history(found)]) + "\n"
    lines += ["", "## Best", "", f"Trial {best['number']}, valid {metric} {best['value']:.4f}, in "
              f"{best['seconds']:.0f} s:", "", "| key | value |", "|---|---|"]  # fmt: skip
    lines += [f"| `{key}` | {_cell(value)} |" for key, value in best["values"].items()]
    lines += [
        "", "All keys are in `best.yaml`; this trains it, and ranks test:", "",
        "```sh", f"kge-torchrec train {study.path / 'best.yaml'}", "```", "",
        "![Trials in order](history.png)", "",
    ]  # fmt: skip
    lines += _importance(found["importance"])
    return "\n".join([*lines, *_history(found)]) + "\n"


_TITLES = {"complete": "Completed", "pruned": "Dropped early", "fail": "Failed"}
_WORDS = {"complete": "completed", "pruned": "dropped early", "fail": "failed"}


def _importance(importance: dict[str, float]) -> list[str]:
    if not importance:
        return ["## Importance", "", f"It takes at least {FEWEST} trials that were compared.", ""]
    return [
        "## Importance", "",
        "Share of each key in what made a trial one of the best fifth where trials were first "
        "compared (PED-ANOVA):", "",
        "| key | share |", "|---|---|",
        *(f"| `{_escaped(name)}` | {share:.1%} |" for name, share in importance.items()), "",
        "![Importance of the keys](importance.png)", "",
    ]  # fmt: skip


def _history(found: dict[str, Any]) -> list[str]:
    """A table per state: values of dropped trials do not compare with those of completed ones."""
    lines = ["## Trials", ""]
    for state, title in _TITLES.items():
        trials = [trial for trial in found["trials"] if trial["state"] == state]
        if trials:
            lines += [f"### {title}", "", *_table_of(trials, state, found["metric"]), ""]
    return lines[:-1]


def _table_of(trials: list[dict[str, Any]], state: str, metric: str) -> list[str]:
    keys = list(dict.fromkeys(key for trial in trials for key in trial["values"]))
    more = {"complete": "best so far", "pruned": "dropped at", "fail": "reason"}[state]
    names = ["trial", metric, more, "seconds", *(f"`{key}`" for key in keys)]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    better, best = min if metric == "mr" else max, None
    for trial in trials:
        value = trial["value"] if trial["value"] is not None else trial["last"]
        if state == "complete":
            best = value if best is None else better(best, value)
            said = f"{best:.4f}"
        else:
            said = str(trial["reached"]) if state == "pruned" else _escaped(trial.get("error", ""))
        cells = [
            str(trial["number"]),
            "" if value is None else f"{value:.4f}",
            said,
            f"{trial['seconds']:.0f}",
            *(_cell(trial["values"].get(key, "")) for key in keys),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _escaped(str(value))


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _draw_history(study: Study, trials: list[FrozenTrial], file: Path) -> None:
    """Completed trials with the best so far; below them those that were dropped early."""
    metric = f"valid {study.settings.metric}"
    values = {
        state: {
            t.number: v for t in trials if t.state is state and (v := _last_value(t)) is not None
        }
        for state in (TrialState.COMPLETE, TrialState.PRUNED)
    }
    done, dropped = values.values()
    figure = Figure(layout="constrained", figsize=(7, 6 if dropped else 4.2))
    rows = figure.subplots(2 if dropped else 1, 1, sharex=True, squeeze=False)[:, 0]
    rows[0].plot(list(done), list(done.values()), "o", ms=5, color=COLOURS["complete"],
                 label="completed")  # fmt: skip
    if done:
        best = np.minimum if study.settings.metric == "mr" else np.maximum
        so_far = best.accumulate(list(done.values()))
        rows[0].step(list(done), so_far, where="post", color="#009E73", label="best so far")
        figure.legend(loc="outside upper right", ncols=2, frameon=False)
    rows[0].set(title=f"{chart_label(study.path.name)}: completed trials", ylabel=metric)
    if dropped:
        rows[1].plot(list(dropped), list(dropped.values()), "x", ms=5, color=COLOURS["pruned"])
        rows[1].set(title="dropped early, by their value then", ylabel=metric)
    rows[-1].set(xlabel="trial")
    for axes in rows:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(file, dpi=150)


def _last_value(trial: FrozenTrial) -> float | None:
    """The value of a completed trial, or the last one before it was dropped."""
    if trial.state is TrialState.COMPLETE:
        return trial.value
    return next(reversed(trial.intermediate_values.values()), None)


def _draw_importance(importance: dict[str, float], file: Path) -> None:
    figure = Figure(layout="constrained", figsize=(7, 1 + 0.35 * len(importance)))
    axes = figure.add_subplot()
    axes.barh(list(importance), list(importance.values()), color="#0072B2")
    axes.invert_yaxis()
    axes.set(title="Importance of the keys (PED-ANOVA)", xlabel="share")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
