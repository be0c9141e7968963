"""Values for the keys that a config leaves null, chosen from the graph.

Small or dense graphs take many epochs of small batches, large ones few of large batches; sparse
ones need the penalty more.  Each rule names what it was fitted to.
docs/reference/results.md has the results, beside tuned figures.  A key that is given stays, and a
run's config.yaml has all numbers, so that they do not change when it resumes elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from kge_torchrec.config.keys import declared, parse_options, replace_keys
from kge_torchrec.config.registry import resolve

Config = Any  # kge_torchrec.config.Config, whose file imports this one
# A race decides the keys of these sections but the free ones.  A value in one of them decides it.
_RACED = ("model", "loss", "negatives", "train")
_FREE = ("model.dim", "train.precision", "train.pipeline", "train.batches", "train.log_every")
_DIM = {"small": 64, "base": 256, "large": 1024}
_CANDIDATES = {"small": 256, "base": 1024, "large": 4096}
_EPOCHS = {"small": 0.5, "base": 1.0, "large": 1.0}
_RATES = {"adam": 0.003, "rowwise_adam": 0.003, "sgd": 0.5}  # adagrad and others: 0.1

# The usual scale of a distribution of initial values.
SCALES = {"normal": 0.001, "uniform": 0.25, "xavier_normal": 1.0, "xavier_uniform": 1.0}
Distribution = Literal["normal", "uniform", "xavier_normal", "xavier_uniform"]

# Entities from which a row has half the numbers, since memory decides: 10M x 128 with Adagrad's
# state are 10 GB.
_MANY = 1_000_000
_MOST_RELATIONS = 1000
_SCORES_OF_VALIDATION = 2e10  # about a minute of two CPU cores


@dataclass(frozen=True)
class GraphSize:
    """Counts of a graph: entities, relations (without inverses), training and valid triples.

    ``typed`` says whether every entity has one type.  ``features`` of entities have rows in the
    table of entities, behind them.
    """

    entities: int
    relations: int
    triples: int
    valid: int = 0
    typed: bool = False
    features: int = 0

    @property
    def rows(self) -> int:
        """Rows of the entity table."""
        return self.entities + self.features

    @property
    def density(self) -> float:
        """Training triples per entity."""
        return self.triples / max(1, self.entities)


def is_raced(key: str) -> bool:
    """Return whether a race decides a key, where no key of this kind is given."""
    return key.partition(".")[0] in _RACED and key not in _FREE


def decided_by(config: Config) -> str | None:
    """Why rules complete a config, such as "loss.name is given"; None if a race does."""
    if config.default == "rules":
        return "default is rules"
    for key, item in declared(config.__class__).items():
        if is_raced(key) and attrgetter(key)(config) != item.default:
            return f"{key} is given"
    needs = {
        "evaluation.every is 0": config.evaluation.every == 0,
        f"data.weights is {config.data.weights}": config.data.weights != "ignore",
        "dense.compile is true": config.dense.compile,
        "entities.tables is given": config.entities.tables is not None,
        f"entities.placement is {config.entities.placement}": (
            config.entities.placement != "memory"
        ),
    }
    return next((reason for reason, holds in needs.items() if holds), None)


def settled(config: Config, graph: GraphSize, on_cuda: bool = False, world_size: int = 1) -> Config:
    """Return the config with a value for every null that stands for one, on some ranks."""
    model, loss, negatives = config.model, config.loss, config.negatives
    scorer = resolve("scorer", model.scorer)
    is_linear = scorer.relation_query is not None  # one product scores all relations
    is_softmax = loss.name == "softmax"

    # A scale belongs to its distribution: another one than the scorer's own gets its usual scale.
    init, init_scale = scorer.start
    if model.init not in (None, init):
        init, init_scale = model.init, SCALES[model.init]

    # The penalty lies between Lacroix et al.'s 0.1 (WN18RR: 2.1 triples per entity), 0.05 for
    # FB15k-237 (19) and the 0.01 that suits Kinship and UMLS (82 and 39). IVR contains it.
    n3 = 0.0
    if is_linear and is_softmax and not {"n3", "ivr"} & loss.regularizers.keys():
        n3 = round(min(0.1, max(0.01, 0.18 / math.sqrt(max(graph.density, 1e-3)))), 3)

    # More relations teach more (Chen et al. 2021 take 4 for FB15k-237, 0.05 for WN18RR). With
    # thousands of relations their scores would outnumber those of the candidates.
    relation_weight = 0.0
    single = negatives.examples == "triples" and graph.relations <= _MOST_RELATIONS
    if is_linear and is_softmax and single:
        relation_weight = min(0.5, graph.relations / 100)

    # Candidates: a power of two, no more than hold all entities once.
    count = min(_CANDIDATES[config.size], max(256, _power_above(graph.entities)))
    by_type = negatives.is_full and loss.allows_typed_candidates
    if negatives.regime == "sampled":
        by_type = negatives.sampling == "uniform" and not negatives.log_q

    epochs = _epochs(config, graph) if config.train.epochs is None else config.train.epochs

    # 512 steps per epoch of 128 to 1,024 triples. On GPUs small batches wait for kernel launches:
    # 8,192 per rank there, as long as an epoch keeps 100 steps.
    batch_size = 2 ** round(math.log2(graph.triples / 512)) if graph.triples > 512 else 128
    batch_size = min(1024, max(128, batch_size))
    if on_cuda and not negatives.is_full:
        batch_size = max(batch_size, min(8192 * world_size, graph.triples // 100))

    # All validation triples (0) unless ranking them takes minutes; otherwise at least a thousand.
    most = max(1000, int(_SCORES_OF_VALIDATION / max(1, 2 * graph.entities)))
    values = {
        "model.dim": _dim(config, scorer, graph),
        "model.init": init,
        "model.init_scale": init_scale,
        "loss.n3": n3,
        "loss.relation_weight": relation_weight,
        "negatives.count": count,
        "negatives.among": "types" if graph.typed and by_type else "all",
        "train.epochs": epochs,
        "train.batch_size": batch_size,
        "train.lr": rate_of(config.train.optimizer),
        "evaluation.every": max(1, epochs // 10),
        "evaluation.patience": 3,
        "evaluation.max_triples": 0 if graph.valid <= most else most,
        "evaluation.candidates": "types" if graph.typed else "all",
    }
    return filled(config, values)


def _epochs(config: Config, graph: GraphSize) -> int:
    """Return 100 epochs for few triples, 20 for FB15k-237, at least 10.

    Early stopping ends most runs before.
    """
    epochs = min(100, max(10, math.ceil(5.5e6 / max(1, graph.triples))))
    return max(5, round(epochs * _EPOCHS[config.size]))


def filled(config: Config, values: dict[str, Any], replaced: Collection[str] = ()) -> Config:
    """Return the config with the values, by dotted key, for the keys that are null or replaced."""
    return replace_keys(
        config,
        {
            key: value
            for key, value in values.items()
            if key in replaced or attrgetter(key)(config) is None
        },
    )


def rate_of(optimizer: str) -> float:
    """Return the learning rate that suits an optimizer."""
    return _RATES.get(optimizer, 0.1)


def _dim(config: Config, scorer: Any, graph: GraphSize) -> int:
    """Return the dim of the size, rounded up for the scorer; smaller if relations are matrices."""
    dim = _DIM[config.size] // (2 if graph.entities > _MANY else 1)
    options = parse_options(scorer, config.model.options, "model.options")
    multiple = math.lcm(4, scorer.multiple_of(options))  # FBGEMM's rows are whole 16 bytes on GPUs
    dim += -dim % multiple
    while scorer.relation_dim(dim, options) > 16 * dim and dim >= 2 * max(64, multiple):
        dim = dim // 2 + -(dim // 2) % multiple
    return dim if not config.model.biases else _with_biases(dim, scorer.multiple_of(options))


def _with_biases(dim: int, multiple: int) -> int:
    """Return dim plus two biases, or a little more if the sum must be a multiple of 4."""
    fitting = (n + 2 for n in range(dim, dim + 4 * multiple, multiple) if (n + 2) % 4 == 0)
    return next(fitting, dim + 2)


def _power_above(number: int) -> int:
    return 2 ** math.ceil(math.log2(max(2, number)))
