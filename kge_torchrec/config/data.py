"""Settings of the triples and of the negatives drawn for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kge_torchrec.config.checks import PICKED, PickedInt, between, choice, least
from kge_torchrec.config.keys import (
    Condition,
    Part,
    Resume,
    Section,
    fixed,
    key,
    only_with,
    only_without,
)
from kge_torchrec.config.registry import check_name

FULL_REGIMES = ("1vsall", "kvsall", "allvsall")  # every entity is a candidate
IN_STORE = fixed(
    "the run has its triples in a store of its own; start a new run, or add triples by `extend`"
)


def _is_another_graph(before: Any, after: Any) -> bool:
    """A store may have been moved; its checkpoints know the fingerprint of its triples."""
    return not (Path(after.data.path) / "meta.json").is_file()


NOT_A_STORE = Condition(
    "data.path naming triples that are no store yet",
    lambda _, facts: None if facts.is_store is None else not facts.is_store,
)


def reading_key(
    default: Any, help: str, check: Callable[[str, Any], None] | None = None, *acts: Condition
) -> Any:
    """Return a dataclass field for a key of how files are read, with further conditions."""
    return key(default, help, check=check, acts=(NOT_A_STORE, *acts), resume=IN_STORE)


def _shares(ratio: Any) -> bool:
    return len(ratio) == 3 and min(ratio) >= 0 < ratio[0] and abs(sum(ratio) - 1) < 1e-6


@dataclass(frozen=True)
class SplitOptions:
    """Options of how triples without splits are split."""

    by: str = reading_key(
        "random",
        "random; head (at random within each head); time (the latest are test); last (the last "
        "ones of each head are test).",
        check=choice("random", "head", "time", "last"),
    )
    ratio: tuple[float, ...] = reading_key(
        (0.9, 0.05, 0.05),
        "Shares of train, valid and test.",
        between("three shares that sum to 1, the first above 0", _shares),
        only_with("data.split.by", "random", "head", "time"),
    )
    count: int = reading_key(
        1,
        "Triples of each head in test, and as many before them in valid; 1: leave the last out.",
        least(1),
        only_with("data.split.by", "last"),
    )


@dataclass(frozen=True)
class LabelOptions:
    """Options of ``data.labels``: files that give ids their labels."""

    entities: str | None = reading_key(
        None,
        "File of the ids and labels of entities; none: triples have labels; null: a file beside "
        "the triples (entity2id.txt, entities.dict, entity_ids.del, ...), if they have its ids.",
    )
    relations: str | None = reading_key(
        None, "File of the ids and labels of relations; none and null as for entities."
    )
    id_column: int | str | None = reading_key(
        None, "Column of the ids, by name or position from 0; null: the one of numbers."
    )
    label_column: int | str | None = reading_key(None, "Column of the labels; null: the other one.")


@dataclass(frozen=True)
class NoOptions:
    """The options of the readers inside the package, which have keys of ``data`` instead."""

    name = "data.reader null"


@dataclass(frozen=True)
class DataConfig(Section):
    """The source of the triples and how it is read."""

    prefix = "data."

    path: str = key(
        "countries",
        'A store, a directory with train/valid/test files, a file of triples, "countries" '
        "(built in), or a data set such as pykeen:fb15k237 or "
        "hf:ORGANIZATION/NAME.",
        resume=Resume(
            "to a store that was moved",
            "name the store that it was trained on, start a new run, or add triples by `extend`",
            _is_another_graph,
        ),
    )
    split: SplitOptions = field(default_factory=SplitOptions)
    columns: str | dict[str, Any] | None = reading_key(
        None,
        "The column of head, relation, tail, weight, time, head_type or tail_type, by name or by "
        "position from 0: head=user_id,tail=item_id. weight may be {RELATION: WEIGHT}, for "
        "relations from a column. null: known words, or the order.",
    )
    relation: str | None = reading_key(
        None, "The relation of all triples, for files of two columns; null: a column has it."
    )
    has_header: bool | None = reading_key(
        None, "Whether text files start with a header; null: recognized by its first lines."
    )
    separator: str = reading_key(
        "",
        "What separates the columns of text: tab, comma, semicolon, bar, blanks or a character; "
        "empty: recognized by the first lines.",
        check=between(
            "tab, comma, semicolon, bar, blanks, or one ASCII character other than a quote",
            lambda text: (
                text in ("", "tab", "comma", "semicolon", "bar", "blanks")
                or (len(text) == 1 and text.isascii() and text not in '"\r\n\0')
            ),
        ),
    )
    quotes: bool | None = reading_key(
        None,
        "Whether quotes around a field may hold separators and line ends; null: yes, except "
        "between tabs or blanks. false reads quotes as text.",
    )
    comments: str = reading_key(
        "", "Start of lines that are left out, such as #; empty: no line is."
    )
    skip: int = reading_key(
        0, "Lines at the start of text files that are left out.", check=least(0)
    )
    bad_lines: str = reading_key(
        "error",
        "Rows with another number of columns, an empty label or a wrong weight: error; skip leaves "
        "them out, counts them and shows the first three.",
        check=choice("error", "skip"),
    )
    where: str = reading_key(
        "",
        "Condition on columns for the rows that are read, such as rating >= 4 and kind in "
        "['buy', 'view']; empty: all rows.",
    )
    labels: LabelOptions = field(default_factory=LabelOptions)
    literals: str = reading_key(
        "drop",
        "RDF triples whose object is a literal: drop leaves them out and counts them; keep makes "
        "an entity of every literal.",
        check=choice("drop", "keep"),
    )
    allow_unseen_relations: bool = reading_key(
        False, "Accept relations that occur only in valid or test."
    )
    weights: str = key(
        "ignore",
        "Use of triple weights (fourth column): ignore; loss (a triple's loss times its weight "
        "over the mean).",
        check=choice("ignore", "loss"),
        resume=fixed(),
    )
    types: str | None = reading_key(
        None,
        "Types of entities: prefix (of labels such as user:17); a file of lines entity, tab, type; "
        "or a relation from entities to types, such as rdf:type, whose triples are taken out. "
        "null: none, unless files have columns head_type and tail_type or data.path is a "
        "description of a typed graph.",
    )
    features: str | None = reading_key(
        None,
        "A file of lines entity, tab, feature, and perhaps a tab and a weight: vectors of features "
        "(genres, tags, words) are added to those of entities; null: none.",
    )
    reader: str | None = reading_key(
        None, "package.module:Class that reads the files; null: chosen by their names."
    )
    reader_options: dict[str, Any] = key(
        dict, "Options of data.reader.", resume=IN_STORE, part=Part("reader", "reader", NoOptions)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reader is not None:
            self.options_in("reader_options")  # some may have no default


_SAMPLED = only_with("negatives.regime", "sampled")
_DRAWN = only_with("negatives.regime", "sampled", "kvssample")


def _keeps_fewer(config: Any, _: Any) -> bool | None:
    negatives = config.negatives
    if negatives.count is None or negatives.in_batch:
        return None
    return negatives.hardest < max(negatives.drawn("head"), negatives.drawn("tail"))


_KEEPS_FEWER = Condition("negatives.count above negatives.hardest", _keeps_fewer)


@dataclass(frozen=True)
class Among:
    """Options of ``negatives.among``."""

    types: str | None = key(
        None,
        "File of lines entity, tab, type; null: the types that the store has by data.types.",
        acts=only_with("negatives.among", "types"),
    )
    share: float = key(
        1.0,
        "Share of the negatives that negatives.among restricts; the others are drawn from all "
        "entities.",
        check=between("in (0, 1]", lambda share: 0 < share <= 1),
        acts=only_with("negatives.among", "seen", "types"),
    )


@dataclass(frozen=True)
class NegativesConfig(Section):
    """The entities that a positive is compared with."""

    prefix = "negatives."

    regime: str = key(
        "sampled",
        "Training type: sampled; 1vsall (triples against all entities); kvsall (queries with "
        "all their answers); allvsall (also unanswered queries); kvssample (queries against "
        "sampled entities).",
        check=choice("sampled", "1vsall", "kvsall", "allvsall", "kvssample"),
        resume=fixed(),
    )
    count: PickedInt = key(
        PICKED,
        "Sampled entities per chunk and side; null: chosen by size.",
        check=least(1),
        acts=_DRAWN,
    )
    head_count: int | None = key(
        None,
        "Sampled entities of head queries; null: negatives.count.",
        check=least(1),
        acts=(_SAMPLED, only_without("negatives.sides", "tail")),
    )
    in_batch: bool | str = key(
        False,
        "Use the answers of a chunk's other triples as candidates too: true; same_relation (only "
        "of triples with the same relation, as TwHIN does); false.",
        check=between(
            "false, true or same_relation", lambda value: value in (False, True, "same_relation")
        ),
        acts=_SAMPLED,
    )
    hardest: int = key(
        0,
        "Keep only this many candidates of each query, those with the highest scores; 0: all.",
        check=least(0),
        acts=(_SAMPLED, _KEEPS_FEWER),
    )
    log_q: bool = key(
        False,
        "Correct scores for how often a candidate is drawn, so that the softmax estimates the one "
        "over all entities.",
        acts=_SAMPLED,
    )
    chunk_size: int = key(
        0,
        "Triples that share their negatives: 1 gives each triple its own; 0 shares them over the "
        "whole batch.",
        check=least(0),
        acts=_DRAWN,
    )
    sides: str = key(
        "both",
        "Ends that are corrupted: both, tail or head; one of them needs model.reciprocal false.",
        check=choice("both", "tail", "head"),
        resume=Resume(
            "with negatives.regime sampled or 1vsall",
            "start a new run",
            lambda before, _: before.negatives.examples == "queries",
        ),
    )
    sampling: str = key(
        "uniform",
        "Distribution of sampled entities: uniform, degree (in proportion to a power of it), or "
        "package.module:Class.",
        acts=_DRAWN,
    )
    filtered: bool = key(False, "Never use a known training triple as a negative.")
    among: str | None = key(
        None,
        "Entities to draw from: all; seen (with the relation and side); types (of the answer). "
        "Queries without such entities use all. 1vsall, kvsall and allvsall "
        "take all, or those of the types of the relation. null: types where every entity has one "
        "type and the other settings allow it, otherwise all.",
        check=choice("all", "seen", "types"),
    )
    among_options: Among = field(default_factory=Among)
    max_answers: int = key(
        1024,
        "Answers of a query per step; every epoch draws others at random from more; 0: all, "
        "with the memory that takes.",
        check=least(0),
        acts=only_with("negatives.regime", "kvssample"),
    )
    options: dict[str, Any] = key(
        dict,
        "Options of the sampling, such as {degree_power: 0.75}; `kge-torchrec list "
        "negative_sampler` lists them.",
        part=Part("negative_sampler", "sampling"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("negative_sampler", self.sampling)
        if self.sampling not in ("uniform", "degree"):
            self.sampler_options()

    @property
    def masks_candidates(self) -> bool:
        """Whether a batch marks candidates that are not negatives."""
        restricts = self.among not in (None, "all")
        return self.filtered or restricts or self.in_batch == "same_relation"

    def drawn(self, side: str) -> int:
        """Return the number of sampled entities per chunk of a side."""
        return self.count if side == "tail" or self.head_count is None else self.head_count

    def candidates(self, side: str, chunk_size: int) -> int:
        """Return the number of candidates per chunk of ``chunk_size`` triples."""
        return self.drawn(side) + (chunk_size if self.in_batch else 0)

    @property
    def is_full(self) -> bool:
        """Whether every entity is a candidate."""
        return self.regime in FULL_REGIMES

    def sampler_options(self) -> Any:
        """Return the sampling's ``Options``."""
        return self.options_in("options")

    @property
    def examples(self) -> str:
        """The unit of an epoch and of a batch: triples or queries."""
        return "triples" if self.regime in ("sampled", "1vsall") else "queries"
