"""Settings of the model: scorer, loss and dense parameters."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal

from kge_torchrec.config.checks import (
    ConfigError,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Share,
)
from kge_torchrec.config.keys import (
    Part,
    Section,
    declared,
    fixed,
    key,
    only_with,
    only_without,
    parse_options,
)
from kge_torchrec.config.registry import KINDS, part_name, resolve
from kge_torchrec.config.sizing import Distribution

SCORER_NAMES = tuple(KINDS["scorer"].ours)

INITIAL = fixed("initial values were drawn when the run began; start a new run")
_FROM_VECTORS = only_without("model.init_from", None, "model.init_from")


@dataclass(frozen=True)
class Dropout(Section, prefix="model.dropout."):
    """Dropout probabilities."""

    entity: Share = 0.0
    """Dropout probability for entity embeddings, of queries and candidates."""
    relation: Share = 0.0
    """Dropout probability for relation embeddings."""
    input: Share = 0.0
    """Further dropout probability for the entity and relation of a query."""
    hidden: Share = 0.0
    """Dropout probability for encoded queries and for the hidden layers of networks."""


@dataclass(frozen=True)
class Vectors(Section, prefix="model.init_options."):
    """Options of ``model.init_from``."""

    frozen: bool = key(False, acts=_FROM_VECTORS, resume=INITIAL)
    """Keep entities of model.init_from at their initial values."""


@dataclass(frozen=True)
class ModelConfig(Section, prefix="model."):
    """The scorer and its parameters."""

    scorer: Annotated[str, part_name("scorer")] = key("complex", resume=fixed())
    """Scorer, by name (see docs/reference/scorers.md) or as package.module:Class. Names:
    SCORER_NAMES."""
    dim: PositiveInt = key(None, resume=fixed())
    """Elements per entity row (complex: dim / 2 complex numbers); null: chosen by size."""
    reciprocal: bool = key(True, resume=fixed())
    """Give every relation an inverse for head queries (Lacroix et al. 2018)."""
    init: Distribution = key(None, resume=INITIAL)
    """Distribution of the initial values: normal, uniform, xavier_normal or xavier_uniform; null:
    what suits the scorer."""
    init_scale: PositiveFloat = key(None, resume=INITIAL)
    """Standard deviation (normal), half width (uniform) or gain (xavier) of the initial values;
    null: what suits the scorer and model.init."""
    normalization: Literal["none", "unit", "layer"] = key("none", resume=fixed())
    """none; unit (entities have Euclidean length 1); or layer (a LayerNorm of entities and one of
    relations)."""
    biases: bool = key(False, resume=fixed())
    """Learn a head bias and a tail bias per entity (Chami et al. 2020): the last two of its
    model.dim elements, initially 0."""
    dropout: Dropout = key(Dropout)
    options: dict[str, Any] = key(dict, resume=fixed(), part=Part("scorer", "scorer"))
    """Other options of the scorer, such as {p: 1, q: 1}; `kge-torchrec list scorer` lists them."""
    init_from: str | None = key(None, resume=INITIAL)
    """Initial vectors by label: the folder of a run, an export to Parquet, or a Parquet file of
    labels and lists of numbers."""
    init_options: Vectors = key(Vectors)

    def __post_init__(self) -> None:
        super().__post_init__()
        keys = declared(ModelConfig).items()
        if any(attrgetter(name)(self) != item.default for name, item in keys):
            self._check_scorer()  # loads torch, which a help text of defaults does without

    def _check_scorer(self) -> None:
        scorer = resolve("scorer", self.scorer)
        options = self.options_in("options")
        if self.dropout.hidden and scorer.measures_distance(options):
            raise ConfigError(
                f"model.dropout.hidden has no meaning for {self.scorer}, whose query is a point; "
                "leave it out"
            )
        of_biases = 2 * (self.biases or scorer.has_biases)
        dim = scorer.multiple_of(options) * 64 + of_biases if self.dim is None else self.dim
        scorer.check_row(dim, self.reciprocal, options, self.biases)


@dataclass(frozen=True)
class LossConfig(Section, prefix="loss."):
    """The loss of a query and the penalties on touched rows."""

    name: Annotated[str, part_name("loss")] = "softmax"
    """softmax (cross-entropy over the candidates), bce (logistic), margin, self_adversarial, bpr,
    or package.module:Class."""
    n3: NonNegativeFloat = key(None)
    """Weight of the nuclear 3-norm penalty; null: chosen from the triples per entity for softmax
    with a linear scorer, otherwise 0."""
    relation_weight: NonNegativeFloat = key(None)
    """Weight of the relation-prediction loss (Chen et al. 2021); null: chosen from the number of
    relations for softmax training with a linear scorer, otherwise 0."""
    regularizers: dict[str, Any] = key(dict)
    """Other penalties, each with its weight or its options, such as {l2: 0.01, dura: 0.05};
    `kge-torchrec list regularizer` lists them."""
    options: dict[str, Any] = key(dict, part=Part("loss", "name"))
    """Options of the loss, such as {margin: 9.0} or {label_smoothing: 0.1}; `kge-torchrec list
    loss` lists them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name != "softmax":
            self.options_in("options")  # loads torch, which a help text of defaults does without
        self.regularizer_options()

    @property
    def sums_answers(self) -> bool:
        """Whether the loss of a query is the sum of the losses of its answers, not their mean."""
        return self.name == "softmax" and self.options_in("options").answers == "sum"

    @property
    def has_closed_form(self) -> bool:
        """Whether the loss can train against all entities."""
        # softmax has one; resolving a loss loads torch, which a help text does without
        return self.name == "softmax" or resolve("loss", self.name).has_closed_form()

    @property
    def allows_typed_candidates(self) -> bool:
        """Whether the loss over all entities can be that over the entities of some types.

        Label smoothing and means count all entities.
        """
        counts_all = self.options.get("label_smoothing") or self.options.get("reduction") == "mean"
        return self.name in ("softmax", "bce") and not counts_all

    def regularizer_options(self) -> dict[str, Any]:
        """The ``Options`` of each of ``regularizers``, by name."""
        parsed = {}
        for name, chosen in self.regularizers.items():
            if chosen is None:
                raise ConfigError(f"loss.regularizers.{name} has no value; give its weight")
            values = chosen if isinstance(chosen, dict) else {"weight": chosen}
            of = resolve("regularizer", name)
            parsed[name] = parse_options(of, values, f"loss.regularizers.{name}")
        return parsed


_IN_PARTS = only_with("dense.wrapper", "fsdp", "hybrid")


@dataclass(frozen=True)
class DenseOptions(Section, prefix="dense.options."):
    """Options of the dense parameters' wrapper."""

    sharding: Literal["full", "grad_op"] = key("full", acts=_IN_PARTS)
    """full holds whole parameters only while a forward or a backward runs; grad_op from forward to
    the end of backward."""
    replicas: PositiveInt | None = key(None, acts=only_with("dense.wrapper", "hybrid"))
    """Groups of ranks that each hold all parameters; null: each host is one."""
    cpu_offload: bool = key(False, acts=_IN_PARTS)
    """Keep parts, their gradients and optimizer state in main memory."""


@dataclass(frozen=True)
class DenseConfig(Section, prefix="dense."):
    """The distribution of the dense parameters (all parameters of the scorer) over the ranks."""

    wrapper: Literal["auto", "none", "ddp", "fsdp", "hybrid"] = "auto"
    """none (one rank); ddp (every rank holds all); fsdp (each holds a part); hybrid (parts within
    groups); auto: none or ddp, by number of ranks."""
    compile: bool = False
    """Compile scorer and loss with torch.compile."""
    options: DenseOptions = key(DenseOptions)
