"""Measure dice-embeddings on the floor's work, in a Python that has it (README.md has versions).

    PYTHON scripts/peers/peer_dicee.py DATA SCORER [--work per-triple|kvsall|1vsall]

Prints one line per repeat: "dicee", triples (kvsall: queries) per second, the unit. It runs the
program's own trainer with 256 numbers per entity and Adam; per-triple has 128 negatives for every
triple. Training ends after --repeats times --steps batches; the first two are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path

import tiktoken
import torch

warnings.filterwarnings("ignore")
os.environ["TQDM_DISABLE"] = "1"


class NoVocabulary:
    """Stands for the vocabulary that dicee would download at its start and does not use here."""

    n_vocab = 50257

    def encode(self, text: str) -> list[int]:
        return [0]


tiktoken.get_encoding = lambda name: NoVocabulary()

import dicee.trainer.torch_trainer  # noqa: E402
from dicee.executer import Execute  # noqa: E402
from dicee.scripts.run import get_default_arguments  # noqa: E402

TECHNIQUES = {"per-triple": "NegSample", "kvsall": "KvsAll", "1vsall": "1vsAll"}


class EnoughError(Exception):
    """Ends the training when all batches are measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("scorer", choices=("ComplEx", "DistMult", "TransE", "RotatE"))
    parser.add_argument("--work", choices=TECHNIQUES, default="per-triple")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(2)
    marks: list[float] = []
    trainer = dicee.trainer.torch_trainer.TorchTrainer
    run_batch = trainer._run_batch

    def timed(self, number, *batch):
        if number >= 2 and (number - 2) % options.steps == 0:
            marks.append(time.perf_counter())
            if len(marks) > options.repeats:
                raise EnoughError
        return run_batch(self, number, *batch)

    trainer._run_batch = timed
    size = 1024 if options.work == "per-triple" else 512
    arguments = get_default_arguments([])
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "dataset_dir": str(options.data), "model": options.scorer, "embedding_dim": 256,
            "batch_size": size, "num_epochs": 1, "scoring_technique": TECHNIQUES[options.work],
            "neg_ratio": 128, "lr": 0.001, "optim": "Adam", "trainer": "torchCPUTrainer",
            "eval_model": None, "path_to_store_single_run": f"{folder}/run",
        }  # fmt: skip
        for name, value in changes.items():
            setattr(arguments, name, value)
        with contextlib.suppress(EnoughError):
            Execute(arguments).start()
    unit = "queries/s" if options.work == "kvsall" else "triples/s"
    for start, stop in pairwise(marks):
        print(f"dicee {options.steps * size / (stop - start):.6g} {unit}", flush=True)


if __name__ == "__main__":
    main()
