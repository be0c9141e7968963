"""Write docs/reference/keys.md, the keys of the config for people, from the fields.

``python -m kge_torchrec.config.reference`` writes it in a checkout; a test compares it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import yaml

from kge_torchrec.config import Config
from kge_torchrec.config.keys import Key, Part, declared, default_of, key_of
from kge_torchrec.config.options import settings_of
from kge_torchrec.config.registry import KINDS, resolve

_PAGE = """\
# Keys of the config

```sh
kge-torchrec train --help
```

The command lists the same keys. `python -m kge_torchrec.config.reference` writes this page from
the fields of `kge_torchrec.config`.

- A key is set in a YAML file (`train: {lr: 0.1}`) or on the command line (`--train.lr 0.1`).
- A key that is set to another value than its default and has no effect is refused. The column
  "acts only with" says what gives it one.
- "may change on resume" says whether `kge-torchrec train --resume RUN --key value` is accepted.
- A key such as `model.dropout` holds options: `model: {dropout: {hidden: 0.1}}` in a file,
  `--model.dropout.hidden 0.1` on the command line. `kge-torchrec list KIND` lists those of scorers,
  losses and samplers.
- null stands for a default that is resolved from the graph, see [defaults](defaults.md).
"""


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
            _words(item),
            rules.resume.answer,
        )
        parts.append(_row(cells))
        parts += [
            _row((f"`{name}.{option.name}`", f"`{_flow(default_of(option))}`",
                  f"{owners}{key_of(option).help}", _words(option), rules.resume.answer))
            for option, owners in _options_of(rules)
        ]  # fmt: skip
    return "\n".join(parts).replace("|\n## ", "|\n\n## ") + "\n"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _words(item: Any) -> str:
    return "; ".join(condition.words for condition in key_of(item).acts)


def _options_of(rules: Key) -> list[tuple[Field[Any], str]]:
    """Return the options in a key that are declared by ``key``, and the parts that have them."""
    owners = {"": rules.options}
    if isinstance(rules.options, Part):
        of = KINDS[rules.options.kind]
        owners = {name: resolve(rules.options.kind, name) for name in of.ours}
        owners |= {"": rules.options.otherwise}
    rows: dict[str, tuple[Field[Any], list[str]]] = {}
    for name, owner in owners.items():
        for item in fields(settings_of(owner)) if owner is not None else ():
            if "key" in item.metadata:
                rows.setdefault(item.name, (item, []))[1].append(name)
    return [(item, f"{', '.join(names)}: " if any(names) else "") for item, names in rows.values()]


def _flow(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip()


def main() -> None:
    """Write the page into the checkout that this module lies in."""
    root = Path(__file__).resolve().parents[2]
    (root / "docs" / "reference" / "keys.md").write_text(keys_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
