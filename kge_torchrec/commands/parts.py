"""``kge-torchrec list``: the keys of a config, the parts that it can name, and their options."""

from __future__ import annotations

import json
from typing import Literal

from kge_torchrec.config import ConfigError
from kge_torchrec.config.describe import json_schema, keys_help, keys_tables, parts_help

Listed = Literal[
    "keys", "scorer", "loss", "regularizer", "table_optimizer", "schedule", "reader",
    "negative_sampler",
]  # fmt: skip


def list_parts(
    kind: Listed,
    name: str | None = None,
    /,
    *,
    format: Literal["text", "markdown", "json-schema"] = "text",
) -> int:
    """List the keys of a config, or the scorers, losses and other parts that it can name.

    Args:
        kind: keys of a config, or a kind of part
        name: name of a part, or package.module:Class
        format: of keys: markdown, tables; json-schema, for editors that complete keys of a config
    """
    if kind != "keys":
        if format != "text":
            raise ConfigError(f"--format {format} is for keys; leave it out")
        print(parts_help(kind, name))
    elif name is not None:
        raise ConfigError("list keys lists all of them; leave the name out")
    elif format == "json-schema":
        print(json.dumps(json_schema(), indent=1))
    else:
        print(keys_tables() if format == "markdown" else keys_help())
    return 0
