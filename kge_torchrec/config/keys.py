"""Declare a key of the config: a field of a dataclass, with its help below it.

    accumulation: PositiveInt = 1
    "Micro-batches per step, for less memory; the result is that of one batch."

The field is the only place where a key is described: its type has the range, and the string below
it, in triple quotes, is the help of ``train --help``, of the docs and of editors. ``key`` adds when
it has an effect (``check_effects`` refuses a value without) and whether it may change when a run
resumes (``check_resume``). ``Section`` checks values.

A field whose default is made by a dataclass is a group of keys, such as ``model.dropout``. A key
with a ``Part`` holds the options of the class that another key names, such as ``model.options``.
The fields of that class's ``Options`` are declared in the same way, and the same rules hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from kge_torchrec.config.checks import ConfigError
from kge_torchrec.config.options import (
    as_yaml,
    check_names,
    checked_type,
    hints,
    is_nullable,
    parse_options,
)
from kge_torchrec.config.registry import is_built_in, resolve

Config = Any  # kge_torchrec.config.Config, whose file imports this one


@dataclass(frozen=True)
class Facts:
    """Facts about a start besides its config; None means unknown, and refuses nothing.

    Args:
        on_cuda: Whether the run trains on CUDA.
        extended: Whether its triples are an extended store.
        is_store: Whether data.path names a store, which is not read again.
    """

    on_cuda: bool | None = None
    extended: bool | None = None
    is_store: bool | None = None


class Condition(NamedTuple):
    """One condition under which a key has an effect."""

    words: str  # completes "It acts only with ..."
    holds: Callable[[Config, Facts], bool | None]  # None: not known yet
    key: str = ""  # the other key that decides it, if one does


def only_with(other: str, *values: Any) -> Condition:
    """Return the condition that another key has one of these values."""
    listed = " or ".join(as_yaml(value) for value in values)
    words = f"{other} {listed}"
    return Condition(words, lambda config, _: attrgetter(other)(config) in values, other)


def only_without(other: str, value: Any, words: str = "") -> Condition:
    """Return the condition that another key has any value but this one."""
    said = words or f"{other} other than {as_yaml(value)}"
    return Condition(said, lambda config, _: attrgetter(other)(config) != value, other)


class Resume(NamedTuple):
    """A rule for whether a key may change when a run resumes.

    ``refuses`` gets the config so far and the new one. ``per_start`` marks keys of how a run is
    started or shown; ``run.resume auto`` accepts another value of them.
    """

    answer: str  # for the table of keys
    remedy: str = ""
    refuses: Callable[[Config, Config], bool] = lambda before, after: False
    per_start: bool = False


MAY_CHANGE = Resume("yes")
PER_START = Resume("yes", per_start=True)


def fixed(remedy: str = "start a new run") -> Resume:
    """Return the rule of a key that never changes on resume."""
    return Resume("no", remedy, lambda before, after: True)


class Part(NamedTuple):
    """The owner of options that another key of the section names.

    Args:
        kind: Kind of the part, as in ``registry.KINDS``.
        field: Field of the section that names the part.
    """

    kind: str
    field: str


class Key(NamedTuple):
    """What ``key`` says of a field."""

    acts: tuple[Condition, ...] = ()
    resume: Resume = MAY_CHANGE
    part: Part | None = None


def key(
    default: Any,
    *,
    acts: Condition | tuple[Condition, ...] = (),
    resume: Resume = MAY_CHANGE,
    part: Part | None = None,
) -> Any:
    """Return a dataclass field for a key of the config.

    Args:
        default: Its default; a type, such as dict, makes a new one for each config.
        acts: All conditions under which the key has an effect; none: it always has.
        resume: Whether it may change when a run resumes.
        part: The owner of the options that it holds.
    """
    metadata = {"key": Key((acts,) if isinstance(acts, Condition) else acts, resume, part)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def key_of(item: Field[Any]) -> Key:
    """Return what ``key`` says of a field."""
    return item.metadata.get("key", Key())


def group_of(item: Field[Any]) -> Any:
    """Return the dataclass of a field that is a group of keys, or None."""
    made_by: Any = item.default_factory
    return made_by if hasattr(made_by, "__dataclass_fields__") else None


@dataclass(frozen=True)
class NoOptions:
    """The options of no part."""

    name = "data.reader null"  # no other part may be null


class Section:
    """Base of a group of keys: gives its values their types and checks them when it is made.

    A mapping is taken for a group too, and the options of a part are those of its class. Raises
    ConfigError for a value of a wrong type or out of range, and for an unknown option.
    """

    prefix = ""  # name of the section and a dot

    def __init_subclass__(cls, prefix: str = "") -> None:
        cls.prefix = prefix

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for item in fields(cls):
            name, value, group = self.prefix + item.name, getattr(self, item.name), group_of(item)
            if group is not None:
                if isinstance(value, Mapping):
                    check_names(group, value, name, name)
                    value = group(**value)
            elif value is not item.default:
                value = checked_type(value, hints(cls)[item.name], name)
            if (part := key_of(item).part) is not None:
                owner = getattr(self, part.field)
                # a foreign class may have an option without a default
                if value or not (owner is None or is_built_in(part.kind, owner)):
                    chosen = [option for option in value if value[option] is not None]
                    options = self.options_in(item.name)
                    value = {option: getattr(options, option) for option in chosen}
            object.__setattr__(self, item.name, value)

    def options_in(self, name: str) -> Any:
        """Return the options of a part that a field holds, with defaults, as its ``Options``."""
        part = key_of(self.__dataclass_fields__[name]).part  # type: ignore[attr-defined]
        assert part is not None
        named = getattr(self, part.field)
        owner = NoOptions if named is None else resolve(part.kind, named)
        return parse_options(owner, getattr(self, name), f"{self.prefix}{name}")


@cache
def declared(of: Any, prefix: str = "") -> Mapping[str, Field[Any]]:
    """Return the field of every dotted key of a config class, in order."""
    results: dict[str, Field[Any]] = {}
    for item in fields(of):
        group = group_of(item)
        if group is None:
            results[prefix + item.name] = item
        else:
            results.update(declared(group, f"{prefix}{item.name}."))
    return results


@cache
def resolved_keys(cls: Any) -> tuple[str, ...]:
    """Return the keys whose default is null and whose type has no null: ``sizing`` chooses one."""
    nulls = (name for name, item in declared(cls).items() if item.default is None)
    return tuple(name for name in nulls if not is_nullable(*owner_of(cls, name)))


def owner_of(cls: Any, name: str) -> tuple[Any, str]:
    """Return the class that has the field of a dotted key, and the name of the field."""
    *groups, own = name.split(".")
    for group in groups:
        cls = group_of(cls.__dataclass_fields__[group])
    return cls, own


def replace_keys(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a config, or a section of one, with other values for some dotted keys."""
    if not values:
        return config
    groups: dict[str, dict[str, Any]] = {}
    changed: dict[str, Any] = {}
    for name, value in values.items():
        group, _, rest = name.partition(".")
        if rest:
            groups.setdefault(group, {})[rest] = value
        else:
            changed[name] = value
    changed |= {name: replace_keys(getattr(config, name), new) for name, new in groups.items()}
    return replace(config, **changed)


