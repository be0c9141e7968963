"""Read a config from a YAML file and dotted overrides; errors name the key, and file and line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from kge_torchrec.config import RESOLVED_KEYS, Config, ConfigError, DataConfig, all_keys
from kge_torchrec.config.checks import Typed, check_no_url, checked_type
from kge_torchrec.config.data import NOT_A_STORE, is_no_store
from kge_torchrec.config.keys import check_effects, declared, replace_keys, without_effect
from kge_torchrec.config.registry import check_imports
from kge_torchrec.config.sizing import is_raced
from kge_torchrec.config.yaml_file import read_yaml

Overrides = Sequence[str] | Mapping[str, Any]  # ["--train.lr", "0.1"] or {"train.lr": 0.1}
# Also nested or dotted values, a YAML file, a run, the name of a file in configs/, None: defaults.
AnyConfig = Config | dict[str, Any] | str | Path | None
# The published configs: a wheel has them inside the package, a checkout beside it.
_INSTALLED = Path(__file__).resolve().parents[1] / "configs"
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1] / "configs"

# What a run writes beside its config.yaml, and what another run does not take over from there.
_BESIDE = (".lock", "checkpoints", "metrics.jsonl", "results.json", "store", "race")
_OF_A_RUN = ("--run.dir=null", "--run.resume=never", "--checkpoint.options.copy_to=null")


class Settings:
    """Values of keys, and where they stand; overrides win over what is there.

    Raises ConfigError if the file is no YAML of keys, or a key is unknown or stands twice.

    Attributes:
        values: {key: value}; a key that holds options has a dict.
        places: {key, group or option: "FILE:LINE"; "" where an override has it}.
        in_file: The keys whose values, or values of options, are those of the file.
        given: The keys whose values, or values of options, are those of overrides.
    """

    def __init__(self, path: Path | None = None, overrides: Overrides = ()):
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.in_file: set[str] = set()
        self.given: set[str] = set()
        if path is not None:
            values, lines = read_yaml(path)
            if values is None:
                raise ConfigError(f"{path} is empty; it should hold keys, such as 'seed: 1'")
            if not isinstance(values, dict):
                kind = type(values).__name__
                raise ConfigError(f"{path} should hold 'key: value' pairs, not a {kind}")
            self.places = {name: f"{path}:{line}" for name, line in lines.items()}
            for name, value in _flat(values):
                try:
                    self.in_file.add(self._set(name, value, "needs nested 'key: value'"))
                except ConfigError as error:
                    raise self.placed(error, name) from None
        self.add(overrides)

    def add(self, overrides: Overrides) -> None:
        """Add values that win over those that are there."""
        named = _flat(overrides) if isinstance(overrides, Mapping) else _of_words(overrides)
        for name, value in named:
            key = self._set(name, value)
            self.given.add(key)
            for inner in [x for x in self.places if x.startswith(f"{name}.")]:
                del self.places[inner]
            self.places[name] = ""
            if name == key:
                self.in_file.discard(key)

    def _set(self, name: str, value: Any, needed: str = "") -> str:
        """Set the value of a key or an option; return the key."""
        key = key_with(name, needed)
        default = declared(Config)[key].default
        if name == key:
            if value is None and default is not None:
                raise ConfigError(f"{name} has no value; write one, or leave the key out")
            if isinstance(default, dict) and isinstance(value, Typed):
                value = checked_type(value, Any, name)
            self.values[key] = deepcopy(value) if isinstance(value, dict) else value
            return key
        options = self.values.setdefault(key, {})
        *groups, last = name.removeprefix(f"{key}.").split(".")
        for group in groups:
            options = options.setdefault(group, {}) if isinstance(options, dict) else None
        if not isinstance(options, dict):
            raise ConfigError(f"{name}: {key} is no mapping")
        options[last] = value
        return key

    def config(self) -> Config:
        """Return the config with these values, and defaults for the others.

        Raises ConfigError for a value of a wrong type or out of range, and for a contradiction.
        """
        try:
            return replace_keys(Config(), self.values)
        except ConfigError as error:
            raise self.placed(error) from None

    def placed(self, error: ConfigError, name: str = "") -> ConfigError:
        """Return an error with the place of a key, or of the one that its message begins with."""
        name = name or str(error).partition(" ")[0].rstrip(":")
        while name and name not in self.places:
            name = name.rpartition(".")[0]
        place = self.places.get(name)
        return ConfigError(f"{place}: {error}") if place else error


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys or options in nested or dotted values, with their values."""
    for own, value in values.items():
        name = f"{prefix}{own}"
        if isinstance(value, Mapping) and not _holder(name) and (value or _first_in(name)):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _of_words(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the keys or options in "--key=value" or "--key", "value", with their values."""
    left = iter(words)
    for word in left:
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise ConfigError(f"settings are given as --key value, got {word!r}")
        if not equals:
            text = next(left, "--")
            if text.startswith("--"):
                key_with(name)
                raise ConfigError(f"argument --{name}: expected one argument")
        yield name, Typed(text)


def key_with(name: str, needed: str = "") -> str:
    """Return the key that a name is, or that holds the option of this name.

    Raises ConfigError, with the closest key, if there is none. ``needed`` says what a group of keys
    needs where it has a value.
    """
    keys = declared(Config)
    if holder := _holder(name):
        return holder
    if inner := _first_in(name):
        how = f" and {needed}" if needed else f"; set them one by one, such as --{inner}"
        raise ConfigError(f"{name} is a group of keys{how}")
    # A key in a wrong place has the same last name.
    same = [key for key in keys if key.split(".")[-1] == name.split(".")[-1]]
    close = difflib.get_close_matches(name, same, n=1, cutoff=0.0)
    close = close or difflib.get_close_matches(name, keys, n=1, cutoff=0.7)
    hint = f"did you mean {close[0]}?" if close else "`kge-torchrec list keys` lists all"
    raise ConfigError(f"unknown key {name}; {hint}")


def _holder(name: str) -> str:
    """Return the key that a name is, or that holds the option of this name; "" if there is none."""
    keys, holder = declared(Config), name
    while holder not in keys and holder:
        holder = holder.rpartition(".")[0]
    return holder if holder == name or (holder and isinstance(keys[holder].default, dict)) else ""


def _first_in(group: str) -> str:
    """Return the first key of a group; "" if there is none."""
    return next((key for key in declared(Config) if key.startswith(f"{group}.")), "")


def load_config(path: str | Path | None = None, overrides: Overrides = ()) -> Config:
    """Read a config.

    Args:
        path: YAML file, the name of one in ``configs/`` ("demo"), the folder of a run, or None for
            the defaults.
        overrides: ["--train.lr", "0.1", ...] or {"train.lr": 0.1, ...}; they win over the file.

    Raises:
        ConfigError: A key is unknown, a value has a wrong type or is out of range, or a key was
            set and has no effect.
    """
    file = None if path is None else find_config(path)
    settings = Settings(file)
    of_run = path is not None and is_of_run(path)
    if of_run and file is not None:
        check_imports(settings.values, file)
        settings.add(_OF_A_RUN)
    settings.add(overrides)
    config = _decided(settings.config(), settings.in_file, settings.given)
    if of_run and not is_no_store(config):  # `extend` reads as they say; the store is not read
        reading = {key: x.default for key, x in declared(Config).items() if NOT_A_STORE in x.acts}
        config = replace_keys(config, {x: reading[x] for x in reading.keys() - settings.given})
    # A file leaves a value without effect where the command line takes the effect from it, as
    # `train demo --negatives.regime kvsall` does, and where `Config.save` has filled in all nulls.
    is_saved = settings.values.keys() >= set(all_keys())
    for key, reason in without_effect(config).items():
        if key in RESOLVED_KEYS and key not in settings.given:
            acts_with = {condition.key for condition in declared(Config)[key].acts}
            if is_saved or acts_with & settings.given:
                continue
        raise settings.placed(ConfigError(reason))
    return config


def _decided(config: Config, from_file: Collection[str], given: Collection[str]) -> Config:
    """Return the config with default rules if a key was given that a race would decide.

    Keys count as given even at their default. The key ``default`` itself says otherwise; overrides
    that ask for a race and give such a key raise ConfigError.
    """
    counted = {*given} if "default" in from_file else {*given, *from_file}
    named = sorted(filter(is_raced, counted))
    if "default" not in given:
        return replace(config, default="rules") if named else config
    why = f"{named[0]} is given" if named else config.decided_by
    if config.default == "race" and why is not None:
        raise ConfigError(f"default race has no effect here: {why}; leave one of them out")
    return config


def read_run_config(file: Path, *overrides: Overrides) -> Config:
    """Read the config of a run, which somebody else may have written, with overrides.

    Raises ConfigError as ``config_from_dict``, and if the config names classes of modules that were
    not imported so far.
    """
    settings = Settings(file)
    check_imports(settings.values, file.parent)
    for values in overrides:
        settings.add(values)
    return settings.config()


def is_of_run(path: str | Path) -> bool:
    """Return whether a config is that of a run, and not one that the user wrote.

    It is named by its folder, or other files of a run lie beside it.
    """
    file = find_config(path)
    beside = file.name == "config.yaml" and any((file.parent / x).exists() for x in _BESIDE)
    return beside or Path(path).is_dir()


def config_from_dict(values: Mapping[str, Any], overrides: Overrides = ()) -> Config:
    """Return the Config of nested values, such as those of ``Config.to_dict``, with overrides.

    Keys without effect are accepted, unlike in ``load_config``.
    """
    settings = Settings(None, values)
    settings.add(overrides)
    return settings.config()


def as_config(config: AnyConfig) -> Config:
    """Return a Config as it is, or make one of values, a file or the name of a config."""
    if isinstance(config, Config):
        return config
    if isinstance(config, dict):
        settings = Settings(None, config)
        return _decided(settings.config(), settings.values, ())
    return load_config(config)


def data_config(data: DataConfig | Overrides | None) -> DataConfig:
    """Return the section ``data`` of values or words, with or without "data." before their names.

    Raises ConfigError as ``load_config``, and if a key is data.path or of another section.
    """
    if data is None or isinstance(data, Mapping):
        data = config_from_dict({_of_data(x): value for x, value in (data or {}).items()}).data
    elif not isinstance(data, DataConfig):
        named = [f"--{_of_data(word.removeprefix('--'))}" for word in data]
        data = config_from_dict({}, named).data
    keys = [key for key in all_keys() if key.startswith("data.")]
    check_effects(Config(data=replace(data, path=os.devnull)), keys)  # what is read is no store
    return data


def _of_data(word: str) -> str:
    """Return a key of ``data``, or "key=value", with "data." before it."""
    name = word.partition("=")[0]
    if name in all_keys() and not name.startswith("data."):
        raise ConfigError(f"{name}: only keys of data say how triples are read and split")
    if name.removeprefix("data.") == "path":
        raise ConfigError("data.path: the triples are named without a key; leave it out")
    return f"data.{word.removeprefix('data.')}"


def values_of(path: str | Path) -> dict[str, Any]:
    """Return the flat values of a config file, or of a published config by name."""
    return Settings(find_config(path)).values


def published() -> list[str]:
    """Names of the configs that come with the package."""
    return sorted(file.stem for file in CONFIGS.rglob("*.yaml"))


def find_config(path: str | Path) -> Path:
    """Return the file of a config: a path, the config.yaml of a run, or a published one by name."""
    check_no_url(path)
    if (Path(path) / "study.json").is_file():
        raise ConfigError(f"{path} is a study; name its best config, {path}/best.yaml")
    if (Path(path) / "seeds.json").is_file():
        raise ConfigError(f"{path} is a folder of seeds; name one of its runs, {path}/seed-...")
    named = [file for file in CONFIGS.rglob("*.yaml") if str(path) in (file.stem, file.name)]
    for candidate in (Path(path), Path(path) / "config.yaml", *named):
        if candidate.is_file():
            return candidate
    known = published()
    hint = f"; there are {', '.join(known)}" if known else ""
    raise ConfigError(f"no config file {str(path)!r}{hint}")
