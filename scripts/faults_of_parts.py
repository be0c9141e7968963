"""Deliberate faults in the checks of parts from other packages."""

from __future__ import annotations

from faults import Fault

_TESTS = "tests/extend/test_mistakes.py -k "

FAULTS = [
    Fault("parts of other packages are not checked", "training/assembly.py",
          "    check_parts(config, objective, table_optimizer(train), processes)\n", "",
          _TESTS + "every_rank_refuses"),
    Fault("an optimizer may replace its state", "training/part_checks.py",
          "if held.get(name) is not states[name]:", "if False:", _TESTS + "replaces_a_state"),
    Fault("an optimizer may step out of place", "training/part_checks.py",
          "    if torch.equal(rows, before):\n", "    if False:\n", _TESTS + "out_of_place"),
    Fault("an optimizer may set new data", "training/part_checks.py",
          "step(rows.view(count, dim), grad", "step(rows, grad", _TESTS + "out_of_place"),
    Fault("an optimizer must step at once", "training/part_checks.py",
          "_STEPS = 8", "_STEPS = 1", _TESTS + "rarely_steps"),
    Fault("the shape of a part's result is not checked", "training/part_checks.py",
          "isinstance(result, Tensor) and result.shape == shape:", "isinstance(result, Tensor):",
          _TESTS + "value_per"),
    Fault("the form of a loss is not that of the regime", "training/part_checks.py",
          'elif regime == "kvssample":', "elif False:", _TESTS + "value_per_query"),
    Fault("a closed form may return its gradients", "training/part_checks.py",
          "    if torch.equal(gradients, scores):\n", "    if False:\n",
          _TESTS + "value_per_query"),
    Fault("similarities may disagree", "training/part_checks.py",
          "        if wrong.any():\n", "        if False:\n", _TESTS + "disagree"),
    Fault("similarities must agree to the last digit", "training/part_checks.py",
          "_MATRIX_ERROR * span + _ROUNDING * largest", "0.0", _TESTS + "round_differently"),
    Fault("a part may have any init", "config/registry.py",
          "        inspect.signature(cls).bind(*args, **named)\n", "        pass\n",
          _TESTS + "another_init"),
    Fault("a scorer may forget the init of its base", "models/scorers/__init__.py",
          'if not hasattr(scorer, "relations"):', "if False:", _TESTS + "scorer_with_another_init"),
    Fault("a sampler may exclude by chunk", "data/negatives.py",
          "            problem = _problem_of_excluded(sampler, chunks, ids)\n",
          "            pass\n", _TESTS + "another_mask"),
    Fault("a sampler may sample nothing", "data/negatives.py",
          "if type(sampler).sample is NegativeSampler.sample and (", "if False and (",
          _TESTS + "without_a_method"),
    Fault("ids of a reader are taken for labels", "data/readers/__init__.py",
          "            _check_text(path, columns.schema)\n", "", _TESTS + "reader_of_numbers"),
]  # fmt: skip
