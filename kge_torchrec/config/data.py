"""Settings of the triples and of the negatives drawn for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from kge_torchrec.config.checks import Check, NonNegativeInt, PositiveInt
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
from kge_torchrec.config.registry import part_name

FULL_REGIMES = ("1vsall", "kvsall", "allvsall")  # every entity is a candidate
IN_STORE = fixed(
    "the run has its triples in a store of its own; start a new run, or add triples by `extend`"
)


def is_no_store(config: Any) -> bool:
    """Return whether data.path has still to be read."""
    return not (Path(config.data.path) / "meta.json").is_file()


NOT_A_STORE = Condition("data.path naming triples that are no store yet", is_no_store)


def reading_key(default: Any, *acts: Condition) -> Any:
    """Return a dataclass field for a key of how files are read, with further conditions."""
    return key(default, acts=(NOT_A_STORE, *acts), resume=IN_STORE)


_SHARES = Check(
    "three shares that sum to 1, the first above 0",
    lambda ratio: len(ratio) == 3 and min(ratio) >= 0 < ratio[0] and abs(sum(ratio) - 1) < 1e-6,
)
_SEPARATORS = ("", "tab", "comma", "semicolon", "bar", "blanks")
_SEPARATOR = Check(
    "tab, comma, semicolon, bar, blanks, or one ASCII character other than a quote",
    lambda text: (
        text in _SEPARATORS or (len(text) == 1 and text.isascii() and text not in '"\r\n\0')
    ),
)


@dataclass(frozen=True)
class SplitOptions(Section, prefix="data.split."):
    """Options of how triples without splits are split."""

    by: Literal["random", "head", "time", "last"] = reading_key("random")
    """random; head (at random within each head); time (the latest are test); last (the last ones of
    each head are test)."""
    ratio: Annotated[tuple[float, ...], _SHARES] = reading_key(
        (0.9, 0.05, 0.05), only_with("data.split.by", "random", "head", "time")
    )
    """Shares of train, valid and test."""
    count: PositiveInt = reading_key(1, only_with("data.split.by", "last"))
    """Triples of each head in test, and as many before them in valid; 1: leave the last out."""


@dataclass(frozen=True)
class LabelOptions(Section, prefix="data.labels."):
    """Options of ``data.labels``: files that give ids their labels."""

    entities: str | None = reading_key(None)
    """File of the ids and labels of entities; none: triples have labels; null: a file beside the
    triples (entity2id.txt, entities.dict, entity_ids.del, ...), if they have its ids."""
    relations: str | None = reading_key(None)
    """File of the ids and labels of relations; none and null as for entities."""
    id_column: int | str | None = reading_key(None)
    """Column of the ids, by name or position from 0; null: the one of numbers."""
    label_column: int | str | None = reading_key(None)
    """Column of the labels; null: the other one."""


@dataclass(frozen=True)
class DataConfig(Section, prefix="data."):
    """The source of the triples and how it is read."""

    path: str = key(
        "countries",
        resume=Resume(
            "to a store that was moved",
            "name the store that it was trained on, start a new run, or add triples by `extend`",
            lambda _, after: is_no_store(after),  # the triples of a moved one are compared
        ),
    )
    """A store, a directory with train/valid/test files, a file of triples, "countries" (built in),
    or a data set such as pykeen:fb15k237 or hf:ORGANIZATION/NAME."""
    split: SplitOptions = key(SplitOptions)
    columns: str | dict[str, Any] | None = reading_key(None)
    """The column of head, relation, tail, weight, time, head_type or tail_type, by name or by
    position from 0: head=user_id,tail=item_id. weight may be {RELATION: WEIGHT}, for relations from
    a column. null: known words, or the order."""
    relation: str | None = reading_key(None)
    """The relation of all triples, for files of two columns; null: a column has it."""
    has_header: bool | None = reading_key(None)
    """Whether text files start with a header; null: recognized by its first lines."""
    separator: Annotated[str, _SEPARATOR] = reading_key("")
    """What separates the columns of text: tab, comma, semicolon, bar, blanks or a character; empty:
    recognized by the first lines."""
    quotes: bool | None = reading_key(None)
    """Whether quotes around a field may hold separators and line ends; null: yes, except between
    tabs or blanks. false reads quotes as text."""
    comments: str = reading_key("")
    """Start of lines that are left out, such as #; empty: no line is."""
    skip: NonNegativeInt = reading_key(0)
    """Lines at the start of text files that are left out."""
    bad_lines: Literal["error", "skip"] = reading_key("error")
    """Rows with another number of columns, an empty label or a wrong weight: error; skip leaves
    them out, counts them and shows three."""
    where: str = reading_key("")
    """Condition on columns for the rows that are read, such as rating >= 4 and kind in ['buy',
    'view']; empty: all rows."""
    labels: LabelOptions = key(LabelOptions)
    literals: Literal["drop", "keep"] = reading_key("drop")
    """RDF triples whose object is a literal: drop leaves them out and counts them; keep makes an
    entity of every literal."""
    allow_unseen_relations: bool = reading_key(False)
    """Accept relations that occur only in valid or test."""
    weights: Literal["ignore", "loss"] = key("ignore", resume=fixed())
    """Use of triple weights (fourth column): ignore; loss (a triple's loss times its weight over
    the mean)."""
    types: str | None = reading_key(None)
    """Types of entities: prefix (of labels such as user:17); a file of lines entity, tab, type; or
    a relation from entities to types, such as rdf:type, whose triples are taken out. null: none,
    unless files have columns head_type and tail_type or data.path is a description of a typed
    graph."""
    features: str | None = reading_key(None)
    """A file of lines entity, tab, feature, and perhaps a tab and a weight: vectors of features
    (genres, tags, words) are added to those of entities; null: none."""
    reader: str | None = reading_key(None)
    """package.module:Class that reads the files; null: chosen by their names."""
    reader_options: dict[str, Any] = key(dict, resume=IN_STORE, part=Part("reader", "reader"))
    """Options of data.reader."""


