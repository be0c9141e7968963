"""Features of entities: stores, cold items and bad input; test_exact trains with them."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import (
    config_of,
    fit,
    largest_difference,
    parameters,
    rank_resumes,
    shared_folder,
)
from worlds import WorldError, run_world

from kge_torchrec import KGEError, load_model, open_run, plan, train
from kge_torchrec.config import Config, DataConfig
from kge_torchrec.data.batches import lookup_of
from kge_torchrec.data.features import Features
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.report import notes
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.backend import EntityShard
from kge_torchrec.embeddings.feature_rows import EntityVectors, FeatureBags
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.start import begin
from kge_torchrec.tuning.race import racers

GROUPS, ITEMS, USERS = 4, 40, 24
COUNT = GROUPS + 1 + ITEMS // 2  # of features, on several ranks
COLD = [f"item:{k}" for k in range(0, ITEMS, 9)]


def visits(seed: int = 0) -> dict[str, list[tuple[str, str, str]]]:
    """Users visit items of their group; nobody visits cold items in train."""
    random, triples = np.random.default_rng(seed), {}
    for user in range(USERS):
        for item in range(user % GROUPS, ITEMS, GROUPS):
            if random.random() < 0.7:
                triples[f"user:{user}", "visits", f"item:{item}"] = None
    is_cold = {triple: triple[2] in COLD for triple in triples}
    return {
        "train": [t for t in triples if not is_cold[t]],
        "test": [t for t in triples if is_cold[t]],
    }


def lines(new: bool = True) -> str:
    """Features of items: their group, for some their name and a tag; one item is in no triple."""
    rows = [f"item:{k}\tgroup {k % GROUPS}\t1.0" for k in range(ITEMS)]
    rows += [f"item:{k}\ttag\t0.5" for k in range(0, ITEMS, 3)]
    rows += [f"item:{k}\tname {k}\t0.1" for k in range(0, ITEMS, 2)]
    rows += ["item:new\tgroup 1\t2.0"] if new else []
    return "\n".join(rows) + "\n"


@functools.cache
def the_store() -> Path:
    folder = shared_folder()
    (folder / "features.tsv").write_text(lines())
    return prepare(
        visits(),
        folder / "store",
        {"types": "prefix", "features": folder / "features.tsv"},
        log_notes=False,
    ).path


def features_config(folder: Path | str | None, **changes) -> Config:
    return config_of(the_store(), folder, **{"negatives__among": "all", **changes})


def test_store_has_features_and_items_that_are_in_no_triple():
    store = TripleStore.open(the_store())
    names, indptr, ids, weights = store.features()
    assert names.to_pylist()[:4] == ["group 0", "group 1", "group 2", "group 3"]
    new = store.entities.ids(["item:new"])[0]
    assert ids[indptr[new] : indptr[new + 1]].tolist() == [1] and weights[indptr[new]] == 2
    assert store.report["features"] | {"source": ""} == {
        "source": "", "features": COUNT, "pairs": 75, "entities": 41, "without_triples": 1,
        "example": "item:new"}  # fmt: skip
    features = Features.of(store)
    cold = store.entities.ids([*COLD, "item:new"])
    assert sorted(np.flatnonzero(~features.own)) == sorted(cold)
    assert store.report["types"]["sizes"] == {"item": 41, "user": USERS}


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**16), st.sets(st.integers(0, 8)))
@settings(max_examples=40)
def test_bags_compose_like_the_matrix(count, kinds, seed, chosen):
    random = np.random.default_rng(seed)
    matrix = np.where(random.random((count, kinds)) < 0.4, random.random((count, kinds)), 0)
    own = random.random(count) < 0.7
    pairs = np.argwhere(matrix)
    indptr = np.append(0, np.cumsum((matrix > 0).sum(1)))
    weights = matrix[tuple(pairs.T)].astype(np.float32)
    arrays = (indptr, pairs[:, 1].copy(), weights, own)
    features = Features(kinds, *map(torch.from_numpy, arrays))
    entities = torch.tensor(sorted(e for e in chosen if e < count), dtype=torch.int64)
    looked_up = lookup_of(entities, features)
    ids, bags = looked_up["ids"], looked_up["bags"]
    assert (np.diff(ids) > 0).all()
    table = torch.from_numpy(random.random((count + kinds, 3)))
    sums = torch.from_numpy(np.concatenate([np.diag(own.astype(float)), matrix], 1))
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-6)
    close(bags.composed(table[ids]), (sums @ table)[entities])
    shard = EntityShard(table.float(), 0, count + kinds)
    vectors = EntityVectors(FeatureBags(features, shard), shard)
    close(vectors.shard.rows.double(), sums @ table)
    grad = torch.from_numpy(random.random((count, 3)))
    close(torch.cat(vectors.row_gradients(grad.float())).double(), sums.T @ grad)


def test_runs_resume_on_other_ranks_and_predict(tmp_path):
    whole = train(features_config(tmp_path / "whole", train__epochs=4)).path
    run = train(features_config(tmp_path / "run", train__epochs=2)).path
    run_world(2, rank_resumes, run, {"train.epochs": 4})
    with open_run(whole) as one, open_run(run) as other:
        assert largest_difference(parameters(one.model), parameters(other.model)) < 1e-5


def rank_ranks(run: Path) -> tuple[dict, list[tuple[str, float]]]:
    with open_run(run) as opened:
        answers = opened.recommend("user:1", "visits", k=5, candidates="all")
        return opened.evaluate("test")["both"], [(a.label, a.score) for a in answers]


def test_ranks_that_hold_only_features_take_part(tmp_path):
    rows = [f"item:{k}\ttag {k} {n}\n" for k in range(ITEMS) for n in range(8)]
    store = untyped(tmp_path, "".join(rows))
    assert store.num_rows > 4 * store.num_entities
    config = {"train__averaging": "ema", "entities__engine": "handrolled"}
    run = train(config_of(store.path, tmp_path / "run", **config)).path
    ((expected, answers),) = run_world(1, rank_ranks, run)
    for results, others in run_world(4, rank_ranks, run):
        assert results == expected
        assert [a for a, _ in others] == [a for a, _ in answers]


def test_cold_items_are_ranked_by_their_features(tmp_path):
    changes = {"model__scorer": "distmult", "train__epochs": 25, "train__lr": 0.1,
               "negatives__count": 32, "negatives__among": "types"}  # fmt: skip
    run = train(features_config(tmp_path / "run", **changes))
    plain = prepare(visits(), tmp_path / "plain", {"types": "prefix"}, log_notes=False).path
    without = train(config_of(plain, tmp_path / "other", **changes))

    def right(path: Path) -> float:
        """How often a user's score of a cold item of the own group beats that of another one."""
        with open_run(path) as opened:
            wins = []
            for user in range(USERS):
                items = [int(label.partition(":")[2]) for label in COLD]
                scores = opened.score([(f"user:{user}", "visits", label) for label in COLD])
                own = [s for s, k in zip(scores, items, strict=True) if k % GROUPS == user % GROUPS]
                others = [s for s, k in zip(scores, items, strict=True) if (k - user) % GROUPS]
                wins += [float(a > b) for a in own for b in others]
            return float(np.mean(wins))

    assert right(run.path) > 0.9 and right(without.path) < 0.8


