"""Compare the results of a dozen small runs bit for bit between two commits.

    python scripts/golden_results.py write golden.json     # at the commit to compare with
    python scripts/golden_results.py check golden.json     # at the other one, same machine

Each config trains 50 steps on the embedded graph and is ranked. The file holds a hash of every
parameter, the losses and the metrics. The script uses only the public interface and config keys, so
it runs at commits far apart. Bits depend on the processor: compare on one machine only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SHARED = {
    "threads": 1, "device": "cpu", "seed": 5, "model.dim": 16, "model.init": "normal",
    "model.init_scale": 0.1, "loss.n3": 0.0, "loss.relation_weight": 0.0, "train.lr": 0.1,
    "evaluation.patience": 0, "evaluation.max_triples": 0,
    "negatives.count": 24, "train.batch_size": 256, "train.log_every": 5, "evaluation.every": 4,
    "run.progress": False, "run.tensorboard": False,
}  # fmt: skip

# name: (ranks, epochs for about 50 steps, keys)
CASES = {
    "sampled": (1, 8, {}),
    "sampled-2": (2, 8, {"train.optimizer": "adam", "train.lr": 0.01}),
    "per-triple": (1, 8, {"negatives.chunk_size": 1, "loss.name": "margin",
                          "model.scorer": "transe_l2", "model.reciprocal": False}),
    "self-adversarial": (1, 8, {"model.scorer": "rotate", "loss.name": "self_adversarial",
                                "loss.options.margin": 6.0, "model.reciprocal": False}),
    "regularized": (1, 8, {"loss.n3": 0.05, "loss.relation_weight": 0.5, "train.schedule": "cosine",
                           "train.warmup_steps": 7}),
    "dropout": (2, 8, {"model.scorer": "conve", "model.hidden_dropout": 0.2,
                       "model.input_dropout": 0.1, "train.optimizer": "rowwise_adam",
                       "train.lr": 0.01}),
    "kvsall": (1, 16, {"negatives.regime": "kvsall", "train.batch_size": 128}),
    "kvsall-2": (2, 16, {"negatives.regime": "kvsall", "train.batch_size": 128,
                         "model.scorer": "keci", "train.optimizer": "adam"}),
    "1vsall": (1, 8, {"negatives.regime": "1vsall", "loss.n3": 0.01}),
    "1vsall-2": (2, 8, {"negatives.regime": "1vsall", "model.scorer": "distmult"}),
    "kvssample": (2, 16, {"negatives.regime": "kvssample", "train.batch_size": 128}),
    "fp16": (1, 8, {"train.precision": "fp16"}),
    "fsdp-2": (2, 8, {"dense.wrapper": "fsdp", "model.scorer": "tucker", "train.optimizer": "adam",
                      "train.lr": 0.01}),
    "accumulated-2": (2, 8, {"train.accumulation": 3, "train.clip_norm": 0.5,
                             "train.clip_value": 0.1, "train.optimizer": "rowwise_adagrad"}),
    "handrolled": (1, 8, {"entities.engine": "handrolled", "train.optimizer": "adam"}),
    "handrolled-2": (2, 8, {"entities.engine": "handrolled", "entities.preset": "dgl",
                            "train.optimizer": "adam", "negatives.sampling": "degree",
                            "negatives.filtered": True}),
}  # fmt: skip


def run_one(name: str, folder: Path) -> None:
    """Run one case on this rank; rank 0 writes result.json."""
    import kge_torchrec

    _, epochs, keys = CASES[name]
    steps = []
    config = {**SHARED, "train.epochs": epochs, **keys, "run.dir": str(folder / "run")}
    if config.get("negatives.regime") in ("kvsall", "1vsall"):
        del config["negatives.count"]  # refused, because it has no effect there
    run = kge_torchrec.train(config, [lambda kind, values: steps.append(values.get("loss"))])
    run.export(folder / "export")
    if os.environ.get("RANK", "0") == "0":
        files = ("entities.npy", "scorer.safetensors")
        hashes = {
            f: hashlib.sha256((folder / "export" / f).read_bytes()).hexdigest() for f in files
        }
        outcome = {"hashes": hashes, "losses": steps, "test": run.results["test"]}
        (folder / "result.json").write_text(json.dumps(outcome))
    run.close()


def results() -> dict:
    outcome = {}
    for name, (ranks, *_) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable]
            if ranks > 1:
                command += [
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    f"--nproc_per_node={ranks}",
                ]
            command += [__file__, "one", name, folder]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
            outcome[name] = json.loads((Path(folder) / "result.json").read_text())
        print(f"{name}: {outcome[name]['hashes']['entities.npy'][:12]}", flush=True)
    return outcome


def compare(before: dict, now: dict) -> int:
    """Print the differences; return the exit code."""
    differing = 0
    for name, old in before.items():
        parts = [part for part in old if old[part] != now.get(name, {}).get(part)]
        differing += bool(parts)
        print(f"{name}: {'DIFFERS in ' + ', '.join(parts) if parts else 'the same bits'}")
    print(f"{len(before) - differing} of {len(before)} the same")
    return 1 if differing else 0


def main() -> int:
    if sys.argv[1:2] == ["one"]:
        run_one(sys.argv[2], Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("write", "check"))
    parser.add_argument("file", type=Path)
    parsed = parser.parse_args()
    outcome = results()
    if parsed.what == "check":
        return compare(json.loads(parsed.file.read_text()), outcome)
    parsed.file.write_text(json.dumps(outcome, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
