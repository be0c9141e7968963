"""``kge-torchrec list``: the keys of a config, the parts that it can name, and their options."""

from __future__ import annotations

import json
from typing import Literal

from kge_torchrec.config import ConfigError
from kge_torchrec.config.describe import json_schema, keys_help, keys_tables, parts_help
from kge_torchrec.config.parser import published

Listed = Literal[
    "keys", "configs", "scorer", "loss", "regularizer", "table_optimizer", "schedule",
    "reader", "negative_sampler",
]  # fmt: skip


def list_parts(
    kind: Listed,
    name: str | None = None,
    *,
    format: Literal["text", "markdown", "json-schema"] = "text",
) -> int:
    """List the keys of a config, the published configs, or the parts that a config can name.

    Examples:
      kge-torchrec list keys train.optimizer
      kge-torchrec list scorer keci

    Args:
        kind: keys of a config, configs that come with the package, or a kind of part
        name: name of a part, or package.module:Class; of keys and configs: how they begin
        format: of keys: markdown, tables; json-schema, for editors that complete keys of a config
    """
    if format != "text" and (kind != "keys" or name is not None):
        raise ConfigError(f"--format {format} is for all keys; leave it out")
    if kind == "configs":
        print(*(config for config in published() if config.startswith(name or "")), sep="\n")
    elif kind != "keys":
        print(parts_help(kind, name))
    elif format == "json-schema":
        print(json.dumps(json_schema(), indent=1))
    else:
        print(keys_tables() if format == "markdown" else keys_help(name or ""))
    return 0
