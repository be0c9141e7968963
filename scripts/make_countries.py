"""Write the graph that the package embeds: real facts about the world's countries, in splits.

    python scripts/make_countries.py    # writes kge_torchrec/data/countries/{train,valid,test}.tsv

The table ``countries.tsv`` has one row per country: the 193 members of the United Nations,
Vatican, Palestine, Kosovo and Taiwan, as things stood at the end of 2025. Its conventions:

* Subregions and continents are those of the United Nations' M49 scheme, which also decides about
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

from __future__ import annotations

import csv
import random
from collections import Counter, defaultdict
from pathlib import Path

TABLE = Path(__file__).with_name("countries.tsv")
OUTPUT = Path(__file__).resolve().parents[1] / "kge_torchrec" / "data" / "countries"

Triple = tuple[str, str, str]
Premises = tuple[Triple, ...]

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
    """Return the rows of ``countries.tsv``, in the table's (alphabetical) order."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
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
        usable = [premise for premise in premises.of(triple) if held_out.keys().isdisjoint(premise)]
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


def main() -> None:
    """Write the three files."""
    OUTPUT.mkdir(exist_ok=True)
    for split, triples in country_splits().items():
        lines = ["\t".join(triple) + "\n" for triple in triples]
        (OUTPUT / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
