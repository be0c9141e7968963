"""``export`` and ``serve``: a trained run as files for other programs, or as an HTTP server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from kge_torchrec.commands import Count, File, RunPath, config_of, is_first_rank, opened
from kge_torchrec.environment import loading_torch


def export(
    run: RunPath,
    *,
    output: Annotated[str, "DIR"],
    checkpoint: Annotated[str, "best|newest|NAME"] = "best",
    format: Literal["safetensors", "parquet", "vectors", "torch"] = "safetensors",
    relation: Annotated[str | None, "Y"] = None,
    overwrite: bool = False,
) -> int:
    """Write a trained run as files that other programs read.

    Args:
        run: the folder of a run
        output: the folder to make
        checkpoint: checkpoint to export; best is the newest without a best one
        format: safetensors: a Hugging Face repository, which load_model reads; parquet: a table for
            data frames and databases; vectors: Parquet files of queries and items for a search
            index; torch: a torch.export program
        relation: label of the relation of vectors (default: all)
        overwrite: replace an existing export
    """
    with opened(run) as trained:
        path = trained.export(output, format, checkpoint, overwrite, relation=relation)
    if is_first_rank():
        for entry in sorted(path.iterdir()):
            size = sum(x.stat().st_size for x in (entry, *entry.rglob("*")) if x.is_file())
            print(f"{size:>15,} bytes  {entry}")
    return 0


def serve(
    run: Annotated[RunPath, "RUN_OR_EXPORT"],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_k: Count = 1000,
    allow_host: Annotated[Sequence[str], "NAME"] = (),
    names: File | None = None,
) -> int:
    """Answer queries about a run over HTTP.

    Args:
        host: address to listen on (127.0.0.1: only this machine); there is no password
        port: port to listen on; 0: any free port
        max_k: most answers per request
        allow_host: also accept requests for this host name; * accepts every name; may be repeated
            (default: --host, localhost, 127.0.0.1 and ::1)
        names: file of labels and readable names, which replies have beside the labels
    """
    if not (Path(run) / "config.json").is_file():  # a run, not an export
        config_of(run)
    with loading_torch():
        from kge_torchrec.serving.server import serve as answer

    answer(
        run,
        host,
        port,
        max_k,
        lambda text: print(text, flush=True),
        allow_hosts=allow_host,
        names=names,
    )
    return 0
