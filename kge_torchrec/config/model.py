"""Settings of the model: scorer, loss, dense parameters, and the backend of the entity table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Optional, Union

from kge_torchrec.config.checks import (
    PICKED,
    ConfigError,
    PickedFloat,
    PickedInt,
    PickedText,
    check_share,
    choice,
    least,
    not_negative,
    one_of,
    positive,
)
from kge_torchrec.config.keys import (
    Part,
    Resume,
    check_values,
    default_of,
    documented,
    fixed,
    key,
    only_with,
    only_without,
    options_in,
    options_key,
    same_names,
)
from kge_torchrec.config.options import parse_options
from kge_torchrec.config.registry import KINDS, canonical, check_name, resolve
from kge_torchrec.config.sparse_options import FBGEMM, SparseOptions, choose
from kge_torchrec.config.type_tables import INIT_NAMES, TypeTable

SCORER_NAMES = tuple(KINDS["scorer"].ours)
ALIASES = {"transe": "transe_l1", "dot": "operator"}

INITIAL = fixed("initial values were drawn when the run began; start a new run")
_FROM_VECTORS = only_without("model.init_from", None, "model.init_from")


DROPOUTS = ("entity", "relation", "input", "hidden")


@dataclass(frozen=True)
class Dropout:
    """Dropout probabilities."""

    entity: float = key(
        0.0,
        "Dropout probability for entity embeddings, of queries and candidates.",
        check=check_share,
    )
    relation: float = key(0.0, "Dropout probability for relation embeddings.", check=check_share)
    input: float = key(
        0.0,
        "Further dropout probability for the entity and relation of a query.",
        check=check_share,
    )
    hidden: float = key(
        0.0,
        "Dropout probability for encoded queries and for the hidden layers of networks.",
        check=check_share,
    )


@dataclass(frozen=True)
class Vectors:
    """Options of ``model.init_from``."""

    width: str = key(
        "refuse",
        "Vectors whose width is not model.dim: refuse them; project them by a random "
        "orthonormal matrix (random) or onto principal components (pca).",
        check=choice("refuse", "random", "pca"),
        acts=_FROM_VECTORS,
    )
    frozen: bool = key(
        False,
        "Keep entities of model.init_from at their initial values.",
        acts=_FROM_VECTORS,
    )


@documented
@dataclass(frozen=True)
class ModelConfig:
    """The scorer and its parameters."""

    scorer: str = key(
        "complex",
        "Scorer, by name (see docs/reference/scorers.md) or as package.module:Class. Names: "
        "transe_l1, transe_l2, transh, distmult, complex, rotate, rotate_l2, simple, rescal, "
        "tucker, qmult, quate, omult, duale, keci, ckeci, decal, mure, pairre, house, pyke, conve, "
        "conex, aconex, convq, convo, coke, shallom, lfmult, rote, roth, meim, operator "
        "(also as dot).",
        resume=fixed(),
    )
    dim: PickedInt = key(
        PICKED,
        "Elements per entity row (complex: dim / 2 complex numbers); null: chosen by size.",
        check=least(1),
        resume=fixed(),
    )
    reciprocal: bool = key(
        True,
        "Give every relation an inverse for head queries (Lacroix et al. 2018).",
        resume=fixed(),
    )
    init: PickedText = key(
        PICKED,
        "Distribution of the initial values: normal, uniform, xavier_normal or xavier_uniform; "
        "null: what suits the scorer.",
        check=choice(*INIT_NAMES),
        resume=INITIAL,
    )
    init_scale: PickedFloat = key(
        PICKED,
        "Standard deviation (normal), half width (uniform) or gain (xavier) of the initial values; "
        "null: what suits the scorer and model.init.",
        check=positive,
        resume=INITIAL,
    )
    normalization: str = key(
        "none",
        "none; unit (entities have Euclidean length 1); or layer (a LayerNorm of entities and one "
        "of relations).",
        check=choice("none", "unit", "layer"),
        resume=fixed(),
    )
    biases: bool = key(
        False,
        "Learn a head bias and a tail bias per entity (Chami et al. 2020): the last two of its "
        "model.dim elements, initially 0.",
        resume=fixed(),
    )
    dropout: dict[str, Any] = options_key(
        Dropout,
        "Dropout probabilities, each 0 by default: entity and relation (rows), input (rows of a "
        "query), hidden (encoded queries and layers).",
        moved={f"{place}_dropout": (place, 0.0) for place in DROPOUTS},
    )
    options: dict[str, Any] = options_key(
        Part("scorer", "scorer"),
        "Other options of the scorer, such as {p: 1, q: 1}; `kge-torchrec list scorer` lists them.",
        resume=fixed(),
        moved={},
    )
    init_from: Optional[str] = key(  # noqa: UP045
        None,
        "Initial vectors by label: the folder of a run or an export, or a file (.npy with a "
        ".txt of labels, .safetensors, .parquet, word2vec text).",
        resume=INITIAL,
    )
    init_options: dict[str, Any] = options_key(
        Vectors,
        "Options of model.init_from: width (refuse, random or pca: what to do with vectors of "
        "another width) and frozen (keep these entities).",
        resume=INITIAL,
        moved={"init_width": ("width", "refuse"), "init_frozen": ("frozen", False)},
    )

    def __post_init__(self) -> None:
        name = canonical(self.scorer)
        object.__setattr__(self, "scorer", ALIASES.get(name, name))
        check_name("scorer", self.scorer)
        check_values(self, "model.")
        if any(getattr(self, item.name) != default_of(item) for item in fields(self)):
            self._check_scorer()  # loads torch, which a help text of defaults does without

    def _check_scorer(self) -> None:
        scorer = resolve("scorer", self.scorer)
        options = options_in(self, "options", "model.")
        if self.dropouts().hidden and scorer.measures_distance(options):
            raise ConfigError(
                f"model.dropout.hidden has no meaning for {self.scorer}, whose query is a point; "
                "leave it out"
            )
        check_dim = scorer.check_biased if self.biases else scorer.check
        dim = scorer.multiple(options)[0] * 64 + 2 * self.biases if self.dim is None else self.dim
        check_dim(dim, self.reciprocal, options)

    def scorer_options(self) -> dict[str, Any]:
        """Return the scorer's own options, with their defaults."""
        return asdict(options_in(self, "options", "model."))

    def dropouts(self) -> Dropout:
        """Return the dropout probabilities."""
        return options_in(self, "dropout", "model.")

    def vectors(self) -> Vectors:
        """Return the options of ``init_from``."""
        return options_in(self, "init_options", "model.")


