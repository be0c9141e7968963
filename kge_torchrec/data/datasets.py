"""Data sets by name: the embedded graph, and those of libraries.

    countries                 a small graph of real facts, in this package
    pykeen:fb15k237           PyKEEN's data sets
    ogb:ogbl-wikikg2          link prediction of the Open Graph Benchmark
    hf:ORGANIZATION/NAME      Hugging Face; hf:ORGANIZATION/NAME:CONFIGURATION for one of several

The libraries download and keep the files where they always do; each is an optional package.
"""

from __future__ import annotations

import csv
import importlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv

from kge_torchrec.data import COLUMNS
from kge_torchrec.data.readers import SPLITS, WHOLE, split_named
from kge_torchrec.data.readers.columns import ColumnChoice
from kge_torchrec.data.readers.tables import column_batch, column_names
from kge_torchrec.errors import DataError

Batches = Iterator[tuple[str, pa.RecordBatch]]
BATCH_ROWS = 1 << 20


def is_named(sources: Any) -> bool:
    """Whether this names a data set of a library, and no file."""
    if not isinstance(sources, str) or Path(sources).exists():
        return False
    scheme, _, name = sources.partition(":")
    return bool(name) and scheme in _LOADERS


def open_named(source: str, choice: ColumnChoice) -> tuple[Sequence[str], Batches]:
    """The splits of a data set, "whole" where it has but one, and batches of its triples.

    Raises DataError where the library is not there or does not have it, and for what is no triples.
    """
    scheme, _, name = source.partition(":")
    package, load = _LOADERS[scheme]
    try:
        library = importlib.import_module(package)
    except ImportError as error:
        raise DataError(
            f"{source}: this takes the package {package.split('.')[0]}, which cannot be imported "
            f"({error}); install it (pip install 'kge-torchrec[{scheme}]')"
        ) from None
    if choice.names is not None and scheme != "hf":
        raise DataError(f"{source}: columns by name: it has none")
    with _telling(source, package):
        splits, batches = load(library, source, name, choice)
    return splits, _guarded(source, package, batches)


def _guarded(source: str, package: str, batches: Batches) -> Batches:
    with _telling(source, package):
        yield from batches


@contextmanager
def _telling(source: str, package: str) -> Iterator[None]:
    """Makes a DataError of whatever a library raises, from no network to an unknown name."""
    try:
        yield
    except (DataError, GeneratorExit):
        raise
    except Exception as error:
        raise DataError(f"{source}: {package.split('.')[0]} cannot load it: {error!r}") from error


def _pykeen(
    library: Any, source: str, name: str, choice: ColumnChoice
) -> tuple[Sequence[str], Batches]:
    found = library.get_dataset(dataset=name)
    parts = {"train": found.training, "valid": found.validation, "test": found.testing}
    splits = {split: part for split, part in parts.items() if part is not None}
    labels = [_in_order(found.entity_to_id), _in_order(found.relation_to_id)]

    def batches() -> Batches:
        for split, part in splits.items():
            yield from _numbered(split, np.asarray(part.mapped_triples), labels)

    return list(splits), batches()


def _in_order(ids: Mapping[Any, int]) -> pa.Array:
    """Labels by their ids, 0 to n - 1."""
    labels = sorted(ids, key=lambda label: ids[label])
    return pa.array([str(label) for label in labels], pa.large_string())


def _numbered(split: str, triples: np.ndarray, labels: Sequence[pa.Array]) -> Batches:
    """Of ids (T, 3) in columns head, relation, tail."""
    entities, relations = labels
    for start in range(0, len(triples), BATCH_ROWS):
        part = triples[start : start + BATCH_ROWS]
        columns = [
            of.take(pa.array(part[:, place]))
            for place, of in enumerate((entities, relations, entities))
        ]
        yield split, pa.record_batch(columns, list(COLUMNS))


def _ogb(
    library: Any, source: str, name: str, choice: ColumnChoice
) -> tuple[Sequence[str], Batches]:
    """Labels are those of the data set's mapping where there are some, otherwise its numbers."""
    found = library.LinkPropPredDataset(name=name)
    edges = found.get_edge_split()
    if not all("relation" in part for part in edges.values()):
        raise DataError(f"{source}: its edges have no relations")
    mapping = Path(getattr(found, "root", "")) / "mapping"
    entities = _mapped(mapping / "nodeidx2entityid.csv.gz")
    relations = _mapped(mapping / "reltype2relid.csv.gz")

    def batches() -> Batches:
        for split in SPLITS:
            part = edges.get(split, {"head": ()})
            for start in range(0, len(part["head"]), BATCH_ROWS):
                rows = slice(start, start + BATCH_ROWS)
                columns = [
                    _labelled(part, role, rows, relations if role == "relation" else entities)
                    for role in COLUMNS
                ]
                yield split, pa.record_batch(columns, list(COLUMNS))

    return [split for split in SPLITS if split in edges], batches()


