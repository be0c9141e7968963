"""Declare when an option of a verb has an effect; refuse one that was given and has none."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from kge_torchrec.config.checks import ConfigError

_ATTRIBUTE = "acts_with"


class _Rule(NamedTuple):
    words: str  # completes "It acts only with ..."
    holds: Callable[[argparse.Namespace], bool]


def acts_with(
    option: argparse.Action, words: str, holds: Callable[[argparse.Namespace], bool]
) -> None:
    """Declare when an option has an effect.

    Args:
        option: what ``add_argument`` returned.
        words: the condition in words, which complete "it acts only with".
        holds: the condition, given the parsed options.
    """
    setattr(option, _ATTRIBUTE, _Rule(words, holds))


def rules_of(verb: argparse.ArgumentParser) -> dict[str, tuple[str, _Rule]]:
    """Return {destination: (option, rule)} of the options that do not always have an effect."""
    return {
        action.dest: ((action.option_strings or [action.dest])[-1], getattr(action, _ATTRIBUTE))
        for action in verb._actions
        if hasattr(action, _ATTRIBUTE)
    }


def check_options(verb: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Raises ConfigError for an option that is not at its default and has no effect."""
    for name, (option, rule) in rules_of(verb).items():
        default = verb.get_default(name)
        value = getattr(parsed, name, default)
        if value not in (default, argparse.SUPPRESS) and not rule.holds(parsed):
            raise ConfigError(
                f"{option} has no effect here: it acts only with {rule.words}; change that, or "
                f"leave {option} out"
            )