def weights_above_zero(key: str, weights: dict[str, float] | str) -> None:
    """Raise ConfigError unless all weights of a mapping are > 0; a file is read later."""
    for label, weight in weights.items() if isinstance(weights, dict) else ():
        positive(f"{key}.{label}", weight)


@documented
@dataclass(frozen=True)
class LossConfig:
    """The loss of a query and the penalties on touched rows."""

    name: str = key(
        "softmax",
        "softmax (cross-entropy over the candidates), bce (logistic), margin, self_adversarial, "
        "bpr, or package.module:Class.",
    )
    n3: PickedFloat = key(
        PICKED,
        "Weight of the nuclear 3-norm penalty; null: chosen from the triples per entity for "
        "softmax with a linear scorer, otherwise 0.",
        check=not_negative,
    )
    l2: float = key(0.0, "Weight of the squared-norm penalty.", check=not_negative)
    relation_weight: PickedFloat = key(
        PICKED,
        "Weight of the relation-prediction loss (Chen et al. 2021); null: chosen from the number "
        "of relations for softmax training with a linear scorer, otherwise 0.",
        check=not_negative,
    )
    relation_weights: Optional[Union[dict[str, float], str]] = key(  # noqa: UP007, UP045
        None,
        "Weights of relations in the loss: a mapping of labels to numbers > 0, or a file of lines "
        "relation, tab, weight; others have 1. Divided by the mean over the triples.",
        check=weights_above_zero,
        acts=only_with("negatives.regime", "sampled", "1vsall"),
    )
    regularizers: dict[str, Any] = key(
        dict,
        "Other penalties, each with its weight or its options, such as {dura: 0.05}; `kge-torchrec "
        "list regularizer` lists them.",
    )
    options: dict[str, Any] = options_key(
        Part("loss", "name"),
        "Options of the loss, such as {margin: 9.0} or {label_smoothing: 0.1}; `kge-torchrec list "
        "loss` lists them.",
        moved=same_names(margin=9.0, temperature=1.0, reduction="sum", label_smoothing=0.0),
    )

    def __post_init__(self) -> None:
        check_name("loss", self.name)
        check_values(self, "loss.")
        if self.name != "softmax":
            self.loss_options()  # loads torch, which a help text of defaults does without
        self.regularizer_options()

    def loss_options(self) -> Any:
        """Return the loss's ``Options``."""
        return options_in(self, "options", "loss.")

    @property
    def sums_answers(self) -> bool:
        """Whether the loss of a query is the sum of the losses of its answers, not their mean."""
        return self.name == "softmax" and self.loss_options().answers == "sum"

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