def _mapped(path: Path) -> pa.Array | None:
    """Labels by number, from a file of two columns; None where it is not there or is another."""
    if not path.is_file():
        return None
    numbers, labels = arrow_csv.read_csv(path).columns[:2]
    if not np.array_equal(numbers.to_numpy(), np.arange(len(numbers))):
        return None
    return labels.cast(pa.large_string()).combine_chunks()


def _labelled(part: Mapping[str, Any], role: str, rows: slice, labels: pa.Array | None) -> pa.Array:
    ids = pa.array(np.asarray(part[role][rows], np.int64))
    kinds = part.get(f"{role}_type")
    if kinds is not None:  # each kind of entities has numbers of its own
        numbered = zip(kinds[rows], ids.to_pylist(), strict=True)
        names = [f"{kind}:{number}" for kind, number in numbered]
        return pa.array(names, pa.large_string())
    return ids.cast(pa.large_string()) if labels is None else labels.take(ids)


def _hugging_face(
    library: Any, source: str, name: str, choice: ColumnChoice
) -> tuple[Sequence[str], Batches]:
    """In a stream; columns as in Parquet."""
    path, _, configuration = name.partition(":")
    loaded = library.load_dataset(path, configuration or None, streaming=True)
    parts = dict(loaded) if isinstance(loaded, Mapping) else {"train": loaded}
    named = {split_named(key): part for key, part in parts.items() if split_named(key)}
    if "train" not in named:
        raise DataError(f"{source}: no split for training among {', '.join(parts)}")
    splits = {split: named[split] for split in SPLITS if split in named}
    if list(splits) == ["train"]:
        splits = {WHOLE: splits["train"]}

    def batches() -> Batches:
        for split, part in splits.items():
            names, row = None, 0
            for table in part.with_format("arrow").iter(batch_size=1 << 16):
                for batch in table.combine_chunks().to_batches():
                    names = names or column_names(source, batch.schema.names, choice)
                    yield split, column_batch(f"{source} {split}", batch, names, row)
                    row += batch.num_rows

    return list(splits), batches()


# By scheme: the module to import, and what reads a data set by it.
_LOADERS: dict[str, tuple[str, Callable[..., tuple[Sequence[str], Batches]]]] = {
    "pykeen": ("pykeen.datasets", _pykeen),
    "ogb": ("ogb.linkproppred", _ogb),
    "hf": ("datasets", _hugging_face),
}


# The embedded graph

Triple = tuple[str, str, str]
Premises = tuple[Triple, ...]

EMBEDDED = "countries"  # in place of a path
HELD_OUT_SHARE = 0.2
SEPARATOR = ";"

# Relations that take one or more values from a column of the table.
COLUMN_OF_RELATION = {
    "borders": "neighbours",
    "has_capital": "capital",
    "has_official_language": "official_languages",
    "in_continent": "continent",
    "in_subregion": "subregion",
    "member_of": "memberships",
    "uses_currency": "currency",
}


def read_countries() -> list[dict[str, str]]:
    """Return the rows of ``countries.tsv``, in the table's (alphabetical) order.

    The table ``countries.tsv`` has one row per country: the 193 members of the United Nations,
    Vatican, Palestine, Kosovo and Taiwan, as things stood at the end of 2025. Its conventions:

    * Subregions and continents are those of the United Nations' M49 scheme, which also settles the
      countries on two continents: Russia is in Eastern Europe; Turkey, Cyprus, Armenia, Azerbaijan
      and Georgia in Western Asia; Kazakhstan in Central Asia; Egypt in Northern Africa. M49 has no
      entry for Kosovo and Taiwan; here they are in Southern Europe and Eastern Asia.
    * Neighbours share a land border, which may follow a river or cross a lake (Tanzania and the
      Democratic Republic of the Congo meet in Lake Tanganyika). Causeways and bridges do not count.
      Neither do overseas parts of a state, whether dependent territories (Gibraltar, Greenland) or
      integral parts on another continent (French Guiana, Ceuta and Melilla), so France does not
      border Brazil or Suriname. Western Sahara has no row, and no border runs along it.
    * Capitals are the seats named in law or used in practice, more than one where the state has
      several. Jerusalem and Ramallah stand for where Israel and Palestine are governed from, and
      say nothing about the status of either.
    * Languages are official or working languages of the whole state; where a constitution lists
      many (Bolivia, Mali, Zimbabwe), only the main ones.
    * A suspended member of an organisation is still a member (Venezuela in Mercosur); partners,
      observers and invited states are not (Saudi Arabia in BRICS).

    No label names two different things: a capital that shares its country's name is called
    ``Luxembourg_City``, ``San_Marino_City`` and so on, and the subregion ``Micronesia`` is distinct
    from the country ``Federated_States_of_Micronesia``.
    """
    table = resources.files(__package__).joinpath("countries.tsv")
    lines = table.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def country_triples() -> list[Triple]:
    """Return every fact of the table as a sorted list of (head, relation, tail) triples."""
    triples = set()
    for row in read_countries():
        country = row["country"]
        for relation, column in COLUMN_OF_RELATION.items():
            for value in filter(None, row[column].split(SEPARATOR)):
                triples.add((country, relation, value))
        for capital in row["capital"].split(SEPARATOR):
            triples.add((capital, "capital_of", country))
        triples.add((row["subregion"], "subregion_in_continent", row["continent"]))
    return sorted(triples)


