"""Consistency checks and hand-written spot facts for the shipped graph of countries."""

from collections import Counter, defaultdict
from itertools import combinations

import pytest

from kge_torchrec.cli import main
from kge_torchrec.data.datasets import embedded_files
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import DataError
from scripts.make_countries import (
    COLUMN_OF_RELATION,
    SEPARATOR,
    country_splits,
    country_triples,
    read_countries,
)

COLUMNS = {
    "country",
    "subregion",
    "continent",
    "capital",
    "currency",
    "official_languages",
    "neighbours",
    "memberships",
}


@pytest.fixture(scope="module")
def rows():
    return {row["country"]: row for row in read_countries()}


@pytest.fixture(scope="module")
def triples():
    return country_triples()


@pytest.fixture(scope="module")
def splits():
    return country_splits()


@pytest.fixture(scope="module")
def tails(triples):
    results = defaultdict(set)
    for head, relation, tail in triples:
        results[head, relation].add(tail)
    return results


@pytest.fixture(scope="module")
def heads(triples):
    results = defaultdict(set)
    for head, relation, tail in triples:
        results[relation, tail].add(head)
    return results


def values(row, column):
    return [value for value in row[column].split(SEPARATOR) if value]


def labels_of(rows, column):
    return {value for row in rows.values() for value in values(row, column)}


def test_table_shape(rows):
    assert len(read_countries()) == len(rows) == 197
    assert list(rows) == sorted(rows)
    assert all(set(row) == COLUMNS for row in rows.values())
    assert {"Vatican", "Palestine", "Kosovo", "Taiwan"} <= rows.keys()


def test_labels_are_single_words_listed_once(rows):
    for row in rows.values():
        for column in COLUMNS:
            results = values(row, column)
            assert len(results) == len(set(results)), (row["country"], column)
            for label in results:
                assert label.replace("_", "").isalnum(), label
                assert label.isascii() and label[0] != "_" != label[-1], label


def test_enough_distinct_triples(triples):
    assert len(triples) >= 2500
    assert len(triples) == len(set(triples))
    assert triples == sorted(triples)


def test_every_country_has_its_basic_facts(rows, tails):
    for country in rows:
        for relation in ("has_capital", "uses_currency", "has_official_language"):
            assert tails[country, relation], (country, relation)
        for relation in ("in_subregion", "in_continent"):
            assert len(tails[country, relation]) == 1, (country, relation)


def test_names_are_disjoint_across_kinds(rows):
    columns = COLUMNS - {"neighbours"}
    for one, other in combinations(sorted(columns), 2):
        assert not labels_of(rows, one) & labels_of(rows, other), (one, other)


def test_borders_are_symmetric_and_between_listed_countries(rows, tails):
    for country in rows:
        for other in tails[country, "borders"]:
            assert other in rows
            assert other != country
            assert country in tails[other, "borders"], (country, other)


def test_each_subregion_lies_in_one_continent(rows, tails):
    subregions = labels_of(rows, "subregion")
    assert len(subregions) == 22
    for subregion in subregions:
        assert len(tails[subregion, "subregion_in_continent"]) == 1
    for country in rows:
        (subregion,) = tails[country, "in_subregion"]
        assert tails[country, "in_continent"] == tails[subregion, "subregion_in_continent"]


def test_capital_of_is_the_inverse_of_has_capital(triples):
    forward = {(head, tail) for head, relation, tail in triples if relation == "has_capital"}
    backward = {(tail, head) for head, relation, tail in triples if relation == "capital_of"}
    assert forward == backward
    capitals = Counter(capital for _, capital in forward)
    assert set(capitals.values()) == {1}


@pytest.mark.parametrize(
    ("continent", "size"),
    [("Africa", 54), ("Americas", 35), ("Asia", 49), ("Europe", 45), ("Oceania", 14)],
)
def test_continent_sizes(heads, continent, size):
    assert len(heads["in_continent", continent]) == size


