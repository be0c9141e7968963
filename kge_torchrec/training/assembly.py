"""Construction of the objects of a run from its config: backend, loss, pipeline and batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from kge_torchrec.config import Config, ConfigError, TrainConfig
from kge_torchrec.config.checks import one_of
from kge_torchrec.config.registry import resolve
from kge_torchrec.data import FEATURES
from kge_torchrec.data.batches import BatchPlan, Delivery
from kge_torchrec.data.batches.queries import (
    DistinctQueries,
    EveryQuery,
    Examples,
    QueryBatches,
    QuerySampleBatches,
    TripleQueries,
)
from kge_torchrec.data.batches.staged import StagedBatches
from kge_torchrec.data.batches.triples import TripleBatches, device_bytes, fits_device
from kge_torchrec.data.features import Features
from kge_torchrec.data.negatives import (
    FilteredSampler,
    InBatchSampler,
    NegativeSampler,
    typed_sampler,
)
from kge_torchrec.data.parts import PartLayout
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.types import Ends, runs_of_types, types_of
from kge_torchrec.distributed.processes import Processes, reduced
from kge_torchrec.embeddings.backend import EmbeddingBackend
from kge_torchrec.embeddings.handrolled import HandrolledBackend
from kge_torchrec.embeddings.init import EntityInit
from kge_torchrec.embeddings.optimizers import RowOptimizer, make_optimizer
from kge_torchrec.embeddings.row_gradients import DenseRows
from kge_torchrec.embeddings.shard import EntityTable
from kge_torchrec.environment import check_torchrec, quiet_dependencies
from kge_torchrec.errors import DataError
from kge_torchrec.kernels.comparisons import InnerProduct
from kge_torchrec.models.losses import build_loss
from kge_torchrec.models.model import Objective, QueryObjective, TripleObjective
from kge_torchrec.models.regularizers import build_regularizers
from kge_torchrec.models.scorers import SIDES, Side, build_scorer
from kge_torchrec.training.captured_step import CapturedStep
from kge_torchrec.training.disk_table import DiskTable
from kge_torchrec.training.full_candidates import FullCandidates
from kge_torchrec.training.own_parts import check_parts, check_sampler
from kge_torchrec.training.step import PipelinedStep, SampledStep, Step

log = logging.getLogger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # others: float32
_ROWS_FOR_BF16 = 4096  # products with fewer rows take too little of a step
_SCORER_STREAM = 0x5C0  # separates the scorer's random stream from others with the same seed


def sides_of(name: str) -> tuple[Side, ...]:
    """Return the sides of negatives.sides, which is "both" or the name of one side."""
    return tuple(side for side in SIDES if name in ("both", side))


@quiet_dependencies()
def build_backend(config: Config, store: TripleStore, processes: Processes) -> EmbeddingBackend:
    """Make table, scorer and optimizers with initial values that depend on the seed only.

    Collective.
    """
    if config.entities.engine == "torchrec":
        check_torchrec("entities.engine torchrec", "entities.engine handrolled")
    if config.entities.exchange.dtype == "int8" and processes.world_size > 1:
        check_torchrec("entities.exchange.dtype int8", "bf16 or fp16")
    config.check_device(processes.device.type == "cuda")
    train = config.train
    objective = build_objective(config, store.num_relations)
    init = EntityInit.of(config.model, objective.scorer.zero_columns)
    stream = np.random.Generator(np.random.SFC64([config.seed, _SCORER_STREAM]))
    with torch.no_grad():
        objective.scorer.reset_parameters(init.draw, stream)
    if config.train.precision == "auto" and _gains_by_bf16(config, objective, store.num_rows):
        objective.precision = torch.bfloat16 if _all_have_bf16(processes) else torch.float32
    check_parts(config, objective, processes)
    if config.dense.compile:
        assert isinstance(objective, TripleObjective)  # the config rejects other objectives
        objective.compile_parts()
    tables = entity_tables(config, store, objective.scorer.zero_columns)
    placement = config.entities.placement
    if placement != "memory" and store.has_features:
        raise ConfigError(
            f"entities.placement {placement}: {store.path} has features of entities, whose sums "
            "need all rows in the fastest memory; use memory, or triples without features"
        )
    layout = PartLayout.of_config(config, store.num_rows, processes.world_size)
    if layout is not None:  # the engine's table holds the parts in memory
        rows = layout.buffer_rows * processes.world_size
        tables = [EntityTable.of_all(rows, tables[0].optimizer, tables[0].init)]
    kind: Callable[..., EmbeddingBackend] = HandrolledBackend
    if config.entities.engine == "torchrec":
        from kge_torchrec.embeddings.torchrec import TorchRecBackend

        kind = TorchRecBackend
    return kind(config, tables, objective, dense_optimizer(train), processes)


def build_objective(config: Config, num_relations: int) -> Objective:
    """Make scorer and loss without setting initial values."""
    negatives = config.negatives
    kind: type[Objective] = Objective if negatives.is_full else TripleObjective
    if negatives.regime == "kvssample":
        kind = QueryObjective
    return kind(
        build_scorer(config.model, num_relations),
        build_loss(config.loss),
        sides_of(config.negatives.sides),
        build_regularizers(config.loss),
        config.loss.relation_weight,
        _DTYPES.get(config.train.precision, torch.float32),
        config.model.dropout.entity,
    )


def _gains_by_bf16(config: Config, objective: Objective, rows: int) -> bool:
    """Return whether most of a step's time is products with the rows of all entities."""
    comparison = objective.scorer.comparison
    by_products = isinstance(getattr(comparison, "inner", comparison), InnerProduct)
    return config.negatives.is_full and by_products and rows >= _ROWS_FOR_BF16


