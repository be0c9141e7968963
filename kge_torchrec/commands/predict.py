"""``kge-torchrec predict``: the best answers of a trained run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from kge_torchrec.commands import add_format, add_verb, is_first_rank, opened
from kge_torchrec.config import ConfigError

if TYPE_CHECKING:
    from kge_torchrec.commands import Verbs


def add(verbs: Verbs) -> None:
    does = "list the best answers of a trained run to (head, relation, ?) or (?, relation, tail)"
    predict = add_verb(verbs, "predict", does, run)
    predict.add_argument("folder", metavar="RUN", help="the folder of a run")
    predict.add_argument("--head", metavar="X", help="label of an entity")
    predict.add_argument("--relation", metavar="Y", required=True, help="label of a relation")
    predict.add_argument("--tail", metavar="Z", help="label of an entity, in place of --head")
    predict.add_argument("--top", type=int, default=10, metavar="K", help="default: 10")
    predict.add_argument(
        "--new", action="store_true", help="leave out answers that the data holds already"
    )
    add_format(predict)


def run(parsed: argparse.Namespace) -> int:
    if (parsed.head is None) == (parsed.tail is None):
        raise ConfigError("predict takes a --relation and either --head or --tail")
    if parsed.top < 1:
        raise ConfigError(f"--top must be an integer >= 1, got {parsed.top}")
    with opened(parsed.folder) as trained:
        answers = trained.predict(
            head=parsed.head,
            relation=parsed.relation,
            tail=parsed.tail,
            k=parsed.top,
            known=not parsed.new,
        )
    if not is_first_rank():
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
