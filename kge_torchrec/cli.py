"""The command line: prepare, data, train, evaluate, predict, export, plan, compare, tune, parts.

The same ``main`` serves one process and, through scripts/train.py, every process of torchrun.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kge_torchrec.config import ConfigError
from kge_torchrec.config.registry import KINDS
from kge_torchrec.environment import check_packages, loading_torch, prepare_process, versions
from kge_torchrec.errors import KGEError

if TYPE_CHECKING:
    from kge_torchrec.api import Run
    from kge_torchrec.config import Config

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Knowledge-graph embeddings on TorchRec.

examples:
  kge-torchrec train demo
  kge-torchrec train umls --data.path DIRECTORY --train.lr 0.05
  kge-torchrec predict RUN --head Austria --relation borders
"""
_EPILOG = "kge-torchrec VERB --help says more of a verb."

_TRAIN_USAGE = """\
kge-torchrec train CONFIG [--key.sub value ...] [--plan plan.json]
       kge-torchrec train --resume RUN [--key.sub value ...]"""
_TRAIN_DESCRIPTION = """\
Trains, ranks the test triples with the best model and writes the folder of the run, which
evaluate, predict and export take.

  CONFIG              a YAML file, or the name of a published one:
{published}
  --key.sub value     changes a key of it; all keys, with meaning and default, are below
  --resume RUN        goes on with the run in that folder as if it had never stopped, on any
                      number of ranks; keys given besides hold from here on
  --plan plan.json    lays the table out by a file that `kge-torchrec plan -o` wrote; the same as
                      --run.plan

examples:
  kge-torchrec train demo
  kge-torchrec train umls --data.path DIRECTORY --train.lr 0.05 --run.dir runs/mine
  kge-torchrec train --resume runs/mine --train.epochs 200
  torchrun --standalone --nproc_per_node=4 -m kge_torchrec train CONFIG
"""
_INDENT = " " * 22


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb; returns the exit code.  Errors are a sentence on stderr, not a traceback."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    prepare_process()
    if os.getcwd() not in sys.path:  # configs may name classes of modules that lie here
        sys.path.append(os.getcwd())
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        return _run(arguments)
    except (KGEError, OSError) as error:
        _tell(error)
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:
        folders = {"train": "RUN", "tune": "STUDY"}
        verb = next(iter(arguments), "")
        hint = f"; continue with {verb} --resume {folders[verb]}" if verb in folders else ""
        print(f"kge-torchrec: interrupted{hint}", file=sys.stderr)
        return 130


def _tell(error: KGEError | OSError) -> None:
    """Says what went wrong, once for all ranks where they all know."""
    if isinstance(error, KGEError):
        error.spell(_as_flag)
    if os.environ.get("RANK", "0") == "0":
        print(f"kge-torchrec: {error}", file=sys.stderr)
    elif not getattr(error, "on_every_rank", False):
        print(f"kge-torchrec: rank {os.environ['RANK']}: {error}", file=sys.stderr)


