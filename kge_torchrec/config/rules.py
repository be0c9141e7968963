"""Settings that do not go together: a table of conditions and what is said where one holds.

A message begins with the key to change, and names values of keys in braces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kge_torchrec.config.checks import ConfigError
from kge_torchrec.config.entities import MANAGED
from kge_torchrec.config.registry import resolve

Config = Any  # kge_torchrec.config.Config, whose file imports this one


def _restricts(config: Config) -> bool:
    """Return whether sampled candidates are drawn among some entities only."""
    return config.negatives.among in ("seen", "types")


RULES: list[tuple[Callable[[Config], Any], str]] = [
    (
        lambda c: c.negatives.in_batch and c.negatives.chunk_size == 1,
        "negatives.in_batch: negatives.chunk_size 1 leaves a chunk no other triples",
    ),
    (
        lambda c: c.negatives.in_batch == "same_relation" and c.negatives.log_q,
        "negatives.log_q: with negatives.in_batch same_relation it depends on the relation how "
        "often a candidate is drawn; set one of them to false",
    ),
    (
        lambda c: c.negatives.hardest and c.negatives.log_q,
        "negatives.log_q estimates the softmax over all entities from all that are drawn; with "
        "negatives.hardest only some of them count",
    ),
    (
        lambda c: (
            c.negatives.is_full
            and c.negatives.among == "types"
            and (c.negatives.among_options.types, c.negatives.among_options.share) != (None, 1)
        ),
        "negatives.among_options: negatives.regime {negatives.regime} takes all entities of the "
        "types of the store; leave types and share at their defaults",
    ),
    (
        lambda c: c.negatives.is_full and c.negatives.among == "seen",
        "negatives.among seen: negatives.regime {negatives.regime} takes every entity, or with "
        "types every entity of a type, as a candidate; use sampled",
    ),
    (
        lambda c: c.negatives.regime == "kvssample" and _restricts(c),
        "negatives.among {negatives.among}: negatives.regime kvssample draws for all queries of a "
        "batch together; use sampled",
    ),
    (
        lambda c: c.negatives.regime == "sampled" and _restricts(c) and c.negatives.log_q,
        "negatives.log_q: with negatives.among {negatives.among} it depends on the triple what is "
        "drawn how often; set it to false",
    ),
    (
        lambda c: (
            c.negatives.regime == "sampled"
            and _restricts(c)
            and c.negatives.among_options.share == 1
            and c.negatives.sampling != "uniform"
        ),
        "negatives.sampling {negatives.sampling}: negatives.among {negatives.among} draws "
        "uniformly; set uniform, or negatives.among_options.share below 1 for others that are "
        "drawn among all",
    ),
    (
        lambda c: c.negatives.is_full and c.negatives.filtered,
        "negatives.filtered: {negatives.regime} takes every entity as a candidate; set it to "
        "false, or use kvsall, where all known answers are right",
    ),
    (
        lambda c: c.entities.placement_options.buffer > c.entities.placement_options.parts,
        "entities.placement_options.buffer: {entities.placement_options.buffer} parts in memory "
        "of {entities.placement_options.parts}; use at most entities.placement_options.parts",
    ),
    (
        lambda c: c.run.resume != "never" and c.run.dir is None,
        "run.resume {run.resume} needs run.dir, the folder to look in",
    ),
    (
        lambda c: c.entities.preset == "dicee" and c.train.optimizer != "adam",
        "entities.preset: dicee has adam only, not {train.optimizer}",
    ),
    (
        lambda c: c.entities.preset == "dgl" and c.train.optimizer not in ("adam", "adagrad"),
        "entities.preset: dgl has adam and adagrad only, not {train.optimizer}",
    ),
    (
        lambda c: c.entities.preset != "fbgemm" and c.train.optimizer_options.get("weight_decay"),
        "train.optimizer_options.weight_decay: {entities.preset}'s table optimizer has none; use "
        "loss.regularizers.l2, or entities.preset fbgemm",
    ),
    (
        lambda c: c.entities.preset == "dgl" and c.train.accumulation > 1,
        "train.accumulation: with entities.preset dgl the places of a micro-batch would count, not "
        "those of the step; use entities.preset fbgemm",
    ),
    (
        lambda c: c.entities.preset != "fbgemm" and c.entities.tables is not None,
        "entities.tables: optimizers per type follow FBGEMM's arithmetic; leave entities.preset at "
        "fbgemm",
    ),
    (
        lambda c: c.data.weights == "loss" and c.negatives.examples == "queries",
        "data.weights loss: queries of negatives.regime {negatives.regime} have several answers, "
        "which share one loss, and no weight of their own; use sampled or 1vsall",
    ),
    # With reciprocal relations, tail queries use relations and head queries their inverses.
    (
        lambda c: c.model.reciprocal and c.negatives.sides == "head",
        "negatives.sides head: with model.reciprocal true, tail queries use the relations "
        "themselves, which would never be trained but are ranked; set negatives.sides both, or "
        "model.reciprocal false",
    ),
    (
        lambda c: c.model.reciprocal and c.negatives.sides == "tail",
        "negatives.sides tail: with model.reciprocal true, head queries use the relations' "
        "inverses, which would never be trained but are ranked; set negatives.sides both, or "
        "model.reciprocal false",
    ),
    (
        lambda c: c.negatives.log_q and c.loss.name != "softmax",
        "negatives.log_q corrects loss.name softmax, not {loss.name}",
    ),
    (
        lambda c: c.negatives.is_full and not c.loss.has_closed_form,
        "loss.name: {loss.name} has no closed form over all entities, which negatives.regime "
        "{negatives.regime} needs; use negatives.regime sampled or kvssample, or loss.name softmax "
        "or bce",
    ),
    (
        lambda c: c.negatives.regime == "allvsall" and resolve("loss", c.loss.name).needs_answers,
        "loss.name: {loss.name} has nothing to learn from the queries without answers that "
        "negatives.regime allvsall adds; use bce, or kvsall",
    ),
    (
        lambda c: c.loss.relation_weight and c.negatives.examples == "queries",
        "loss.relation_weight: negatives.regime {negatives.regime} trains queries, and relation "
        "prediction needs single triples; use sampled or 1vsall",
    ),
    (
        lambda c: (
            c.negatives.regime == "kvssample" and c.loss.options.get("answers", "mean") == "sum"
        ),
        "loss.options.answers sum: negatives.regime kvssample does not sum answers; use kvsall, or "
        "mean",
    ),
    (
        lambda c: c.negatives.regime == "kvssample" and c.dense.compile,
        "dense.compile: negatives.regime kvssample has answers of any number; set it to false",
    ),
    (
        lambda c: c.negatives.regime == "kvssample" and c.negatives.chunk_size,
        "negatives.chunk_size: negatives.regime kvssample samples entities for the whole batch; "
        "set it to 0",
    ),
    (
        lambda c: (
            c.negatives.is_full
            and c.negatives.among == "types"
            and not c.loss.allows_typed_candidates
        ),
        "negatives.among types: with negatives.regime {negatives.regime} only loss.name softmax "
        "and bce can leave entities out, without label_smoothing and with reduction sum; use one "
        "of them, or negatives.among all",
    ),
    (
        lambda c: c.negatives.is_full and c.train.pipeline == "sparse_dist",
        "train.pipeline: with negatives.regime {negatives.regime} every rank scores its own rows, "
        "there is no lookup for sparse_dist to send ahead; use auto",
    ),
    (
        lambda c: c.negatives.is_full and c.dense.compile,
        "dense.compile: with negatives.regime {negatives.regime} a loss is in closed form over "
        "blocks of scores, outside the function that is compiled; set it to false, or "
        "negatives.regime sampled",
    ),
    (
        lambda c: c.train.pipeline == "sparse_dist" and c.entities.engine != "torchrec",
        "train.pipeline sparse_dist is TorchRec's; with entities.engine {entities.engine} use auto "
        "or loop",
    ),
]


# Where the table lies on disk, or in main memory with a cache on the GPU: the key of a setting that
# does not go with it, when it does not, and what to use.
_NOT_ON_DISK: list[tuple[str, Callable[[Config], Any], str]] = [
    (
        "negatives.regime",
        lambda c: c.negatives.regime != "sampled",
        "sampled: otherwise every entity is a candidate, and only some are in memory",
    ),
    (
        "negatives.sampling",
        lambda c: c.negatives.sampling != "uniform",
        "uniform: candidates are entities of the parts in memory, all alike",
    ),
    (
        "negatives.among",
        _restricts,
        "all: candidates are entities of the parts in memory, of any type",
    ),
    (
        "negatives.log_q",
        lambda c: c.negatives.log_q,
        "false: chances are known for the whole graph, not for the parts in memory",
    ),
    (
        "entities.tables",
        lambda c: c.entities.tables is not None,
        "null: parts are cut from one table",
    ),
    ("train.extension.freeze", lambda c: c.freezes, "none: rows change their places in memory"),
    (
        "train.averaging",
        lambda c: c.train.averaging != "none",
        "none: an average would need a second table",
    ),
    (
        "train.pipeline",
        lambda c: c.train.pipeline not in ("auto", "loop"),
        "auto or loop: a batch that is sent ahead may need parts that are not there yet",
    ),
    ("train.batches", lambda c: c.train.batches not in ("auto", "cpu"), "auto or cpu"),
]
_NOT_CACHED: list[tuple[str, Callable[[Config], Any], str]] = [
    (
        "entities.engine",
        lambda c: c.entities.engine != "torchrec",
        "torchrec: the cache is FBGEMM's",
    ),
    (
        "negatives.regime",
        lambda c: c.negatives.is_full,
        "sampled or kvssample: otherwise every step reads and updates all rows",
    ),
    (
        "entities.tables",
        lambda c: c.entities.tables is not None,
        "null: tables of node types are one block of the GPU's memory",
    ),
    (
        "train.averaging",
        lambda c: c.train.averaging != "none",
        "none: an average would need a second table",
    ),
]


def check_rules(config: Config) -> None:
    """Raise ConfigError for settings that do not go together."""
    placement = config.entities.placement
    for key, holds, remedy in {"disk": _NOT_ON_DISK, MANAGED: _NOT_CACHED}.get(placement, []):
        if holds(config):
            raise ConfigError(
                f"{key}: entities.placement {placement} does not go with this; use {remedy}"
            )
    for holds, message in RULES:
        if holds(config):
            raise ConfigError(message.format(**vars(config)))
    for kind in config.entities.tables or ():
        config.entities.table_of(kind, config.train, config.model)
    for name in config.loss.regularizers:  # penalties on whole triples
        part, key = resolve("regularizer", name), f"loss.regularizers.{name}"
        if part.takes_triples and config.negatives.examples == "queries":
            raise ConfigError(
                f"{key}: queries of negatives.regime {config.negatives.regime} may have several "
                "answers, and this penalty is of single triples; use sampled or 1vsall"
            )
        if part.takes_triples:
            part.check_scorer(resolve("scorer", config.model.scorer), key)