_SAMPLED = only_with("negatives.regime", "sampled")
_DRAWN = only_with("negatives.regime", "sampled", "kvssample")


_IN_BATCH = Check(
    "false, true or same_relation", lambda value: value in (False, True, "same_relation")
)


@dataclass(frozen=True)
class NegativesConfig(Section, prefix="negatives."):
    """The entities that a positive is compared with."""

    regime: Literal["sampled", "1vsall", "kvsall", "allvsall", "kvssample"] = key(
        "sampled", resume=fixed()
    )
    """Training type: sampled; 1vsall (triples against all entities); kvsall (queries with all their
    answers); allvsall (also unanswered queries); kvssample (queries against sampled entities)."""
    count: PositiveInt = key(None, acts=_DRAWN)
    """Sampled entities per chunk and side; null: chosen by size."""
    head_count: PositiveInt | None = key(
        None, acts=(_SAMPLED, only_without("negatives.sides", "tail"))
    )
    """Sampled entities of head queries; null: negatives.count."""
    in_batch: Annotated[bool | str, _IN_BATCH] = key(False, acts=_SAMPLED)
    """Use the answers of a chunk's other triples as candidates too: true; same_relation (only of
    triples with the same relation, as TwHIN does); false."""
    log_q: bool = key(False, acts=_SAMPLED)
    """Correct scores for how often a candidate is drawn, so that the softmax estimates the one over
    all entities."""
    chunk_size: NonNegativeInt = key(0, acts=_DRAWN)
    """Triples that share their negatives: 1 gives each triple its own; 0 shares them over the whole
    batch."""
    sides: Literal["both", "tail", "head"] = key(
        "both",
        resume=Resume(
            "with negatives.regime sampled or 1vsall",
            "start a new run",
            lambda before, _: before.negatives.examples == "queries",
        ),
    )
    """Ends that are corrupted: both, tail or head; one of them needs model.reciprocal false."""
    sampling: Annotated[str, part_name("negative_sampler")] = key("uniform", acts=_DRAWN)
    """Distribution of sampled entities: uniform, degree (in proportion to a power of it), or
    package.module:Class."""
    filtered: bool = False
    """Never use a known training triple as a negative."""
    among: Literal["all", "seen", "types"] = key(None)
    """Entities to draw from: all; seen (with the relation and side); types (of the answer; of
    several types the rarest). Queries without such entities use all. 1vsall, kvsall and allvsall
    take all, or those of the types of the relation. null: types where every entity has one type and
    the other settings allow it, otherwise all."""
    among_share: Annotated[float, Check("in (0, 1]", lambda share: 0 < share <= 1)] = key(
        1.0, acts=only_with("negatives.among", "seen", "types")
    )
    """Share of the negatives that negatives.among restricts; the others are drawn from all
    entities."""
    max_answers: NonNegativeInt = key(1024, acts=only_with("negatives.regime", "kvssample"))
    """Answers of a query per step; every epoch draws others at random from more; 0: all, with the
    memory that takes."""
    options: dict[str, Any] = key(dict, part=Part("negative_sampler", "sampling"))
    """Options of the sampling, such as {degree_power: 0.75}; `kge-torchrec list negative_sampler`
    lists them."""

    @property
    def masks_candidates(self) -> bool:
        """Whether a batch marks candidates that are not negatives."""
        return self.filtered or self.restricts or self.in_batch == "same_relation"

    @property
    def restricts(self) -> bool:
        """Whether sampled candidates are drawn among some entities only."""
        return self.among in ("seen", "types")

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

    @property
    def examples(self) -> str:
        """The unit of an epoch and of a batch: triples or queries."""
        return "triples" if self.regime in ("sampled", "1vsall") else "queries"