def _as_flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def _run(arguments: list[str]) -> int:
    if not arguments:
        _parser().print_help(sys.stderr)
        return 2
    verb, rest = arguments[0], arguments[1:]
    # They take the config's keys too.
    own = {"train": _train, "plan": _plan, "compare": _compare, "tune": _tune}
    if verb in own:
        if rest and not _asks_for_help(rest):
            check_packages()
        return own[verb](rest)
    parsed = _parser().parse_args(arguments)
    check_packages()
    return parsed.run(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kge-torchrec",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=_version(),
        help="show the versions of this program, torch, torchrec and fbgemm",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB", title="verbs")
    _add_prepare(verbs)
    _add_data(verbs)
    verbs.add_parser("train", help="train a model and rank the test triples with it")
    _add_evaluate(verbs)
    _add_predict(verbs)
    _add_export(verbs)
    verbs.add_parser("plan", help="see without devices whether a run fits, and what a step costs")
    verbs.add_parser("compare", help="train and measure engines side by side, with a report")
    verbs.add_parser("tune", help="search for settings by many runs, poor ones dropped early")
    _add_parts(verbs)
    return parser


def _version() -> str:
    from kge_torchrec import __version__

    others = ", ".join(f"{name} {version or 'missing'}" for name, version in versions().items())
    return f"kge-torchrec {__version__} ({others})"


def _add_verb(
    verbs: Verbs, name: str, does: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
    verb.set_defaults(run=run)
    return verb


def _add_parts(verbs: Verbs) -> None:
    does = "list what a config can name, with the options of each"
    parts = _add_verb(verbs, "parts", does, _parts)
    parts.add_argument("kind", choices=tuple(KINDS))
    parts.add_argument("name", nargs="?", help="one of them, or package.module:Class")


def _add_prepare(verbs: Verbs) -> None:
    does = "turn files of triples into a memory-mapped store, once for many runs"
    prepare = _add_verb(verbs, "prepare", does, _prepare)
    prepare.add_argument(
        "sources",
        nargs="+",
        metavar="DIR_OR_FILE",
        help="a directory with train, valid and test files, or files",
    )
    prepare.add_argument(
        "-o", "--output", required=True, metavar="STORE", help="the store, for --data.path"
    )
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
    prepare.add_argument(
        "--reader", metavar="MODULE:CLASS", help="reads the files (default: by their names)"
    )
    prepare.add_argument(
        "--reader-options",
        type=_yaml_dict,
        default={},
        metavar="{NAME: VALUE}",
        help="settings of that reader",
    )
    prepare.add_argument("--overwrite", action="store_true", help="replace an existing store")
    prepare.add_argument("--no-progress", action="store_true", help="show no progress bar")


def _add_data(verbs: Verbs) -> None:
    does = "check a graph before training: leaks between splits, repeats, unseen entities, degrees"
    data = verbs.add_parser("data", help=does, description=f"{does[0].upper()}{does[1:]}.")
    actions = data.add_subparsers(required=True, metavar="check", title="what to do")
    check = _add_verb(actions, "check", does, _check_data)
    check.add_argument(
        "data", metavar="DATA", help="a store, a directory or file of triples, or countries"
    )
    check.add_argument(
        "-o", "--output", metavar="DIR", help="write data-check.json and degrees.png there"
    )
    check.add_argument(
        "--threshold",
        type=float,
        default=0.8,
        metavar="SHARE",
        help="of the triples of either that makes two relations inverses or duplicates "
        "(default: 0.8)",
    )
    check.add_argument(
        "--format", choices=("table", "json"), default="table", help="default: table"
    )


def _yaml_dict(text: str) -> dict[str, Any]:
    import yaml

    values = yaml.safe_load(text)
    if not isinstance(values, dict):
        raise argparse.ArgumentTypeError(f"not of the form {{name: value}}: {text}")
    return values


def _add_evaluate(verbs: Verbs) -> None:
    does = "rank the triples of a split exactly, among all entities, with a trained run"
    evaluate = _add_verb(verbs, "evaluate", does, _evaluate)
    evaluate.add_argument("folder", metavar="RUN", help="the folder of a run")
    evaluate.add_argument(
        "--split", choices=("test", "valid", "train"), default="test", help="default: test"
    )
    evaluate.add_argument(
        "--by",
        nargs="+",
        action="extend",
        default=[],
        choices=("relation", "category", "frequency"),
        help="group the ranks as well: by relation; by its category in train (1-1, 1-N, N-1, N-N); "
        "by how often the answer occurs in train.  Several at once, each with a table, and a file "
        "and a picture in the folder of the run",
    )
    evaluate.add_argument(
        "--candidates",
        choices=("all", "seen", "types"),
        help="rank among all entities, those that the relation has been seen with on that side in "
        "train, or those of the same types; results are labelled (default: the run's "
        "evaluation.candidates)",
    )
    evaluate.add_argument(
        "--types", metavar="FILE", help="of --candidates types: lines of entity, tab, type"
    )
    evaluate.add_argument(
        "--format", choices=("table", "json"), default="table", help="default: table"
    )


def _add_predict(verbs: Verbs) -> None:
    does = "list the best answers of a trained run to (head, relation, ?) or (?, relation, tail)"
    predict = _add_verb(verbs, "predict", does, _predict)
    predict.add_argument("folder", metavar="RUN", help="the folder of a run")
    predict.add_argument("--head", metavar="X", help="label of an entity")
    predict.add_argument("--relation", metavar="Y", required=True, help="label of a relation")
    predict.add_argument("--tail", metavar="Z", help="label of an entity, in place of --head")
    predict.add_argument("--top", type=int, default=10, metavar="K", help="default: 10")
    predict.add_argument(
        "--new", action="store_true", help="leave out answers that the data holds already"
    )
    predict.add_argument(
        "--format", choices=("table", "json"), default="table", help="default: table"
    )


def _add_export(verbs: Verbs) -> None:
    does = "write a trained run as plain files, which other programs and load_model read"
    export = _add_verb(verbs, "export", does, _export)
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


def _asks_for_help(arguments: list[str]) -> bool:
    return bool({"-h", "--help"} & set(arguments))


def _train(arguments: list[str]) -> int:
    if not arguments:
        print(f"usage: {_TRAIN_USAGE}\n\nkge-torchrec train --help says more.", file=sys.stderr)
        return 2
    if _asks_for_help(arguments):
        print(_train_help())
        return 0
    arguments = [re.sub(r"^--plan(?=$|=)", "--run.plan", word) for word in arguments]
    if arguments[0] == "--resume":
        return _resume(arguments[1:])
    from kge_torchrec.config.parser import load_config

    name, overrides = None, arguments
    if not arguments[0].startswith("-"):
        name, overrides = arguments[0], arguments[1:]
    with loading_torch():  # which some configs need
        config = load_config(name, overrides)
        from kge_torchrec import api

    _report(api.train(config))
    return 0


def _train_help() -> str:
    from kge_torchrec.config.parser import build_parser, published

    names = textwrap.fill(
        ", ".join(published()), width=98, initial_indent=_INDENT, subsequent_indent=_INDENT
    )
    description = _TRAIN_DESCRIPTION.format(published=names)
    return build_parser("kge-torchrec train", _TRAIN_USAGE, description).format_help()


def _resume(arguments: list[str]) -> int:
    from kge_torchrec.config.parser import load_config

    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("train --resume needs the folder of a run")
    folder, overrides = arguments[0], arguments[1:]
    load_config(None, overrides)  # complains about unknown keys before anything starts
    with loading_torch():
        _config_of(folder)
        from kge_torchrec import api

    _report(api.resume(folder, overrides))
    return 0


def _report(run: Run) -> None:
    """The results table and where to go from here, on rank 0."""
    from kge_torchrec.ranking.metrics import ranked_among, results_table

    if os.environ.get("RANK", "0") != "0":
        return
    results = run.results
    for note in results["notes"]:
        print(f"note: {note}")
    if results["test"] is not None:
        table = results_table(results["test"])  # which says so where candidates are restricted
        restricted = "candidates" in results["test"]
        print(f"\ntest{'' if restricted else f', {ranked_among({})}'}\n{table}")
    train = results["train"]
    print(
        f"\ntrained {train['epochs']} epochs in {train['seconds']:.1f} s, "
        f"{train['triples_per_second']:,.0f} {run.config.negatives.examples}/s, "
        f"peak memory {train['peak_memory_bytes'] / 2**20:,.0f} MiB a rank\n"
        f"run folder: {run.path}"
    )


def _plan(arguments: list[str]) -> int:
    from kge_torchrec.planning.command import run

    return run(arguments)


def _compare(arguments: list[str]) -> int:
    from kge_torchrec.comparison.command import run

    return run(arguments)


def _tune(arguments: list[str]) -> int:
    from kge_torchrec.tuning.command import run

    return run(arguments)


def _parts(parsed: argparse.Namespace) -> int:
    from kge_torchrec.parts import listing

    print(listing(parsed.kind, parsed.name))
    return 0


def _prepare(parsed: argparse.Namespace) -> int:
    from kge_torchrec.data.prepare import prepare
    from kge_torchrec.data.readers import make_reader

    sources = parsed.sources[0] if len(parsed.sources) == 1 else parsed.sources
    store = prepare(
        sources,
        parsed.output,
        ratio=parsed.ratio,
        seed=parsed.seed,
        has_header={"auto": None, "yes": True, "no": False}[parsed.header],
        allow_unseen_relations=parsed.allow_unseen_relations,
        literals=parsed.literals,
        reader=make_reader(parsed.reader, parsed.reader_options, "--reader-options"),
        overwrite=parsed.overwrite,
        progress=not parsed.no_progress,
    )
    from kge_torchrec.data.report import notes

    print(store)
    for note in notes(store.report, "--literals keep"):
        print(f"note: {note}")
    return 0


def _check_data(parsed: argparse.Namespace) -> int:
    with loading_torch():
        from kge_torchrec.diagnosis.data_check import check_data, table

    found = check_data(parsed.data, parsed.output, parsed.threshold)
    print(json.dumps(found) if parsed.format == "json" else table(found))
    return 0


def _open(folder: str) -> Run:
    """The run in a folder, as ``open_run`` gives it."""
    with loading_torch():
        config = _config_of(folder)
        from kge_torchrec.api import Run

    return Run(folder, config)


def _config_of(folder: str) -> Config:
    """Raises ConfigError unless the folder holds a run, before torch is loaded for seconds."""
    from kge_torchrec.training.run_folder import RunFolder

    return RunFolder(folder).load_config()


def _evaluate(parsed: argparse.Namespace) -> int:
    with _open(parsed.folder) as run:
        results = run.evaluate(parsed.split, parsed.by, parsed.candidates, parsed.types)

    if os.environ.get("RANK", "0") != "0":
        return 0
    if parsed.format == "json":
        print(json.dumps(results))
        return 0
    from kge_torchrec.ranking.metrics import results_table

    by = results.pop("by", {})
    print(results_table(results))
    if by:
        from kge_torchrec.diagnosis.report import table

        for name, found in by.items():
            print(f"\n{table(name, found)}")
        print(f"\nfiles and pictures: {run.path}/evaluation-{parsed.split}-by-*")
    return 0


def _predict(parsed: argparse.Namespace) -> int:
    if (parsed.head is None) == (parsed.tail is None):
        raise ConfigError("predict takes a --relation and either --head or --tail")
    if parsed.top < 1:
        raise ConfigError(f"--top must be an integer >= 1, got {parsed.top}")
    with _open(parsed.folder) as run:
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
    with _open(parsed.folder) as run:
        path = run.export(parsed.output, parsed.format, parsed.checkpoint, parsed.overwrite)
    if os.environ.get("RANK", "0") == "0":
        for file in sorted(path.iterdir()):
            print(f"{file.stat().st_size:>15,} bytes  {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
