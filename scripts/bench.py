"""Every speed that we watch, on this machine, each beside the floor where there is one.

    python scripts/bench.py [SECTION ...] [--repeats N] [--json FILE] [--chart FILE]
    python scripts/bench.py training --only transe_l1 --with-peers PYTHON

Sections: training, ranks, scale, ranking, ingest, start-up; all of them if none is named.

**training** FB15k-237, 256 real numbers, Adam, tails corrupted, logistic loss with 128 negatives,
shared by the batch or drawn for each triple; and against all entities (1vsall with softmax, kvsall
with the logistic loss, batches of 512).  The floor is the same work with gradients derived by hand
in plain torch, without autograd or a framework; against all entities it has ComplEx with 1vsall.
**ranks** the FB15k-237 recipe in one process with all cores and in several with their share of
them, by both engines.  **scale**, **ranking**, **ingest**: the scripts of those names.
**start-up** seconds of whole commands.

Both sides run in processes of their own, by turns, under the same settings of allocator and OpenMP.
A figure is the median over processes of each one's median.  Where a side's processes differ by more
than ``--spread``, two more pairs are measured; what still does is marked "unquiet".

--with-peers: a Python with PyKEEN, PyG or PyTorch-BigGraph, whichever it has, under the same
settings of the allocator.  PyKEEN and PyG do the floor's work per triple.  BigGraph shares
negatives and corrupts both ends, so that ours does for once, and a triple counts twice.
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
ROOT, SHARED = HERE.parents[1], HERE.parents[2] / "shared"
# Freed blocks are kept, as our programs do for themselves; OpenMP's workers spin as by default.
KEEP = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    "MALLOC_TOP_PAD_": str(16 << 20),
    "GOMP_SPINCOUNT": "300000",
}
# Any MALLOC_ setting keeps ours from changing the allocator.
DEFAULTS = {"MALLOC_ARENA_MAX": "8", "GOMP_SPINCOUNT": "300000"}
SCORERS = {"complex": "ComplEx", "distmult": "DistMult", "transe_l1": "TransE", "rotate": "RotatE"}
# batch size, negatives.chunk_size, the floor's mode, steps that are timed at once
SAMPLED = {
    "shared-1024": (1024, 0, "shared", 100),
    "shared-4096": (4096, 0, "shared", 30),
    "per-triple": (1024, 1, "pertriple", 10),
}
# Against all entities, and of whom: in bfloat16 products alone are faster.
FULL = {"1vsall": tuple(SCORERS), "kvsall": tuple(SCORERS), "1vsall-bf16": ("complex", "distmult")}
SECTIONS = ("training", "ranks", "scale", "ranking", "ingest", "start-up")


@dataclass
class Figure:
    """What was measured of one piece of work."""

    name: str
    unit: str
    ours: list[float]  # the median of each process
    floor: list[float] = field(default_factory=list)
    peers: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # theirs, ours
    unquiet: bool = False

    @property
    def ratio(self) -> float | None:
        """Ours in the floor's: of rates, so that more is faster."""
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
    """The floor's work as overrides of our config."""
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
        batch, chunk, *_ = SAMPLED[work]
        values |= {"loss.name": "bce", "negatives.count": 128, "negatives.chunk_size": chunk}
    else:
        batch = 512
        regime, _, precision = work.partition("-")
        values |= {"negatives.regime": regime}
        values["loss.name"] = "softmax" if regime == "1vsall" else "bce"
        values["train.precision"] = precision or "fp32"
    return [f"--{key}={value}" for key, value in (values | {"train.batch_size": batch}).items()]


def ours(data: Path, scorer: str, work: str, pipeline: str, sides: str = "tail") -> list[float]:
    """Queries a second of a few blocks of steps."""
    from kge_torchrec.environment import keep_large_blocks, limit_spinning

    limit_spinning()  # as the command line does, before torch is loaded
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
        steps = SAMPLED[work][3] if work in SAMPLED else 10
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


