"""Make the tables of docs/reference/results.md from runs.

    python scripts/results.py add NAME RUN [RUN ...] [--note TEXT] [--commit SHA]
    python scripts/results.py write        # the tables of the page

`add` writes a record: docs/records/NAME/config.yaml, and record.json with seeds, test and valid
figures, the validation curve over minutes of training, ranks, machine, commit and command. The runs
may differ only in seed and folder. `write` replaces the text between the marks of the page by
tables of all records: figures with the spread over seeds, and the minutes until valid MRR passed
certain values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from kge_torchrec.comparison.launch import machine_facts

ROOT = Path(__file__).resolve().parents[1]
RECORDS, PAGE = ROOT / "docs" / "records", ROOT / "docs" / "reference" / "results.md"
START, STOP = "<!-- records: start -->", "<!-- records: stop -->"
METRICS = ("mrr", "hits@1", "hits@3", "hits@10", "mr")
# Values of valid MRR for the table of minutes, by graph.
MARKS = {"fb15k-237": (0.30, 0.32, 0.34, 0.36), "wn18rr": (0.43, 0.45, 0.47, 0.48)}
PER_RUN = ("seed", "run", "device", "threads")  # keys in which the runs of one record may differ


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    verbs = parser.add_subparsers(dest="verb", required=True)
    add = verbs.add_parser("add", help="write runs of one config as a record")
    add.add_argument("name")
    add.add_argument("runs", nargs="+", type=Path)
    add.add_argument("--note", default="", help="remark on how the runs were made")
    add.add_argument("--commit", help="commit that trained the runs; default: that of the checkout")
    verbs.add_parser("write", help="write the tables of docs/reference/results.md")
    options = parser.parse_args(arguments)
    if options.verb == "add":
        add_record(RECORDS / options.name, options.runs, options.note, options.commit)
    PAGE.write_text(with_tables(PAGE.read_text("utf-8"), read_records(RECORDS)), "utf-8")


class _Plain(argparse.RawDescriptionHelpFormatter):
    pass


def add_record(folder: Path, runs: list[Path], note: str = "", commit: str | None = None) -> None:
    """Write a record of runs of one config, trained by ``commit`` or the current one.

    Raises:
        SystemExit: the configs differ, or a run has no results.
    """
    configs = [yaml.safe_load((run / "config.yaml").read_text("utf-8")) for run in runs]
    for run, config in zip(runs, configs, strict=True):
        differing = [key for key in config if key not in PER_RUN and config[key] != configs[0][key]]
        if differing:
            sys.exit(f"{run} is no run of {runs[0]}'s config: they differ in {differing[0]}")
        if not (run / "results.json").is_file():
            sys.exit(f"{run} has no results.json: its training has not ended")
    folder.mkdir(parents=True, exist_ok=True)
    shown = {key: value for key, value in configs[0].items() if key not in ("run", "threads")}
    shown["data"]["path"] = Path(shown["data"]["path"]).name  # without its folder
    (folder / "config.yaml").write_text(yaml.safe_dump(shown, sort_keys=False), "utf-8")
    facts = machine_facts()
    record = {
        "data": shown["data"]["path"],
        "commit": commit or _git("rev-parse", "--short", "HEAD"),
        "machine": {name: facts[name] for name in ("cores", "gpus", "system", "packages")},
        "command": f"kge-torchrec train {folder.name} --data.path DIRECTORY",
        "note": note,
        "runs": [
            {"seed": config["seed"], **_facts_of(run)}
            for run, config in zip(runs, configs, strict=True)
        ],
    }
    text = json.dumps(record, indent=1)
    (folder / "record.json").write_text(text + "\n", "utf-8")


def _facts_of(run: Path) -> dict[str, Any]:
    results = json.loads((run / "results.json").read_text("utf-8"))
    test = {
        side: {name: round(of_side["realistic"][name], 6) for name in METRICS}
        for side, of_side in results["test"].items()
    }
    train = results["train"]
    return {
        "test": test,
        "curve": curve_of(run / "metrics.jsonl"),
        "seconds": round(train["seconds"], 1),
        "epochs": train["epochs"],
        "ranks": train["world_size"],
        "peak_memory_bytes": train["peak_memory_bytes"],
    }


def curve_of(metrics: Path) -> list[dict[str, float]]:
    """Return valid MRR by epoch, with the seconds of training; a killed epoch counts once."""
    seconds, mrr_of = {}, {}
    for line in map(json.loads, metrics.read_text("utf-8").splitlines()):
        if line["kind"] == "epoch":
            seconds[line["epoch"]] = line["seconds"]
        elif line["kind"] == "valid":
            mrr_of[line["epoch"]] = line["both"]["realistic"]["mrr"]
    return [
        {
            "epoch": epoch,
            "seconds": round(sum(s for e, s in seconds.items() if e <= epoch), 1),
            "mrr": round(mrr, 6),
        }
        for epoch, mrr in sorted(mrr_of.items())
    ]


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the records by name, ordered by data, then by falling MRR."""
    mrr_of = {
        path.parent.name: json.loads(path.read_text("utf-8"))
        for path in folder.glob("*/record.json")
    }
    return dict(sorted(mrr_of.items(), key=lambda item: (item[1]["data"], -_mean(item[1], "mrr"))))


