"""Declare a key of the config: its default, its help, its check, and when it has an effect.

    batch_size: int = key(512, "Queries scored at once.", check=least(1))

The dataclass field is the only place where a key is described. Its help goes into ``train --help``
and the docs; ``Section`` applies its check; ``check_effects`` refuses a value without effect;
``check_resume`` refuses a change that a resumed run could not follow.

A field whose default is made by a dataclass is a group of keys, such as ``model.dropout``. A key
with a ``Part`` holds the options of the class that another key names, such as ``model.options``.
The fields of that class's ``Options`` may be declared by ``key``, and the same rules hold for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from kge_torchrec.config.checks import ConfigError
from kge_torchrec.config.options import as_yaml, checked_type, hints, parse_options
from kge_torchrec.config.registry import resolve

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


def only_with(other: str, *values: Any) -> Condition:
    """Return the condition that another key has one of these values."""
    listed = " or ".join(as_yaml(value) for value in values)
    return Condition(f"{other} {listed}", lambda config, _: attrgetter(other)(config) in values)


def only_without(other: str, value: Any, words: str = "") -> Condition:
    """Return the condition that another key has any value but this one."""
    said = words or f"{other} other than {as_yaml(value)}"
    return Condition(said, lambda config, _: attrgetter(other)(config) != value)


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
        otherwise: The owner where that field is null.
    """

    kind: str
    field: str
    otherwise: Any = None


class Key(NamedTuple):
    """The metadata of a key's field."""

    help: str
    check: Callable[[str, Any], None] | None
    acts: tuple[Condition, ...]
    resume: Resume
    part: Part | None = None  # the owner of the options that the key holds


def key(
    default: Any,
    help: str,
    *,
    check: Callable[[str, Any], None] | None = None,
    acts: Condition | tuple[Condition, ...] = (),
    resume: Resume = MAY_CHANGE,
    part: Part | None = None,
) -> Any:
    """Return a dataclass field for a key of the config.

    Args:
        default: Its default; a type, such as dict, makes a new empty one for each config.
        help: One sentence for people, with the values it takes.
        check: Raises ConfigError for a bad value; takes the dotted key and a value other than null.
        acts: All conditions under which the key has an effect; none: it always has.
        resume: Whether it may change when a run resumes.
        part: The owner of the options that it holds.
    """
    conditions = (acts,) if isinstance(acts, Condition) else acts
    metadata = {"key": Key(help, check, conditions, resume, part)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def key_of(item: Field[Any]) -> Key:
    """Return the description of a field."""
    return item.metadata["key"]


def group_of(item: Field[Any]) -> Any:
    """Return the dataclass of a field that is a group of keys, or None."""
    made_by: Any = item.default_factory
    return made_by if hasattr(made_by, "__dataclass_fields__") else None


def build(cls: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Return a dataclass of keys with some values, by dotted key, and defaults for the others.

    Raises:
        ConfigError: A value has a wrong type or is out of range.
    """
    made: dict[str, Any] = {}
    for item in fields(cls):
        name, group = prefix + item.name, group_of(item)
        if group is not None:
            made[item.name] = build(group, values, f"{name}.")
        elif name in values:
            value, part = values[name], key_of(item).part
            if part is None or not isinstance(value, Mapping):
                value = checked_type(value, hints(cls)[item.name], name)
            made[item.name] = value  # the part that a section names types its options
    return cls(**made)


class Section:
    """Base of a section of keys: checks the values when it is made, and types options of parts.

    Raises ConfigError for a value that is out of range, and for an unknown option.
    """

    prefix = ""  # name of the section and a dot

    def __post_init__(self) -> None:
        self._check_values(self, self.prefix)

    def _check_values(self, group: Any, prefix: str) -> None:
        for item in fields(group):
            name, value, made_by = prefix + item.name, getattr(group, item.name), group_of(item)
            if made_by is not None:
                if isinstance(value, Mapping):  # as Python code may give it
                    value = parse_options(made_by, value, name)
                    object.__setattr__(group, item.name, value)
                if not isinstance(value, Section):
                    self._check_values(value, f"{name}.")
            elif "key" in item.metadata:
                rules = key_of(item)
                if rules.check is not None and value is not None:
                    rules.check(name, value)
                if rules.part is not None and value:
                    chosen = [option for option in value if value[option] is not None]
                    options = self.options_in(item.name)
                    value = {option: getattr(options, option) for option in chosen}
                    object.__setattr__(group, item.name, value)

    def options_in(self, name: str) -> Any:
        """Return the options of a part that a field holds, with defaults, as its ``Options``."""
        part = key_of(self.__dataclass_fields__[name]).part  # type: ignore[attr-defined]
        assert part is not None
        named = getattr(self, part.field)
        owner = part.otherwise if named is None else resolve(part.kind, named)
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


def type_of(cls: Any, name: str) -> Any:
    """Return the type of a dotted key of a config class."""
    *groups, own = name.split(".")
    for group in groups:
        cls = group_of(cls.__dataclass_fields__[group])
    return hints(cls)[own]


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
            if item.name in value and "key" in item.metadata:
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
