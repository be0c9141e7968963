"""Classes by the names in a config: a built-in name or an import path.

    model.scorer: complex                       ours
    model.scorer: my_package.models:MyScorer    any class that can be imported

A part is imported when a config names it. The config of a run that is read may be somebody else's,
so it imports nothing: ``check_imports`` refuses modules that nobody has imported so far.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from kge_torchrec.config.checks import ConfigError, one_of


class Kind(NamedTuple):
    """A kind of part that a config names."""

    key: str
    base: str  # the base class, as module:Class
    ours: dict[str, str]  # the built-in classes by name, as module:Class
    init: str = "self and the fields of its Options by name"  # what a class is constructed with


def _classes(within: str, **ours: str) -> dict[str, str]:
    """Return {name: module:Class} of classes in a module or package of ours."""
    return {name: f"kge_torchrec.{within}{path}" for name, path in ours.items()}


KINDS = {
    "scorer": Kind(
        "model.scorer",
        "kge_torchrec.models.scorers.base:Scorer",
        _classes(
            "models.scorers.",
            transe_l1="translational:TransEL1",
            transe_l2="translational:TransEL2",
            transh="translational:TransH",
            distmult="bilinear:DistMult",
            complex="bilinear:ComplEx",
            rotate="rotational:RotatE",
            rotate_l2="rotational:RotatEL2",
            simple="bilinear:SimplE",
            rescal="bilinear:RESCAL",
            tucker="bilinear:TuckER",
            qmult="algebra:QMult",
            quate="algebra:QuatE",
            omult="algebra:OMult",
            duale="algebra:DualE",
            keci="clifford:Keci",
            ckeci="clifford:CKeci",
            decal="clifford:DeCaL",
            mure="translational:MuRE",
            pairre="translational:PairRE",
            house="rotational:HousE",
            pyke="translational:Pyke",
            conve="networks:ConvE",
            conex="networks:ConEx",
            aconex="networks:AConEx",
            convq="networks:ConvQ",
            convo="networks:ConvO",
            coke="networks:CoKE",
            lfmult="algebra:LFMult",
            rote="rotational:RotE",
            roth="hyperbolic:RotH",
            meim="bilinear:MEIM",
            operator="operators:Operator",
        ),
        "self, *args, **kwargs, and call super().__init__(*args, **kwargs)",
    ),
    "loss": Kind(
        "loss.name",
        "kge_torchrec.models.losses:Loss",
        _classes(
            "models.losses:",
            softmax="SoftmaxLoss",
            bce="BinaryCrossEntropyLoss",
            margin="MarginLoss",
            self_adversarial="SelfAdversarialLoss",
            bpr="BPRLoss",
        ),
    ),
    "regularizer": Kind(
        "loss.regularizers",
        "kge_torchrec.models.regularizers:Regularizer",
        _classes("models.regularizers:", n3="N3", l2="L2", dura="DURA", ivr="IVR"),
    ),
    "table_optimizer": Kind(
        "train.optimizer",
        "kge_torchrec.embeddings.optimizers:RowOptimizer",
        _classes(
            "embeddings.optimizers:",
            adam="Adam",
            rowwise_adam="RowwiseAdam",
            adagrad="Adagrad",
            rowwise_adagrad="RowwiseAdagrad",
            sgd="SGD",
        ),
    ),
    "schedule": Kind(
        "train.schedule",
        "kge_torchrec.training.schedules:Schedule",
        _classes(
            "training.schedules:",
            constant="Constant",
            linear="Linear",
            cosine="Cosine",
            exponential="Exponential",
            plateau="Plateau",
        ),
        "self, options, warmup_steps, total_steps and steps_per_epoch",
    ),
    "reader": Kind("data.reader", "kge_torchrec.data.readers:Reader", {}),
    "negative_sampler": Kind(
        "negatives.sampling",
        "kge_torchrec.data.negatives:NegativeSampler",
        _classes("data.negatives:", uniform="UniformSampler", degree="DegreeSampler"),
        "self, store and options",
    ),
}


def part_name(kind: str) -> Callable[[str, str], None]:
    """Return the check of a key that names a part of a kind; it imports nothing."""
    return lambda key, name: check_name(kind, name, key)


def check_name(kind: str, name: str, key: str) -> None:
    """Raise ConfigError unless the name is known or an import path."""
    names = tuple(KINDS[kind].ours)
    module, _, cls = name.partition(":")
    is_path = all(word.isidentifier() for word in (*module.split("."), *cls.split(".")))
    if name in names or is_path:
        return
    if ":" in name or "." in name or not names:
        raise ConfigError(f"{key} must be a name or package.module:Class, got {name!r}")
    one_of(key, name, names)


def resolve(kind: str, name: str) -> Any:
    """Return the class of a name.

    Raises ConfigError if the name is unknown or the class cannot be imported or has another base.
    """
    key, base_path, ours, _ = KINDS[kind]
    check_name(kind, name, key)
    loaded, base = _loaded(key, ours.get(name, name)), _loaded(key, base_path)
    if not (inspect.isclass(loaded) and issubclass(loaded, base)):
        raise ConfigError(
            f"{key}: {name} is no class derived from {base.__module__}.{base.__name__}"
        )
    return loaded


def construct(kind: str, part: str | type, *args: Any, **named: Any) -> Any:
    """Return an instance of a class, or of the class of a name.

    Raises ConfigError if the class cannot be found or its ``__init__`` takes other arguments.
    """
    cls = resolve(kind, part) if isinstance(part, str) else part
    try:
        inspect.signature(cls).bind(*args, **named)
    except TypeError as error:
        of = KINDS[kind]
        raise ConfigError(
            f"{of.key}: {cls.__module__}:{cls.__qualname__} cannot be constructed: {error}; let "
            f"its __init__ take {of.init}"
        ) from None
    return cls(*args, **named)


_CLASS_PATH = re.compile(r"(?<![\w.])([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]")


def find_modules(text: str, folder: Path) -> None:
    """Make a folder importable if a module that a class path in the text names lies there."""
    for top in _CLASS_PATH.findall(text):
        lies_there = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
        if lies_there and str(folder) not in sys.path:
            sys.path.append(str(folder))  # after the installed packages, which it cannot replace


def import_modules(names: Collection[str]) -> None:
    """Import modules that the user trusts, so that the config of a run may name their classes."""
    for name in names:
        try:
            importlib.import_module(name)
        except (ImportError, TypeError, ValueError) as error:  # "." and "" are no names
            raise ConfigError(f"module {name} cannot be imported: {error}") from error


def check_imports(values: Mapping[str, Any], where: Path) -> None:
    """Raise ConfigError if a config names classes of modules that were not imported so far.

    Args:
        values: The values of the config, by dotted key.
        where: The folder or file that has them.
    """
    named = [(kind.key, values.get(kind.key)) for kind in KINDS.values()]
    tables = (values.get("entities.tables") or {}).values()
    named += [("entities.tables", x.get("optimizer")) for x in tables if isinstance(x, dict)]
    for key, names in named:
        for name in map(str, names if isinstance(names, dict) else [names]):
            module = name.partition(":")[0]
            if ":" in name and module not in sys.modules:
                raise ConfigError(
                    f"{key}: {where} names the class {name}, and reading it runs the code of "
                    f"{module}. If you trust that code, add --allow-import {module} (in Python, "
                    f"import {module} first)"
                )


def is_built_in(kind: str, name: str) -> bool:
    """Return whether a name is that of a built-in class."""
    return name in KINDS[kind].ours


def _loaded(key: str, target: str) -> Any:
    module, _, name = target.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key}: {target} cannot be imported: {error}; install its package, or put the "
            "module beside the config, or into the folder where you start"
        ) from error
    try:
        return attrgetter(name)(loaded)
    except AttributeError:
        close = difflib.get_close_matches(name, vars(loaded), n=1, cutoff=0.7)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{key}: the module {module} has no {name}{hint}") from None
