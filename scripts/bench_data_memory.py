"""Measure the memory of a large graph's data, on a synthetic store of 50 million triples.

Each piece of work runs in its own process. Its figure is the peak of anonymous memory beyond that
before the work, sampled every millisecond. Pages of mapped files, which all processes of a host
share, do not count. Prints one line per figure: name, value, unit.

    python scripts/bench_data_memory.py --folder FOLDER
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

HUBS, HUB_ANSWERS = 256, 50_000
ENTITIES, TRIPLES, RELATIONS = 10_000_000, 50_000_000, 20
TEST = HUBS + 1  # a triple of every hub, and one of the entity that is linked with all


def main() -> None:
    args = parse()
    if args.work is not None:
        measure(args.work, args.folder)
        return
    if not (args.folder / "meta.json").exists():
        make(args.folder)
    for name in WORKS:
        command = [sys.executable, __file__, "--folder", str(args.folder), "--work", name]
        subprocess.run(command, check=True)


def make(folder: Path) -> None:
    """Write a store with hubs that have many answers to relation 0, and random triples."""
    import pyarrow as pa

    from kge_torchrec.data.store.filter_index import build_indices
    from kge_torchrec.data.store.writing import StoreContents, write_store

    stream = np.random.default_rng(0)
    hubs = np.repeat(np.arange(HUBS), HUB_ANSWERS)
    answers = np.tile(np.arange(HUB_ANSWERS), HUBS) * (ENTITIES // HUB_ANSWERS)
    parts = [(hubs, hubs * 0, answers)]
    every = np.arange(ENTITIES)
    parts.append((every * 0 + HUBS, every * 0, every))
    rest = TRIPLES - sum(len(part[0]) for part in parts)
    heads = stream.integers(TEST, ENTITIES, rest)
    parts.append((heads, stream.integers(1, RELATIONS, rest), stream.integers(0, ENTITIES, rest)))
    train = np.concatenate([np.stack(part, 1).astype(np.int32) for part in parts])
    test = np.stack([np.arange(TEST), np.zeros(TEST), np.ones(TEST) * ENTITIES // 2], 1)
    splits = {"train": train, "valid": train[:0], "test": test.astype(np.int32)}
    indices = build_indices(splits, ENTITIES, RELATIONS)
    labels = [pa.array(map(str, range(size)), pa.large_string()) for size in (ENTITIES, RELATIONS)]
    folder.mkdir(parents=True, exist_ok=True)
    write_store(folder, StoreContents(*labels, splits, indices), {})


def filtered_ranking(store, triples: np.ndarray) -> Callable[[], object]:
    import torch

    from kge_torchrec.embeddings.backend import EntityShard
    from kge_torchrec.models.scorers import SCORERS
    from kge_torchrec.ranking.exact import RankOptions, rank_triples

    torch.set_num_threads(1)
    scorer = SCORERS["distmult"](RELATIONS, 4)
    shard = EntityShard(torch.rand(ENTITIES, 4), 0, ENTITIES)
    known = store.filter_index()

    def rank() -> None:
        rank_triples(scorer, shard, triples.astype(np.int64), known, RankOptions(sides=("tail",)))

    # Compile, and warm the allocator with blocks of the same number of scores.
    few = EntityShard(shard.rows[:40_000], 0, 40_000)
    other = np.stack([np.arange(len(triples)) + TEST, np.ones(len(triples))] * 2, 1)[:, :3]
    other = other.astype(np.int64) * [1, 1, 0]
    rank_triples(scorer, few, other, known, RankOptions(sides=("tail",)))
    return rank


def hubs_ranked(store):
    """Rank 256 queries with 50,000 answers each."""
    return filtered_ranking(store, store.test[:HUBS])


def all_answers_ranked(store):
    """Rank one query with 10 million answers."""
    return filtered_ranking(store, store.test[HUBS:])


def popularity_planned(store):
    """Compute entity frequencies from the degrees, as rank 0 does for the plan of a run."""
    from kge_torchrec.planning.frequency import EntityFrequency

    return lambda: EntityFrequency.of_degrees(store.degrees())


def config_of(store, **keys):
    from kge_torchrec.config.parser import load_config

    return load_config(None, {"data.path": str(store.path), **keys}).settled(store.size)


def degree_sampler(store):
    """Build the degree sampler of a rank, which lives until the end."""
    import torch

    from kge_torchrec.distributed.processes import Processes
    from kge_torchrec.training.assembly import build_batches

    ranks = Processes(0, 1, 1, torch.device("cpu"))
    config = config_of(store, **{"negatives.sampling": "degree"})
    return lambda: build_batches(config, store, ranks)


def queries_listed(store):
    """Build the distinct queries of a rank for kvsall and kvssample."""
    from kge_torchrec.data.batches.queries import DistinctQueries

    return lambda: DistinctQueries(store.filter_index(("train",)), ("head", "tail"))


def hubs_asked(store):
    """Load a kvsall step of the 256 hubs, and the answers for one block of 8 MiB of scores."""
    import torch

    from kge_torchrec.data.batches.queries import DistinctQueries
    from kge_torchrec.embeddings.backend import EntityShard
    from kge_torchrec.training.query_shards import QueryShard

    class Rows:
        shape, device = (ENTITIES, 4), torch.device("cpu")

        def __len__(self) -> int:
            return ENTITIES

    queries = DistinctQueries(store.filter_index(("train",)), ("tail",))

    def ask() -> None:
        (asked,) = queries.ask(np.arange(HUBS + 1)[None])
        QueryShard(asked, EntityShard(Rows(), 0, ENTITIES)).answers(range(8192))

    return ask


def hub_sampled(store):
    """Load a kvssample step of the query with 10 million answers."""
    from kge_torchrec.data.batches import BatchPlan, Candidates
    from kge_torchrec.data.batches.order import EpochShuffle
    from kge_torchrec.data.batches.queries import QuerySampleBatches
    from kge_torchrec.data.negatives import UniformSampler

    candidates = Candidates(UniformSampler(ENTITIES), 512)
    plan = BatchPlan(1, sides=("tail",), candidates=candidates, max_answers=1024)
    batches = QuerySampleBatches(store.filter_index(("train",)), plan)
    order = EpochShuffle(batches.examples, 0, 0)
    every = order(np.arange(batches.examples))
    step = int(np.flatnonzero(every == HUBS)[0])
    del every
    return lambda: batches.batch(order, 0, step)


WORKS = {
    work.__name__: work
    for work in (
        hubs_ranked,
        all_answers_ranked,
        popularity_planned,
        degree_sampler,
        queries_listed,
        hubs_asked,
        hub_sampled,
    )
}


def measure(name: str, folder: Path) -> None:
    from kge_torchrec.data.store import TripleStore

    work = WORKS[name](TripleStore.open(folder))
    before, peak, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    held = anonymous() - before
    del kept
    print(f"{name}_peak {(peak[0] - before) / 2**20:.1f} MiB")
    print(f"{name}_held {held / 2**20:.1f} MiB")
    print(f"{name}_time {seconds:.2f} s", flush=True)


def anonymous() -> int:
    """Return the bytes of this process's anonymous memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise OSError("no RssAnon in /proc/self/status")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="folder of the store, which is written if missing",
    )
    parser.add_argument("--work", choices=list(WORKS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
