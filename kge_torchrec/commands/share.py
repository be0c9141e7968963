"""``export`` and ``serve``: a trained run as files for other programs, or as an HTTP server."""

from __future__ import annotations

import argparse
from pathlib import Path

from kge_torchrec.commands import config_of, is_first_rank, opened
from kge_torchrec.environment import loading_torch
from kge_torchrec.export import FORMATS


def add_export(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("folder", metavar="RUN", help="the folder or URL of a run")
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
        default=FORMATS[0],
        help="safetensors: a Hugging Face repository, which load_model reads; parquet: a table for "
        "data frames; vectors: Parquet files of queries and items for a search index; torch: a "
        "torch.export program (default: safetensors)",
    )
    verb.add_argument(
        "--relation", metavar="Y", help="label of the relation of vectors (default: all)"
    )
    verb.add_argument("--overwrite", action="store_true", help="replace an existing export")


def run_export(parsed: argparse.Namespace) -> int:
    with opened(parsed.folder) as trained:
        path = trained.export(
            parsed.output,
            parsed.format,
            parsed.checkpoint,
            parsed.overwrite,
            relation=parsed.relation,
        )
    if is_first_rank():
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            print(f"{file.stat().st_size:>15,} bytes  {file}")
    return 0


def add_serve(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "folder", metavar="RUN_OR_EXPORT", help="the folder or URL of a run, or an export"
    )
    verb.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, only this machine); there is no password",
    )
    verb.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0: any free port (default: 8000)"
    )
    verb.add_argument(
        "--max-k",
        type=int,
        default=1000,
        metavar="K",
        help="most answers per request (default: 1000)",
    )
    verb.add_argument(
        "--max-body",
        type=int,
        default=1 << 20,
        metavar="BYTES",
        help="largest request (default: 1048576)",
    )
    verb.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="also accept requests for this host name; * accepts every name; may be repeated "
        "(default: --host, localhost, 127.0.0.1 and ::1)",
    )
    verb.add_argument(
        "--max-connections",
        type=int,
        default=1000,
        metavar="N",
        help="most open connections (default: 1000)",
    )
    verb.add_argument(
        "--names",
        metavar="FILE",
        help="file of labels and readable names, which replies have beside the labels",
    )
    verb.add_argument(
        "--access-log",
        action="store_true",
        help="print one line per request; the log has no size limit",
    )


def run_serve(parsed: argparse.Namespace) -> int:
    if not (Path(parsed.folder) / "model.json").is_file():  # a run, not an export
        config_of(parsed.folder)
    with loading_torch():
        from kge_torchrec.serving.server import serve
    serve(
        parsed.folder,
        parsed.host,
        parsed.port,
        parsed.max_k,
        parsed.max_body,
        _print_now,
        allow_hosts=parsed.allow_host,
        max_connections=parsed.max_connections,
        access_log=parsed.access_log,
        names=parsed.names,
    )
    return 0


def _print_now(text: str) -> None:
    print(text, flush=True)
