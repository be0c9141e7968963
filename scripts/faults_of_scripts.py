"""Deliberate faults in the language check."""

from faults import Fault

CHECK = "../scripts/check_language.py"

FAULTS = [
    Fault("the language check does not read errors", CHECK,
          "if isinstance(node, ast.Raise) and node.exc:", "if False and node.exc:",
          "tests/test_language.py -k messages"),
    Fault("the language check does not read help", CHECK,
          "if word.arg in HELPING]", "if word.arg in ()]",
          "tests/test_language.py -k messages"),
    Fault("the language check does not read text after a value in an f-string", CHECK,
          "parts = (part.value if isinstance(part, ast.Constant) else \"CODE\" for part in",
          "parts = (part.value if isinstance(part, ast.Constant) else \"CODE\" for part in [] and",
          "tests/test_language.py -k messages"),
    Fault("the language check lists findings and passes", CHECK,
          "return int(len(findings) > 0)", "return 0",
          "tests/test_language.py -k any_path"),
    Fault("the language check does not read a Makefile", CHECK,
          "for finding in (bad_words(Block(number, comment)) if mark else [])",
          "for finding in []",
          "tests/test_language.py -k other_files"),
]  # fmt: skip