def untyped(path: Path, text: str) -> TripleStore:
    (path / "f.tsv").write_text(text)
    return prepare(
        visits(), path / "s", {"features": path / "f.tsv"}, overwrite=True, log_notes=False
    )


def test_features_have_a_table_of_their_own_without_types(tmp_path):
    store = untyped(tmp_path, lines())
    tables = {"features": {"optimizer": "sgd", "lr": 0.5}}
    config = config_of(store.path, tmp_path / "run", entities__tables=tables)
    session = fit(config)
    assert [(t.type, len(t.ids), t.optimizer.name) for t in session.backend.table.tables] == [
        ("entity", 65, "adagrad"), ("features", COUNT, "sgd")]  # fmt: skip
    with pytest.raises(KGEError, match="does not have one type per entity"):
        fit(config_of(store.path, tmp_path / "other", entities__tables={"user": {}}))


def test_runs_with_features_have_rows_of_both(tmp_path):
    config = features_config(tmp_path / "run")
    run = train(config)
    assert f"{41 + USERS + COUNT} rows x 8" in (run.path / "plan.txt").read_text()
    planned = plan(config, devices="1xCPU")
    assert (planned["entities"], planned["features"]) == (41 + USERS, COUNT)


def test_exports_have_the_summed_vectors(tmp_path):
    with open_run(train(features_config(tmp_path / "run")).path) as run:
        written = run.export(tmp_path / "export")
        vectors = run.model.entities
    exported = load_model(written).entities
    assert exported.shape == (41 + USERS, 8) and np.array_equal(exported, vectors)
    text = (written / "README.md").read_text("utf-8")
    assert f"the weighted sums of {COUNT} features." in text