@pytest.mark.parametrize(
    ("organisation", "size"),
    [
        ("African_Union", 54),  # 55 members, of which Western Sahara has no row
        ("APEC", 20),  # 21 members, of which Hong Kong has no row
        ("Arab_League", 22),
        ("ASEAN", 11),
        ("BRICS", 10),
        ("CARICOM", 14),  # 15 members, of which Montserrat has no row
        ("Commonwealth_of_Nations", 56),
        ("Council_of_Europe", 46),
        ("ECOWAS", 12),
        ("European_Union", 27),
        ("G20", 19),  # besides the European and the African Union
        ("G7", 7),
        ("Mercosur", 6),
        ("NATO", 32),
        ("Nordic_Council", 5),
        ("OECD", 38),
        ("OPEC", 12),
        ("Organisation_of_Islamic_Cooperation", 57),
        ("OSCE", 57),
        ("Pacific_Islands_Forum", 14),  # 18 members, four of which have no row
        ("SADC", 16),
        ("Schengen_Area", 29),
    ],
)
def test_membership_sizes(heads, organisation, size):
    assert len(heads["member_of", organisation]) == size


def test_euro_is_used_by_the_euro_area_and_six_others(heads):
    users = heads["uses_currency", "Euro"]
    outside = {"Andorra", "Kosovo", "Monaco", "Montenegro", "San_Marino", "Vatican"}
    assert len(users) == 26
    assert users - heads["member_of", "European_Union"] == outside


@pytest.mark.parametrize(
    ("country", "neighbours"),
    [
        (
            "Austria",
            "Czechia Germany Hungary Italy Liechtenstein Slovakia Slovenia Switzerland",
        ),
        # Overseas parts of a state do not count: French Guiana is left out.
        ("France", "Andorra Belgium Germany Italy Luxembourg Monaco Spain Switzerland"),
        ("Suriname", "Brazil Guyana"),
        (
            "Brazil",
            "Argentina Bolivia Colombia Guyana Paraguay Peru Suriname Uruguay Venezuela",
        ),
        ("Spain", "Andorra France Portugal"),
        ("Morocco", "Algeria"),
        ("Lesotho", "South_Africa"),
        (
            "Zambia",
            "Angola Botswana Democratic_Republic_of_the_Congo Malawi Mozambique "
            "Namibia Tanzania Zimbabwe",
        ),
        ("Papua_New_Guinea", "Indonesia"),
        ("Japan", ""),
        ("Singapore", ""),
    ],
)
def test_exact_neighbours(tails, country, neighbours):
    assert tails[country, "borders"] == set(neighbours.split())


def test_the_two_countries_with_most_neighbours(rows, tails):
    counts = {country: len(tails[country, "borders"]) for country in rows}
    assert {country for country, n in counts.items() if n >= 14} == {"China", "Russia"}
    assert counts["China"] == counts["Russia"] == 14


@pytest.mark.parametrize(
    "fact",
    [
        ("Australia", "has_capital", "Canberra"),
        ("Burundi", "has_capital", "Gitega"),
        ("Kazakhstan", "has_capital", "Astana"),
        ("La_Paz", "capital_of", "Bolivia"),
        ("Luxembourg_City", "capital_of", "Luxembourg"),
        ("Ecuador", "uses_currency", "United_States_dollar"),
        ("Liechtenstein", "uses_currency", "Swiss_franc"),
        ("Senegal", "uses_currency", "West_African_CFA_franc"),
        ("Angola", "has_official_language", "Portuguese"),
        ("Switzerland", "has_official_language", "Romansh"),
        ("Suriname", "has_official_language", "Dutch"),
        ("Finland", "member_of", "NATO"),
        ("Timor_Leste", "member_of", "ASEAN"),
        ("Mexico", "in_subregion", "Central_America"),
        ("Turkey", "in_continent", "Asia"),
        ("Micronesia", "subregion_in_continent", "Oceania"),
    ],
)
def test_spot_facts(triples, fact):
    assert fact in triples


@pytest.mark.parametrize(
    "fact",
    [
        ("Mali", "member_of", "ECOWAS"),
        ("Switzerland", "member_of", "European_Union"),
        ("United_Kingdom", "member_of", "European_Union"),
        ("Zimbabwe", "borders", "Namibia"),
    ],
)
def test_plausible_falsehoods_are_absent(triples, fact):
    assert fact not in triples