def country_splits(seed: int = 0) -> dict[str, list[Triple]]:
    """Split the graph about 80/10/10 into ``train``, ``valid`` and ``test``.

    A triple is held out only if one of these rules derives it from triples that stay in train:

    * ``borders(a, b)``: from ``borders(b, a)``, or from a common neighbour of ``a`` and ``b``.
      With the second reason both directions of one border may be held out.
    * ``has_capital`` and ``capital_of``: each from the other.
    * ``in_continent``: from the country's subregion and that subregion's continent.
    * ``in_subregion``: from a neighbour in the same subregion.
    * ``uses_currency``, ``has_official_language``, ``member_of``: from a neighbour, or a country
      in the same subregion, of which the same is true.

    A rule shows that there is evidence for the answer, not that the answer is certain. As the
    triples a rule starts from mention both entities, every entity stays in train; and as each
    relation gives up at most a fifth of its triples, so does every relation. One-off facts, such
    as a currency that only one country uses, always stay in train, and so does
    ``subregion_in_continent``.

    The same seed gives the same split.
    """
    triples = country_triples()
    premises = _Premises(triples)
    rng = random.Random(seed)
    counts = Counter(relation for _, relation, _ in triples)
    quota = {relation: int(HELD_OUT_SHARE * count) for relation, count in counts.items()}
    held_out: dict[Triple, None] = {}  # a dict, to keep the order in which they were drawn
    needed: set[Triple] = set()
    for triple in rng.sample(triples, len(triples)):
        if triple in needed or not quota[triple[1]]:
            continue
        usable = [found for found in premises.of(triple) if held_out.keys().isdisjoint(found)]
        if usable:
            needed.update(rng.choice(usable))
            held_out[triple] = None
            quota[triple[1]] -= 1
    # By relation, so that valid and test get the same number of triples of each.
    drawn = sorted(held_out, key=lambda triple: triple[1])
    return {
        "train": [triple for triple in triples if triple not in held_out],
        "valid": sorted(drawn[::2]),
        "test": sorted(drawn[1::2]),
    }


class _Premises:
    """For a triple, the sets of other triples from which a rule derives it."""

    def __init__(self, triples: list[Triple]):
        self.tails: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        self.heads: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for head, relation, tail in triples:
            self.tails[head, relation].append(tail)
            self.heads[relation, tail].append(head)

    def of(self, triple: Triple) -> list[Premises]:
        """List the premises of every rule that derives the triple in the whole graph."""
        head, relation, tail = triple
        if relation == "borders":
            return [((tail, "borders", head),), *self._through_common_neighbour(head, tail)]
        if relation == "has_capital":
            return [((tail, "capital_of", head),)]
        if relation == "capital_of":
            return [((tail, "has_capital", head),)]
        if relation == "in_continent":
            (subregion,) = self.tails[head, "in_subregion"]
            step = (subregion, "subregion_in_continent", tail)
            return [((head, "in_subregion", subregion), step)]
        if relation == "in_subregion":
            return self._from_neighbours(triple)
        if relation in ("uses_currency", "has_official_language", "member_of"):
            return self._from_neighbours(triple) + self._from_subregion(triple)
        return []

    def _through_common_neighbour(self, head: str, tail: str) -> list[Premises]:
        others = self.tails[head, "borders"]
        return [
            ((head, "borders", other), (other, "borders", tail))
            for other in others
            if tail in self.tails[other, "borders"]
        ]

    def _from_neighbours(self, triple: Triple) -> list[Premises]:
        head, relation, tail = triple
        return [
            ((head, "borders", other), (other, relation, tail))
            for other in self.tails[head, "borders"]
            if tail in self.tails[other, relation]
        ]

    def _from_subregion(self, triple: Triple) -> list[Premises]:
        head, relation, tail = triple
        (subregion,) = self.tails[head, "in_subregion"]
        own = (head, "in_subregion", subregion)
        return [
            (own, (other, "in_subregion", subregion), (other, relation, tail))
            for other in self.heads["in_subregion", subregion]
            if other != head and tail in self.tails[other, relation]
        ]
