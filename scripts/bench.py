"""Measure training, ranking, preparing and start-up, and compare them with plain torch.

    python scripts/bench.py [SECTION ...] --data FB15K237 [--repeats N] [--json FILE]
    python scripts/bench.py training --data FB15K237 --only distmult --with-peers PYTHON

FB15K237 is a folder with train.txt, valid.txt and test.txt of FB15k-237, which is not in this
repository. Sections (default: all):

    training   dim 256, Adam, tail queries: bce with 128 negatives, shared by a batch or per triple,
               and against all entities in batches of 512 (1vsall with softmax, kvsall with bce)
    ranking    filtered ranks of test, both sides, ComplEx with dim 256
    prepare    a store of --triples lines, beside pyarrow's bare reading and numbering of the file
    start-up   seconds of whole commands
    whole      with --with-peers: minutes and test MRR of --epochs epochs of ComplEx, kvsall, bce,
               here and in PyKEEN

The floor (peers/floor.py) is the same work in plain torch with gradients derived by hand. Both
sides run in separate processes, alternating. A figure is the median over processes of their
medians. If the processes of a side differ by more than --spread, two more pairs run; if they still
differ, the figure is marked "unquiet". --with-peers names a Python that has PyKEEN, PyTorch
Geometric, dice-embeddings or PyTorch-BigGraph (peers/README.md). The first three have negatives per
triple; BigGraph shares them and corrupts both ends, so here a triple counts twice too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT, PEERS = HERE.parents[1], HERE.parent / "peers"
sys.path.append(str(PEERS))
# Keep freed blocks, as kge-torchrec does. OpenMP's workers spin for the default time.
KEEP = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    "MALLOC_TOP_PAD_": str(16 << 20),
    "GOMP_SPINCOUNT": "300000",
}
SCORERS = {"complex": "ComplEx", "distmult": "DistMult", "transe_l1": "TransE", "rotate": "RotatE"}
# batch size, negatives.chunk_size, steps of a block
SAMPLED = {"shared-1024": (1024, 0, 100), "shared-4096": (4096, 0, 30), "per-triple": (1024, 1, 10)}
PEERS_PER_TRIPLE = {  # module of a Python, script
    "pykeen": "peer_pykeen.py",
    "torch_geometric": "peer_pyg.py",
    "dicee": "peer_dicee.py",
}
# Scorers measured against all entities. In bfloat16 only products are faster.
FULL = {"1vsall": tuple(SCORERS), "kvsall": tuple(SCORERS), "1vsall-bf16": ("complex", "distmult")}
RELATIONS, ROWS_AT_ONCE, DIM = 500, 1_000_000, 256


@dataclass
class Figure:
    """The rates of one piece of work, on both sides: the median of each process."""

    name: str
    unit: str
    ours: list[float]
    floor: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    unquiet: bool = False

    def __str__(self) -> str:
        text = f"{self.name} {_spread(self.ours)} {self.unit}"
        for name, rates in ("floor", self.floor), ("peer", self.peer):
            if rates:
                ratio = statistics.median(self.ours) / statistics.median(rates)
                text += f", {name} {_spread(rates)}: {ratio:.3f} of it"
        return text + (" unquiet" if self.unquiet else "")


def _spread(values: list[float]) -> str:
    every = f" ({min(values):.6g} to {max(values):.6g})" if len(values) > 1 else ""
    return f"{statistics.median(values):.6g}{every}"


# Work of a process


def settings(data: Path, scorer: str, work: str, folder: str, sides: str = "tail") -> list[str]:
    """Return the config overrides that give the floor's work."""
    values = {
        "data.path": data,
        "model.scorer": scorer,
        "model.dim": 256,
        "model.reciprocal": False,
        "model.init_scale": 0.1,
        "loss.n3": 0.0,
        "loss.relation_weight": 0.0,
        "negatives.sides": sides,
        "train.optimizer": "adam",
        "train.lr": 0.001,
        "run.dir": folder,
        "run.progress": False,
        "threads": 2,
    }
    if work in SAMPLED:
        batch, chunk, _ = SAMPLED[work]
        values |= {"loss.name": "bce", "negatives.count": 128, "negatives.chunk_size": chunk}
    else:
        batch = 512
        regime, _, precision = work.partition("-")
        values |= {"negatives.regime": regime}
        values["loss.name"] = "softmax" if regime == "1vsall" else "bce"
        values["train.precision"] = precision or "fp32"
    return [f"--{key}={value}" for key, value in (values | {"train.batch_size": batch}).items()]


