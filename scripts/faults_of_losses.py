"""Faults in losses of several answers and of all entities without a closed form."""

from __future__ import annotations

from faults import Fault

PASS = "training/query_pass.py"
FULL = "training/full_candidates.py"

FAULTS = [
    Fault("answers are compared with each other", "training/score_rows.py",
          "mask = ~known.index_select(0, query[some])",
          "mask = torch.ones_like(rows, dtype=torch.bool)",
          "tests/training/test_any_loss.py -k oracle"),
    Fault("a loss is a sum over answers against all entities", PASS,
          "[share.start : share.stop] / counts)", "[share.start : share.stop])",
          "tests/training/test_any_loss.py -k oracle"),
    Fault("a loss is a sum over answers", "models/losses.py",
          " / answers.clamp(min=1)", "", "tests/training/test_any_loss.py -k averaged"),
    Fault("gradients of scores travel back in another order", "training/score_rows.py",
          "parts = [gradients[:, rows.start : rows.stop].reshape(-1)",
          "parts = [gradients[:, rows.start : rows.stop].t().reshape(-1)",
          "tests/training/test_any_loss.py -k oracle"),
    Fault("some queries of a batch drop what others drop", FULL,
          "seed=batch.seed + number", "seed=batch.seed",
          "tests/training/test_any_loss.py -k random"),
    Fault("parameters of a loss are not trained against all entities", "training/assembly.py",
          "closed_form or loss", "closed_form or build_loss(config.loss)",
          "tests/training/test_any_loss.py -k depend"),
    Fault("a loss that needs answers trains without", "config/__init__.py",
          'not resolve("loss", loss).learns_without_answers()',
          'resolve("loss", loss).needs_answers',
          "tests/training/test_full_candidates_parts.py -k unsupported"),
    Fault("earlier names of a loss are unknown", "models/full_losses.py",
          "setattr(loss, name, getattr(loss, earlier))", "pass",
          "tests/models/test_full_losses.py -k earlier_versions"),
    Fault("torch's gradients without label smoothing", "kernels/operators.py",
          "        scores.sub_(rest)\n", "        pass\n",
          "tests/kernels/test_operators.py -k full_scores"),
]  # fmt: skip