def with_tables(page: str, records: dict[str, dict[str, Any]]) -> str:
    """Return the page with the tables of the records between its marks."""
    before, rest = page.split(START)
    _, after = rest.split(STOP)
    return f"{before}{START}\n\n{figures(records)}\n\n{minutes(records)}\n\n{STOP}{after}"


def figures(records: dict[str, dict[str, Any]]) -> str:
    """Return a table of test figures, with the spread over several seeds."""
    head = ["data", "record", "MRR", "Hits@1", "Hits@3", "Hits@10", "seeds", "epochs", "minutes",
            "commit"]  # fmt: skip
    rows = []
    for name, record in records.items():
        runs = record["runs"]
        time = statistics.median(run["seconds"] for run in runs) / 60
        epochs = statistics.median_low(run["epochs"] for run in runs)
        values = [_with_spread(record, metric) for metric in METRICS[:4]]
        link = f"[`{name}`](../records/{name}/config.yaml)"
        rows.append([record["data"], link, *values, str(len(runs)), str(epochs), f"{time:.1f}",
                     f"`{record['commit']}`"])  # fmt: skip
    notes = [f"- `{name}`: {r['note']}" for name, r in records.items() if r["note"]]
    return "\n".join([_table(head, rows), *(["", *notes] if notes else [])])


def minutes(records: dict[str, dict[str, Any]]) -> str:
    """Return tables of the minutes until valid MRR first passed each mark (first seed)."""
    parts = []
    for data, marks in MARKS.items():
        of_data = {name: r for name, r in records.items() if r["data"] == data}
        rows = [
            [f"`{name}`", *(_minutes_until(record["runs"][0]["curve"], mark) for mark in marks)]
            for name, record in of_data.items()
        ]
        if rows:
            head = [data, *(f"{mark:.2f}".lstrip("0") for mark in marks)]
            parts.append(_table(head, rows))
    return "\n\n".join(parts)


def _minutes_until(curve: list[dict[str, float]], mark: float) -> str:
    passed = [point["seconds"] for point in curve if point["mrr"] >= mark]
    return f"{passed[0] / 60:.1f}" if passed else "-"


def _with_spread(record: dict[str, Any], metric: str) -> str:
    values = [run["test"]["both"][metric] for run in record["runs"]]
    mean = f"{statistics.mean(values):.4f}".lstrip("0")
    if len(values) == 1:
        return mean
    return f"{mean} ± " + f"{statistics.stdev(values):.4f}".lstrip("0")


def _mean(record: dict[str, Any], metric: str) -> float:
    return statistics.mean(run["test"]["both"][metric] for run in record["runs"])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