def floor(folder: Path, data: Path, scorer: str, work: str) -> list[float]:
    """The same work in floor.py."""
    sys.path.insert(0, str(folder))
    import torch
    from common import load_ids, measure
    from floor import Tr

    torch.set_num_threads(2)
    if work not in SAMPLED:
        return _floor_of_all_entities(measure)
    splits, entities, relations = load_ids(data.name)
    triples = torch.from_numpy(splits["train"])
    batch, _, mode, steps = SAMPLED[work]
    trainer = Tr(SCORERS[scorer], entities, relations, 256, batch, 128, mode)
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


def _floor_of_all_entities(measure) -> list[float]:
    import floor

    rates: list[float] = []
    floor.report = lambda who, task, found, **_: rates.extend(n / wall for wall, _, n in found)
    floor.measure = lambda work: measure(work, maxwait=0)
    floor.run_kvs()
    return rates


def peers(options: argparse.Namespace, figure: Figure, scorer: str, work: str) -> dict[str, dict]:
    """Queries a second of those that do this work and of ours, each in a process of its own."""
    found = {}
    if work == "per-triple":
        for name, module, script, kind in (
            ("PyKEEN", "pykeen", "peer_pykeen.py", "a"),
            ("PyG", "torch_geometric", "peer_pyg.py", "as"),
        ):
            if _has(options.with_peers, module):
                given = options.floor / script, kind, SCORERS[scorer]
                found[name] = {"theirs": _peer(options.with_peers, *given), "ours": figure.ours}
        return found
    takes = work in SAMPLED and scorer in ("complex", "distmult")
    if takes and _has(options.with_peers, "torchbiggraph"):
        given = HERE.with_name("peer_biggraph.py"), options.data, scorer, SAMPLED[work][0]
        theirs = _peer(options.with_peers, *given)
        same = _worker(KEEP, "ours", options.data, scorer, work, options.pipeline, "both")
        found["PyTorch-BigGraph"] = {"theirs": theirs, "ours": same}
    return found


def _has(python: str, module: str) -> bool:
    """Whether a Python has a module installed."""
    script = f"import importlib.util; raise SystemExit(not importlib.util.find_spec({module!r}))"
    return subprocess.run([python, "-c", script]).returncode == 0


def _peer(python: str, *arguments: object) -> list[float]:
    """Queries a second that a peer's script prints, each after its name or its name and work."""
    with tempfile.TemporaryDirectory() as folder:
        homes = {"PYKEEN_HOME": folder, "PYSTOW_HOME": folder, "STEPS": "3"}
        out = _run([python, *map(str, arguments)], os.environ | KEEP | homes)
    lines = [line.split() for line in out.splitlines()]
    rates = [float(line[2]) for line in lines if line[:1] in (["pykeen"], ["pyg"])]
    return rates + [float(line[1]) for line in lines if line[:1] == ["biggraph"]]


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
                sides["floor"] = "floor", options.floor, options.data, scorer, work
            found = _pairs(options, sides, environment)
            unit = "queries/s" if work == "kvsall" else "triples/s"
            figure = Figure(f"{name}{label}", unit, *found)
            figure.unquiet = any(_differ(values, options.spread) for values in found)
            if options.with_peers and not label:
                figure.peers = peers(options, figure, scorer, work)
            figures.append(_said(figure))
    return figures


def _pairs(options: argparse.Namespace, sides: dict, environment: dict) -> list[list[float]]:
    """Medians of the processes of each side, which take turns."""
    found: dict[str, list[float]] = {who: [] for who in sides}
    for repeat in range(options.repeats + 2):
        differ = any(_differ(values, options.spread) for values in found.values() if values)
        if repeat >= options.repeats and not differ:
            break
        for who in list(sides)[:: 1 if repeat % 2 else -1]:
            found[who].append(_median(_worker(environment, *sides[who])))
    return list(found.values())