def _all_have_bf16(processes: Processes) -> bool:
    """Return whether the CPUs of all ranks multiply bfloat16, and say so.  Collective."""
    if processes.device.type != "cpu":
        return False
    names = "_is_avx512_bf16_supported", "_is_amx_tile_supported"
    has = any(getattr(torch.cpu, name, bool)() for name in names)
    all_have = bool(reduced(torch.tensor(int(has)), dist.ReduceOp.MIN))
    if all_have and processes.is_first:
        log.info(
            "train.precision auto: this CPU has bf16 products, so scores of all entities are "
            "computed in bf16; train.precision fp32 computes them in float32"
        )
    return all_have


def entity_tables(config: Config, store: TripleStore, zero_columns: int) -> list[EntityTable]:
    """Return the entity tables of a run: one of all entities, or by entities.tables."""
    init, chosen = EntityInit.of(config.model, zero_columns), config.entities.tables
    if chosen is None:
        optimizer = table_optimizer(config.train, config.entities.preset)
        return [EntityTable.of_all(store.num_rows, optimizer, init)]
    runs = runs_of_types(store)
    known = {name for name, _ in runs}
    if store.size.typed:
        known |= set(types_of(store).names.to_pylist())
    elif FEATURES not in known or not set(chosen) <= {FEATURES}:
        raise ConfigError(
            f"entities.tables: {store.path} does not have one type per entity; give types by "
            "data.types, columns head_type and tail_type, or a description of a typed graph"
        )
    for name in chosen:
        one_of(f"entities.tables: a type of {store.path}", name, sorted(known))

    def table(name: str, ids: range) -> EntityTable:
        own = config.entities.table_of(name, config.train, config.model)
        optimizer = make_optimizer(own.optimizer, own.lr, **vars(own.optimizer_options))
        return EntityTable(ids, optimizer, EntityInit(own.init, own.init_scale, zero_columns), name)

    return [table(name, ids) for name, ids in runs]


def table_optimizer(train: TrainConfig, preset: str = "fbgemm") -> RowOptimizer:
    """Make the table's optimizer from the config."""
    options = vars(train.options_in("optimizer_options"))
    return make_optimizer(train.optimizer, train.lr, preset, **options)


