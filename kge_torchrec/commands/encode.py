"""``kge-torchrec encode``: vectors of labels or descriptions, to start entities from."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kge_torchrec.commands import add_verb

if TYPE_CHECKING:
    from kge_torchrec.commands import Verbs


def add(verbs: Verbs) -> None:
    does = "make vectors of labels or descriptions by a text encoder, for model.init_from"
    encode = add_verb(verbs, "encode", does, run, alone=True)
    encode.add_argument(
        "source",
        metavar="TEXTS",
        help="a file of lines 'label, tab, text', or a prepared store, whose labels are the texts",
    )
    encode.add_argument(
        "--encoder",
        required=True,
        metavar="NAME",
        help="a model of sentence-transformers, by its name or folder; needs pip install "
        "'kge-torchrec[text]'",
    )
    encode.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="NAME.parquet, of label and vector"
    )
    encode.add_argument("--device", help="of the encoder (default: a GPU where there is one)")
    encode.add_argument(
        "--batch-size", type=int, default=64, metavar="N", help="texts at once (default: 64)"
    )


def run(parsed: argparse.Namespace) -> int:
    from kge_torchrec.data.vectors import encode_texts

    made = encode_texts(
        parsed.source, parsed.output, parsed.encoder, parsed.device, parsed.batch_size
    )
    print(f"{parsed.output}: {made.vectors:,} vectors of {made.width} numbers")
    return 0