def train_here(data: Path, scorer: str, work: str, sides: str = "tail") -> list[float]:
    """Return queries per second of a few blocks of steps."""
    from kge_torchrec.environment import keep_large_blocks, limit_spinning

    limit_spinning()  # before torch is loaded, as the command line does
    keep_large_blocks()

    from kge_torchrec.config.parser import load_config
    from kge_torchrec.distributed.processes import processes
    from kge_torchrec.training.assembly import build_batches, build_pipeline
    from kge_torchrec.training.run_folder import RunFolder
    from kge_torchrec.training.session import Session

    with tempfile.TemporaryDirectory() as folder, processes("cpu") as ranks:
        config = load_config(None, settings(data, scorer, work, folder, sides))
        session = Session(config, RunFolder(folder), ranks)
        batches = build_batches(config, session.store, ranks)
        trained = build_pipeline(config, session.backend, ranks)
        steps = SAMPLED[work][2] if work in SAMPLED else 10
        rates = []
        for epoch in range(4):
            stream = batches.epoch(epoch)
            for _ in range(5 if epoch else 10):  # warm up
                trained.progress(stream)
            start = time.perf_counter()
            for _ in range(steps):
                trained.progress(stream)
            queries = steps * config.train.batch_size * (2 if sides == "both" else 1)
            rates.append(queries / (time.perf_counter() - start))
    return rates[1:]


def train_floor(data: Path, scorer: str, work: str) -> list[float]:
    """Run the same work in peers/floor.py."""
    import torch
    from floor import AllEntities, Sampled, read_graph

    torch.set_num_threads(2)
    splits, entities, relations = read_graph(data)
    triples = torch.from_numpy(splits["train"])
    trainer: AllEntities | Sampled
    if work in SAMPLED:
        batch, chunk, steps = SAMPLED[work]
        trainer = Sampled(SCORERS[scorer], entities, relations, 256, 128, shared=chunk == 0)
    else:
        batch, steps = 512, 10
        trainer = AllEntities(entities, relations, 256, batch)
    rates = []
    for block in range(4):
        order = torch.randperm(len(triples))
        for _ in range(5 if block else 10):
            trainer.step(triples[order[:batch]])
        start = time.perf_counter()
        for i in range(steps):
            at = (i * batch) % (len(triples) - batch)
            trainer.step(triples[order[at : at + batch]])
        rates.append(steps * batch / (time.perf_counter() - start))
    return rates[1:]


def rank_here(data: Path) -> list[float]:
    """Return test triples per second of ranking both sides with random parameters."""
    import torch
    from floor import read_graph

    from kge_torchrec.data.store.filter_index import FilterIndex
    from kge_torchrec.embeddings.backend import EntityShard
    from kge_torchrec.models.scorers.bilinear import ComplEx
    from kge_torchrec.ranking.blocks import ModelScores
    from kge_torchrec.ranking.ranks import rank_triples

    torch.set_num_threads(2)
    splits, entities, relations = read_graph(data)
    scorer = ComplEx(relations, DIM)
    for parameter in scorer.parameters():
        torch.nn.init.normal_(parameter)
    shard = EntityShard(torch.randn(entities, DIM), 0, entities)
    known = FilterIndex.of(*splits.values())
    return _rates(
        lambda: rank_triples(ModelScores(scorer, shard), splits["test"], known), len(splits["test"])
    )


def rank_floor(data: Path) -> list[float]:
    """Run the same work in peers/floor.py."""
    import torch
    from floor import rank, read_graph

    torch.set_num_threads(2)
    splits, entities, relations = read_graph(data)
    rows = torch.randn(entities, DIM), torch.randn(relations, DIM)
    return _rates(lambda: rank(*rows, splits), len(splits["test"]))


def _rates(work: Callable[[], object], count: int) -> list[float]:
    """Return how many of ``count`` pieces a second takes, of three runs after the first."""
    rates = []
    for _ in range(4):
        start = time.perf_counter()
        work()
        rates.append(count / (time.perf_counter() - start))
    return rates[1:]


def prepare_here(source: Path, triples: str) -> list[float]:
    """Return triples per second of `prepare`; print the peak of memory to stderr."""
    from kge_torchrec.data.prepare import prepare

    start = time.perf_counter()
    prepare(source, source.with_name("store"), overwrite=True, progress=False)
    rate = int(triples) / (time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"prepare: peak of memory {peak:.2f} GiB", file=sys.stderr)
    return [rate]