def test_splits_partition_the_graph(triples, splits):
    assert list(splits) == ["train", "valid", "test"]
    together = [triple for part in splits.values() for triple in part]
    assert len(together) == len(triples)
    assert set(together) == set(triples)


@pytest.mark.parametrize("seed", range(3))
def test_split_sizes_and_coverage(triples, seed):
    splits = country_splits(seed)
    for part in ("valid", "test"):
        assert 0.08 <= len(splits[part]) / len(triples) <= 0.1
    train = splits["train"]
    assert {x for h, _, t in train for x in (h, t)} == {x for h, _, t in triples for x in (h, t)}
    assert {relation for _, relation, _ in train} == {relation for _, relation, _ in triples}


def test_every_table_relation_is_evaluated(splits):
    expected = set(COLUMN_OF_RELATION) | {"capital_of"}
    for part in ("valid", "test"):
        assert {relation for _, relation, _ in splits[part]} == expected


def test_borders_are_held_out_in_one_or_both_directions(splits):
    held_out = {t for part in ("valid", "test") for t in splits[part] if t[1] == "borders"}
    both = {(a, relation, b) for a, relation, b in held_out if (b, relation, a) in held_out}
    assert both
    assert held_out - both


@pytest.mark.parametrize("seed", range(3))
def test_what_is_held_out_follows_from_train(seed):
    splits = country_splits(seed)
    tails = defaultdict(set)
    for head, relation, tail in splits["train"]:
        tails[head, relation].add(tail)
    residents = defaultdict(set)
    for (head, relation), results in tails.items():
        if relation == "in_subregion":
            residents[min(results)].add(head)
    for head, relation, tail in splits["valid"] + splits["test"]:
        near = tails[head, "borders"]
        if relation == "borders":
            derived = head in tails[tail, "borders"] or any(
                tail in tails[other, "borders"] for other in near
            )
        elif relation in ("has_capital", "capital_of"):
            inverse = {"has_capital": "capital_of", "capital_of": "has_capital"}[relation]
            derived = head in tails[tail, inverse]
        elif relation == "in_continent":
            (subregion,) = tails[head, "in_subregion"]
            derived = tail in tails[subregion, "subregion_in_continent"]
        else:
            peers = set(near)
            for subregion in tails[head, "in_subregion"]:
                peers |= residents[subregion] - {head}
            derived = any(tail in tails[other, relation] for other in peers)
        assert derived, (head, relation, tail)


def test_splits_are_deterministic(splits):
    assert country_splits() == splits == country_splits(seed=0)
    assert country_splits(seed=1) != splits


def test_the_package_has_the_files_of_the_script(splits):
    for split, (path,) in embedded_files().items():
        lines = path.read_text("utf-8").splitlines()
        assert [tuple(line.split("\t")) for line in lines] == splits[split]


def test_countries_are_prepared_by_name_unless_a_file_has_it(tmp_path, monkeypatch, capsys, splits):
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "countries", "-o", "whole", "--types-from", "in_continent"]) == 0
    store = TripleStore.open(tmp_path / "whole")
    kept = [triple for triple in splits["train"] if triple[1] != "in_continent"]
    assert store.report["triples"]["train"] == len(kept)
    assert store.report["sources"] == {split: ["countries"] for split in splits}
    for option in (
        ["--columns", "a,b,c"],
        ["--no-has-header"],
        ["--reader", "foreign_parts:Words"],
    ):
        assert main(["prepare", "countries", "-o", "other", *option]) == 1
        assert "has no effect here" in capsys.readouterr().err
    for options in ({"columns": ["a", "b", "c"]}, {"has_header": False}):
        with pytest.raises(DataError, match="a graph by name, not a file: leave out"):
            prepare("countries", "other", **options)
    (tmp_path / "countries").mkdir()
    (tmp_path / "countries" / "train.tsv").write_text("a\tr\tb\n")
    assert main(["prepare", "countries", "-o", "own"]) == 0
    assert TripleStore.open(tmp_path / "own").num_entities == 2
