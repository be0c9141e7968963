"""What verbs print about the results of a run."""

from __future__ import annotations

from typing import Any

from kge_torchrec.tables import Cell, Format, table

SIDES = ("head", "tail", "both")
TITLES = {"most popular": "the most popular unseen items"}
MEAN_RANK = {"mr": ".1f"}  # how its column is written


def results_table(results: dict[str, Any], format: Format = "table", ties: bool = False) -> str:
    """Return the metrics of a ranking, one line per side.

    Args:
        results: The result of ``metrics``.
        format: Any but "json".
        ties: Whether to add lines with the optimistic and the pessimistic rank of ties.
    """
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