def default_of(item: Field[Any]) -> Any:
    """Return the default of a key."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def without_effect(
    config: Config, facts: Facts, keys: Iterable[str] | None = None
) -> dict[str, str]:
    """Return why each key or option that was set, of these keys or of all, has no effect."""
    results: dict[str, str] = {}
    known = declared(config.__class__)
    for key in known if keys is None else keys:
        value = attrgetter(key)(config)
        settings = [(key, value, known[key])]
        options = _options(config, key) if value else None
        for item in () if options is None else fields(options):
            if item.name in value:
                settings.append((f"{key}.{item.name}", getattr(options, item.name), item))
        for name, own, item in settings:
            failing = (x for x in key_of(item).acts if x.holds(config, facts) is False)
            if own != default_of(item) and (condition := next(failing, None)) is not None:
                results[name] = (
                    f"{name} {as_yaml(own)} has no effect here: it acts only with "
                    f"{condition.words}; change that, or leave {name} at its default, "
                    f"{as_yaml(default_of(item))}"
                )
    return results


def _options(config: Config, key: str) -> Any:
    """Return the ``Options`` that a key holds, with their defaults; None for another key."""
    if key_of(declared(config.__class__)[key]).part is None:
        return None
    section, _, name = key.rpartition(".")
    return attrgetter(section)(config).options_in(name)


def _complete(config: Config, key: str) -> Any:
    """Return the value of a key; that of options includes their defaults."""
    options = _options(config, key)
    return attrgetter(key)(config) if options is None else asdict(options)


def all_values(config: Config) -> dict[str, Any]:
    """Return the value of every key, and of every option in a key, with defaults."""
    values: dict[str, Any] = {}
    for name in declared(config.__class__):
        value = _complete(config, name)
        if isinstance(value, dict):
            values |= {f"{name}.{option}": option_value for option, option_value in value.items()}
        else:
            values[name] = value
    return values


def check_effects(
    config: Config, facts: Facts = Facts(), keys: Iterable[str] | None = None
) -> None:
    """Raise ConfigError for a key that was set and has no effect.

    keys: look at these only; None looks at all.
    """
    for reason in without_effect(config, facts, keys).values():
        raise ConfigError(reason)


def changed_keys(before: Config, after: Config) -> list[str]:
    """Return the dotted keys whose values differ; an option may be left at its default."""
    return [
        name
        for name in declared(after.__class__)
        if attrgetter(name)(before) != attrgetter(name)(after)
        and _complete(before, name) != _complete(after, name)
    ]


def check_resume(
    before: Config, after: Config, folder: Path, allowed: Collection[str] = ()
) -> None:
    """Raise ConfigError for a key that must not change when the run in a folder resumes."""
    for name in changed_keys(before, after):
        if name in allowed:
            continue
        if name == "run.dir" and Path(after.run.dir or "").resolve() == folder.resolve():
            continue
        rule = key_of(declared(after.__class__)[name]).resume
        if rule.refuses(before, after):
            raise ConfigError(
                f"{name} is {attrgetter(name)(before)!r} in this run and cannot change on resume; "
                f"{rule.remedy}"
            )
