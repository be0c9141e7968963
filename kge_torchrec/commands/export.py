"""``kge-torchrec export``: a trained run as plain files."""

from __future__ import annotations

import argparse

from kge_torchrec.commands import is_first_rank, opened

FORMATS = (
    "npy", "safetensors", "word2vec", "parquet", "huggingface",
    "pykeen", "libkge", "dglke", "torch",
)  # fmt: skip


def add(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    verb.add_argument("folder", metavar="RUN", help="the folder of a run")
    verb.add_argument("-o", "--output", required=True, metavar="DIR", help="the folder to make")
    verb.add_argument(
        "--checkpoint",
        default="best",
        metavar="best|newest|NAME",
        help="default: best, the newest if none is known to be best",
    )
    verb.add_argument(
        "--format",
        choices=FORMATS,
        default="npy",
        help="npy (default), safetensors, word2vec, parquet: plain files, the entity table like "
        "this; huggingface: safetensors as a repository of Hugging Face; pykeen, libkge, dglke: "
        "what those load, with the same scores; torch: a program of torch.export",
    )
    verb.add_argument(
        "--card", action="store_true", help="write README.md, a model card, with npy and the like"
    )
    verb.add_argument("--license", metavar="ID", help="of the model, for the card")
    verb.add_argument("--data-license", metavar="ID", help="of the data, for the card")
    verb.add_argument(
        "--changed-since",
        metavar="RUN",
        help="write only entities whose rows are others than in that run, the one that this one "
        "was extended from",
    )
    verb.add_argument("--overwrite", action="store_true", help="replace an existing export")


def run(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    with opened(parsed.folder) as trained:
        path = trained.export(
            parsed.output,
            parsed.format,
            parsed.checkpoint,
            parsed.overwrite,
            card=parsed.card,
            license=parsed.license,
            data_license=parsed.data_license,
            changed_since=parsed.changed_since,
        )
    if is_first_rank():
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            print(f"{file.stat().st_size:>15,} bytes  {file}")
    return 0