WRAPPERS = ("auto", "none", "ddp", "fsdp", "hybrid")
REPLAYING_MODES = ("reduce-overhead", "max-autotune")  # modes of torch.compile that use CUDA graphs
COMPILE_MODES = ("default", *REPLAYING_MODES, "max-autotune-no-cudagraphs")


_IN_PARTS = only_with("dense.wrapper", "fsdp", "hybrid")


@dataclass(frozen=True)
class DenseOptions:
    """Options of the dense parameters' wrapper and of torch.compile."""

    sharding: str = key(
        "full",
        "full holds whole parameters only while a forward or a backward runs; grad_op from forward "
        "to the end of backward.",
        check=choice("full", "grad_op"),
        acts=_IN_PARTS,
    )
    replicas: Optional[int] = key(  # noqa: UP045
        None,
        "Groups of ranks that each hold all parameters; null: each host is one.",
        check=least(1),
        acts=only_with("dense.wrapper", "hybrid"),
    )
    cpu_offload: bool = key(
        False, "Keep parts, their gradients and optimizer state in main memory.", acts=_IN_PARTS
    )
    compile_mode: str = key(
        "default",
        "Mode of torch.compile: default; reduce-overhead (CUDA graphs); max-autotune or "
        "max-autotune-no-cudagraphs (kernels are timed first, with or without graphs).",
        check=choice(*COMPILE_MODES),
        acts=only_with("dense.compile", True),
    )


