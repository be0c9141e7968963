"""Measure training, ranking, preparing and start-up, and compare them with plain torch.

    python scripts/bench.py [SECTION ...] --data FB15K237 [--repeats N] [--json FILE]
    python scripts/bench.py training --data FB15K237 --only transe_l1 --with-peers PYTHON

FB15K237 is a folder with train.txt, valid.txt and test.txt of FB15k-237, which is not in this
repository.

Sections (default: all):

    training   FB15k-237, dim 256, Adam, tail queries, bce with 128 negatives, shared by the batch
               or per triple; and against all entities in batches of 512 (1vsall with softmax,
               kvsall with bce). The floor (peers/floor.py) is the same work in plain torch with
               gradients derived by hand. Against all entities it has ComplEx with 1vsall only.
    ranks      the FB15k-237 recipe in one process with all cores and in several that share them,
               with both engines
    scale, ranking, ingest   the scripts bench_scale.py, bench_ranking.py, bench_prepare.py
    start-up   seconds of whole commands
    whole      with --with-peers: minutes and test MRR of ten epochs of ComplEx, kvsall, bce,
               batches of 512, 256 numbers per entity, reciprocal relations, here and in PyKEEN

Both sides run in separate processes, alternating, with the same settings of allocator and OpenMP.
A figure is the median over processes of their medians. If the processes of a side differ by more
than ``--spread``, two more pairs run. If they still differ, the figure is marked "unquiet".

``--with-peers`` names a Python that has PyKEEN, PyG, dice-embeddings or PyTorch-BigGraph
(peers/README.md). The first three do the floor's work per triple. BigGraph shares negatives and
corrupts both ends. For that comparison this package does so too, and a triple counts twice.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT, PEERS = HERE.parents[1], HERE.parent / "peers"
# Keep freed blocks, as kge-torchrec does. OpenMP's workers spin for the default time.
KEEP = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    "MALLOC_TOP_PAD_": str(16 << 20),
    "GOMP_SPINCOUNT": "300000",
}
# Any MALLOC_ setting keeps kge-torchrec from changing the allocator.
DEFAULTS = {"MALLOC_ARENA_MAX": "8", "GOMP_SPINCOUNT": "300000"}
SCORERS = {"complex": "ComplEx", "distmult": "DistMult", "transe_l1": "TransE", "rotate": "RotatE"}
# batch size, negatives.chunk_size, steps per timed block
SAMPLED = {"shared-1024": (1024, 0, 100), "shared-4096": (4096, 0, 30), "per-triple": (1024, 1, 10)}
# Scorers measured against all entities. In bfloat16 only products are faster.
FULL = {"1vsall": tuple(SCORERS), "kvsall": tuple(SCORERS), "1vsall-bf16": ("complex", "distmult")}
SECTIONS = ("training", "ranks", "scale", "ranking", "ingest", "start-up", "whole")


@dataclass
class Figure:
    """The measured times of one piece of work, on both sides."""

    name: str
    unit: str
    ours: list[float]  # the median of each process
    floor: list[float] = field(default_factory=list)
    peers: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # theirs, ours
    unquiet: bool = False

    @property
    def ratio(self) -> float | None:
        """Return our rate over the floor's; above 1 is faster."""
        return _median(self.ours) / _median(self.floor) if self.floor else None

    def __str__(self) -> str:
        text = f"{self.name} {_median(self.ours):.6g} {self.unit}{_spread(self.ours)}"
        if self.floor:
            text += f", floor {_median(self.floor):.6g}{_spread(self.floor)}"
            text += f": {self.ratio:.3f} of it"
        for name, rates in self.peers.items():
            theirs, ours = _median(rates["theirs"]), _median(rates["ours"])
            text += f", {name} {theirs:.6g}, ours {ours:.6g}: {ours / theirs:.2f} x"
        return text + (" unquiet" if self.unquiet else "")


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _spread(values: list[float]) -> str:
    return f" ({min(values):.6g} to {max(values):.6g})" if len(values) > 1 else ""


def _differ(values: list[float], most: float) -> bool:
    return max(values) - min(values) > most * _median(values)


# Training


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


def ours(data: Path, scorer: str, work: str, pipeline: str, sides: str = "tail") -> list[float]:
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
        config = replace(config, train=replace(config.train, pipeline=pipeline))
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


def floor(data: Path, scorer: str, work: str) -> list[float]:
    """Run the same work in peers/floor.py."""
    sys.path.insert(0, str(PEERS))
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


def peers(options: argparse.Namespace, figure: Figure, scorer: str, work: str) -> dict[str, dict]:
    """Return queries per second of other systems that do this work and of this package."""
    results = {}
    if work == "per-triple":
        for name, module, script in (
            ("PyKEEN", "pykeen", "peer_pykeen.py"),
            ("PyG", "torch_geometric", "peer_pyg.py"),
            ("dice-embeddings", "dicee", "peer_dicee.py"),
        ):
            if _has(options.with_peers, module):
                theirs = _peer(options.with_peers, script, options.data, SCORERS[scorer])
                results[name] = {"theirs": theirs, "ours": figure.ours}
        return results
    takes = work in SAMPLED and scorer in ("complex", "distmult")
    if takes and _has(options.with_peers, "torchbiggraph"):
        arguments = options.data, scorer, SAMPLED[work][0]
        theirs = _peer(options.with_peers, "peer_biggraph.py", *arguments)
        same = _worker(KEEP, "ours", options.data, scorer, work, options.pipeline, "both")
        results["PyTorch-BigGraph"] = {"theirs": theirs, "ours": same}
    return results


