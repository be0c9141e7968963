"""Declare a key of the config: a field of a dataclass, with its help below it.

    accumulation: PositiveInt = 1
    "Micro-batches per step, for less memory; the result is that of one batch."

The type has the range, and the string, in triple quotes, is the help in ``list keys``, in the docs
and in editors.  A default that is a dataclass makes a group of keys, such as ``model.dropout``.  A
key with a ``Part`` has the options of the class that another key names, as ``model.options``; that
class declares them in its ``Options`` in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_type_hints

from kge_torchrec.config.checks import ConfigError, as_yaml, checked_type, members
from kge_torchrec.config.registry import is_built_in, resolve

Config = Any  # kge_torchrec.config.Config, whose file imports this one


class Condition(NamedTuple):
    """One condition under which a key has an effect."""

    words: str  # completes "It acts only with ..."
    holds: Callable[[Config], bool]
    key: str = ""  # the other key that decides it, if one does


def only_with(other: str, *values: Any) -> Condition:
    """Return the condition that another key has one of these values."""
    words = f"{other} {' or '.join(map(as_yaml, values))}"
    return Condition(words, lambda config: attrgetter(other)(config) in values, other)


def only_without(other: str, value: Any, words: str = "") -> Condition:
    """Return the condition that another key has any value but this one."""
    said = words or f"{other} other than {as_yaml(value)}"
    return Condition(said, lambda config: attrgetter(other)(config) != value, other)


class Resume(NamedTuple):
    """A rule for whether a key may change when a run resumes."""

    answer: str  # for the table of keys
    remedy: str = ""
    refuses: Callable[[Config, Config], bool] = lambda before, after: False
    per_start: bool = False  # how a run is started or shown; run.resume auto accepts a change


PER_START = Resume("yes", per_start=True)


def fixed(remedy: str = "start a new run") -> Resume:
    """Return the rule of a key that never changes on resume."""
    return Resume("no", remedy, lambda before, after: True)


class Part(NamedTuple):
    """The owner of the options in a key."""

    kind: str  # of ``registry.KINDS``
    field: str  # the field of the section that names it


class Key(NamedTuple):
    """A key of the config by its dotted name, or an option of a part by its name."""

    name: str
    owner: Any  # the dataclass with its field
    type: Any  # it takes null where the default is null
    default: Any  # MISSING if a foreign option has none
    is_chosen: bool  # ``sizing`` chooses a value for null: its declared type has no null
    acts: tuple[Condition, ...] = ()  # it has an effect where all of them hold
    resume: Resume = Resume("yes")
    part: Part | None = None


def key(
    default: Any,
    *,
    acts: Condition | tuple[Condition, ...] = (),
    resume: Resume = Resume("yes"),  # noqa: B008
    part: Part | None = None,
) -> Any:
    """Return a dataclass field for a key of the config; the arguments are those of ``Key``.

    A default that is a type, such as dict, makes a new value for each config.
    """
    conditions = (acts,) if isinstance(acts, Condition) else acts
    metadata = {"acts": conditions, "resume": resume, "part": part}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def group_of(item: Field[Any]) -> Any:
    """Return the dataclass of a field that is a group of keys, or None."""
    made_by: Any = item.default_factory
    return made_by if hasattr(made_by, "__dataclass_fields__") else None


@cache
def declared(of: Any, prefix: str = "") -> Mapping[str, Key]:
    """Return the keys of a config class, or the options of a class ``Options``, by dotted name."""
    keys: dict[str, Key] = {}
    types = get_type_hints(of, include_extras=True)
    for item in fields(of):
        name, default, hint = prefix + item.name, item.default, types[item.name]
        if (group := group_of(item)) is not None:
            keys.update(declared(group, f"{name}."))
            continue
        if item.default_factory is not MISSING:
            default = item.default_factory()
        is_chosen = default is None and NoneType not in members(hint)
        hint = hint | None if default is None else hint
        keys[name] = Key(name, of, hint, default, is_chosen, **item.metadata)
    return keys


class Section:
    """Base of a group of keys: gives its values their types and checks them when it is made.

    Options of a part are those that are not at their defaults. Raises ConfigError for a value of a
    wrong type or out of range, and for an unknown option.
    """

    prefix = ""  # name of the section and a dot

    def __init_subclass__(cls, prefix: str = "") -> None:
        cls.prefix = prefix

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name, item in declared(cls).items():
            if "." in name:  # its group has checked it
                continue
            value = getattr(self, name)
            if value is not item.default:
                value = checked_type(value, item.type, self.prefix + name)
            if item.part is not None:
                owner = getattr(self, item.part.field)
                if value and owner is None:
                    named = self.prefix + item.part.field
                    raise ConfigError(f"{self.prefix}{name}: {named} null has no options")
                # a foreign class may have an option without a default
                if value or not (owner is None or is_built_in(item.part.kind, owner)):
                    options = self.options_in(name)
                    value = {
                        x: getattr(options, x)
                        for x, option in declared(options.__class__).items()
                        if value.get(x) is not None and getattr(options, x) != option.default
                    }
            object.__setattr__(self, name, value)

    def options_in(self, name: str) -> Any:
        """Return the options of a part that a field holds, with defaults, as its ``Options``."""
        cls: Any = type(self)
        part = declared(cls)[name].part
        assert part is not None
        owner = resolve(part.kind, getattr(self, part.field))
        return parse_options(owner, getattr(self, name), self.prefix + name)


def parse_options(owner: Any, values: Mapping[str, Any], key: str) -> Any:
    """Return the ``Options`` of a class, or a dataclass, with some values; null takes the default.

    Raises ConfigError, with the ``key`` that holds the values, for an option that is unknown,
    required and missing, of a wrong type or out of range.
    """
    options: Any = getattr(owner, "Options", owner)
    of = getattr(owner, "name", "") or owner.__name__
    if not hasattr(options, "__dataclass_fields__"):
        raise ConfigError(f"{key}: {of}.Options must be a dataclass")
    known = declared(options)
    chosen = {name: value for name, value in values.items() if value is not None}
    for name in sorted(chosen.keys() - known, key=str):
        has = f"has {', '.join(known)}" if known else "has none"
        raise ConfigError(f"{key}.{name} is no option of {of}, which {has}")
    for name, item in known.items():
        if name in chosen:
            chosen[name] = checked_type(chosen[name], item.type, f"{key}.{name}")
        elif item.default is MISSING:
            raise ConfigError(f"{key}.{name}: {of} has no default for it; set it")
    try:
        return options(**chosen)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def replace_keys(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a config, or a section of one, with other values for some dotted keys."""
    if not values:
        return config
    changed: dict[str, Any] = {}
    for name, value in values.items():
        group, _, rest = name.partition(".")
        if rest:
            changed.setdefault(group, {})[rest] = value
        else:
            changed[name] = value
    groups = {name.partition(".")[0] for name in values if "." in name}
    changed |= {x: replace_keys(getattr(config, x), changed[x]) for x in changed if x in groups}
    return replace(config, **changed)


