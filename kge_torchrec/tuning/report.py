"""The report of a study: the best config, the importance of each key, and all trials.

It consists of report.html, trials.json and best.yaml, a config for ``train``.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import yaml
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator
from optuna.trial import FrozenTrial, TrialState

from kge_torchrec import files
from kge_torchrec.pages import COLORS, add_legend, draw_bars, new_figure, render, svg
from kge_torchrec.tuning.study import Study, retries_of, seconds_of

FEWEST = 6  # the fewest trials that importances are computed from
FEWEST_COMPLETED = 5  # the fewest completed trials that an expected gain is computed from
MORE = 10  # trials whose gain is estimated
# Per state of a trial: its name, and the title of its own column.
_STATES = {
    "complete": ("Completed", "best so far"),
    "pruned": ("Dropped early", "dropped at"),
    "fail": ("Failed", "reason"),
}
Described = dict[str, Any]  # the entry of a trial in trials.json


def write_report(study: Study) -> dict[str, Any]:
    """Write all files of a study's report; return the content of trials.json."""
    with study.locked():  # before it reads the trials, so that no older report replaces a newer one
        trials, best = study.ended(), study.best()
        results = {
            "metric": study.settings.metric,
            "halving": study.settings.halving,
            "started_from": study.settings.started_from,
            "best": None if best is None else _described(study, best),
            "expected_gain": expected_gain_of(study, trials),
            "importance": importances(study, trials),
            "trials": [_described(study, trial) for trial in trials],
        }
        if best is not None:
            files.write_text(study.path / "best.yaml", _best_yaml(study, best))
        files.write_json(study.path / "trials.json", results)
        files.write_text(study.path / "report.html", _page(study, results))
    return results


def importances(study: Study, trials: list[FrozenTrial]) -> dict[str, float]:
    """Return how much each parameter contributes to a trial being among the best fifth.

    The shares are computed by PED-ANOVA (Watanabe et al. 2023). Trials are compared by their metric
    at the first comparison, which dropped trials have reached as well.

    Returns:
        Shares by name, largest first; empty for fewer than ``FEWEST`` trials.
    """
    if study.settings.halving == "none":
        values = {t.number: t.value for t in trials if t.state is TrialState.COMPLETE}
    else:
        values = {
            t.number: t.intermediate_values[min(t.intermediate_values)]
            for t in trials
            if t.intermediate_values
        }
    compared = [trial for trial in trials if values.get(trial.number) is not None and trial.params]
    if len(compared) < FEWEST:
        return {}
    sign = 1.0 if study.settings.metric == "mr" else -1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        again = optuna.create_study()  # minimizes, hence the sign
        for trial in compared:
            value = sign * values[trial.number]  # type: ignore[operator]
            space, params = trial.distributions, trial.params
            again.add_trial(optuna.create_trial(params=params, distributions=space, value=value))
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.2)
        shares = optuna.importance.get_param_importances(again, evaluator=evaluator)
    return {name: float(share) for name, share in shares.items()}


def expected_gain_of(study: Study, trials: list[FrozenTrial]) -> dict[str, float] | None:
    """Return what ``MORE`` trials are expected to gain over the best one, for trials.json.

    Returns:
        "trials", "gain" and "error" (see ``expected_gain``), or None if fewer than
        ``FEWEST_COMPLETED`` trials are completed.
    """
    sign = -1 if study.settings.metric == "mr" else 1
    done = (trial for trial in trials if trial.state is TrialState.COMPLETE)  # others have values
    completed = [sign * trial.value for trial in done if trial.value is not None]
    if len(completed) < FEWEST_COMPLETED:
        return None
    gain, error = expected_gain(np.array(completed), len(trials), MORE)
    return {"trials": MORE, "gain": gain, "error": error}


def expected_gain(completed: np.ndarray, trials: int, more: int) -> tuple[float, float]:
    """Return by how much the maximum is expected to rise with more trials, and its standard error.

    The results of trials are taken as independent draws; dropped and failed ones lie below the
    threshold. The tail above the threshold is a generalized Pareto distribution, fitted by
    probability-weighted moments (Hosking and Wallis 1987) to the best third. Its shape is limited
    to [-1, 0], from a uniform to an exponential tail. The error is that of the jackknife (Efron
    and Stein 1981) over all trials.

    A study's trials are not alike: later ones are drawn near good ones, and may gain more.

    Args:
        completed: (T,) values of the completed trials, larger is better.
        trials: All trials, including the dropped and failed ones.
        more: The number of further trials.
    """
    values = np.concatenate([np.full(trials - len(completed), -np.inf), np.sort(completed)])
    gains = [_rise(np.delete(values, i), more) for i in range(trials)]
    error = np.sqrt((trials - 1) * np.var(gains))
    return _rise(values, more), float(error)


def _rise(values: np.ndarray, more: int) -> float:
    """Return the expected rise of the maximum. values: (T,) ascending, -inf below a threshold."""
    count, finite = len(values), values[np.isfinite(values)]
    tail = min(max(3, math.ceil(len(finite) / 3)), len(finite) - 1)
    excess = finite[-tail:] - finite[-tail - 1]
    mean = excess.mean()
    if mean <= 0:
        return 0.0
    weighted = (excess * np.arange(tail)[::-1]).mean() / (tail - 1)
    shape = float(np.clip(2 - mean / (mean - 2 * weighted), -1, 0)) if mean > 2 * weighted else 0.0
    scale = mean * (1 - shape)
    if shape > -1e-6:
        return float(scale * (1 / np.arange(count + 1, count + more + 1)).sum())

    def maximum(draws: int) -> float:
        """Return the expected maximum of draws, up to a constant and a factor."""
        return math.exp(math.lgamma(draws + 1) - math.lgamma(draws + 1 - shape))

    factor = scale / shape * math.gamma(1 - shape) * (tail / count) ** shape
    return float(factor * (maximum(count + more) - maximum(count)))