@documented
@dataclass(frozen=True)
class DenseConfig:
    """The distribution of the dense parameters (all parameters of the scorer) over the ranks."""

    wrapper: str = key(
        "auto",
        "none (one rank); ddp (every rank holds all); fsdp (each holds a part); hybrid (parts "
        "within groups); auto: none or ddp, by number of ranks.",
        check=choice(*WRAPPERS),
    )
    compile: bool = key(False, "Compile scorer and loss with torch.compile.")
    options: dict[str, Any] = options_key(
        DenseOptions,
        "Options of the wrappers fsdp and hybrid (sharding, replicas, cpu_offload) and of "
        "compiling (compile_mode).",
        moved=same_names(sharding="full", replicas=None, cpu_offload=False, compile_mode="default"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_values(self, "dense.")

    def settings(self) -> DenseOptions:
        """Return the options of wrapper and compiler."""
        return options_in(self, "options", "dense.")


ENGINE_NAMES = ("torchrec", "handrolled")


BIAS_CORRECTION = Resume(
    "unless it changes bias_correction",
    "that changes what the states of the optimizer mean (bias_correction); start a new run",
    lambda before, after: _bias_correction(before) != _bias_correction(after),
)


def _bias_correction(config: Any) -> str:
    return config.entities.sparse_options(config.train.optimizer).bias_correction


def _without_rates(config: Any) -> dict[str, dict[str, Any]] | None:
    tables = config.entities.tables
    if tables is None:
        return None
    return {
        kind: {name: value for name, value in (own or {}).items() if name != "lr"}
        for kind, own in tables.items()
    }


_AT_EPOCH_END = Resume("between two epochs", "")
_ON_DISK = only_with("entities.placement", "disk")


@dataclass(frozen=True)
class DiskOptions:
    """How a table on disk is cut into parts."""

    parts: int = key(
        16,
        "Parts that the table is cut into. Epochs with more parts read and write more.",
        check=least(2),
        acts=_ON_DISK,
    )
    buffer: int = key(
        4, "Parts in memory at a time, at most as many as there are.", check=least(2), acts=_ON_DISK
    )


@documented
@dataclass(frozen=True)
class EntitiesConfig:
    """The backend that holds the entity table."""

    engine: str = key(
        "torchrec",
        "torchrec, or handrolled (own all_to_all exchange and sparse optimizer, to compare with).",
        check=choice(*ENGINE_NAMES),
    )
    deduplicate: bool = key(
        True,
        "Look every entity of a batch up once; false sends duplicates as well.",
        acts=only_with("negatives.regime", "sampled", "kvssample"),
    )
    preset: str = key(
        "fbgemm",
        "System that handrolled imitates, with its options: fbgemm, dicee or dgl.",
        resume=BIAS_CORRECTION,
    )
    options: dict[str, Any] = options_key(
        None,
        "Options in place of the preset's: duplicates, bias_correction, epsilon, state_dtype, "
        "state_rounding, state_device, async_step (docs/how-to/compare-backends.md).",
        resume=BIAS_CORRECTION,
        moved=same_names(**dict.fromkeys(asdict(FBGEMM))),
    )

    exchange_dtype: str = key(
        "fp32",
        "What rows and gradients travel as between ranks: fp32, fp16, bf16, or int8 (each row has "
        "its own range).",
        check=choice("fp32", "fp16", "bf16", "int8"),
        acts=only_with("negatives.regime", "sampled", "kvssample"),
    )
    placement: str = key(
        "memory",
        "Where the table and its optimizer's state lie: memory, or disk (some parts are in memory "
        "at a time; candidates are entities of these parts).",
        check=choice("memory", "disk"),
        resume=_AT_EPOCH_END,
    )
    placement_options: dict[str, Any] = options_key(
        DiskOptions,
        "Options of entities.placement disk: parts and buffer (parts in memory).",
        moved={},
        resume=_AT_EPOCH_END,
    )
    tables: Optional[dict[str, Any]] = key(  # noqa: UP045
        None,
        "Settings of node types, each with a table of its own: {user: {optimizer: adam, lr: "
        "0.01}, item: {}}; settings: optimizer, lr, optimizer_options, init, init_scale. Types "
        "without settings have those of train and model. null: one table of all entities.",
        resume=Resume(
            "learning rates only",
            "types keep their optimizers and initial values; start a new run",
            lambda before, after: _without_rates(before) != _without_rates(after),
        ),
    )

    def __post_init__(self) -> None:
        for name, values in (self.tables or {}).items():
            TypeTable.parse(name, values)
        chosen = {name: value for name, value in self.options.items() if value is not None}
        object.__setattr__(self, "options", chosen)
        for name in chosen:
            one_of("entities.options", name, tuple(asdict(FBGEMM)))
        check_values(self, "entities.")
        disk = self.disk()
        if disk.buffer > disk.parts:
            raise ConfigError(
                f"entities.placement_options.buffer: {disk.buffer} parts in memory of "
                f"{disk.parts}; use at most entities.placement_options.parts"
            )

    @property
    def on_disk(self) -> bool:
        """Whether the table lies on disk, with some parts in memory."""
        return self.placement == "disk"

    def disk(self) -> DiskOptions:
        """Return how the table is cut into parts where it lies on disk."""
        return options_in(self, "placement_options", "entities.")

    def table_of(self, kind: str, train: Any, model: Any) -> TypeTable:
        """Return the settings of a node type's table, completed from ``train`` and ``model``."""
        return TypeTable.parse(kind, (self.tables or {}).get(kind)).completed(kind, train, model)

    def optimizers(self, default: str) -> list[str]:
        """Return the optimizers of all tables; ``default`` is that of types without their own."""
        own = (self.optimizer_of(kind, default) for kind in self.tables or {})
        return list(dict.fromkeys([default, *own]))

    def optimizer_of(self, kind: str, default: str) -> str:
        """Return the optimizer of a node type's table; ``default`` without its own."""
        return TypeTable.parse(kind, (self.tables or {}).get(kind)).optimizer or default

    def sparse_options(self, optimizer: str) -> SparseOptions:
        """The preset with the keys that are set.

        Raises ConfigError, naming the key, when they contradict each other, the optimizer or the
        backend.
        """
        try:
            options = choose(self.preset, optimizer, **self.options)
        except ValueError as error:
            group = "entities." if str(error).startswith("preset") else "entities.options."
            raise ConfigError(f"{group}{error}") from None
        if self.engine == "torchrec" and options != FBGEMM:
            _refuse_for_fbgemm(self.preset, options)
        return options


def _refuse_for_fbgemm(preset: str, options: SparseOptions) -> None:
    if preset != "fbgemm":
        raise ConfigError(
            f"entities.preset {preset!r} is of the hand-rolled engine; "
            "set entities.engine handrolled"
        )
    ours, theirs = asdict(options), asdict(FBGEMM)
    key = next(name for name in ours if ours[name] != theirs[name])
    raise ConfigError(
        f"entities.options.{key} {ours[key]!r}: FBGEMM's kernel, which the torchrec engine runs, "
        f"has {theirs[key]!r} only; set entities.engine handrolled"
    )
