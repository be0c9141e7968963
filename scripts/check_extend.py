"""Compare ways to add entities to a run: placing, further training, training from scratch.

    python scripts/check_extend.py DATA [--held 1000] [--dim 128] [--epochs 8] [--on 2]
                                        [--recipe fb15k237_complex] [--output FILE] [--set K=V ...]

DATA is a folder of train, valid and test files, such as FB15k-237's. HELD random entities are new:
every triple with one of them is removed from train and valid. A run is trained without them and
then extended by their training triples in several ways. "New" is the MRR of the test triples with
a new entity, "old" that of the valid triples without one. The filter holds all triples of the run,
so MRR compares within this table only. Minutes include ranking. Drift is the mean distance that
rows of old entities moved, as a share of their length.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kge_torchrec
from kge_torchrec.config.parser import load_config

Triples = list[tuple[str, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--held", type=int, default=1000, help="number of new entities")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=8, help="epochs of the run, and from scratch")
    parser.add_argument("--on", type=int, default=2, help="further epochs, on old and new triples")
    parser.add_argument("--alone", type=int, default=20, help="further epochs, on new triples only")
    parser.add_argument("--recipe", default="fb15k237_complex")
    parser.add_argument("--seed", type=int, default=0, help="seed for the choice of new entities")
    parser.add_argument("--only", nargs="*", help="variants to run besides the run itself")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, help="file for the results as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = check(options, Path(folder))
    print(table(results))
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


def check(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train and extend; return the results by variant."""
    sizes = divide(options, folder)
    keys = {"model.dim": options.dim, "train.epochs": options.epochs, "run.progress": False,
            "run.trackers.tensorboard": False, "evaluation.every": 0,
            "checkpoint.every.epochs": 0}  # fmt: skip
    overrides = [f"--{key}={str(value).lower()}" for key, value in keys.items()]
    overrides += [f"--{setting}" for setting in options.set]

    def train(name: str) -> kge_torchrec.Run:
        where = [f"--data.path={folder / name}", f"--run.dir={folder / 'runs' / name}"]
        return kge_torchrec.train(load_config(options.recipe, [*overrides, *where]))

    def extend(name: str, **how: Any) -> kge_torchrec.Run:
        return kge_torchrec.extend(
            folder / "runs/old", folder / "new", folder / "runs" / name, **how
        )

    on = options.on
    variants: dict[str, Callable[[str], kge_torchrec.Run]] = {
        "as drawn": lambda name: extend(name, epochs=0),
        "place": lambda name: extend(name, place=True),
        "new alone, frozen": lambda name: extend(name, epochs=options.alone, freeze=True, replay=0),
        "place, then on": lambda name: extend(name, place=True, epochs=on),
        "on": lambda name: extend(name, epochs=on),
        "on, replay 0.1": lambda name: extend(name, epochs=on, replay=0.1),
        "from scratch": lambda name: train("whole"),
    }
    results: dict[str, Any] = {"settings": vars(options) | {"data": str(options.data)}, **sizes}
    results["settings"].pop("output")
    results["variants"] = {"the run before": measured(lambda: train("old"))}
    for name, make in variants.items():
        if options.only is None or name in options.only:
            results["variants"][name] = measured(lambda make=make, name=name: make(name))
            print(f"{name}: {results['variants'][name]}", flush=True)
    return results


def measured(make: Callable[[], kge_torchrec.Run]) -> dict[str, Any]:
    """Return MRR of new test and old valid triples, minutes, and the drift if there is one."""
    started = time.perf_counter()
    run = make()
    seconds = time.perf_counter() - started
    results = run.results
    extended = results.get("extended", {})
    with run:
        old = run.evaluate("valid")["both"]["realistic"]["mrr"]
    test = results["test"]
    return {
        "mrr": test["both"]["realistic"]["mrr"] if test else None,
        "old_mrr": old,
        "minutes": seconds / 60,
        "placing_seconds": (extended.get("placed") or {}).get("seconds"),
        "training_seconds": results["train"]["seconds"],
        "drift": extended.get("drift"),
    }


def divide(options: argparse.Namespace, folder: Path) -> dict[str, int]:
    """Write the folders old, new and whole; return the number of triples of each."""
    splits = {split: read(options.data, split) for split in ("train", "valid", "test")}
    names = sorted({end for triple in splits["train"] for end in triple[0::2]})
    drawn = np.random.default_rng(options.seed).choice(len(names), options.held, replace=False)
    held = {names[place] for place in drawn}

    def touching(split: str, wanted: bool) -> Triples:
        return [t for t in splits[split] if (t[0] in held or t[2] in held) == wanted]

    late, test = touching("train", True), touching("test", True)
    old, valid = touching("train", False), touching("valid", False)
    known = {t[1] for t in old}
    valid = [t for t in valid if t[1] in known]
    write(folder / "old", train=old, valid=valid)
    write(folder / "new", train=late, test=test)
    write(folder / "whole", train=old + late, valid=valid, test=test)
    return {"old_triples": len(old), "new_triples": len(late), "test": len(test)}


def read(folder: Path, split: str) -> Triples:
    (file,) = folder.glob(f"{split}.*")
    lines = file.read_text(encoding="utf-8").splitlines()
    return [tuple(line.split("\t")) for line in lines if line]


def write(folder: Path, **splits: Triples) -> None:
    folder.mkdir()
    for split, triples in splits.items():
        text = "".join("\t".join(triple) + "\n" for triple in triples)
        (folder / f"{split}.tsv").write_text(text, encoding="utf-8")


def table(results: dict[str, Any]) -> str:
    lines = [
        f"{results['settings']['held']:,} entities with {results['new_triples']:,} triples come to "
        f"{results['old_triples']:,}; {results['test']:,} test triples touch them",
        f"{'':20}{'MRR new':>9}{'MRR old':>9}{'minutes':>9}{'drift':>9}{'largest':>9}{'same':>8}",
    ]
    for name, of in results["variants"].items():
        drift = of["drift"]
        moved = (
            f"{drift['mean']:>9.2%}{drift['max']:>9.1%}{drift['unchanged']:>8,}" if drift else ""
        )
        new = "-" if of["mrr"] is None else f"{of['mrr']:.4f}"
        lines.append(f"{name:20}{new:>9}{of['old_mrr']:>9.4f}{of['minutes']:>9.2f}{moved}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
