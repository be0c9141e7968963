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
    Fault("IVR leaves out a pair of rows", "models/regularizers.py",
          "second * (x * y + y * z + z * x)", "second * (x * y + y * z)",
          "tests/models/test_ivr.py -k norms"),
    Fault("IVR's weights with the core are 0 where they are not set", "models/regularizers.py",
          "lambda2 if lambda4 is None else lambda4", "lambda4 or 0.0",
          "tests/models/test_ivr.py -k null_weights"),
    Fault("IVR's gradient at zero is not a number", "models/regularizers.py",
          "(squares + 1e-30).pow", "squares.pow", "tests/models/test_ivr.py -k at_zero"),
    Fault("IVR takes scorers that have no parts", "models/regularizers.py",
          'if getattr(scorer, "part_size", None) is None:', "if False:",
          "tests/models/test_ivr.py -k which_scorers"),
    Fault("IVR of TuckER takes the ends the other way round", "models/scorers/bilinear.py",
          'head, tail = ends if side == "tail" else ends[::-1]', "head, tail = ends",
          "tests/models/test_ivr.py -k norms"),
    Fault("N3 is chosen on top of IVR", "config/sizing.py", '{"n3", "ivr"}', '{"n3"}',
          "tests/training/test_sizing.py -k depend_on"),
]  # fmt: skip
