"""The command line: prepare, train, evaluate, predict, export, compare, plan.

The same ``main`` serves one process and, through scripts/train.py, every process of torchrun.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict

from kge_torchrec.config import ConfigError
from kge_torchrec.environment import PackageSetError, check_packages

_TRAIN_USAGE = """\
kge-torchrec train CONFIG [--key.sub value ...] [--plan plan.json]
       kge-torchrec train --resume RUN [--key.sub value ...]
       kge-torchrec train --help          all keys, with meaning and default

CONFIG is a YAML file or the name of one in configs/ (demo, default, umls, ...)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb; returns the exit code.  Errors are a sentence on stderr, not a traceback."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    first_rank = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        check_packages()
        return _run(arguments)
    except _expected_errors() as error:
        if first_rank:
            print(f"kge-torchrec: {error}", file=sys.stderr)
        elif not getattr(error, "on_every_rank", isinstance(error, ConfigError)):
            print(f"kge-torchrec: rank {os.environ['RANK']}: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:
        print("kge-torchrec: interrupted; continue with train --resume RUN", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["train"]:  # its options are the config's keys, not argparse's
        return _train(arguments[1:])
    if arguments[:1] == ["compare"]:  # takes the config's keys as well
        from kge_torchrec.comparison.command import run

        return run(arguments[1:])
    if arguments[:1] == ["plan"]:
        from kge_torchrec.plan_command import run

        return run(arguments[1:])
    parsed = _parser().parse_args(arguments)
    return parsed.run(parsed)


def _expected_errors() -> tuple[type[Exception], ...]:
    """Errors whose message is written for the person who reads it."""
    from kge_torchrec.data.errors import DataError

    expected: list[type[Exception]] = [ConfigError, PackageSetError, DataError, OSError]
    if "torch" in sys.modules:
        from kge_torchrec.export.errors import ExportError
        from kge_torchrec.parallel.processes import OtherRankFailed, RankLost
        from kge_torchrec.planning.planner import PlanDoesNotFit
        from kge_torchrec.training.checkpoints import CheckpointError
        from kge_torchrec.training.losses_seen import NonFiniteLoss, NonFiniteParameters
        from kge_torchrec.training.steps import NotPipelined
        from kge_torchrec.training.stop_signal import TrainingStopped

        expected += [PlanDoesNotFit, CheckpointError, ExportError, NonFiniteLoss, NotPipelined]
        expected += [NonFiniteParameters, OtherRankFailed, RankLost, TrainingStopped]
    return tuple(expected)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kge-torchrec", description="Knowledge-graph embeddings on TorchRec."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    prepare = verbs.add_parser("prepare", help="turn files of triples into a memory-mapped store")
    prepare.add_argument("sources", nargs="+", metavar="DIR_OR_FILE")
    prepare.add_argument("-o", "--output", required=True, metavar="STORE")
    prepare.add_argument(
        "--ratio",
        nargs=3,
        type=float,
        default=(0.9, 0.05, 0.05),
        metavar=("TRAIN", "VALID", "TEST"),
        help="shares, where the files name no split (default: 0.9 0.05 0.05)",
    )
    prepare.add_argument("--seed", type=int, default=0, help="of the split by ratio")
    prepare.add_argument(
        "--header",
        choices=("auto", "yes", "no"),
        default="auto",
        help="whether text files start with a header (default: auto, known by its words)",
    )
    prepare.add_argument(
        "--allow-unseen-relations",
        action="store_true",
        help="accept relations that occur in valid or test only",
    )
    prepare.add_argument(
        "--literals",
        choices=("drop", "keep"),
        default="drop",
        help="of N-Triples: leave out triples whose object is a literal, or make entities of "
        "literals (default: drop)",
    )
    prepare.add_argument("--overwrite", action="store_true", help="replace an existing store")
    prepare.add_argument("--no-progress", action="store_true")
    prepare.set_defaults(run=_prepare)

    verbs.add_parser("train", help="train a model (kge-torchrec train --help lists all keys)")

    evaluate = verbs.add_parser("evaluate", help="exact filtered ranking with a trained run")
    evaluate.add_argument("folder", metavar="RUN")
    evaluate.add_argument("--split", choices=("test", "valid", "train"), default="test")
    evaluate.add_argument("--format", choices=("table", "json"), default="table")
    evaluate.set_defaults(run=_evaluate)

    predict = verbs.add_parser("predict", help="the best answers to a query")
    predict.add_argument("folder", metavar="RUN")
    predict.add_argument("--head", metavar="X")
    predict.add_argument("--relation", metavar="Y", required=True)
    predict.add_argument("--tail", metavar="Z")
    predict.add_argument("--top", type=int, default=10, metavar="K", help="default: 10")
    predict.add_argument(
        "--new", action="store_true", help="leave out answers that the data holds already"
    )
    predict.add_argument("--format", choices=("table", "json"), default="table")
    predict.set_defaults(run=_predict)

    export = verbs.add_parser("export", help="write a trained run as plain files")
    export.add_argument("folder", metavar="RUN")
    export.add_argument("-o", "--output", required=True, metavar="DIR")
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
    export.set_defaults(run=_export)

    verbs.add_parser("plan", help="lay a run out without devices (kge-torchrec plan --help)")
    verbs.add_parser("compare", help="engines side by side (kge-torchrec compare --help says how)")
    return parser


def _train(arguments: list[str]) -> int:
    from kge_torchrec.config_parser import build_parser, load_config

    if not arguments:
        print(f"usage: {_TRAIN_USAGE}", file=sys.stderr)
        return 2
    if {"-h", "--help"} & set(arguments):
        build_parser().print_help()
        return 0
    arguments = [re.sub(r"^--plan(?=$|=)", "--run.plan", word) for word in arguments]
    if arguments[0] == "--resume":
        return _resume(arguments[1:])
    name, overrides = None, arguments
    if not arguments[0].startswith("-"):
        name, overrides = arguments[0], arguments[1:]
    config = load_config(name, overrides)

    from kge_torchrec import api

    _report(api.train(config))
    return 0


def _resume(arguments: list[str]) -> int:
    from kge_torchrec.config_parser import load_config

    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("train --resume needs the folder of a run")
    folder, overrides = arguments[0], arguments[1:]
    load_config(None, overrides)  # complains about unknown keys before anything starts

    from kge_torchrec import api

    _report(api.resume(folder, overrides))
    return 0


def _report(run) -> None:
    """The results table and where to go from here, on rank 0."""
    from kge_torchrec.ranking.metrics import results_table

    if os.environ.get("RANK", "0") != "0":
        return
    results = run.results
    for note in results["notes"]:
        print(f"note: {note}")
    if results["test"] is not None:
        print(f"\ntest, filtered ranks among all entities\n{results_table(results['test'])}")
    train = results["train"]
    print(
        f"\ntrained {train['epochs']} epochs in {train['seconds']:.1f} s, "
        f"{train['triples_per_second']:,.0f} {run.config.negatives.examples}/s, "
        f"peak memory {train['peak_memory_bytes'] / 2**20:,.0f} MiB a rank\n"
        f"run folder: {run.path}"
    )


def _prepare(parsed: argparse.Namespace) -> int:
    from kge_torchrec.data.prepare import prepare

    sources = parsed.sources[0] if len(parsed.sources) == 1 else parsed.sources
    store = prepare(
        sources,
        parsed.output,
        ratio=parsed.ratio,
        seed=parsed.seed,
        has_header={"auto": None, "yes": True, "no": False}[parsed.header],
        allow_unseen_relations=parsed.allow_unseen_relations,
        literals=parsed.literals,
        overwrite=parsed.overwrite,
        progress=not parsed.no_progress,
    )
    from kge_torchrec.data.report import notes

    print(store)
    for note in notes(store.report):
        print(f"note: {note}")
    return 0


def _evaluate(parsed: argparse.Namespace) -> int:
    from kge_torchrec.api import open_run
    from kge_torchrec.ranking.metrics import results_table

    with open_run(parsed.folder) as run:
        results = run.evaluate(parsed.split)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(results) if parsed.format == "json" else results_table(results))
    return 0


def _predict(parsed: argparse.Namespace) -> int:
    from kge_torchrec.api import open_run

    if (parsed.head is None) == (parsed.tail is None):
        raise ConfigError("predict takes a --relation and either --head or --tail")
    with open_run(parsed.folder) as run:
        answers = run.predict(
            head=parsed.head,
            relation=parsed.relation,
            tail=parsed.tail,
            k=parsed.top,
            known=not parsed.new,
        )
    if os.environ.get("RANK", "0") != "0":
        return 0
    if parsed.format == "json":
        query = {"head": parsed.head, "relation": parsed.relation, "tail": parsed.tail}
        print(json.dumps({"query": query, "answers": [asdict(answer) for answer in answers]}))
        return 0
    width = max([len(answer.label) for answer in answers] + [6])
    print(f"{'rank':>4}  {'answer':<{width}}  {'score':>10}  in the data")
    for answer in answers:
        known = answer.known or ""
        print(f"{answer.rank:>4}  {answer.label:<{width}}  {answer.score:>10.4f}  {known}")
    return 0


def _export(parsed: argparse.Namespace) -> int:
    from kge_torchrec.api import open_run

    with open_run(parsed.folder) as run:
        path = run.export(parsed.output, parsed.format, parsed.checkpoint, parsed.overwrite)
    if os.environ.get("RANK", "0") == "0":
        for file in sorted(path.iterdir()):
            print(f"{file.stat().st_size:>15,} bytes  {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
