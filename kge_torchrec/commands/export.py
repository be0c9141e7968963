"""``kge-torchrec export``: a trained run as plain files."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kge_torchrec.commands import add_verb, is_first_rank, opened

if TYPE_CHECKING:
    from kge_torchrec.commands import Verbs


def add(verbs: Verbs) -> None:
    does = "write a trained run as plain files, which other programs and load_model read"
    export = add_verb(verbs, "export", does, run)
    export.add_argument("folder", metavar="RUN", help="the folder of a run")
    export.add_argument("-o", "--output", required=True, metavar="DIR", help="the folder to make")
    export.add_argument(
        "--checkpoint",
        default="best",
        metavar="best|newest|NAME",
        help="default: best, the newest if none is known to be best",
    )
    export.add_argument(
        "--format",
        choices=("npy", "safetensors", "word2vec"),
        default="npy",
        help="of the entity table (default: npy)",
    )
    export.add_argument("--overwrite", action="store_true", help="replace an existing export")


def run(parsed: argparse.Namespace) -> int:
    with opened(parsed.folder) as trained:
        path = trained.export(parsed.output, parsed.format, parsed.checkpoint, parsed.overwrite)
    if is_first_rank():
        for file in sorted(path.iterdir()):
            print(f"{file.stat().st_size:>15,} bytes  {file}")
    return 0
