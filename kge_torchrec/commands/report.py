"""``kge-torchrec report``: one page about one run, or several side by side."""

from __future__ import annotations

import argparse

from kge_torchrec.environment import announced, loading_torch


def add(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    verb.add_argument("folders", nargs="+", metavar="RUN", help="the folders of runs")
    verb.add_argument(
        "-o", "--output", metavar="FILE", help="the page (default: report.html in the first run)"
    )
    verb.add_argument(
        "--no-models",
        action="store_true",
        help="load no model: no examples, no map of entities, and ranks by relation only where "
        "evaluate --by relation has written them",
    )


def run(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    with loading_torch():
        from kge_torchrec.reports.page import report

    output = parsed.output or f"{parsed.folders[0]}/report.html"
    with announced("writing the report"):
        page = report(parsed.folders, output, with_models=not parsed.no_models)
    print(page)
    return 0