def prepare_floor(source: Path, triples: str) -> list[float]:
    """Read the file into memory and number entities and relations, without writing."""
    import pyarrow as pa
    from pyarrow import csv

    start = time.perf_counter()
    table = csv.read_csv(
        source,
        read_options=csv.ReadOptions(column_names=["h", "r", "t"]),
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
    )
    ends = pa.chunked_array(table["h"].chunks + table["t"].chunks)
    ends.dictionary_encode().combine_chunks()
    table["r"].dictionary_encode()
    return [int(triples) / (time.perf_counter() - start)]


def write_tsv(path: Path, triples: int) -> None:
    """Write labels whose frequencies follow Zipf's law, of as many entities as triples."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv

    random = np.random.default_rng(0)

    def labels(prefix: str, size: int, count: int) -> pa.Array:
        ranks = np.minimum((size ** random.random(count)).astype(np.int64) - 1, size - 1)
        scattered = pa.array(ranks * 2_654_435_761 % size * 7 + 13).cast(pa.string())
        return pc.binary_join_element_wise(prefix, scattered, "")

    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    schema = pa.schema([(name, pa.string()) for name in "hrt"])
    with csv.CSVWriter(path, schema, write_options=options) as writer:
        for start in range(0, triples, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, triples - start)
            ends = [labels("Q", triples, count) for _ in range(2)]
            table = pa.table([ends[0], labels("P", RELATIONS, count), ends[1]], schema)
            writer.write_table(table)


# Sections


def training(options: argparse.Namespace) -> Iterator[Figure]:
    works = [(scorer, work) for scorer in SCORERS for work in SAMPLED]
    works += [(scorer, work) for work, scorers in FULL.items() for scorer in scorers]
    for scorer, work in works:
        name = f"{scorer}-{work}"
        if options.only and not re.search(options.only, name):
            continue
        has_floor = work in SAMPLED or (scorer == "complex" and work != "kvsall")
        unit = "queries/s" if work == "kvsall" else "triples/s"
        figure = _pairs(options, name, unit, "train", has_floor, options.data, scorer, work)
        yield figure
        if not options.with_peers:
            continue
        for module, script in PEERS_PER_TRIPLE.items() if work == "per-triple" else ():
            if _has(options.with_peers, module):
                theirs = _rates_of(options, script, SCORERS[scorer])
                yield Figure(f"{name}-beside-{module}", unit, figure.ours, peer=theirs)
        takes = work.startswith("shared") and scorer in ("complex", "distmult")
        if takes and _has(options.with_peers, "torchbiggraph"):
            theirs = _rates_of(options, "peer_biggraph.py", scorer, str(SAMPLED[work][0]))
            same = _worker("train_here", options.data, scorer, work, "both")
            yield Figure(f"{name}-beside-biggraph", "queries/s", same, peer=theirs)


def ranking(options: argparse.Namespace) -> Iterator[Figure]:
    yield _pairs(options, "ranking", "triples/s", "rank", True, options.data)


def prepare(options: argparse.Namespace) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "triples.tsv")
        write_tsv(source, options.triples)
        yield _pairs(options, "prepare", "triples/s", "prepare", True, source, options.triples)


def _pairs(
    options: argparse.Namespace, name: str, unit: str, work: str, has_floor: bool,
    *arguments: object,
) -> Figure:  # fmt: skip
    """Return the median of each process, per side; the sides alternate."""
    rates: dict[str, list[float]] = {"here": [], **({"floor": []} if has_floor else {})}

    def differ() -> bool:
        return any(
            max(values) - min(values) > options.spread * statistics.median(values)
            for values in rates.values()
        )

    for repeat in range(options.repeats + 2):
        if repeat >= options.repeats and not differ():
            break
        for side in list(rates)[:: 1 if repeat % 2 else -1]:
            rates[side].append(statistics.median(_worker(f"{work}_{side}", *arguments)))
    return Figure(name, unit, rates["here"], rates.get("floor", []), unquiet=differ())


def _worker(name: str, *arguments: object) -> list[float]:
    """Run a function of this file in a new process and return its result."""
    ours = ("MALLOC_", "GOMP_", "OMP_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [sys.executable, str(HERE), "--worker", name, *map(str, arguments)]
    return json.loads(_run(command, inherited | KEEP).splitlines()[-1])


def _has(python: str, module: str) -> bool:
    """Return whether a Python has a module installed."""
    script = f"import importlib.util; raise SystemExit(not importlib.util.find_spec({module!r}))"
    return subprocess.run([python, "-c", script]).returncode == 0


def _rates_of(options: argparse.Namespace, script: str, *arguments: str) -> list[float]:
    """Return the rates that a peer's script prints, one per line: name, rate, unit."""
    lines = _peer(options.with_peers, script, str(options.data), *arguments).splitlines()
    words = [line.split() for line in lines]
    return [float(line[1]) for line in words if line[2:] in (["triples/s"], ["queries/s"])]