def dense_optimizer(
    train: TrainConfig,
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return a function that makes the optimizer of the dense parameters."""
    table, rate = table_optimizer(train), train.relation_lr or train.lr

    def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        own = table.dense(parameters, rate)
        return DenseRows(parameters, rate, table) if own is None else own

    return build


def build_pipeline(
    config: Config,
    backend: EmbeddingBackend,
    processes: Processes,
    features: Features | None = None,
) -> Step:
    """Make the step that trains the batches of ``build_batches``.  Collective."""
    place = processes.device.type == "cuda", processes.world_size, features is not None
    if config.captures(*place):
        if config.train.pipeline == "auto" and processes.is_first:
            log.info("steps replay a CUDA graph; train.pipeline loop takes the plain path")
        return CapturedStep(backend, config.train, processes.device)
    if config.train.pipeline == "graph" and processes.is_first:
        problem = config.capture_problem(*place)
        log.warning("train.pipeline graph: %s; steps take the plain path", problem)
    if not config.negatives.is_full:
        is_pipelined = config.train.pipeline == "sparse_dist"
        if config.train.pipeline in ("auto", "graph"):  # no graph can be captured
            is_pipelined = backend.gains_by_pipeline
        kind = PipelinedStep if is_pipelined and not config.entities.on_disk else SampledStep
        return kind(backend, config.train, processes.device)
    loss = backend.unwrapped_model.objective.loss
    num_entities = backend.shard().num_entities - (0 if features is None else features.count)
    return FullCandidates(
        backend, loss.over_all(num_entities), config.train, processes.device, features=features
    )


def build_batches(
    config: Config,
    store: TripleStore,
    processes: Processes,
    disk: DiskTable | None = None,
) -> TripleBatches | QueryBatches | QuerySampleBatches:
    """Return this rank's batches.  Collective unless negatives.among is "all"."""
    plan = batch_plan(config, store, processes)
    delivery = _delivery(config, store, processes)
    regime = config.negatives.regime
    if regime == "kvssample":
        return QuerySampleBatches(store.filter_index(("train",)), plan, delivery)
    weights = store.weights("train") if config.data.weights == "loss" else None
    if disk is not None:
        return StagedBatches(store.train, plan, delivery, weights, disk.layout, disk.show)
    if regime == "sampled":
        resident = _makes_batches_on_device(config, store, plan, processes)
        device = processes.device if resident else None
        return TripleBatches(store.train, plan, delivery, weights, device)
    ends = None
    if config.negatives.among == "types":
        if not store.size.typed:
            raise DataError(
                f"negatives.among types: with negatives.regime {regime} every entity of "
                f"{store.path} needs one type; set data.types, or negatives.among all"
            )
        ends = Ends(store)
    return QueryBatches(_examples(config, store, weights), plan, delivery, ends)


def _makes_batches_on_device(
    config: Config, store: TripleStore, plan: BatchPlan, processes: Processes
) -> bool:
    """Return whether train.batches means the device, and say so on CUDA."""
    chosen, on_cuda = config.train.batches, processes.device.type == "cuda"
    if chosen == "cpu" or (chosen == "auto" and not on_cuda):
        return False
    if resolve("negative_sampler", config.negatives.sampling).on_cpu:
        if processes.is_first:
            log.info("batches are made on the CPU, where %s works", config.negatives.sampling)
        return False
    if chosen == "device":
        return True
    features = () if plan.features is None else (store.num_entities, len(plan.features.ids))
    size = device_bytes(config, len(store.train), *features)
    free, memory = torch.cuda.mem_get_info(processes.device)
    problem = ""
    if not fits_device(size, memory, free):
        of = f"{memory / 2**30:,.1f} GiB, of which {free / 2**30:,.1f} are free"
        problem = f"triples take {size / 2**30:,.1f} of {of}"
    if processes.is_first:
        where = f"the CPU ({problem})" if problem else f"the GPU ({size / 2**30:,.2f} GiB)"
        log.info("batches are made on %s; train.batches cpu or device changes it", where)
    return not problem


def batch_plan(config: Config, store: TripleStore, processes: Processes) -> BatchPlan:
    """Return the plan of the batches of a run, the same on every rank.

    Collective, with the errors of ``build_batches``.
    """
    negatives, triples = config.negatives, config.negatives.regime == "sampled"
    return BatchPlan(
        batch_size=config.train.batch_size,
        seed=config.seed,
        sides=sides_of(negatives.sides),
        sampler=None if negatives.is_full else _sampler(config, store, processes),
        counts={side: negatives.drawn(side) if triples else negatives.count for side in SIDES},
        chunk_size=negatives.chunk_size,
        log_q=negatives.log_q,
        accumulation=config.train.accumulation,
        max_answers=negatives.max_answers,
        features=Features.of(store),
    )


def _sampler(config: Config, store: TripleStore, processes: Processes) -> NegativeSampler:
    """Return the sampler of a run's candidates."""
    negatives, triples = config.negatives, config.negatives.regime == "sampled"
    named = resolve("negative_sampler", negatives.sampling)
    sampler: NegativeSampler = named.of(store, negatives.options_in("options"))
    sides = sides_of(negatives.sides)
    check_sampler(sampler, store.num_entities, sides, store.train if triples else None)
    if negatives.in_batch:
        degrees = {side: store.degrees(side) for side in SIDES} if negatives.log_q else None
        sampler = InBatchSampler(sampler, degrees, negatives.in_batch == "same_relation")
    if negatives.restricts:
        sampler = typed_sampler(sampler, negatives, store)
    if negatives.filtered and triples:
        sampler = FilteredSampler(sampler, store.filter_index(("train",)))
    return sampler


def _delivery(config: Config, store: TripleStore, processes: Processes) -> Delivery:
    """Return how this rank gets its share of the batches, in the form for its device."""
    on_cuda = processes.device.type == "cuda"
    captures = config.captures(on_cuda, processes.world_size, store.has_features)
    delivery = Delivery(
        processes.rank, processes.world_size, ahead=on_cuda, deduplicate=not captures
    )
    if config.entities.engine == "torchrec":
        from kge_torchrec.embeddings.torchrec.collection import feature_for

        return replace(delivery, feature=feature_for(processes.device.type))
    return delivery


def _examples(config: Config, store: TripleStore, weights: np.ndarray | None = None) -> Examples:
    """Return the examples of an epoch in the regimes other than "sampled"."""
    regime, sides = config.negatives.regime, sides_of(config.negatives.sides)
    if regime == "1vsall":
        return TripleQueries(store.train, sides, weights)
    known = store.filter_index(("train",))
    if regime == "allvsall":
        return EveryQuery(known, sides, (store.num_entities, store.num_relations))
    return DistinctQueries(known, sides, config.loss.sums_answers)