def _worker(environment: dict, *arguments: object) -> list[float]:
    """What this file returns as a worker."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GOMP_", "OMP_"))
    }
    command = [sys.executable, str(HERE), "--worker", *map(str, arguments)]
    return json.loads(_run(command, inherited | environment).splitlines()[-1])


# The other sections


def ranks(options: argparse.Namespace) -> list[Figure]:
    """Of the recipe and of a larger batch: both engines on 1, 2 and 4 ranks."""
    figures = []
    for batch in (None, 4096):
        with tempfile.TemporaryDirectory() as folder:
            found = _compared(options, folder, batch)
        for world_size, engines in found.items():
            for engine, rates in engines.items():
                name = f"{engine}-{world_size}-ranks-batch-{batch or 'recipe'}"
                figure = Figure(name, "triples/s", _medians(rates))
                figure.unquiet = _differ(figure.ours, options.spread)
                figures.append(_said(figure))
                of_one = _median(figure.ours) / _median(_medians(found["1"][engine]))
                of_other = _median(figure.ours) / _median(_medians(engines["handrolled"]))
                print(f"  {of_one:.3f} of one process, {of_other:.3f} of the hand-rolled engine")
    return figures


def _medians(rates: list[list[float]]) -> list[float]:
    return [_median(repeat) for repeat in rates]


def _compared(options: argparse.Namespace, folder: str, batch: int | None) -> dict:
    """{ranks: {engine: [triples/s of each block, of every repeat]}}"""
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
    """Another script's lines: name, value, unit."""
    command = [sys.executable, str(HERE.parent / name), *map(str, arguments)]
    figures = []
    for line in _run(command, dict(os.environ)).splitlines():
        words = line.split()
        if len(words) >= 3:
            figures.append(_said(Figure(words[0], words[2], [float(words[1])])))
    return figures


def start_up(options: argparse.Namespace) -> list[Figure]:
    """Whole commands on the graph of countries."""
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


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def _said(figure: Figure) -> Figure:
    print(figure, flush=True)
    return figure


def draw(figures: list[Figure], path: Path) -> None:
    """Bars: ours as a share of the floor."""
    from matplotlib.figure import Figure as Picture

    shown = [figure for figure in figures if figure.ratio][::-1]
    picture = Picture(figsize=(8, 0.6 + 0.3 * len(shown)), layout="constrained")
    axes = picture.add_subplot()
    axes.barh(
        [figure.name for figure in shown], [figure.ratio for figure in shown], color="#4477aa"
    )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("examples a second, of the floor's")
    picture.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "fb15k-237")
    parser.add_argument("--floor", type=Path, default=SHARED / "tools" / "peers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--spread", type=float, default=0.2, help="that two processes may differ by"
    )
    parser.add_argument("--only", metavar="PATTERN", help="of the names of training")
    parser.add_argument("--pipeline", default="auto", choices=("auto", "sparse_dist", "loop"))
    parser.add_argument("--allocators", action="store_true", help="glibc's defaults as well")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--with-peers", metavar="PYTHON", help="one that has some")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    busy = os.getloadavg()[0]
    if busy > 0.7:
        print(f"something else is running here: load {busy:.1f}", flush=True)
    measured = {
        "training": lambda: training(options),
        "ranks": lambda: ranks(options),
        "scale": lambda: _script("bench_scale.py", "--repeats", options.repeats),
        "ranking": lambda: _script("bench_ranking.py", "--floor", options.floor / "floor.py",
                                   "--repeats", options.repeats),
        "ingest": lambda: _script("bench_prepare.py", "--repeats", options.repeats),
        "start-up": lambda: start_up(options),
    }  # fmt: skip
    figures: list[Figure] = []
    for section in options.sections or SECTIONS:
        print(f"# {section}", flush=True)
        figures += measured[section]()
    if options.json:
        kept = [asdict(figure) | {"ratio": figure.ratio} for figure in figures]
        options.json.write_text(json.dumps({"load": busy, "figures": kept}, indent=1) + "\n")
    if options.chart:
        draw(figures, options.chart)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        who, *rest = sys.argv[2:]
        if who == "ours":
            rates = ours(Path(rest[0]), *rest[1:])
        else:
            rates = floor(Path(rest[0]), Path(rest[1]), *rest[2:])
        print(json.dumps(rates))
    else:
        main()
