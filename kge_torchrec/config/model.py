"""Settings of the model: scorer, loss, dense parameters, and the backend of the entity table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Optional

from kge_torchrec.config.checks import (
    PICKED,
    ConfigError,
    PickedFloat,
    PickedInt,
    PickedText,
    at_least,
    check,
    not_negative,
    one_of,
    positive,
)
from kge_torchrec.config.options import parse_options
from kge_torchrec.config.registry import KINDS, canonical, check_name, resolve
from kge_torchrec.config.sparse_options import FBGEMM, SparseOptions, choose

SCORER_NAMES = tuple(KINDS["scorer"].ours)
INIT_NAMES = ("normal", "uniform", "xavier_normal", "xavier_uniform")


@dataclass(frozen=True)
class ModelConfig:
    """The scorer and its parameters.

    Args:
        scorer: transe_l1, transe_l2, transh, distmult, complex, rotate, rotate_l2, simple, rescal,
            tucker, qmult, quate, omult, duale, keci, ckeci, decal, mure, pairre, house, pyke,
            conve, conex, aconex, convq, convo, coke, shallom, lfmult, rote, roth or meim; or
            package.module:Class.
        dim: Real numbers an entity, whatever the scorer makes of them (complex: dim / 2 complex
            numbers); null picks them by size.
        reciprocal: Give every relation an inverse for head queries (Lacroix et al. 2018).
        init: Distribution of the start: normal, uniform, xavier_normal or xavier_uniform; null
            takes what suits the scorer.
        init_scale: Standard deviation (normal) or half width (uniform) of the start; null takes
            what suits the scorer.
        normalization: none; unit (entities have Euclidean length 1); or layer (a LayerNorm of
            entities, another of relations).
        biases: Learn a bias of every entity as a head and one as a tail, which scores are added to
            (Chami et al. 2020). They are the last two of its model.dim numbers, and start at 0.
        entity_dropout: Share of the numbers of every entity's row that are dropped, of candidates
            as of queries.
        relation_dropout: Share of the numbers of a relation that are dropped.
        input_dropout: Share of the numbers of a query's entity and relation that are dropped,
            besides.
        hidden_dropout: Share of the numbers of an encoded query that are dropped; of networks, of
            their hidden layers too.
        options: Settings that the scorer has besides; `kge-torchrec parts scorer` lists them.
        init_from: Vectors to start from, by label: the folder of a run (its entities and relations)
            or of an export, or a file of entities: .npy with their labels in a .txt beside it,
            .safetensors, .parquet, or word2vec's text. Labels that it does not have are drawn.
        init_width: Of vectors of another width than model.dim: refuse them, or project them by a
            random orthonormal matrix (random) or onto their first principal components (pca).
        init_frozen: Keep the entities that init_from has as they start.
    """

    scorer: str = "complex"
    dim: PickedInt = PICKED
    reciprocal: bool = True
    init: PickedText = PICKED
    init_scale: PickedFloat = PICKED
    normalization: str = "none"
    biases: bool = False
    entity_dropout: float = 0.0
    relation_dropout: float = 0.0
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    init_from: Optional[str] = None  # noqa: UP045
    init_width: str = "refuse"
    init_frozen: bool = False

    def __post_init__(self) -> None:
        name = canonical(self.scorer)
        object.__setattr__(self, "scorer", "transe_l1" if name == "transe" else name)
        # Runs of before list the options of all scorers, as null.
        given = {key: value for key, value in self.options.items() if value is not None}
        object.__setattr__(self, "options", given)
        check_name("scorer", self.scorer)
        at_least("model.dim", self.dim, 1)
        if self.init is not None:
            one_of("model.init", self.init, INIT_NAMES)
        positive("model.init_scale", self.init_scale)
        one_of("model.init_width", self.init_width, ("refuse", "random", "pca"))
        for key, unset in (("init_width", "refuse"), ("init_frozen", False)):
            if self.init_from is None and getattr(self, key) != unset:
                raise ConfigError(f"model.{key} is of model.init_from; set that too")
        one_of("model.normalization", self.normalization, ("none", "unit", "layer"))
        for key in ("entity_dropout", "relation_dropout", "input_dropout", "hidden_dropout"):
            value = getattr(self, key)
            check(0 <= value < 1, f"model.{key}", "in [0, 1)", value)
        if asdict(self) != {item.name: item.default for item in fields(self)} | {"options": {}}:
            self._check_scorer()  # loads torch, which a help text of defaults does without

    def _check_scorer(self) -> None:
        scorer = resolve("scorer", self.scorer)
        if self.hidden_dropout and scorer.is_distance:
            raise ConfigError(
                f"model.hidden_dropout has no meaning for {self.scorer}, whose query is a point"
            )
        options = parse_options(scorer, self.options, "model.options")
        check_dim = scorer.check_biased if self.biases else scorer.check
        dim = scorer.multiple(options)[0] * 64 + 2 * self.biases if self.dim is None else self.dim
        check_dim(dim, self.reciprocal, options)

    def scorer_options(self) -> dict[str, Any]:
        """The scorer's own options, with its defaults for those that are not given."""
        return asdict(parse_options(resolve("scorer", self.scorer), self.options, "model.options"))


