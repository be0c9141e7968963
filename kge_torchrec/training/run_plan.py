"""The plan of a run, beside its other files: what each rank holds, sends and takes."""

from __future__ import annotations

import logging
import sys

from kge_torchrec.planning.of_run import plan_run
from kge_torchrec.planning.plan_file import plan_content, write_plan
from kge_torchrec.planning.report import report
from kge_torchrec.training.assembly import build_objective
from kge_torchrec.training.session import Session

log = logging.getLogger(__name__)


def write_run_plan(session: Session) -> None:
    """Writes plan.txt and plan.json, and prints the layout, on rank 0; nothing on the others.

    plan.txt begins with the layout that the engine has; the rest of both files is what a dry run
    says of the run, with which another one may train (run.plan).  Training does without a plan that
    cannot be made or written: that is a warning.
    """
    if not session.processes.is_first:
        return
    folder, layout = session.folder.path, session.engine.layout
    try:
        plan = plan_run(session.config, session.store, session.processes, build_objective)
        (folder / "plan.txt").write_text(f"{layout}\n\n{report(plan)}\n", encoding="utf-8")
        write_plan(folder / "plan.json", plan_content(plan))
    except Exception as error:
        log.warning("this run has no plan.txt: %s", error)
    if session.show:
        print(layout, file=sys.stderr)
