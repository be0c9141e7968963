"""Settings that do not go together: conditions, and what is said where one holds.

A message begins with the key to change.
"""

from __future__ import annotations

from typing import Any

from kge_torchrec.config.checks import ConfigError
from kge_torchrec.config.entities import MANAGED
from kge_torchrec.config.registry import resolve

Config = Any  # kge_torchrec.config.Config, whose file imports this one


def check_rules(config: Config) -> None:
    """Raise ConfigError for settings that do not go together."""
    for holds, problem in (*_placement(config), *_contradictions(config)):
        if holds:
            raise ConfigError(problem)
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


def _placement(c: Config) -> list[tuple[Any, str]]:
    """Return the same for a table on disk, or in main memory."""
    negatives, train = c.negatives, c.train
    problems: list[tuple[str, Any, str]] = []
    if c.entities.on_disk:
        problems = [
            ("negatives.regime", negatives.regime != "sampled",
             "sampled: otherwise every entity is a candidate, and only some are in memory"),
            ("negatives.sampling", negatives.sampling != "uniform",
             "uniform: candidates are entities of the parts in memory, all alike"),
            ("negatives.among", negatives.restricts,
             "all: candidates are entities of the parts in memory, of any type"),
            ("negatives.log_q", negatives.log_q,
             "false: chances are known for the whole graph, not for the parts in memory"),
            ("entities.tables", c.entities.tables is not None,
             "null: parts are cut from one table"),
            ("train.extension.freeze", c.freezes, "none: rows change their places in memory"),
            ("train.averaging", train.averaging != "none",
             "none: an average would need a second table"),
            ("train.pipeline", train.pipeline not in ("auto", "loop"),
             "auto or loop: a batch that is sent ahead may need parts that are not there yet"),
            ("train.batches", train.batches not in ("auto", "cpu"), "auto or cpu"),
        ]  # fmt: skip
    elif c.entities.placement == MANAGED:
        problems = [
            ("entities.engine", c.entities.engine != "torchrec",
             "torchrec: the cache is FBGEMM's"),
            ("negatives.regime", negatives.is_full,
             "sampled or kvssample: otherwise every step reads and updates all rows"),
            ("entities.tables", c.entities.tables is not None,
             "null: tables of node types are one block of the GPU's memory"),
            ("train.averaging", train.averaging != "none",
             "none: an average would need a second table"),
        ]  # fmt: skip
    said = f"entities.placement {c.entities.placement} does not go with this; use"
    return [(holds, f"{key}: {said} {remedy}") for key, holds, remedy in problems]


