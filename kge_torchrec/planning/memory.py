"""The memory of a rank by part, at the fullest moment of training.

Exact are the bytes of the table and of dense parameters. Expected are rows, ids and batches (they
follow the number of different entities per batch) and activations (see ``cost``). Measured or
assumed is the process itself.
"""

from __future__ import annotations

from kge_torchrec.config.registry import resolve
from kge_torchrec.data.batches.triples import device_bytes, fits_device
from kge_torchrec.embeddings.torchrec.planner import Bytes, dense_state_numbers
from kge_torchrec.planning.rank import CUDA_PROCESS, Rank
from kge_torchrec.training.assembly import sides_of
from kge_torchrec.training.checkpoint_files import PIECE_BYTES

MIB = 1 << 20
TABLE_PARTS = ("weights", "optimizer state", "average", "cache", "gradients", "parts on their way")
# A CPU rank with the packages imported, its process group and compiled kernels, and the bytes per
# triple of the pages that the final ranking maps, at most those of the largest graph that was
# measured: fitted to ten runs (docs/how-to/plan.md).
CPU_PROCESS, RANKED_TRIPLE, RANKED_MOST = 672 * MIB, 58, 128 * MIB
_IN_FLIGHT = 3  # batches that TorchRec's pipeline holds at once


def memory_of(rank: Rank) -> dict[str, Bytes]:
    """Return the bytes of a rank by part."""
    config, sizes, parts = rank.config, rank.sizes, dict(rank.table)

    def computed(size: float) -> Bytes:
        return Bytes(**{rank.place: round(size)})

    held = parts["weights"] + parts["optimizer state"]
    saved = held.device + held.main
    if rank.is_full and (rank.micro_batches > 1 or sizes.num_features):
        # The sum over micro-batches, or the gradients of vectors of entities.
        parts["gradients"] = computed(4 * rank.dim * len(rank.block))
    if rank.parts is not None:  # one is read ahead, and one is written
        parts["parts on their way"] = Bytes(main=round(2 / rank.parts.places * saved))
    parts["dense parameters"] = _dense(rank)
    # A CUDA graph keeps its memory, and the last batch of an epoch has its own.
    growth = 2 if rank.captures else 1
    parts["rows and ids"] = computed(growth * _exchanged(rank))
    parts["activations"] = computed(growth * rank.cost.peak_bytes)
    parts["batches"] = computed(_IN_FLIGHT * _batch(rank))
    main = 0 if rank.is_cuda else CPU_PROCESS
    if rank.degree_power is not None and not rank.is_full:  # cumulated degrees
        main += 8 * sizes.entities
    if config.entities.on_disk:  # numbers of triples, sorted by stage
        main += 4 * sizes.triples
    if rank.is_cuda:  # a checkpoint copies one piece after another; a CPU writes them in place
        main += min(PIECE_BYTES, saved)
    parts["process"] = (CUDA_PROCESS if rank.is_cuda else Bytes()) + Bytes(main=main)
    device = _triples_on_device(rank, sum(size.device for size in parts.values()))
    ranked = 0 if rank.is_cuda else min(RANKED_TRIPLE * sizes.triples, RANKED_MOST)
    parts["triples"] = Bytes(device=device, main=_mapped(rank) + ranked)
    return parts


def _dense(rank: Rank) -> Bytes:
    """Return the bytes of parameters, gradients, state and averages, all float32.

    DDP's buckets are views of the gradients. FSDP gathers whole parameters. It scatters whole
    gradients: those of a backward are among the activations. Against all entities they are summed
    over blocks first, and held once more where they are sent.
    """
    numbers, train = rank.costs.dense_numbers, rank.config.train
    assert train.optimizer is not None
    per_element = 4 * (2 + dense_state_numbers(train.optimizer) + train.averages)
    kept = -(-numbers // rank.dense_splits) * per_element
    if not rank.dense_is_sharded:
        return Bytes(**{rank.place: kept})
    whole = 4 * numbers
    if rank.is_full:
        whole *= 3 if rank.dense_splits > 1 else 2
    if rank.config.dense.options.cpu_offload and rank.is_cuda:
        return Bytes(device=whole, main=kept)
    return Bytes(**{rank.place: kept + whole})


def _exchanged(rank: Rank) -> float:
    """Return the bytes of rows, gradients and ids that a rank holds in a micro-batch.

    Rows are held as looked up for others and as received, gradients as sent and as received. Ids
    are held as given, grouped by owner, with the way back, and as received. Gradients of several
    micro-batches wait for the step, which puts them together; clipping sums those of a row.
    """
    row, features, steps = 4 * rank.dim, rank.sizes.num_features, rank.micro_batches
    if rank.is_full:  # fetched rows, their gradients, sums of own rows, and places
        size = -(-rank.fetched // steps) * (3 * row + 8 * 3)
        # Vectors, rows of features and their gradients.
        return size + (row * (len(rank.block) + 2 * features) if features else 0)
    wanted, served = rank.wanted.sum(), rank.busiest[1].sum()
    rows = 2 * (wanted + served) / steps
    rows += 2 * served * (steps > 1) + served * rank.config.train.clips
    size = row * rows + 8 * (3 * wanted + served) / steps
    if features:  # vectors of entities, rows of pairs, and these times weights
        size += row * (rank.batch.distinct.sum() + 2 * rank.batch.pairs)
    return float(size)


def _batch(rank: Rank) -> float:
    """Return the bytes of a batch: positions, ids, relations, weights, the mask of candidates.

    A pair of an entity and a feature has two positions and a weight. Against all entities a batch
    has anchors, relations and answers of its queries, with one answer each.
    """
    if rank.is_full:
        return 8 * 4 * rank.queries
    batch = rank.batch
    queries = batch.chunks * batch.triples
    places = 3 * queries + batch.negatives + batch.distinct.sum()
    masks = rank.config.negatives.masks_candidates
    mask = queries * sum(rank.candidates.values()) if masks else 0
    return float(8 * places + 4 * queries + mask + 20 * batch.pairs)


def _mapped(rank: Rank) -> int:
    """Return the bytes of the store that training reads again and again: triples, filter index.

    The filter index of a side has an id per triple, and 16 bytes per query. A triple has at most
    one query of its own.
    """
    negatives, id_bytes = rank.config.negatives, 4 if rank.sizes.rows < 1 << 31 else 8
    ids = rank.sizes.triples * id_bytes
    triples = 3 * ids if negatives.regime in ("sampled", "1vsall") else 0
    is_indexed = negatives.filtered or negatives.examples == "queries"
    index = len(sides_of(negatives.sides)) if is_indexed else 0
    return triples + (ids + 16 * rank.sizes.triples) * index


def _triples_on_device(rank: Rank, others: int) -> int:
    """Return the bytes of the triples from which a GPU makes its batches, beside others."""
    config, features = rank.config, rank.sizes.features
    on_cpu = config.train.batches == "cpu"
    on_cpu |= resolve("negative_sampler", config.negatives.sampling).on_cpu
    if not rank.is_cuda or config.negatives.regime != "sampled" or on_cpu:
        return 0
    of_features = () if features is None else (rank.sizes.entities, len(features.feature))
    size = device_bytes(config, rank.sizes.triples, *of_features)
    memory = rank.cluster.device.memory
    free = memory * (1 - rank.reserve) - others
    return size if config.train.batches == "device" or fits_device(size, memory, free) else 0
