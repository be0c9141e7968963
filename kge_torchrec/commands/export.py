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
        help="checkpoint to export (default: best, or newest without a best one)",
    )
    verb.add_argument(
        "--format",
        choices=FORMATS,
        default="npy",
        help="format of the table; huggingface: a model repository; pykeen, libkge, dglke: files "
        "for these programs; torch: a torch.export program (default: npy)",
    )
    verb.add_argument(
        "--card",
        action="store_true",
        help="write a model card, README.md; huggingface always has one",
    )
    verb.add_argument("--license", metavar="ID", help="license of the model, for the card")
    verb.add_argument("--data-license", metavar="ID", help="license of the data, for the card")
    verb.add_argument(
        "--changed-since",
        metavar="RUN",
        help="write only entities whose rows differ from those of another run, such as the run "
        "that this one extends",
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
