"""Compare what two commits compute: parameters, losses and metrics of short trainings.

    python scripts/golden_results.py COMMIT HEAD
    python scripts/golden_results.py COMMIT HEAD --names fp16 disk

The trainings are of small graphs, on 1, 2 and 4 ranks. Each commit is checked out in --folder and
runs with this Python. Results are kept there, so a second start continues. Parameters are compared
by the labels of their rows. Bits depend on the processor: compare on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
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

# name: (graph, ranks, epochs, keys); what happens in between is in SPECIAL
RUNS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "sampled": ("countries", 1, 8, {}),
    "sampled-2": ("countries", 2, 8, {"train.optimizer": "adam", "train.lr": 0.01}),
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
    "1vsall-4": ("countries", 4, 8, {"negatives.regime": "1vsall", **HANDROLLED}),
    "kvsall-2": ("countries", 2, 16, {"negatives.regime": "kvsall", "model.scorer": "keci",
                                      "loss.name": "bce", "train.optimizer": "adam",
                                      "train.lr": 0.01, **QUERIES}),
    "allvsall": ("countries", 1, 2, {"negatives.regime": "allvsall", "loss.name": "bce",
                                     **QUERIES}),
    "kvssample-2": ("countries", 2, 16, {"negatives.regime": "kvssample", **QUERIES}),
    "fp16": ("countries", 1, 8, {"train.precision": "fp16"}),
    "fsdp-2": ("countries", 2, 8, {"dense.wrapper": "fsdp", "model.scorer": "tucker",
                                   "train.optimizer": "adam", "train.lr": 0.01}),
    "accumulated-2": ("countries", 2, 8, {
        "train.accumulation": 3, "train.clip.norm": 0.5, "train.clip.value": 0.1,
        "train.optimizer": "rowwise_adagrad"}),
    "averaged": ("countries", 1, 8, {"train.averaging": "ema"}),
    "in-batch": ("countries", 1, 8, {"negatives.in_batch": "same_relation",
                                     "negatives.chunk_size": 64}),
    "log-q": ("countries", 1, 8, {"negatives.in_batch": True, "negatives.log_q": True}),
    "handrolled-2": ("countries", 2, 8, {
        **HANDROLLED, "train.optimizer": "adam", "negatives.sampling": "degree",
        "negatives.filtered": True}),
    "dicee-2": ("countries", 2, 8, {**HANDROLLED, "entities.preset": "dicee",
                                    "train.optimizer": "adam"}),
    "dgl-2": ("countries", 2, 8, {**HANDROLLED, "entities.preset": "dgl",
                                  "train.optimizer": "adam"}),
    "house": ("countries", 1, 4, {"model.scorer": "house"}),
    "typed": ("places", 1, 8, {**TYPED, "negatives.among": "types"}),
    "features-2": ("places", 2, 8, {**TYPED, "data.features": "FEATURES"}),
    "tables-2": ("places", 2, 8, {**TYPED, "entities.tables": {
        "user": {"optimizer": "adam", "lr": 0.01}, "place": {"optimizer": "adagrad"}}}),
    "disk-2": ("countries", 2, 4, {"entities.placement": "disk", "train.optimizer": "adam",
                                   "train.lr": 0.01}),
    "killed-2": ("countries", 2, 8, {"checkpoint.every.steps": 7, "train.optimizer": "adam",
                                     "train.lr": 0.01}),
    "killed-disk": ("countries", 1, 4, {"entities.placement": "disk",
                                        "checkpoint.every.steps": 7}),
    "extended-twice-2": ("countries", 2, 4, {"train.optimizer": "adam", "train.lr": 0.01}),
}  # fmt: skip
NEW = [("Atlantis", "borders", "Greece"), ("Atlantis", "borders", "Lemuria"),
       ("Lemuria", "sank_in", "Ocean"), ("Lemuria", "borders", "Greece")]  # fmt: skip
NEWER = [("Mu", "sank_in", "Ocean"), ("Mu", "borders", "Lemuria")]


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


def work(name: str, folder: Path, graph: str, attempt: int) -> None:
    """Train one case; the killed ones end by SIGKILL in their first attempt."""
    import kge_torchrec

    _, _, epochs, changes = RUNS[name]
    config = {**SHARED, "data.path": graph, "train.epochs": epochs, **changes,
              "run.dir": str(folder / "run")}  # fmt: skip
    if config.get("data.features") == "FEATURES":
        config["data.features"] = f"{graph}/features.tsv"
    if config.get("negatives.regime", "").endswith("vsall"):
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
    for number, triples in enumerate([NEW, NEWER] if name.startswith("extended") else []):
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
        hashes = {
            key: hashlib.md5(np.ascontiguousarray(value).tobytes()).hexdigest()
            for key, value in arrays.items()
        }
        outcome = {"losses": losses, "test": run.results["test"], "hashes": hashes}
        (folder / "result.json").write_text(json.dumps(outcome, default=str))


# Both commits


def child(tree: Path, name: str, folder: Path, graph: str, attempt: int) -> str:
    """Run a training in new processes; return what it printed if it failed."""
    command, ranks = [sys.executable], RUNS[name][1]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [__file__, "--worker", name, str(folder), graph, str(attempt)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    said = (done.stdout + done.stderr)[-3000:]
    return "" if done.returncode == 0 else f"exit code {done.returncode}\n{said}"


def result(tree: Path, name: str, results: Path, graph: str) -> Any:
    """Return the outcome of a training, from the folder if it is there already."""
    folder = results / name
    file = folder / "result.json"
    if not file.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        is_killed = name.startswith("killed")
        if is_killed and not child(tree, name, folder, graph, 1):
            return {"failed": "the run was not killed"}
        if trouble := child(tree, name, folder, graph, 2 * is_killed):
            return {"failed": trouble}
        for left in ("run", "extended-0", "extended-1"):
            shutil.rmtree(folder / left, ignore_errors=True)
    return json.loads(file.read_text())


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every plain value."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from leaves(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def difference(name: str, works: list[Path], outcomes: list[Any]) -> str:
    """Return in words how the second outcome differs from the first; "" if not at all."""
    for outcome, which in zip(outcomes, ("first", "second"), strict=True):
        if "failed" in outcome:
            return f"FAILED at the {which} commit:\n{outcome['failed']}"
    first, second = (dict(leaves(outcome)) for outcome in outcomes)
    gone, new = sorted(first.keys() - second), sorted(second.keys() - first)
    changed = [path for path in first if path in second and first[path] != second[path]]
    words = [f"{len(paths)} values {how}: {', '.join(paths[:8])}{' ...' if len(paths) > 8 else ''}"
             for paths, how in ((gone, "gone"), (new, "new")) if paths]  # fmt: skip
    if any(path.startswith("hashes") for path in changed):
        files = [np.load(work / name / "parameters.npz") for work in works]
        for key in files[0].files:
            if key in files[1].files and files[0][key].shape == files[1][key].shape:
                apart = np.abs(files[0][key] - files[1][key]).max(initial=0)
                words.append(f"{key} differs by at most {apart:.2g}")
    for path in changed[:12]:
        if not path.startswith("hashes"):
            words.append(f"{path}: {first[path]!r:.60} -> {second[path]!r:.60}")
    if len(changed) > 12:
        words.append(f"{len(changed)} values changed in all")
    return "; ".join(words)


def checkout(commit: str, folder: Path) -> tuple[Path, Path]:
    """Return (tree, folder of results) of a commit, checked out without touching this one."""
    full = subprocess.run(["git", "rev-parse", f"{commit}^{{commit}}"], cwd=ROOT, check=True,
                          capture_output=True, text=True).stdout.strip()  # fmt: skip
    work = folder / full[:12]
    tree = work / "tree"
    if not tree.exists():
        (work / "partial").mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(
            ["git", "archive", full], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", str(work / "partial")], input=archive.stdout, check=True)
        (work / "partial").rename(tree)
    return tree, work


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs=2, help="the commit to compare with, and the other one")
    parser.add_argument("--names", nargs="+", choices=RUNS, default=RUNS, metavar="NAME")
    parser.add_argument(
        "--folder", type=lambda text: Path(text).resolve(), default=ROOT / "runs/golden"
    )
    options = parser.parse_args()
    places = options.folder / "places"
    if not places.exists():
        places.mkdir(parents=True)
        make_places(places)
    pairs = [checkout(commit, options.folder) for commit in options.commits]
    differing = 0
    for name in options.names:
        graph = str(places) if RUNS[name][0] == "places" else "countries"
        outcomes = [result(tree, name, results, graph) for tree, results in pairs]
        words = difference(name, [results for _, results in pairs], outcomes)
        differing += bool(words)
        print(f"{name}: {words or 'the same'}", flush=True)
    print(f"{len(options.names) - differing} of {len(options.names)} the same")
    return int(differing > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        name, folder, graph, attempt = sys.argv[2:]
        work(name, Path(folder), graph, int(attempt))
    else:
        sys.exit(main())
