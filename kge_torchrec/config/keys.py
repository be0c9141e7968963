"""Declare a key of the config: its default, its help, its check, and when it has an effect.

    batch_size: int = key(512, "Queries scored at once.", check=least(1))

The dataclass field is the only place where a key is described. Its help goes into ``train --help``
and the docs; ``check_values`` applies its check; ``check_effects`` refuses a value without effect;
``check_resume`` refuses a change that a resumed run could not follow.

A key of type dict may hold the options of an owner, a class with a dataclass ``Options``. The
fields of ``Options`` may be declared by ``key`` as well, so that the same rules hold for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kge_torchrec.config.checks import ConfigError
from kge_torchrec.config.options import parse_options
from kge_torchrec.config.registry import resolve

Config = Any  # kge_torchrec.config.Config, whose file imports this one
Section = TypeVar("Section")
Options = TypeVar("Options")


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
    listed = " or ".join(_as_yaml(value) for value in values)
    return Condition(f"{other} {listed}", lambda config, _: attrgetter(other)(config) in values)


def only_without(other: str, value: Any, words: str = "") -> Condition:
    """Return the condition that another key has any value but this one."""
    said = words or f"{other} other than {_as_yaml(value)}"
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

    def owner(self, section: Any) -> Any:
        """Return the class that the section names."""
        name = getattr(section, self.field)
        return self.otherwise if name is None else resolve(self.kind, name)


class Key(NamedTuple):
    """The metadata of a key's field."""

    help: str
    check: Callable[[str, Any], None] | None
    acts: tuple[Condition, ...]
    resume: Resume
    options: Any = None  # the owner of the options that the key holds: a class or a Part

    def owner(self, section: Any) -> Any:
        """Return the class that owns the options in this key, or None."""
        return self.options.owner(section) if isinstance(self.options, Part) else self.options


def key(
    default: Any,
    help: str,
    *,
    check: Callable[[str, Any], None] | None = None,
    acts: Condition | tuple[Condition, ...] = (),
    resume: Resume = MAY_CHANGE,
) -> Any:
    """Return a dataclass field for a key of the config.

    Args:
        default: Its default; a type, such as dict, makes a new empty one for each config.
        help: One sentence for people, with the values it takes.
        check: Raises ConfigError for a bad value; takes the dotted key and a value other than null.
        acts: All conditions under which the key has an effect; none: it always has.
        resume: Whether it may change when a run resumes.
    """
    conditions = (acts,) if isinstance(acts, Condition) else acts
    metadata = {"key": Key(help, check, conditions, resume)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def options_key(owner: Any, help: str, resume: Resume = MAY_CHANGE) -> Any:
    """Return a dataclass field for a key that holds options.

    Args:
        owner: Owner of the options, a class or a `Part`; None: the section checks them.
        help: One sentence for people, with the names of options.
        resume: Whether the options may change when a run resumes.
    """
    rules = Key(help, None, (), resume, owner)
    return field(default_factory=dict, metadata={"key": rules})


def documented(section: type[Section]) -> type[Section]:
    """Add the help of all keys to the docstring of a section, where ``--help`` looks for them."""
    lines = [
        f"    {item.name}: {key_of(item).help}"
        for item in fields(section)  # type: ignore[arg-type]
        if "key" in item.metadata
    ]
    section.__doc__ = f"{section.__doc__}\n\nArgs:\n" + "\n".join(lines)
    return section


def key_of(item: Field[Any]) -> Key:
    """Return the description of a field."""
    return item.metadata["key"]


def check_values(section: Any, prefix: str) -> None:
    """Apply the check of every key of a section, and of every option in it.

    Raises:
        ConfigError: A value is out of range, or an option is unknown.
    """
    for item in fields(section):
        if "key" not in item.metadata:
            continue
        value, rules = getattr(section, item.name), key_of(item)
        if rules.check is not None and value is not None:
            rules.check(f"{prefix}{item.name}", value)
        if rules.options is not None and value:
            chosen = {name: option for name, option in value.items() if option is not None}
            object.__setattr__(section, item.name, chosen)
            if chosen:
                options_in(section, item.name, prefix)


def options_in(section: Any, name: str, prefix: str) -> Any:
    """Return the options in a key, with their defaults, as the owner's ``Options``.

    Args:
        section: The section of the config.
        name: The field that holds the options.
        prefix: Name of the section and a dot, for messages.
    """
    rules = key_of(section.__dataclass_fields__[name])
    values, owner = getattr(section, name), rules.owner(section)
    return parse_options(owner, values, f"{prefix}{name}")


def parsed(owner: type[Options], key: str) -> cached_property[Options]:
    """Return a property of a section: the options in one of its keys, with their defaults.

    Args:
        owner: The class that owns the options.
        key: The dotted key.
    """
    section, name = key.split(".")
    return cached_property(lambda config: options_in(config, name, f"{section}."))


@cache
def declared(of: Any, prefix: str = "") -> Mapping[str, Field[Any]]:
    """Return the field of every dotted key of a config class, in order."""
    results: dict[str, Field[Any]] = {}
    for item in fields(of):
        nested: Any = item.default_factory
        if hasattr(nested, "__dataclass_fields__"):
            results.update(declared(nested, f"{prefix}{item.name}."))
        else:
            results[prefix + item.name] = item
    return results


def default_of(item: Field[Any]) -> Any:
    """Return the default of a key."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def without_effect(
    config: Config, facts: Facts, keys: Iterable[str] | None = None
) -> dict[str, str]:
    """Return why each key or option that was set, of these keys or of all, has no effect."""
    results = {}
    for name, value, item in _settings(config, keys):
        rules = key_of(item)
        if value == default_of(item):
            continue
        failing = next((c for c in rules.acts if c.holds(config, facts) is False), None)
        if failing is not None:
            results[name] = (
                f"{name} {_as_yaml(value)} has no effect here: it acts only with {failing.words}; "
                f"change that, or leave {name} at its default, {_as_yaml(default_of(item))}"
            )
    return results


def _settings(config: Config, keys: Iterable[str] | None) -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yield the name, value and field of keys, and of the options in them."""
    known = declared(config.__class__)
    for name in known if keys is None else keys:
        value, rules = attrgetter(name)(config), key_of(known[name])
        yield name, value, known[name]
        if rules.options is None or not value:
            continue
        group, _, own = name.rpartition(".")
        options = options_in(attrgetter(group)(config), own, f"{group}.")
        for item in fields(options):
            if item.name in value and "key" in item.metadata:
                yield f"{name}.{item.name}", getattr(options, item.name), item


def _complete(config: Config, name: str) -> Any:
    """Return the value of a key; that of options includes their defaults."""
    if key_of(declared(config.__class__)[name]).options is None:
        return attrgetter(name)(config)
    section, _, key = name.rpartition(".")
    return asdict(options_in(attrgetter(section)(config), key, f"{section}."))


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
    config: Config,
    facts: Facts = Facts(),
    keys: Iterable[str] | None = None,
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


def _as_yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