@dataclass(frozen=True)
class LossConfig:
    """The loss of a query and the penalties on touched rows.

    Args:
        name: softmax (cross-entropy over the candidates), bce (logistic), margin or
            self_adversarial; or package.module:Class.
        margin: Of margin and self_adversarial.
        temperature: Of self_adversarial.
        reduction: Of bce: sum, or mean, over all candidates of a query, answers included.
        label_smoothing: Of softmax and bce, in [0, 1).
        n3: Weight of the nuclear 3-norm penalty; null picks it by the triples an entity, where
            scorers are linear and the loss is softmax.
        l2: Weight of the squared-norm penalty.
        relation_weight: Weight of telling a triple's relation by its entities (Chen et al. 2021);
            null picks it by the number of relations where triples are trained by softmax and a
            linear scorer, else 0.
        regularizers: Other penalties, each with its weight or its options, such as {dura: 0.05} or
            {n3: {weight: 0.1, relation_weight: 0.01}}; `kge-torchrec parts regularizer` lists them.
        options: Settings that the loss has besides; `kge-torchrec parts loss` lists them.
    """

    name: str = "softmax"
    margin: float = 9.0
    temperature: float = 1.0
    reduction: str = "sum"
    label_smoothing: float = 0.0
    n3: PickedFloat = PICKED
    l2: float = 0.0
    relation_weight: PickedFloat = PICKED
    regularizers: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("loss", self.name)
        for key in ("margin", "temperature", "n3", "l2", "relation_weight"):
            not_negative(f"loss.{key}", getattr(self, key))
        one_of("loss.reduction", self.reduction, ("sum", "mean"))
        smooth = self.label_smoothing
        check(0 <= smooth < 1, "loss.label_smoothing", "in [0, 1)", smooth)
        if self.name != "softmax" or self.options:
            self._check_loss()  # loads torch, which a help text of defaults does without
        self.regularizer_options()

    def _check_loss(self) -> None:
        known = self._common_to(resolve("loss", self.name))
        for key, unset in (("reduction", "sum"), ("label_smoothing", 0)):
            if getattr(self, key) != unset and key not in known:
                raise ConfigError(f"loss.{key} has no meaning for loss.name {self.name!r}")
        self.loss_options()

    def loss_options(self) -> Any:
        """The loss's ``Options``, of the keys above that it has and of ``options``."""
        loss = resolve("loss", self.name)
        return parse_options(loss, {**self._common_to(loss), **self.options}, "loss.options")

    def _common_to(self, loss: Any) -> dict[str, Any]:
        common = ("margin", "temperature", "reduction", "label_smoothing")
        known = {item.name for item in fields(loss.Options)}
        return {key: getattr(self, key) for key in common if key in known}

    def regularizer_options(self) -> dict[str, Any]:
        """The ``Options`` of each of ``regularizers``, by name."""
        found = {}
        for name, given in self.regularizers.items():
            if given is None:
                raise ConfigError(f"loss.regularizers.{name} has no value; give its weight")
            values = given if isinstance(given, dict) else {"weight": given}
            of = resolve("regularizer", name)
            found[name] = parse_options(of, values, f"loss.regularizers.{name}")
        return found


