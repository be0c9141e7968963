"""``kge-torchrec encode``: vectors of labels or descriptions, to start entities from."""

from __future__ import annotations

import argparse


def add(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    verb.add_argument(
        "source",
        metavar="TEXTS",
        help="a file of lines 'label, tab, text', or a prepared store, whose labels are the texts",
    )
    verb.add_argument(
        "--encoder",
        required=True,
        metavar="NAME",
        help="a model of sentence-transformers, by its name or folder; needs pip install "
        "'kge-torchrec[text]'",
    )
    verb.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="NAME.parquet, of label and vector"
    )
    verb.add_argument("--device", help="of the encoder (default: a GPU where there is one)")
    verb.add_argument(
        "--batch-size", type=int, default=64, metavar="N", help="texts at once (default: 64)"
    )


def run(parsed: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    from kge_torchrec.data.vectors import encode_texts

    made = encode_texts(
        parsed.source, parsed.output, parsed.encoder, parsed.device, parsed.batch_size
    )
    print(f"{parsed.output}: {made.vectors:,} vectors of {made.width} numbers")
    return 0