def _described(study: Study, trial: FrozenTrial) -> Described:
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "value": trial.value if trial.state is TrialState.COMPLETE else None,
        "last": list(trial.intermediate_values.values())[-1] if trial.intermediate_values else None,
        "reached": trial.last_step,
        "seconds": seconds_of(trial),
        "values": study.values_of(trial),
        **({"error": trial.user_attrs["error"]} if "error" in trial.user_attrs else {}),
        **({"again": retries_of(trial)[-1]} if retries_of(trial) else {}),
    }


def _best_yaml(study: Study, best: FrozenTrial) -> str:
    # With a value for each key, size has no effect, and train would refuse it.
    config = study.config_of(study.values_of(best)).to_dict() | {"size": "base"}
    path = config["data"]["path"]
    if Path(path).exists():  # a file, not the name of a dataset: make it valid in any folder
        config["data"]["path"] = os.path.abspath(path)
    head = (
        f"# Trial {best.number} of {study.path.name}: valid {study.settings.metric} "
        f"{best.value:.4f}.\n# kge-torchrec train {study.path / 'best.yaml'}\n"
    )
    return head + yaml.safe_dump(config, sort_keys=False)


def _page(study: Study, results: dict[str, Any]) -> str:
    counts = Counter(trial["state"] for trial in results["trials"])
    by_state = {
        state: [trial for trial in results["trials"] if trial["state"] == state]
        for state in _STATES
    }
    best = results["best"]["values"].items() if results["best"] else ()
    shares = results["importance"]
    return render(
        "study.html",
        title=study.path.name,
        results=results,
        config=study.config,
        subject="the portfolio" if study.space.starts else study.config.model.scorer,
        counts=", ".join(f"{n} {_STATES[state][0].lower()}" for state, n in counts.items()),
        best=[[_code(key), _cell(value)] for key, value in best],
        best_yaml=study.path / "best.yaml",
        history=_history(by_state["complete"], by_state["pruned"], results["metric"]),
        importance=[[_code(name), f"{share:.1%}"] for name, share in shares.items()],
        chart=_importance_chart(shares) if shares else "",
        fewest=FEWEST,
        tables=[
            # One table per state, since values of dropped and completed trials don't compare.
            (_STATES[state][0], *_table(trials, state, results["metric"]))
            for state, trials in by_state.items()
            if trials
        ],
    )


def _table(
    trials: list[Described], state: str, metric: str
) -> tuple[list[str | Markup], list[list[str]]]:
    """Return the header and the rows of a table of trials with the same state."""
    keys = list(dict.fromkeys(key for trial in trials for key in trial["values"]))
    better, best, rows = min if metric == "mr" else max, None, []
    for trial in trials:
        value: Any = _last_value(trial)
        if state == "complete":
            best = value if best is None else better(best, value)
        said = {"complete": best, "pruned": trial["reached"], "fail": trial.get("error", "")}[state]
        row = [str(trial["number"]), f"{value:.4f}" if value is not None else ""]
        row += [f"{said:.4f}" if state == "complete" else str(said), f"{trial['seconds']:.0f}"]
        rows.append([*row, *(_cell(trial["values"].get(key, "")) for key in keys)])
    return ["trial", metric, _STATES[state][1], "seconds", *map(_code, keys)], rows


def _code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(text)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _last_value(trial: Described) -> float | None:
    """Return the value of a completed trial, or the last value of a dropped one."""
    return trial["last"] if trial["value"] is None else trial["value"]


def _history(completed: list[Described], dropped: list[Described], metric: str) -> Markup:
    """Draw completed trials with the best value so far, and below them the dropped trials."""
    figure, rows = new_figure(10, 6 if dropped else 4.2, rows=2 if dropped else 1)
    numbers, values = [t["number"] for t in completed], [t["value"] for t in completed]
    rows[0].plot(numbers, values, "o", ms=5, color=COLORS[0], label="completed")
    if completed:
        so_far = (np.minimum if metric == "mr" else np.maximum).accumulate(values)
        rows[0].step(numbers, so_far, where="post", color=COLORS[2], label="best so far")
        add_legend(figure, rows[0])
    rows[0].set(title="completed trials")
    if dropped:
        numbers, values = [t["number"] for t in dropped], [_last_value(t) for t in dropped]
        rows[1].plot(numbers, values, "x", ms=5, color=COLORS[7])
        rows[1].set(title="dropped early, by their value then")
    rows[-1].set(xlabel="trial")
    for axes in rows:
        axes.set(ylabel=f"valid {metric}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", alpha=0.3)
    said = (
        f"valid {metric} of {len(completed)} completed and {len(dropped)} dropped trials in order"
    )
    return svg(figure, said)


def _importance_chart(shares: dict[str, float]) -> Markup:
    figure, (axes,) = new_figure(10, 1 + 0.35 * len(shares))
    draw_bars(axes, list(shares), {"share": list(shares.values())})
    axes.set(title="Importance of the keys (PED-ANOVA)", xlabel="share")
    first, share = next(iter(shares.items()))
    return svg(
        figure, f"Importance of {len(shares)} keys; {first} has the largest share, {share:.0%}"
    )