def _contradictions(c: Config) -> list[tuple[Any, str]]:
    """Return conditions, and what does not go together where one holds."""
    negatives, loss, regime = c.negatives, c.loss, c.negatives.regime
    among, share = negatives.among, negatives.among_share
    places, preset, optimizer = c.entities.placement_options, c.entities.preset, c.train.optimizer
    unused = "head queries use the relations' inverses"
    if negatives.sides == "head":
        unused = "tail queries use the relations themselves"
    return [
        # the candidates of a query
        (negatives.in_batch and negatives.chunk_size == 1,
         "negatives.in_batch: negatives.chunk_size 1 leaves a chunk no other triples"),
        (negatives.in_batch == "same_relation" and negatives.log_q,
         "negatives.log_q: with negatives.in_batch same_relation it depends on the relation how "
         "often a candidate is drawn; set one of them to false"),
        (negatives.is_full and among == "types" and share != 1,
         f"negatives.among_share: negatives.regime {regime} takes all entities of the types; "
         "set it to 1"),
        (negatives.is_full and among == "seen",
         f"negatives.among seen: negatives.regime {regime} takes every entity, or with types "
         "every entity of a type, as a candidate; use sampled"),
        (regime == "kvssample" and negatives.restricts,
         f"negatives.among {among}: negatives.regime kvssample draws for all queries of a batch "
         "together; use sampled"),
        (regime == "sampled" and negatives.restricts and negatives.log_q,
         f"negatives.log_q: with negatives.among {among} it depends on the triple what is drawn "
         "how often; set it to false"),
        (regime == "sampled" and negatives.restricts and share == 1
         and negatives.sampling != "uniform",
         f"negatives.sampling {negatives.sampling}: negatives.among {among} draws uniformly; "
         "set uniform, or negatives.among_share below 1 for others that are drawn among all"),
        (negatives.is_full and negatives.filtered,
         f"negatives.filtered: {regime} takes every entity as a candidate; set it to false, or "
         "use kvsall, where all known answers are right"),
        # the table, its optimizer and the run folder
        (places.buffer > places.parts,
         f"entities.placement_options.buffer: {places.buffer} parts in memory of "
         f"{places.parts}; use at most entities.placement_options.parts"),
        (c.run.resume != "never" and c.run.dir is None,
         f"run.resume {c.run.resume} needs run.dir, the folder to look in"),
        (preset == "dicee" and optimizer != "adam",
         f"entities.preset: dicee has adam only, not {optimizer}"),
        (preset == "dgl" and optimizer not in ("adam", "adagrad"),
         f"entities.preset: dgl has adam and adagrad only, not {optimizer}"),
        (preset != "fbgemm" and c.train.optimizer_options.get("weight_decay"),
         f"train.optimizer_options.weight_decay: {preset}'s table optimizer has none; use "
         "loss.regularizers.l2, or entities.preset fbgemm"),
        (preset == "dgl" and c.train.accumulation > 1,
         "train.accumulation: with entities.preset dgl the places of a micro-batch would count, "
         "not those of the step; use entities.preset fbgemm"),
        (preset != "fbgemm" and c.entities.tables is not None,
         "entities.tables: optimizers per type follow FBGEMM's arithmetic; leave "
         "entities.preset at fbgemm"),
        # the loss and what is trained on
        (c.data.weights == "loss" and negatives.examples == "queries",
         f"data.weights loss: queries of negatives.regime {regime} have several answers, which "
         "share one loss, and no weight of their own; use sampled or 1vsall"),
        # With reciprocal relations, tail queries use relations and head queries their inverses.
        (c.model.reciprocal and negatives.sides != "both",
         f"negatives.sides {negatives.sides}: with model.reciprocal true, {unused}, which would "
         "never be trained but are ranked; set negatives.sides both, or model.reciprocal false"),
        (negatives.log_q and loss.name != "softmax",
         f"negatives.log_q corrects loss.name softmax, not {loss.name}"),
        (negatives.is_full and not loss.has_closed_form,
         f"loss.name: {loss.name} has no closed form over all entities, which negatives.regime "
         f"{regime} needs; use negatives.regime sampled or kvssample, or loss.name softmax or "
         "bce"),
        (regime == "allvsall" and resolve("loss", loss.name).needs_answers,
         f"loss.name: {loss.name} has nothing to learn from the queries without answers that "
         "negatives.regime allvsall adds; use bce, or kvsall"),
        (loss.relation_weight and negatives.examples == "queries",
         f"loss.relation_weight: negatives.regime {regime} trains queries, and relation "
         "prediction needs single triples; use sampled or 1vsall"),
        (regime == "kvssample" and loss.options.get("answers", "mean") == "sum",
         "loss.options.answers sum: negatives.regime kvssample does not sum answers; use "
         "kvsall, or mean"),
        # how a step is computed
        (regime == "kvssample" and c.dense.compile,
         "dense.compile: negatives.regime kvssample has answers of any number; set it to false"),
        (regime == "kvssample" and negatives.chunk_size,
         "negatives.chunk_size: negatives.regime kvssample samples entities for the whole "
         "batch; set it to 0"),
        (negatives.is_full and among == "types" and not c.loss.allows_typed_candidates,
         f"negatives.among types: with negatives.regime {regime} only loss.name softmax and bce "
         "can leave entities out, without label_smoothing and with reduction sum; use one of "
         "them, or negatives.among all"),
        (negatives.is_full and c.train.pipeline == "sparse_dist",
         f"train.pipeline: with negatives.regime {regime} every rank scores its own rows, there "
         "is no lookup for sparse_dist to send ahead; use auto"),
        (negatives.is_full and c.dense.compile,
         f"dense.compile: with negatives.regime {regime} a loss is in closed form over blocks "
         "of scores, outside the function that is compiled; set it to false, or "
         "negatives.regime sampled"),
        (c.train.pipeline == "sparse_dist" and c.entities.engine != "torchrec",
         "train.pipeline sparse_dist is TorchRec's; with entities.engine "
         f"{c.entities.engine} use auto or loop"),
    ]  # fmt: skip
