"""A check before a run starts that every configured key has an effect."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from kge_torchrec.config import Config, all_keys
from kge_torchrec.config.keys import Facts, check_effects, without_effect
from kge_torchrec.config.sizing import KEYS as RESOLVED_KEYS
from kge_torchrec.data.datasets import unread_options
from kge_torchrec.data.readers import make_reader
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.data.store import META, TripleStore

log = logging.getLogger(__name__)


def facts_of(
    config: Config,
    on_cuda: bool | None = None,
    triples: Mapping[str, InMemory] | None = None,
    extended: bool = False,
) -> Facts:
    """Return the facts that decide, together with the config, which keys have an effect.

    Args:
        config: The config.
        on_cuda: Whether the run trains on CUDA; None if unknown.
        triples: Splits in memory that replace data.path, if any.
        extended: Whether ``extend`` made the run.
    """
    path = Path(config.data.path)
    if triples is None and (path / META).is_file():
        extended = TripleStore.open(path).base is not None
    options = config.data.reader_options
    reader = make_reader(config.data.reader, options, "data.reader_options")
    unread = unread_options(config.data.path if triples is None else triples, reader)
    return Facts(on_cuda, extended, unread)


def check_start(config: Config, facts: Facts) -> None:
    """Check that every configured key has an effect.

    Keys that are null by default only cause a warning, because the config.yaml of a run has a
    number for each of them, with or without an effect.

    Raises:
        ConfigError: A key was set and has no effect.
    """
    check_effects(config, facts, [key for key in all_keys() if key not in RESOLVED_KEYS])
    for reason in without_effect(config, facts, RESOLVED_KEYS).values():
        log.warning("%s", reason)
