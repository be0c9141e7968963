"""Check before a run starts that every key which was set has an effect."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from kge_torchrec.config import Config, all_keys
from kge_torchrec.config.keys import Facts, check_effects, without_effect
from kge_torchrec.config.sizing import KEYS as PICKED_KEYS
from kge_torchrec.data.prepare import InMemory
from kge_torchrec.data.readers import make_reader
from kge_torchrec.data.reading_options import unread_options
from kge_torchrec.data.store import META, TripleStore

log = logging.getLogger(__name__)


def facts_of(
    config: Config,
    on_cuda: bool | None = None,
    triples: Mapping[str, InMemory] | None = None,
    extended: bool = False,
) -> Facts:
    """Return what decides, besides the config, which keys act.

    Args:
        on_cuda: whether the run trains on CUDA; None: not known.
        triples: the splits in memory that take the place of data.path, if any.
        extended: whether the run was made by ``extend``.
    """
    path = Path(config.data.path)
    if triples is None and (path / META).is_file():
        extended = TripleStore.open(path).base is not None
    options = config.data.reader_options
    reader = make_reader(config.data.reader, options, "data.reader_options")
    unread = unread_options(config.data.path if triples is None else triples, reader)
    return Facts(on_cuda, extended, unread)


def check_start(config: Config, facts: Facts) -> None:
    """Raises ConfigError for a key that was set and has no effect.

    Keys that are null by default are only warned of: the config.yaml of another run has a number
    for each of them, whether it acts or not.
    """
    check_effects(config, facts, [key for key in all_keys() if key not in PICKED_KEYS])
    for reason in without_effect(config, facts, PICKED_KEYS).values():
        log.warning("%s", reason)