def _has(python: str, module: str) -> bool:
    """Return whether a Python has a module installed."""
    script = f"import importlib.util; raise SystemExit(not importlib.util.find_spec({module!r}))"
    return subprocess.run([python, "-c", script]).returncode == 0


def _peer(python: str, script: str, *arguments: object) -> list[float]:
    """Return the rates that a peer's script prints, one per line: name, rate, unit."""
    with tempfile.TemporaryDirectory() as folder:
        homes = {"PYKEEN_HOME": folder, "PYSTOW_HOME": folder}
        command = [python, str(PEERS / script), *map(str, arguments)]
        lines = [line.split() for line in _run(command, os.environ | KEEP | homes).splitlines()]
    return [float(line[1]) for line in lines if line[2:] in (["triples/s"], ["queries/s"])]


def training(options: argparse.Namespace) -> list[Figure]:
    works = [(scorer, work) for scorer in SCORERS for work in SAMPLED]
    works += [(scorer, work) for work, scorers in FULL.items() for scorer in scorers]
    figures = []
    for scorer, work in works:
        name = f"{scorer}-{work}"
        if options.only and not re.search(options.only, name):
            continue
        allocators = {"": KEEP}
        if options.allocators:
            allocators |= {"-glibc": DEFAULTS, "-as-shipped": {}}
        for label, environment in allocators.items():
            sides: dict[str, tuple] = {
                "ours": ("ours", options.data, scorer, work, options.pipeline)
            }
            if work in SAMPLED or (scorer == "complex" and work != "kvsall"):
                sides["floor"] = "floor", options.data, scorer, work
            results = _pairs(options, sides, environment)
            unit = "queries/s" if work == "kvsall" else "triples/s"
            figure = Figure(f"{name}{label}", unit, *results)
            figure.unquiet = any(_differ(values, options.spread) for values in results)
            if options.with_peers and not label:
                figure.peers = peers(options, figure, scorer, work)
            figures.append(_said(figure))
    return figures


def _pairs(options: argparse.Namespace, sides: dict, environment: dict) -> list[list[float]]:
    """Return the median of each process, per side; the sides alternate."""
    results: dict[str, list[float]] = {who: [] for who in sides}
    for repeat in range(options.repeats + 2):
        differ = any(_differ(values, options.spread) for values in results.values() if values)
        if repeat >= options.repeats and not differ:
            break
        for who in list(sides)[:: 1 if repeat % 2 else -1]:
            results[who].append(_median(_worker(environment, *sides[who])))
    return list(results.values())


def _worker(environment: dict, *arguments: object) -> list[float]:
    """Run this file as a worker and return its result."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GOMP_", "OMP_"))
    }
    command = [sys.executable, str(HERE), "--worker", *map(str, arguments)]
    return json.loads(_run(command, inherited | environment).splitlines()[-1])


# The other sections


def ranks(options: argparse.Namespace) -> list[Figure]:
    """Measure the recipe and a larger batch with both engines on 1, 2 and 4 ranks."""
    figures = []
    for batch in (None, 4096):
        with tempfile.TemporaryDirectory() as folder:
            results = _compared(options, folder, batch)
        for world_size, engines in results.items():
            for engine, rates in engines.items():
                name = f"{engine}-{world_size}-ranks-batch-{batch or 'recipe'}"
                figure = Figure(name, "triples/s", _medians(rates))
                figure.unquiet = _differ(figure.ours, options.spread)
                figures.append(_said(figure))
                of_one = _median(figure.ours) / _median(_medians(results["1"][engine]))
                of_other = _median(figure.ours) / _median(_medians(engines["handrolled"]))
                print(f"  {of_one:.3f} of one process, {of_other:.3f} of the hand-rolled engine")
    return figures


def _medians(rates: list[list[float]]) -> list[float]:
    return [_median(repeat) for repeat in rates]


def _compared(options: argparse.Namespace, folder: str, batch: int | None) -> dict:
    """Return {ranks: {engine: [triples/s of each block, for every repeat]}}."""
    sizes = [str(size) for size in options.world_sizes]
    command = [sys.executable, "-m", "kge_torchrec", "compare", "fb15k237_complex",
               f"--data.path={options.data}", f"--run.dir={folder}/compared", "--train.epochs=1",
               "--engines", "torchrec", "handrolled", "--world-sizes", *sizes,
               "--repeats", str(options.repeats), "--steps", "60"]  # fmt: skip
    command += [f"--train.batch_size={batch}"] if batch else []
    _run(command, dict(os.environ))
    speed = json.loads(Path(folder, "compared", "comparison.json").read_text())["speed"]
    return {
        size: {engine: [repeat["triples_per_second"] for repeat in repeats]
               for engine, repeats in by_engine.items()}
        for size, by_engine in speed.items()
    }  # fmt: skip


def _script(name: str, *arguments: object) -> list[Figure]:
    """Return another script's lines: name, value, unit."""
    command = [sys.executable, str(HERE.parent / name), *map(str, arguments)]
    figures = []
    for line in _run(command, dict(os.environ)).splitlines():
        words = line.split()
        if len(words) >= 3:
            figures.append(_said(Figure(words[0], words[2], [float(words[1])])))
    return figures