WRAPPERS = ("auto", "none", "ddp", "fsdp", "hybrid")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class DenseConfig:
    """How the dense parameters (relations and all others of the scorer) lie on the ranks.

    Args:
        wrapper: none (one rank only), ddp (every rank holds all), fsdp (every rank holds a part),
            hybrid (parts within groups of ranks that repeat each other), or auto: none on one
            rank, ddp on several.
        sharding: Of fsdp and hybrid: full holds whole parameters only while a forward or a
            backward runs, grad_op from forward to the end of backward.
        replicas: Of hybrid: groups of ranks that each hold all; null makes each host one.
        cpu_offload: Of fsdp and hybrid: parts, their gradients and optimizer state lie in main
            memory.
        compile: Compile scorer and loss with torch.compile.
        compile_mode: What torch.compile is after: default; reduce-overhead (on CUDA the kernels of
            a loss are replayed as one graph, which launches faster and keeps their memory); or
            max-autotune and max-autotune-no-cudagraphs (kernels are timed first, with or without
            graphs).
    """

    wrapper: str = "auto"
    sharding: str = "full"
    replicas: Optional[int] = None  # noqa: UP045
    cpu_offload: bool = False
    compile: bool = False
    compile_mode: str = "default"

    def __post_init__(self) -> None:
        one_of("dense.wrapper", self.wrapper, WRAPPERS)
        one_of("dense.sharding", self.sharding, ("full", "grad_op"))
        one_of("dense.compile_mode", self.compile_mode, COMPILE_MODES)
        if self.compile_mode != "default" and not self.compile:
            raise ConfigError("dense.compile_mode is of dense.compile true; set that too")
        if self.replicas is not None:
            at_least("dense.replicas", self.replicas, 1)
            if self.wrapper != "hybrid":
                raise ConfigError("dense.replicas is of dense.wrapper hybrid; set that too")
        if self.wrapper not in ("fsdp", "hybrid"):
            if self.sharding != "full":
                raise ConfigError("dense.sharding is of dense.wrapper fsdp or hybrid; set one")
            if self.cpu_offload:
                raise ConfigError("dense.cpu_offload needs dense.wrapper fsdp or hybrid")


ENGINE_NAMES = ("torchrec", "handrolled")


@dataclass(frozen=True)
class EntitiesConfig:
    """The backend that holds the entity table.

    Args:
        engine: torchrec, or handrolled (own all_to_all exchange and sparse optimizer, to compare
            with).
        deduplicate: Look every entity of a batch up once; false sends duplicates as well.
        preset: Of handrolled: fbgemm, dicee or dgl, what the keys below are when null.
        duplicates: sum or mean of the gradients of one row.
        bias_correction: Steps that adam counts: table, row or shard.
        epsilon: outside or inside the root, or uncorrected (adam).
        state_dtype: fp32 or bf16 optimizer state.
        state_rounding: Of bf16: stochastic or nearest.
        state_device: same (as the table) or cpu.
        async_step: Step in a thread while the next batch is loaded.
    """

    engine: str = "torchrec"
    deduplicate: bool = True
    preset: str = "fbgemm"
    duplicates: Optional[str] = None  # noqa: UP045
    bias_correction: Optional[str] = None  # noqa: UP045
    epsilon: Optional[str] = None  # noqa: UP045
    state_dtype: Optional[str] = None  # noqa: UP045
    state_rounding: Optional[str] = None  # noqa: UP045
    state_device: Optional[str] = None  # noqa: UP045
    async_step: Optional[bool] = None  # noqa: UP045

    def __post_init__(self) -> None:
        one_of("entities.engine", self.engine, ENGINE_NAMES)

    def sparse_options(self, optimizer: str) -> SparseOptions:
        """The preset with the keys that are set.

        Raises ConfigError, naming the key, when they contradict each other, the optimizer or the
        backend.
        """
        keys = {name: getattr(self, name) for name in asdict(FBGEMM)}
        try:
            options = choose(self.preset, optimizer, **keys)
        except ValueError as error:
            raise ConfigError(f"entities.{error}") from None
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
        f"entities.{key} {ours[key]!r}: FBGEMM's kernel, which the torchrec engine runs, has "
        f"{theirs[key]!r} only; set entities.engine handrolled"
    )
