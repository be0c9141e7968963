"""What a name in a config stands for: one of our classes, a registered one, or an import path.

    model.scorer: complex                       ours
    model.scorer: my_package.models:MyScorer    any class that can be imported
    model.scorer: my_scorer                     a name that a package gave its class, by

        kge_torchrec.register("scorer", "my_scorer", "my_package.models:MyScorer")

or, so that it is known wherever the package is installed, by an entry point:

        [project.entry-points."kge_torchrec.scorer"]
        my_scorer = "my_package.models:MyScorer"

Nothing is imported before it is asked for: reading a config costs what the config names.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from kge_torchrec.config.checks import ConfigError, one_of

_SCORERS = "kge_torchrec.models.scorers"


@dataclass(frozen=True)
class Kind:
    """A kind of part that a config names: its key, what its classes derive from, and ours."""

    key: str
    base: str
    ours: dict[str, str]  # name -> module:Class


KINDS = {
    "scorer": Kind(
        "model.scorer",
        f"{_SCORERS}.base:Scorer",
        {
            name: f"{_SCORERS}.{path}"
            for name, path in {
                "transe_l1": "translational:TransEL1",
                "transe_l2": "translational:TransEL2",
                "transh": "translational:TransH",
                "distmult": "bilinear:DistMult",
                "complex": "bilinear:ComplEx",
                "rotate": "rotational:RotatE",
                "simple": "bilinear:SimplE",
                "rescal": "bilinear:RESCAL",
                "tucker": "bilinear:TuckER",
                "qmult": "algebra:QMult",
                "quate": "algebra:QuatE",
                "omult": "algebra:OMult",
                "duale": "algebra:DualE",
                "keci": "clifford:Keci",
                "ckeci": "clifford:CKeci",
                "decal": "clifford:DeCaL",
                "mure": "translational:MuRE",
                "pairre": "translational:PairRE",
                "house": "rotational:HousE",
                "pyke": "translational:Pyke",
                "conve": "convolution:ConvE",
                "conex": "convolution:ConEx",
                "aconex": "convolution:AConEx",
                "convq": "convolution:ConvQ",
                "convo": "convolution:ConvO",
                "coke": "neural:CoKE",
                "shallom": "neural:Shallom",
                "lfmult": "algebra:LFMult",
            }.items()
        },
    ),
    "loss": Kind(
        "loss.name",
        "kge_torchrec.models.losses:Loss",
        {
            "softmax": "kge_torchrec.models.losses:SoftmaxLoss",
            "bce": "kge_torchrec.models.losses:BinaryCrossEntropyLoss",
            "margin": "kge_torchrec.models.losses:MarginLoss",
            "self_adversarial": "kge_torchrec.models.losses:SelfAdversarialLoss",
        },
    ),
    "regularizer": Kind(
        "loss.regularizers",
        "kge_torchrec.models.regularizers:Regularizer",
        {
            "n3": "kge_torchrec.models.regularizers:N3",
            "l2": "kge_torchrec.models.regularizers:L2",
        },
    ),
    "table_optimizer": Kind(
        "train.optimizer",
        "kge_torchrec.embeddings.optimizers:RowOptimizer",
        {
            "adam": "kge_torchrec.embeddings.optimizers:Adam",
            "rowwise_adam": "kge_torchrec.embeddings.optimizers:RowwiseAdam",
            "adagrad": "kge_torchrec.embeddings.optimizers:Adagrad",
            "rowwise_adagrad": "kge_torchrec.embeddings.optimizers:RowwiseAdagrad",
            "sgd": "kge_torchrec.embeddings.optimizers:SGD",
        },
    ),
    "reader": Kind("data.reader", "kge_torchrec.data.readers:Reader", {}),
    "negative_sampler": Kind(
        "negatives.sampling",
        "kge_torchrec.data.negatives:EntityDraw",
        {
            "uniform": "kge_torchrec.data.negatives:UniformDraw",
            "degree": "kge_torchrec.data.negatives:DegreeDraw",
        },
    ),
}
_registered: dict[tuple[str, str], str | type] = {}


def register(kind: str, name: str, target: str | type) -> None:
    """Gives a class a name that configs can use in this process.

    kind: scorer, loss, regularizer, negative_sampler, table_optimizer or reader.
    target: the class, or where it is, as "package.module:Class".

    Every process that reads such a config has to register the name: where several train, let the
    config name the import path, or let an entry point register it.

    Raises ValueError for an unknown kind, and for a name that is taken by another class.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    name = canonical(name)
    if name in KINDS[kind].ours or _registered.get((kind, name), target) != target:
        raise ValueError(f"the {kind} {name!r} exists already; register yours by another name")
    _registered[kind, name] = target


def canonical(name: str) -> str:
    """A name as it is looked up: of lower case, with underscores; import paths as they are."""
    return name if ":" in name else name.lower().replace("-", "_")


def names_of(kind: str) -> list[str]:
    """The names a config can use: ours, registered ones, those of installed packages."""
    registered = [name for of, name in _registered if of == kind]
    return list(dict.fromkeys([*KINDS[kind].ours, *registered, *_installed(kind)]))


def check_name(kind: str, name: str) -> None:
    """Raises ConfigError unless the name is known or an import path; imports nothing."""
    if ":" not in name:
        one_of(KINDS[kind].key, name, names_of(kind))


def resolve(kind: str, name: str) -> Any:
    """The class of that name.

    Raises ConfigError, naming the key, for an unknown name, for a module or class that cannot be
    imported, and for a class that is not of this kind.
    """
    check_name(kind, name)
    known = KINDS[kind].ours | _installed(kind)
    found = _loaded(KINDS[kind].key, known.get(name) or _registered.get((kind, name), name))
    base = _loaded(KINDS[kind].key, KINDS[kind].base)
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise ConfigError(
            f"{KINDS[kind].key}: {name} is no class derived from {base.__module__}.{base.__name__}"
        )
    return found


def _loaded(key: str, target: str | type) -> Any:
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key}: {target} cannot be imported: {error}; install its package, or start Python "
            "where the module lies"
        ) from error
    if not hasattr(found, name):
        raise ConfigError(f"{key}: the module {module} has no {name}")
    return getattr(found, name)


@cache
def _installed(kind: str) -> dict[str, str]:
    """What the entry points of installed packages say, {name: module:Class}."""
    return {point.name: point.value for point in entry_points(group=f"kge_torchrec.{kind}")}