def settings_of(config: Config, key: Key) -> dict[str, tuple[Key, Any]]:
    """Return {name: (key, value)} of a key, or of all options that it holds, with defaults."""
    holder, _, own = key.name.rpartition(".")
    section: Any = attrgetter(holder)(config) if holder else config
    if key.part is None or getattr(section, key.part.field) is None:
        return {key.name: (key, getattr(section, own))}
    options = section.options_in(own)
    items = declared(options.__class__).items()
    return {f"{key.name}.{x}": (item, getattr(options, x)) for x, item in items}


def without_effect(config: Config, keys: Iterable[str] | None = None) -> dict[str, str]:
    """Return why each key or option that was set, of these keys or of all, has no effect."""
    results: dict[str, str] = {}
    known = declared(config.__class__)
    for name in known if keys is None else keys:
        if attrgetter(name)(config) == known[name].default:
            continue
        for own, (item, value) in settings_of(config, known[name]).items():
            failing = (x for x in item.acts if not x.holds(config))
            if value != item.default and (condition := next(failing, None)) is not None:
                default = as_yaml(item.default)
                results[own] = (
                    f"{own} {as_yaml(value)} has no effect here: it acts only with "
                    f"{condition.words}; change that, or leave {own} at its default, {default}"
                )
    return results


def check_effects(config: Config, keys: Iterable[str] | None = None) -> None:
    """Raise ConfigError for a key, of these or of all, that was set and has no effect."""
    for reason in without_effect(config, keys).values():
        raise ConfigError(reason)


def all_values(config: Config) -> dict[str, Any]:
    """Return the value of every key, and of every option in a key, with defaults."""
    values: dict[str, Any] = {}
    for key in declared(config.__class__).values():
        for name, (_, value) in settings_of(config, key).items():
            inner = value if isinstance(value, dict) else None
            values |= {name: value} if inner is None else {f"{name}.{x}": inner[x] for x in inner}
    return values


def changed_keys(before: Config, after: Config) -> list[str]:
    """Return the dotted keys whose values differ."""
    keys = declared(after.__class__)
    return [name for name in keys if attrgetter(name)(before) != attrgetter(name)(after)]


def check_resume(
    before: Config, after: Config, folder: Path, allowed: Collection[str] = ()
) -> None:
    """Raise ConfigError for a key that must not change when the run in a folder resumes."""
    for name in changed_keys(before, after):
        if name in allowed:
            continue
        if name == "run.dir" and Path(after.run.dir or "").resolve() == folder.resolve():
            continue
        rule = declared(after.__class__)[name].resume
        if rule.refuses(before, after):
            raise ConfigError(
                f"{name} is {attrgetter(name)(before)!r} in this run and cannot change on resume; "
                f"{rule.remedy}"
            )