def test_races_have_all_settings(tmp_path):
    config = Config(data=DataConfig(path=str(the_store())))
    chosen = racers(config, TripleStore.open(the_store()), (False, 1))
    assert len({racer.negatives.regime for racer in chosen.values()}) > 1


def test_features_are_part_of_the_fingerprint(tmp_path):
    stores = [untyped(tmp_path, lines() + more).fingerprint
              for more in ("", "item:1\tnew\t1\n", "item:1\ttag\t2\n")]  # fmt: skip
    assert len(set(stores)) == 3


def test_prepare_says_which_entities_have_features_only(tmp_path):
    (note,) = [n for n in notes(untyped(tmp_path, lines())) if "in no triple" in n]
    assert "f.tsv: 1 of its entities are in no triple, such as 'item:new'" in note
    assert not [n for n in notes(untyped(tmp_path, lines(new=False))) if "in no triple" in n]


BAD = {
    "no such file": (None, "no such file, which should have entity and feature"),
    "an empty file": ("", "f.tsv: empty file"),
    "one column": ("item:1\n", "f.tsv:1: .* 1 columns: 0 'item:1'; expected 2 columns"),
    "a weight of 0": (
        "item:1\ta\t1\nitem:2\ta\t0\n",
        ":2: the weight is no positive, finite number: '0'",
    ),
    "a word as weight": (
        "item:1\ta\tmuch\n",
        ":1: the weight is no positive, finite number: 'much'",
    ),
    "an empty label": ("item:1\ta\n\tb\n", ":2: the entity is empty"),
    "unknown items": ("book:1\ta\n", "none of its 1 entities is in the graph, such as 'book:1'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_get_a_sentence(tmp_path, case):
    text, message = BAD[case]
    if text is not None:
        (tmp_path / "f.tsv").write_text(text)
    with pytest.raises(KGEError, match=message):
        prepare(visits(), tmp_path / "s", {"features": tmp_path / "f.tsv"}, log_notes=False)
    assert not (tmp_path / "s").exists()


def test_no_node_type_is_named_like_the_table_of_features(tmp_path):
    (tmp_path / "f.tsv").write_text("a:1\tx\n")
    triples = {"train": [("a:1", "has", "features:1")]}
    with pytest.raises(KGEError, match="no node type can have the name 'features'; rename"):
        prepare(
            triples,
            tmp_path / "s",
            {"features": tmp_path / "f.tsv", "types": "prefix"},
            log_notes=False,
        )


def rank_starts(config: Config) -> torch.Tensor:
    """The rows of entities and features of a run at its start, or after its last step."""
    with processes("cpu") as ranks:
        folder = RunFolder(config.run.dir)
        session = Session(config, folder, ranks)
        session.restore() if folder.path.exists() else begin(session)
        shard = session.backend.shard()
        return shard.fetch(torch.arange(shard.num_entities))


def test_runs_with_features_are_initial_vectors(tmp_path):
    config = features_config(tmp_path / "run")
    run = train(config).path
    old, trained_rows = TripleStore.open(the_store()), rank_starts(config)
    with open_run(run) as opened:
        summed = opened.model.entities.copy()
        exported = opened.export(tmp_path / "export", "parquet")
    plain = prepare(visits(1), tmp_path / "plain", {"types": "prefix"}, log_notes=False)
    (tmp_path / "f.tsv").write_text(lines() + "item:1\tnew\t1\nuser:1\ttag\t1\n")
    other = prepare(
        visits(1),
        tmp_path / "other",
        {"types": "prefix", "features": tmp_path / "f.tsv"},
        log_notes=False,
    )

    def starts(store: TripleStore, **changes) -> torch.Tensor:
        config = config_of(store.path, tmp_path / "none", **changes)
        return run_world(2, rank_starts, config)[0]

    with pytest.raises(WorldError, match="start from an export of the run, which has the sums"):
        starts(plain, model__init_from=str(run))
    rows = starts(plain, model__init_from=str(exported))
    assert np.array_equal(rows, summed[old.entities.ids(plain.entities.array.to_pylist())])
    rows, drawn = starts(other, model__init_from=str(run)), starts(other)
    count = other.num_entities
    ids = old.entities.ids(other.entities.array.to_pylist())
    assert torch.equal(rows[:count], trained_rows[ids])
    before = old.features()[0].to_pylist()
    for row, start, name in zip(
        rows[count:], drawn[count:], other.features()[0].to_pylist(), strict=True
    ):
        is_old = name in before
        assert is_old or name == "new"
        assert torch.equal(
            row, trained_rows[old.num_entities + before.index(name)] if is_old else start
        )