def _peer(python: str, script: str, *arguments: str) -> str:
    """Return what a peer's script prints."""
    with tempfile.TemporaryDirectory() as folder:
        homes = {"PYKEEN_HOME": folder, "PYSTOW_HOME": folder}
        return _run([python, str(PEERS / script), *arguments], os.environ | KEEP | homes)


def start_up(options: argparse.Namespace) -> Iterator[Figure]:
    program = [sys.executable, "-m", "kge_torchrec"]
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        _run([*program, "train", "demo", f"--run.dir={run}", "--train.epochs=1"], dict(os.environ))
        for name, command in {
            "help": [*program, "--help"],
            "predict": [*program, "predict", run, "--head", "Austria", "--relation", "borders"],
            "evaluate": [*program, "evaluate", run],
            "import-of-torch": [sys.executable, "-c", "import torch"],
        }.items():
            seconds = []
            for _ in range(options.repeats):
                start = time.perf_counter()
                _run(command, dict(os.environ))
                seconds.append(time.perf_counter() - start)
            yield Figure(name, "s", seconds)


def whole(options: argparse.Namespace) -> Iterator[Figure]:
    """Train one model in PyKEEN and here, fp32 and as shipped; say minutes and test MRR."""
    if not (options.with_peers and _has(options.with_peers, "pykeen")):
        return
    arguments = str(options.data), "ComplEx", "--work", "whole", "--epochs", str(options.epochs)
    words = _peer(options.with_peers, "peer_pykeen.py", *arguments).split()
    yield Figure(f"pykeen: test mrr {float(words[-1]):.4f} in", "minutes", [float(words[1])])
    for name, changes in {"ours, fp32": ["--train.precision=fp32"], "ours": []}.items():
        with tempfile.TemporaryDirectory() as folder:
            keys = settings(options.data, "complex", "kvsall", f"{folder}/run", "both")
            keys = [key for key in keys if not key.startswith("--train.precision")]
            keys += ["--model.reciprocal=true", "--evaluation.every=0"]
            keys += [f"--train.epochs={options.epochs}", *changes]
            _run([sys.executable, "-m", "kge_torchrec", "train", *keys], dict(os.environ))
            results: Any = json.loads(Path(folder, "run", "results.json").read_text())
        mrr, minutes = results["test"]["both"]["realistic"]["mrr"], results["train"]["seconds"] / 60
        yield Figure(f"{name}: test mrr {mrr:.4f} in", "minutes", [minutes])


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(" ".join(command))
    return done.stdout


SECTIONS = {"training": training, "ranking": ranking, "prepare": prepare, "start-up": start_up,
            "whole": whole}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--data", type=Path, help="the folder of FB15k-237")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--spread", type=float, default=0.2,
                        help="largest relative difference between processes of a side")  # fmt: skip
    parser.add_argument("--only", metavar="PATTERN", help="of training, these names only")
    parser.add_argument("--with-peers", metavar="PYTHON", help="a Python with another system")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of the section whole")
    parser.add_argument("--triples", type=int, default=5_000_000, help="lines to prepare")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := {*options.sections} - {*SECTIONS}:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    sections = options.sections or list(SECTIONS)
    if options.data is None and {"training", "ranking", "whole"} & {*sections}:
        parser.error("give --data, a folder with train.txt, valid.txt and test.txt of FB15k-237")
    if (busy := os.getloadavg()[0]) > 0.7:
        print(f"other programs are running: load {busy:.1f}", flush=True)
    figures = []
    for section in sections:
        for figure in SECTIONS[section](options):
            print(figure, flush=True)
            figures.append(asdict(figure))
    if options.json:
        options.json.write_text(json.dumps({"load": busy, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        name, first, *rest = sys.argv[2:]
        print(json.dumps(globals()[name](Path(first), *rest)))
    else:
        main()