def start_up(options: argparse.Namespace) -> list[Figure]:
    """Time whole commands on the graph of countries."""
    program = [sys.executable, "-m", "kge_torchrec"]
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        _run([*program, "train", "demo", f"--run.dir={run}", "--train.epochs=1"], dict(os.environ))
        commands = {
            "help": [*program, "--help"],
            "predict": [*program, "predict", run, "--head", "Austria", "--relation", "borders"],
            "evaluate": [*program, "evaluate", run],
            "import-of-torch": [sys.executable, "-c", "import torch"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(options.repeats):
            for name, command in commands.items():
                start = time.perf_counter()
                _run(command, dict(os.environ))
                seconds[name].append(time.perf_counter() - start)
    return [_said(Figure(name, "s", values)) for name, values in seconds.items()]


def whole(options: argparse.Namespace) -> list[Figure]:
    """Train one model in PyKEEN and here, fp32 and as shipped; say minutes and test MRR."""
    if not options.with_peers or not _has(options.with_peers, "pykeen"):
        return []
    figures = []
    sides = {"pykeen": [], "ours, fp32": ["--train.precision=fp32"], "ours": []}
    for name, changes in sides.items():
        with tempfile.TemporaryDirectory() as folder:
            if name == "pykeen":
                command = [options.with_peers, str(PEERS / "peer_pykeen.py"), str(options.data)]
                command += ["ComplEx", "--work", "whole", "--epochs", str(options.epochs)]
                homes = {"PYKEEN_HOME": folder, "PYSTOW_HOME": folder}
                words = _run(command, os.environ | KEEP | homes).split()
                minutes, mrr = float(words[1]), float(words[-1])
            else:
                keys = settings(options.data, "complex", "kvsall", f"{folder}/run")
                keys = [key for key in keys if not key.startswith("--train.precision")]
                keys += [
                    "--model.reciprocal=true",
                    "--negatives.sides=both",
                    "--evaluation.every=0",
                ]
                keys += [f"--train.epochs={options.epochs}", *changes]
                _run([sys.executable, "-m", "kge_torchrec", "train", *keys], dict(os.environ))
                results = json.loads(Path(folder, "run", "results.json").read_text())
                minutes = results["train"]["seconds"] / 60
                mrr = results["test"]["both"]["realistic"]["mrr"]
        figures.append(_said(Figure(f"{name}: test mrr {mrr:.4f} in", "minutes", [minutes])))
    return figures


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def _said(figure: Figure) -> Figure:
    print(figure, flush=True)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--data", type=Path, help="the folder of FB15k-237")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--spread",
        type=float,
        default=0.2,
        help="largest relative difference between processes of a side",
    )
    parser.add_argument(
        "--only", metavar="PATTERN", help="measure only training figures whose names match"
    )
    parser.add_argument("--pipeline", default="auto", choices=("auto", "sparse_dist", "loop"))
    parser.add_argument(
        "--allocators", action="store_true", help="also measure with glibc's default settings"
    )
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--with-peers", metavar="PYTHON", help="a Python with PyKEEN, PyG or PyTorch-BigGraph"
    )
    parser.add_argument("--epochs", type=int, default=10, help="epochs of the section whole")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if options.data is None and {"training", "ranks", "ranking", "whole"} & {
        *(options.sections or SECTIONS)
    }:
        parser.error("give --data, a folder with train.txt, valid.txt and test.txt of FB15k-237")
    busy = os.getloadavg()[0]
    if busy > 0.7:
        print(f"other programs are running: load {busy:.1f}", flush=True)
    measured = {
        "training": lambda: training(options),
        "ranks": lambda: ranks(options),
        "scale": lambda: _script("bench_scale.py", "--repeats", options.repeats),
        "ranking": lambda: _script("bench_ranking.py", options.data, "--repeats", options.repeats),
        "ingest": lambda: _script("bench_prepare.py", "--repeats", options.repeats),
        "start-up": lambda: start_up(options),
        "whole": lambda: whole(options),
    }  # fmt: skip
    figures: list[Figure] = []
    for section in options.sections or SECTIONS:
        print(f"# {section}", flush=True)
        figures += measured[section]()
    if options.json:
        kept = [asdict(figure) | {"ratio": figure.ratio} for figure in figures]
        options.json.write_text(json.dumps({"load": busy, "figures": kept}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        who, *rest = sys.argv[2:]
        measured = ours if who == "ours" else floor
        print(json.dumps(measured(Path(rest[0]), *rest[1:])))
    else:
        main()
