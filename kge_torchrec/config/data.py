"""Settings of the triples and of the negatives drawn for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from kge_torchrec.config.checks import (
    PICKED,
    ConfigError,
    PickedInt,
    at_least,
    check,
    not_negative,
    one_of,
)
from kge_torchrec.config.options import parse_options
from kge_torchrec.config.registry import check_name, resolve


@dataclass(frozen=True)
class DataConfig:
    """Where the triples come from.

    Args:
        path: "countries" (the graph inside the package), a prepared store, a directory with
            train/valid/test files, a single file of triples, or a library's data set, such as
            pykeen:fb15k237, ogb:ogbl-wikikg2 or hf:ORGANIZATION/NAME.
        ratio: Shares of train, valid and test when there is only one file.
        has_header: Whether the files start with a header; null finds out.
        allow_unseen_relations: Accept relations that occur in valid or test only.
        literals: Of RDF: drop leaves out triples whose object is a literal, and counts them; keep
            makes an entity of every literal.
        columns: What the header of text and Parquet files calls head, relation and tail, and the
            weight if there is a fourth; null goes by known words.
        weights: What weights of triples, a fourth column, are for: ignore, nothing; loss, a
            triple's loss counts in proportion to its weight over the mean of train; sampling, an
            epoch has a triple in proportion to it.
        types_from: A relation whose tails are types of its heads, such as rdf:type; null: none.
        type_triples: drop takes its triples out of the graph; keep leaves them in, and only those
            of train say types.
        reader: package.module:Class that reads the files; null goes by their names.
        reader_options: Settings of that reader.
    """

    path: str = "countries"
    ratio: tuple[float, float, float] = (0.9, 0.05, 0.05)
    has_header: Optional[bool] = None  # noqa: UP045 - jsonargparse on Python 3.10
    allow_unseen_relations: bool = False
    literals: str = "drop"
    columns: Optional[list[str]] = None  # noqa: UP045
    weights: str = "ignore"
    types_from: Optional[str] = None  # noqa: UP045
    type_triples: str = "drop"
    reader: Optional[str] = None  # noqa: UP045
    reader_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("data.literals", self.literals, ("drop", "keep"))
        one_of("data.type_triples", self.type_triples, ("drop", "keep"))
        one_of("data.weights", self.weights, ("ignore", "loss", "sampling"))
        if self.reader is not None:
            parse_options(
                resolve("reader", self.reader), self.reader_options, "data.reader_options"
            )
        elif self.reader_options:
            raise ConfigError("data.reader_options are of data.reader; set that too")
        for share in self.ratio:
            not_negative("data.ratio", share)
        check(abs(sum(self.ratio) - 1) < 1e-6, "data.ratio", "shares that sum to 1", self.ratio)


AMONG = ("all", "seen", "types", "own")
REGIMES = ("sampled", "1vsall", "kvsall", "allvsall", "kvssample")
FULL_REGIMES = ("1vsall", "kvsall", "allvsall")  # every entity is a candidate


@dataclass(frozen=True)
class NegativesConfig:
    """Which entities a positive is compared with.

    Args:
        regime: sampled; 1vsall (each triple against all entities); kvsall (each distinct query
            with all its answers against all entities); allvsall (the same for every entity and
            relation, answered or not); or kvssample (queries of kvsall against their answers and
            sampled entities).  With all entities as candidates, the keys below but sides mean
            nothing.
        count: Negatives a chunk and side; null picks them by size, no more than need be.
        head_count: Of head queries, where there are to be more or fewer; null takes count.
        in_batch: Answers of a chunk's other triples are candidates as well.
        hardest: Of a query's candidates only so many with the highest scores count; 0 takes all.
        log_q: Correct the scores of candidates for how often they are drawn, so that the softmax
            estimates that over all entities.
        chunk_size: Triples that share their negatives: 1 gives each triple its own, 0 shares
            them over the whole batch (one matrix product scores them).
        sides: both, tail or head: which ends are corrupted; one alone needs model.reciprocal
            false.
        sampling: uniform, or degree (in proportion to degree ** degree_power); or
            package.module:Class.
        degree_power: Exponent of degree sampling.
        filtered: Never use a known training fact as a negative.
        among: Entities that negatives are drawn among: all; seen, those that the relation has been
            seen with on that side in train; types, those that share a type with the true one; or
            own, those that a file says are wrong.  Of a query that has none the negatives are
            drawn among all.
        types: Of among types: a file of lines entity, tab, type; null takes those that the store
            has by data.types_from.
        file: Of among own: a file of triples that are known to be wrong, of any format that
            data.path takes.
        among_share: Share of the drawn negatives that are drawn so; the others are drawn among all.
        max_answers: Of kvssample: answers of a query that a step takes; of a query with more,
            every epoch draws others at random.  0 takes them all, whatever memory that needs.
        options: Settings that the sampling has besides; `kge-torchrec parts negative_sampler`
            lists them.
    """

    regime: str = "sampled"
    count: PickedInt = PICKED
    head_count: Optional[int] = None  # noqa: UP045
    in_batch: bool = False
    hardest: int = 0
    log_q: bool = False
    chunk_size: int = 0
    sides: str = "both"
    sampling: str = "uniform"
    degree_power: float = 0.75
    filtered: bool = False
    among: str = "all"
    types: Optional[str] = None  # noqa: UP045
    file: Optional[str] = None  # noqa: UP045
    among_share: float = 1.0
    max_answers: int = 1024
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("negatives.regime", self.regime, REGIMES)
        at_least("negatives.count", self.count, 1)
        if self.head_count is not None:
            at_least("negatives.head_count", self.head_count, 1)
        at_least("negatives.hardest", self.hardest, 0)
        at_least("negatives.chunk_size", self.chunk_size, 0)
        self._check_candidates()
        self._check_among()
        one_of("negatives.sides", self.sides, ("both", "tail", "head"))
        check_name("negative_sampler", self.sampling)
        if self.sampling not in ("uniform", "degree") or self.options:
            self.sampler_options()
        not_negative("negatives.degree_power", self.degree_power)
        at_least("negatives.max_answers", self.max_answers, 0)
        if self.filtered and self.regime in FULL_REGIMES:
            raise ConfigError(
                f"negatives.filtered: {self.regime} takes every entity as a candidate; set it to "
                "false, or use kvsall, where all known answers are right"
            )

    def _check_candidates(self) -> None:
        """What only candidates that are drawn for triples can have."""
        asked = {
            "head_count": self.head_count is not None,
            "in_batch": self.in_batch,
            "hardest": self.hardest,
            "log_q": self.log_q,
        }
        key = next((key for key, is_set in asked.items() if is_set), None)
        if key and self.regime != "sampled":
            raise ConfigError(f"negatives.{key} is of negatives.regime sampled, not {self.regime}")
        if key == "head_count" and self.sides == "tail":
            raise ConfigError(
                "negatives.head_count: with negatives.sides tail no head is asked for"
            )
        if self.in_batch and self.chunk_size == 1:
            raise ConfigError(
                "negatives.in_batch: negatives.chunk_size 1 leaves a chunk no other triples"
            )
        if self.hardest and self.log_q:
            raise ConfigError(
                "negatives.log_q estimates the softmax over all entities from all that are drawn; "
                "with negatives.hardest only some of them count"
            )

    def _check_among(self) -> None:
        among, key = self.among, f"negatives.among {self.among}"
        one_of("negatives.among", among, AMONG)
        check(0 < self.among_share <= 1, "negatives.among_share", "in (0, 1]", self.among_share)
        for name, owner in (("types", "types"), ("file", "own")):
            if getattr(self, name) is not None and among != owner:
                raise ConfigError(f"negatives.{name} is of negatives.among {owner}, not {among}")
        if among == "all":
            return
        if among == "own" and self.file is None:
            raise ConfigError(f"{key} needs negatives.file, triples that are known to be wrong")
        if self.regime != "sampled":
            what = "draws for all queries of a batch together"
            if self.regime in FULL_REGIMES:
                what = "takes every entity as a candidate"
            raise ConfigError(f"{key}: negatives.regime {self.regime} {what}; use sampled")
        if self.log_q:
            raise ConfigError(
                f"negatives.log_q: with {key} it depends on the triple what is drawn how often; "
                "set it to false"
            )
        if among != "own" and self.among_share == 1 and self.sampling != "uniform":
            raise ConfigError(
                f"negatives.sampling {self.sampling}: {key} draws uniformly; set uniform, or "
                "negatives.among_share below 1 for others that are drawn among all"
            )

    def drawn(self, side: str) -> int:
        """Entities that are drawn for each chunk of a side."""
        return self.count if side == "tail" or self.head_count is None else self.head_count

    def candidates(self, side: str, chunk_size: int) -> int:
        """Candidates of each chunk of a side, of so many triples."""
        return self.drawn(side) + (chunk_size if self.in_batch else 0)

    @property
    def is_full(self) -> bool:
        """Whether every entity is a candidate."""
        return self.regime in FULL_REGIMES

    def sampler_options(self) -> Any:
        """The sampling's ``Options``, of ``degree_power`` if it has that and of ``options``."""
        sampler = resolve("negative_sampler", self.sampling)
        has_power = hasattr(sampler.Options, "degree_power")
        common = {"degree_power": self.degree_power} if has_power else {}
        return parse_options(sampler, {**common, **self.options}, "negatives.options")

    @property
    def examples(self) -> str:
        """What an epoch passes through and a batch counts: triples or queries."""
        return "triples" if self.regime in ("sampled", "1vsall") else "queries"
