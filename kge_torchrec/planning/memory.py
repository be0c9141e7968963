"""The memory of a rank by part, at the fullest moment of training.

Exact are the bytes of the table and of dense parameters. Expected are rows, ids and batches (they
follow the number of different entities per batch) and activations (see ``cost``). Measured or
assumed is the process itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kge_torchrec.config.registry import resolve
from kge_torchrec.data.batches.triples import device_bytes, fits_device
from kge_torchrec.embeddings.torchrec.planner import Bytes, dense_state_numbers
from kge_torchrec.planning.batch import degree_power
from kge_torchrec.ranking.blocks import FETCH_BYTES
from kge_torchrec.training.assembly import sides_of
from kge_torchrec.training.checkpoint_files import PIECE_BYTES

if TYPE_CHECKING:
    from kge_torchrec.planning.plan import Plan

MIB = 1 << 20
# A CUDA rank's context, libraries and NCCL's buffers, and its host side: assumed, not measured.
CUDA_PROCESS = Bytes(device=1536 * MIB, main=3072 * MIB)
# A CPU rank with packages, process group and compiled kernels. The process of runs with 20,000 rows
# in batches of 256 took 591 to 593 MiB on 1, 2 and 4 ranks.
CPU_PROCESS = 592 * MIB
# Blocks of earlier steps that the C library keeps free for each thread (``malloc_trim`` gives them
# back), on one rank and, where collectives have threads, on several: at most so much, a small step
# and a small table in the final ranking leave less. Ranks that held the same had 69 to 131 MiB.
KEPT, KEPT_WITH_OTHERS, KEPT_STEPS = 80 * MIB, 105 * MIB, 4
RANKED_MOST = 128 * MIB  # pages of the filter index that the final ranking reads, at most: assumed
_IN_FLIGHT = 3  # batches that TorchRec's pipeline holds at once


def memory_of(plan: Plan, peak_bytes: float) -> dict[str, Bytes]:
    """Return the bytes of a rank by part; the activations of a micro-batch take ``peak_bytes``."""
    config, sizes, rows = plan.config, plan.sizes, int(plan.rows.sum())
    parts = plan.table_of(plan.rows)

    def computed(size: float) -> Bytes:
        return Bytes(**{plan.place: round(size)})

    held = parts["weights"] + parts["optimizer state"]
    saved = held.device + held.main
    if plan.is_full and (plan.micro_batches > 1 or sizes.num_features):
        # The sum over micro-batches, or the gradients of vectors of entities.
        parts["gradients"] = computed(4 * plan.dim * rows)
    if plan.parts is not None:  # one is read ahead, and one is written
        parts["parts on their way"] = Bytes(main=round(2 / plan.parts.places * saved))
    parts["dense parameters"] = _dense(plan)
    # A CUDA graph keeps its memory, and the last batch of an epoch has its own.
    growth = 2 if plan.captures else 1
    parts["rows and ids"] = computed(growth * _exchanged(plan))
    parts["activations"] = computed(growth * peak_bytes)
    parts["batches"] = computed(_IN_FLIGHT * _batch(plan))
    main = 0
    if degree_power(config.negatives) is not None and not plan.is_full:  # cumulated degrees
        main += 8 * sizes.entities
    if config.entities.on_disk:  # numbers of triples, sorted by stage
        main += 4 * sizes.triples
    if plan.is_cuda:  # a checkpoint copies one piece after another; a CPU writes them in place
        main += min(PIECE_BYTES, saved)
    else:
        step = sum(parts[part].main for part in ("rows and ids", "activations", "batches"))
        kept = KEPT if plan.cluster.world_size == 1 else KEPT_WITH_OTHERS
        ranked = 2 * min(FETCH_BYTES, parts["weights"].main)  # rows, as fetched and as sent
        parts["kept free"] = Bytes(main=min(kept, KEPT_STEPS * step + ranked))
    process = CUDA_PROCESS if plan.is_cuda else Bytes(main=CPU_PROCESS)
    parts["process"] = process + Bytes(main=main)
    device = _triples_on_device(plan, sum(size.device for size in parts.values()))
    parts["triples"] = Bytes(device=device, main=_mapped(plan))
    return parts


def _dense(plan: Plan) -> Bytes:
    """Return the bytes of parameters, gradients, state and averages, all float32.

    DDP's buckets are views of the gradients. FSDP gathers whole parameters. It scatters whole
    gradients: those of a backward are among the activations. Against all entities they are summed
    over blocks first, and held once more where they are sent.
    """
    numbers, train = plan.costs.dense_numbers, plan.config.train
    assert train.optimizer is not None
    per_element = 4 * (2 + dense_state_numbers(train.optimizer) + train.averages)
    kept = -(-numbers // plan.dense_splits) * per_element
    if not plan.dense_is_sharded:
        return Bytes(**{plan.place: kept})
    whole = 4 * numbers
    if plan.is_full:
        whole *= 3 if plan.dense_splits > 1 else 2
    if plan.config.dense.options.cpu_offload and plan.is_cuda:
        return Bytes(device=whole, main=kept)
    return Bytes(**{plan.place: kept + whole})


def _exchanged(plan: Plan) -> float:
    """Return the bytes of rows, gradients and ids that a rank holds in a micro-batch.

    Rows and gradients are held as sent and as received, ids as given, grouped by owner, with the
    way back, and as received. Gradients of several micro-batches wait for the step, which puts them
    together; clipping sums those of a row.
    """
    row, features, steps = 4 * plan.dim, plan.sizes.num_features, plan.micro_batches
    if plan.is_full:  # fetched rows, their gradients, sums of own rows, and places
        size = -(-plan.fetched // steps) * (3 * row + 8 * 3)
        # Vectors, rows of features and their gradients.
        return size + (row * (int(plan.rows.sum()) + 2 * features) if features else 0)
    wanted, served = plan.wanted.sum(), plan.busiest[1].sum()
    rows = 2 * (wanted + served) / steps
    rows += 2 * served * (steps > 1) + served * plan.config.train.clips
    size = row * rows + 8 * (3 * wanted + served) / steps
    if features:  # vectors of entities, rows of pairs, and these times weights
        size += row * (plan.batch.distinct.sum() + 2 * plan.batch.pairs)
    return float(size)


def _batch(plan: Plan) -> float:
    """Return the bytes of a batch: positions, ids, relations, weights, the mask of candidates.

    A pair of an entity and a feature has two positions and a weight. Against all entities a batch
    has anchors, relations and answers of its queries, with one answer each.
    """
    if plan.is_full:
        return 8 * 4 * plan.queries
    batch = plan.batch
    queries = batch.chunks * batch.triples
    places = 3 * queries + batch.negatives + batch.distinct.sum()
    masks = plan.config.negatives.masks_candidates
    mask = queries * sum(plan.candidates.values()) if masks else 0
    return float(8 * places + 4 * queries + mask + 20 * batch.pairs)


def _mapped(plan: Plan) -> int:
    """Return the bytes of the store that a run maps: triples, and the filter index of sides.

    The filter index of a side has an id per triple, and 16 bytes per query. A triple has at most
    one query of its own. On a CPU, the final ranking is as full a moment as training, and reads the
    index of both sides.
    """
    negatives, id_bytes = plan.config.negatives, 4 if plan.sizes.rows < 1 << 31 else 8
    ids = plan.sizes.triples * id_bytes
    triples = 3 * ids if negatives.regime in ("sampled", "1vsall") else 0
    is_indexed = negatives.filtered or negatives.examples == "queries"
    sides, index = len(sides_of(negatives.sides)) * is_indexed, ids + 16 * plan.sizes.triples
    ranked = 0 if plan.is_cuda else min((2 - sides) * index, RANKED_MOST)
    return triples + sides * index + ranked


def _triples_on_device(plan: Plan, others: int) -> int:
    """Return the bytes of the triples from which a GPU makes its batches, beside others."""
    config, features = plan.config, plan.sizes.features
    on_cpu = config.train.batches == "cpu"
    on_cpu |= resolve("negative_sampler", config.negatives.sampling).on_cpu
    if not plan.is_cuda or config.negatives.regime != "sampled" or on_cpu:
        return 0
    of_features = () if features is None else (plan.sizes.entities, len(features.feature))
    size = device_bytes(config, plan.sizes.triples, *of_features)
    memory = plan.cluster.device.memory
    free = memory * (1 - plan.reserve) - others
    return size if config.train.batches == "device" or fits_device(size, memory, free) else 0
