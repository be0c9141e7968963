"""Write the keys of the config for people: configs/default.yaml and docs/reference/keys.md.

Both come from the fields alone. ``python -m kge_torchrec.config.reference`` writes them anew in a
checkout, and a test compares them.
"""

from __future__ import annotations

import textwrap
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from kge_torchrec.config import Config
from kge_torchrec.config.keys import declared, default_of, key_of

_WIDTH = 100
_HEAD = """\
# Every key with its default.  Copy what you change, or give it as --section.key value.
# kge-torchrec train default --data.path DIRECTORY
"""
_PAGE = """\
# Keys of the config

```sh
kge-torchrec train --help
```

The command lists the same keys. `python -m kge_torchrec.config.reference` writes this page and
`configs/default.yaml` from the fields of `kge_torchrec.config`.

- A key is set in a YAML file (`train: {lr: 0.1}`) or on the command line (`--train.lr 0.1`).
- A key that is set to another value than its default and has no effect is refused. The column
  "acts only with" says what gives it one.
- "may change on resume" says whether `kge-torchrec train --resume RUN --key value` is accepted.
- null stands for a default that is resolved from the graph, see [defaults](defaults.md).
"""


def default_yaml() -> str:
    """Return configs/default.yaml: every key with its help and default."""
    lines = [_HEAD]
    for item in fields(Config):
        section: Any = item.default_factory
        if not is_dataclass(section):
            lines += _yaml_of(item, "")
            continue
        first_line = (section.__doc__ or "").split("\n")[0]
        lines += [*_comment(first_line, ""), f"{item.name}:"]
        for one in fields(section):
            lines += _yaml_of(one, "  ")
        lines.append("")
    return "\n".join(lines) + "\n"


def keys_page() -> str:
    """Return docs/reference/keys.md: a table of keys for each section."""
    parts, of = [_PAGE], ""
    for name, item in declared(Config).items():
        section = name.rpartition(".")[0] or "the rest"
        if section != of:
            of = section
            parts += [
                f"## {section}\n",
                "| key | default | meaning | acts only with | may change on resume |",
                "|---|---|---|---|---|",
            ]
        rules = key_of(item)
        cells = (
            f"`{name}`",
            f"`{_flow(default_of(item))}`",
            rules.help,
            "; ".join(condition.words for condition in rules.acts),
            rules.resume.answer,
        )
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(parts).replace("|\n## ", "|\n\n## ") + "\n"


def _yaml_of(item: Any, indent: str) -> list[str]:
    value = _flow(default_of(item))
    return [*_comment(key_of(item).help, indent), f"{indent}{item.name}: {value}"]


def _comment(text: str, indent: str) -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(
        text, _WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False
    )


def _flow(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip()


def main() -> None:
    """Write both files into the checkout that this module lies in."""
    root = Path(__file__).resolve().parents[2]
    (root / "configs" / "default.yaml").write_text(default_yaml(), encoding="utf-8")
    (root / "docs" / "reference" / "keys.md").write_text(keys_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
