"""The cases of golden_results.py, and what a process does for one of them.

`golden_results.py` starts this file with the package of one commit on its path:

    python golden_cases.py PART NAME FOLDER GRAPH ATTEMPT

It writes FOLDER/result.json. The file uses the public interface and today's names of keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SHARED = {
    "threads": 1, "device": "cpu", "seed": 5, "model.dim": 16, "model.init": "normal",
    "model.init_scale": 0.1, "loss.n3": 0.0, "loss.relation_weight": 0.0, "train.lr": 0.1,
    "evaluation.patience": 0, "evaluation.max_triples": 0, "negatives.count": 24,
    "train.batch_size": 256, "train.log_every": 5, "evaluation.every": 4, "run.progress": False,
    "run.trackers.tensorboard": False,
}  # fmt: skip
HANDROLLED = {"entities.engine": "handrolled"}
QUERIES = {"train.batch_size": 128}
TYPED = {"data.types": "prefix"}
ALL_ENTITIES = ("1vsall", "kvsall", "allvsall")

# name: (graph, ranks, epochs, keys); what happens in between is in SPECIAL
RUNS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "sampled": ("countries", 1, 8, {}),
    "sampled-2": ("countries", 2, 8, {"train.optimizer": "adam", "train.lr": 0.01}),
    "sampled-4": ("countries", 4, 8, {"train.optimizer": "rowwise_adagrad"}),
    "per-triple": ("countries", 1, 8, {"negatives.chunk_size": 1, "loss.name": "margin",
                                       "model.scorer": "transe_l2", "model.reciprocal": False}),
    "self-adversarial": ("countries", 1, 8, {
        "model.scorer": "rotate", "loss.name": "self_adversarial", "loss.options.margin": 6.0,
        "model.reciprocal": False}),
    "penalties": ("countries", 1, 8, {"loss.n3": 0.05, "loss.relation_weight": 0.5,
                                      "train.schedule": "cosine", "train.warmup_steps": 7}),
    "ivr": ("countries", 1, 4, {"loss.regularizers": {"ivr": {"lambda1": 0.01, "lambda2": 0.02}}}),
    "dropout-2": ("countries", 2, 8, {
        "model.scorer": "conve", "model.dropout.hidden": 0.2, "model.dropout.input": 0.1,
        "train.optimizer": "rowwise_adam", "train.lr": 0.01}),
    "1vsall": ("countries", 1, 8, {"negatives.regime": "1vsall", "loss.n3": 0.01}),
    "1vsall-2": ("countries", 2, 8, {"negatives.regime": "1vsall", "model.scorer": "distmult"}),
    "1vsall-4": ("countries", 4, 8, {"negatives.regime": "1vsall", **HANDROLLED}),
    "kvsall": ("countries", 1, 16, {"negatives.regime": "kvsall", **QUERIES}),
    "kvsall-2": ("countries", 2, 16, {"negatives.regime": "kvsall", "model.scorer": "keci",
                                      "loss.name": "bce", "train.optimizer": "adam",
                                      "train.lr": 0.01, **QUERIES}),
    "allvsall": ("countries", 1, 2, {"negatives.regime": "allvsall", "loss.name": "bce",
                                     **QUERIES}),
    "kvssample": ("countries", 1, 16, {"negatives.regime": "kvssample", "loss.name": "bce",
                                       **QUERIES}),
    "kvssample-2": ("countries", 2, 16, {"negatives.regime": "kvssample", **QUERIES}),
    "bf16": ("countries", 1, 8, {"train.precision": "bf16"}),
    "fp16": ("countries", 1, 8, {"train.precision": "fp16"}),
    "fsdp-2": ("countries", 2, 8, {"dense.wrapper": "fsdp", "model.scorer": "tucker",
                                   "train.optimizer": "adam", "train.lr": 0.01}),
    "accumulated-2": ("countries", 2, 8, {
        "train.accumulation": 3, "train.clip.norm": 0.5, "train.clip.value": 0.1,
        "train.optimizer": "rowwise_adagrad"}),
    "averaged": ("countries", 1, 8, {"train.averaging": "ema"}),
    "hardest": ("countries", 1, 8, {"negatives.hardest": 8}),
    "in-batch": ("countries", 1, 8, {"negatives.in_batch": "same_relation",
                                     "negatives.chunk_size": 64}),
    "log-q": ("countries", 1, 8, {"negatives.in_batch": True, "negatives.log_q": True}),
    "handrolled": ("countries", 1, 8, {**HANDROLLED, "train.optimizer": "adam"}),
    "handrolled-2": ("countries", 2, 8, {
        **HANDROLLED, "train.optimizer": "adam", "negatives.sampling": "degree",
        "negatives.filtered": True}),
    "handrolled-4": ("countries", 4, 8, {**HANDROLLED, "train.clip.norm": 0.5}),
    "dicee-2": ("countries", 2, 8, {**HANDROLLED, "entities.preset": "dicee",
                                    "train.optimizer": "adam"}),
    "dgl-2": ("countries", 2, 8, {**HANDROLLED, "entities.preset": "dgl",
                                  "train.optimizer": "adam"}),
    "house": ("countries", 1, 4, {"model.scorer": "house"}),
    "rescal": ("countries", 1, 4, {"model.scorer": "rescal", "model.dropout.relation": 0.2}),
    "transh": ("countries", 1, 4, {"model.scorer": "transh"}),
    "typed": ("places", 1, 8, {**TYPED, "negatives.among": "types"}),
    "features-2": ("places", 2, 8, {**TYPED, "data.features": "FEATURES"}),
    "tables-2": ("places", 2, 8, {**TYPED, "entities.tables": {
        "user": {"optimizer": "adam", "lr": 0.01}, "place": {"optimizer": "adagrad"}}}),
    "disk": ("countries", 1, 4, {"entities.placement": "disk"}),
    "disk-2": ("countries", 2, 4, {"entities.placement": "disk", "train.optimizer": "adam",
                                   "train.lr": 0.01}),
    "killed": ("countries", 1, 8, {"checkpoint.every.steps": 7}),
    "killed-2": ("countries", 2, 8, {"checkpoint.every.steps": 7, "train.optimizer": "adam",
                                     "train.lr": 0.01}),
    "killed-disk": ("countries", 1, 4, {"entities.placement": "disk",
                                        "checkpoint.every.steps": 7}),
    "extended": ("countries", 1, 4, {}),
    "extended-twice-2": ("countries", 2, 4, {"train.optimizer": "adam", "train.lr": 0.01}),
}  # fmt: skip
NEW = [("Atlantis", "borders", "Greece"), ("Atlantis", "borders", "Lemuria"),
       ("Lemuria", "sank_in", "Ocean"), ("Lemuria", "borders", "Greece")]  # fmt: skip
NEWER = [("Mu", "sank_in", "Ocean"), ("Mu", "borders", "Lemuria")]

RANKED = ("transe_l1", "transe_l2", "distmult", "complex", "rotate")
FREEBASE = {"entities": 86_054_151, "relations": 14_824, "triples": 338_586_276}
FB15K = {"entities": 14_541, "relations": 237, "triples": 272_115}
# name: (devices, sizes and options, keys)
PLANS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cpu": ("1xCPU-16GB", FB15K, {}),
    "cpu-2": ("2xCPU-16GB", FB15K, {"train.optimizer": "adam"}),
    "cpu-1vsall": ("1xCPU-16GB", FB15K, {"negatives.regime": "1vsall"}),
    "cpu-kvsall": ("4xCPU-64GB", FB15K, {"negatives.regime": "kvsall"}),
    "cpu-disk": ("1xCPU-16GB", FREEBASE, {"entities.placement": "disk"}),
    "h100": ("1xH100-80GB", FREEBASE, {"train.optimizer": "rowwise_adagrad"}),
    "h100-8": ("8xH100-80GB", FREEBASE, {"train.optimizer": "adam"}),
    "h100-16": ("16xH100-80GB", {**FREEBASE, "hosts": 2}, {"train.batch_size": 65_536}),
    "h200": ("1xH200", FREEBASE, {"model.dim": 200}),
    "a100-8-fsdp": ("8xA100-80GB", FREEBASE, {"dense.wrapper": "fsdp", "model.scorer": "conve"}),
    "caching": ("1xA100-40GB", FREEBASE, {"entities.placement": "managed_caching"}),
    "accumulated": ("4xH100-80GB", FREEBASE, {
        "train.accumulation": 4, "train.clip.norm": 1.0, "train.averaging": "ema"}),
    "rotate": ("2xH200", FREEBASE, {"model.scorer": "rotate", "loss.name": "self_adversarial",
                                    "model.reciprocal": False}),
    "too-small": ("1xA100-40GB", FREEBASE, {"model.dim": 512, "train.optimizer": "adam"}),
}  # fmt: skip
RACES = ("countries", "umls")
# name: (graph, keys of data)
DATA: dict[str, tuple[str, dict[str, Any]]] = {
    "countries": ("countries", {}), "umls": ("umls", {}), "gowalla": ("gowalla", {}),
    "fb15k-237": ("fb15k-237", {}), "places": ("places", TYPED),
    "one-file": ("one-file", {}), "csv": ("csv", {}), "parquet": ("parquet", {}),
    "gzip": ("gzip", {}),
}  # fmt: skip
RECIPE = {"threads": 2, "train.epochs": 2, "evaluation.every": 0, "run.progress": False,
          "run.trackers.tensorboard": False}  # fmt: skip
# name: (graph, config, keys, rounds)
TIMED: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "sampled": ("fb15k-237", "fb15k237_complex", RECIPE, 4),
    "1vsall": ("fb15k-237", "fb15k237_complex_1vsall", {**RECIPE, "train.epochs": 1}, 3),
    "rotate": ("fb15k-237", "fb15k237_rotate", {**RECIPE, "train.epochs": 1}, 3),
    "ranking": ("fb15k-237", "fb15k237_complex", {**RECIPE, "train.epochs": 1}, 4),
    "prepare-10M": ("zipf", "", {}, 3),
    "help": ("", "", {}, 5),
    "demo": ("countries", "demo", {}, 3),
}


class Missing(Exception):
    """A graph is not on this machine."""


def graph_of(name: str, graphs: Path, folder: Path) -> str:
    """Return the path of a graph, made in ``folder`` if it is one of the made-up ones."""
    if name == "countries":
        return name
    if name in ("places", "one-file", "csv", "parquet", "gzip", "zipf"):
        made = folder / "graphs" / name
        if not made.exists():
            partial = made.with_name(f"{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            MADE[name](partial)
            partial.rename(made)
        files = [*made.glob("whole.*")]
        return str(files[0] if files else made)
    if not (graphs / name).is_dir():
        raise Missing(f"{graphs / name} is not here")
    return str(graphs / name)


def make_places(folder: Path) -> None:
    """Write users, places and authors, and features of places."""
    draw = random.Random(7)
    lines = {f"user:{draw.randrange(80)}\tvisits\tplace:{draw.randrange(60)}" for _ in range(700)}
    lines |= {f"user:{draw.randrange(80)}\tfollows\tuser:{draw.randrange(80)}" for _ in range(300)}
    lines |= {f"author:{draw.randrange(9)}\tmade\tplace:{k}" for k in range(60)}
    ordered = sorted(lines)
    draw.shuffle(ordered)
    for split, part in (
        ("train", ordered[100:]),
        ("valid", ordered[:50]),
        ("test", ordered[50:100]),
    ):
        (folder / f"{split}.txt").write_text("\n".join(part) + "\n")
    tags = [f"place:{k}\ttag {k % 7}\t0.{k % 3 + 1}" for k in range(60)]
    (folder / "features.tsv").write_text("\n".join(tags) + "\n")


def one_graph() -> list[list[str]]:
    draw = random.Random(3)
    draws = ((int(200 * draw.random() ** 2), draw.randrange(5), draw.randrange(200))
             for _ in range(3000))  # fmt: skip
    return [[f"e{head}", f"r{relation}", f"e{tail}"] for head, relation, tail in sorted({*draws})]


def make_text(name: str, separator: str, header: str = "") -> Any:
    def make(folder: Path) -> None:
        text = header + "".join(separator.join(triple) + "\n" for triple in one_graph())
        if name.endswith(".gz"):
            import gzip

            (folder / name).write_bytes(gzip.compress(text.encode(), mtime=0))
        else:
            (folder / name).write_text(text)

    return make


def make_parquet(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = dict(zip(("head", "relation", "tail"), zip(*one_graph(), strict=True), strict=True))
    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}),
                   folder / "whole.parquet")  # fmt: skip


def make_zipf(folder: Path) -> None:
    from bench_prepare import write_tsv

    write_tsv(folder / "whole.tsv", 10_000_000, 5_000_000)


MADE = {
    "places": make_places,
    "one-file": make_text("whole.tsv", "\t"),
    "csv": make_text("whole.csv", ",", "head,relation,tail\n"),
    "gzip": make_text("whole.tsv.gz", "\t"),
    "parquet": make_parquet,
    "zipf": make_zipf,
}


# What a process does for one case.


def do_run(name: str, folder: Path, graph: str, attempt: int) -> None:
    """Train one case; the killed ones end by SIGKILL in their first attempt."""
    import kge_torchrec

    _, _, epochs, changes = RUNS[name]
    config = {**SHARED, "data.path": graph, "train.epochs": epochs, **changes,
              "run.dir": str(folder / "run")}  # fmt: skip
    if config.get("data.features") == "FEATURES":
        config["data.features"] = f"{graph}/features.tsv"
    if config.get("negatives.regime") in ALL_ENTITIES:
        del config["negatives.count"]  # refused, because it has no effect there
    losses: list[Any] = []

    def listen(kind: str, values: dict[str, Any]) -> None:
        if kind != "checkpoint":  # earlier commits call for fewer kinds
            losses.append(values.get("loss"))
        if name.startswith("killed") and attempt == 1 and kind == "step" and len(losses) > 4:
            os.kill(os.getpid(), signal.SIGKILL)

    if attempt == 2:
        run = kge_torchrec.resume(folder / "run", {}, [listen])
    else:
        run = kge_torchrec.train(config, [listen])
    for number, triples in enumerate([NEW, NEWER][: 2 * ("twice" in name) or name == "extended"]):
        earlier, output = run.path, folder / f"extended-{number}"
        run.close()
        run = kge_torchrec.extend(earlier, {"train": triples}, output, epochs=2,
                                  callbacks=[listen])  # fmt: skip
    save_run(run, folder, losses)
    run.close()


def save_run(run: Any, folder: Path, losses: list[Any]) -> None:
    """Write parameters by label and the figures of a run."""
    order = np.argsort(np.array(run.entity_labels.array.to_pylist()))
    rows = run.entities[: len(order)]
    arrays = {"entities": rows[order]}
    if len(run.entities) > len(order):
        arrays["features"] = run.entities[len(order) :]
    for key, tensor in run.model.scorer.state_dict().items():
        arrays[f"scorer.{key}"] = tensor.float().numpy()
    if os.environ.get("RANK", "0") == "0":
        np.savez(folder / "parameters.npz", **arrays)
        hashes = {key: digest(value) for key, value in arrays.items()}
        write(folder, {"losses": losses, "test": run.results["test"], "hashes": hashes})


def do_ranks(name: str, folder: Path, graph: str, _: int) -> None:
    import kge_torchrec

    run = kge_torchrec.train({
        **SHARED, "threads": 2, "data.path": graph, "model.scorer": name.partition("/")[2],
        "model.dim": 64, "train.epochs": 1, "train.batch_size": 8192, "evaluation.every": 0,
        "run.dir": str(folder / "run"),
    })  # fmt: skip
    model = run.model
    store = model.store
    ranks = model.ranks_of(store.test, "test", run.config.evaluation)
    outcome = {f"{kind} {side}": digest(getattr(ranks, kind)[side])
               for kind in ("optimistic", "pessimistic") for side in ("head", "tail")}  # fmt: skip
    write(folder, {**outcome, "metrics": run.results["test"], "table": digest(run.entities)})


def do_plans(name: str, folder: Path, graph: str, _: int) -> None:
    import kge_torchrec

    devices, options, keys = PLANS[name]
    config = {"model.scorer": "complex", "model.dim": 100, "negatives.count": 1000,
              "train.batch_size": 4096, "train.epochs": 10, **keys}  # fmt: skip
    if config.get("negatives.regime") in ALL_ENTITIES:
        del config["negatives.count"]
    write(folder, kge_torchrec.plan(config, devices=devices, **options))


def do_races(name: str, folder: Path, graph: str, _: int) -> None:
    import kge_torchrec

    run = kge_torchrec.train({
        "data.path": graph, "threads": 1, "run.progress": False, "run.dir": str(folder / "run"),
    })  # fmt: skip
    (race,) = (folder / "run").glob("race.json")
    write(folder, {"test": run.results["test"], "race": json.loads(race.read_text()),
                   "table": digest(run.entities)})  # fmt: skip


def do_data(name: str, folder: Path, graph: str, _: int) -> None:
    import kge_torchrec

    keys = DATA[name][1]
    if graph == "countries":
        run = kge_torchrec.train({**SHARED, "train.epochs": 1, "run.dir": str(folder / "run")})
        store = run.model.store
    else:
        types, output = ({"types": "prefix"} if keys else {}), folder / "store"
        try:
            store = kge_torchrec.prepare(graph, output, types, progress=False)
        except TypeError:  # the commit that the recording is of
            store = kge_torchrec.prepare(graph, output, progress=False, **types)
    entities = np.array(store.entities.array.to_pylist())
    relations = np.array(store.relations.array.to_pylist())
    outcome: dict[str, Any] = {
        "entities": digest(np.sort(entities)),
        "relations": digest(np.sort(relations)),
    }
    everything = []
    for split in ("train", "valid", "test"):
        triples = np.asarray(store.split(split))
        labelled = sorted(zip(entities[triples[:, 0]], relations[triples[:, 1]],
                              entities[triples[:, 2]], strict=True))  # fmt: skip
        everything += labelled
        outcome[split] = [len(labelled), text_digest(labelled)]
    outcome["all splits"] = text_digest(sorted(everything))
    ids = (
        {label: k for k, label in enumerate(entities)},
        {label: k for k, label in enumerate(relations)},
    )
    queries = random.Random(1).sample(sorted(everything), min(1000, len(everything)))
    heads, tails = (np.array([ids[0][triple[at]] for triple in queries]) for at in (0, 2))
    relation = np.array([ids[1][triple[1]] for triple in queries])
    known = store.filter_index(("train", "valid", "test"))
    for side, anchors in (("tail", heads), ("head", tails)):
        lists = []
        for first in range(0, len(queries), 100):
            piece = slice(first, first + 100)
            mask = known.contains(side, anchors[piece], relation[piece], np.arange(len(entities)))
            lists += [sorted(entities[row]) for row in mask]
        outcome[f"known answers, {side}"] = text_digest(lists)
    write(folder, outcome)


def do_speed(name: str, folder: Path, graph: str, _: int) -> None:
    """Time one piece of work; the seconds exclude imports where the work has a start of its own."""
    _, recipe, keys, _ = TIMED[name]
    start, before = time.perf_counter(), time.process_time()
    if name == "help":
        subprocess.run([sys.executable, "-m", "kge_torchrec", "--help"], check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
    elif name == "prepare-10M":
        import kge_torchrec

        start, before = time.perf_counter(), time.process_time()
        kge_torchrec.prepare(graph, folder / "store", overwrite=True, progress=False)
    else:
        import kge_torchrec

        config = kge_torchrec.load_config(recipe, {
            **keys, "data.path": graph, "run.dir": str(folder / f"run-{os.getpid()}")})  # fmt: skip
        start, before = time.perf_counter(), time.process_time()
        run = kge_torchrec.train(config, rank_test=name == "demo")
        if name in ("sampled", "1vsall", "rotate"):
            lines = [line for line in run.history if line["kind"] == "epoch"]
            write(folder, {"seconds": sum(line["seconds"] for line in lines), "peak": peak()})
            return
        if name == "ranking":
            run.evaluate("valid")  # loads the model and compiles
            start, before = time.perf_counter(), time.process_time()
            run.evaluate("test")
    write(folder, {"seconds": time.perf_counter() - start, "peak": peak(),
                   "cpu": time.process_time() - before})  # fmt: skip


def peak() -> float:
    """Return the largest resident memory of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def write(folder: Path, outcome: Any) -> None:
    (folder / "result.json").write_text(json.dumps(outcome, default=str))


def digest(array: np.ndarray) -> str:
    return hashlib.md5(np.ascontiguousarray(array).tobytes()).hexdigest()


def text_digest(lines: list[Any]) -> str:
    return hashlib.md5("\n".join("\t".join(line) for line in lines).encode()).hexdigest()


if __name__ == "__main__":
    part, name, folder, graph, attempt = sys.argv[1:]
    {"runs": do_run, "ranks": do_ranks, "plans": do_plans, "races": do_races, "data": do_data,
     "speed": do_speed}[part](name, Path(folder), graph, int(attempt))  # fmt: skip
