"""Deliberate faults in features of entities."""

from faults import Fault

FEATURES, TESTS = "data/features.py", "tests/training/test_features.py"
ORACLE, BAGS = f"{TESTS} -k oracle", "data/batches/triples.py"

FAULTS = [
    Fault(
        "rows of features count once whatever their weight",
        BAGS,
        "(rows[self.row] * self.weight)",
        "rows[self.row]",
        f"{TESTS} -k matrix",
    ),
    Fault(
        "the noise in the own row of a cold item counts",
        BAGS,
        "own = rows[: len(self.own)] * self.own",
        "own = rows[: len(self.own)]",
        f"{TESTS} -k matrix",
    ),
    Fault(
        "features are looked up among entities",
        FEATURES,
        "ids = np.concatenate([entities, features + len(self.own)])",
        "ids = np.concatenate([entities, features])",
        f"{TESTS} -k matrix",
    ),
    Fault(
        "a rank composes its entities from the features of the first ones",
        FEATURES,
        "pairs = slice(self.indptr[first], self.indptr[stop])",
        "pairs = slice(0, self.indptr[stop] - self.indptr[first])",
        ORACLE,
    ),
    Fault(
        "a rank with features in its block takes them for entities",
        "trained_model.py",
        "own = shard.rows[: max(0, min(shard.row_range[1], count) - first)]",
        "own = shard.rows",
        ORACLE,
    ),
    Fault(
        "validations rank the raw rows",
        "training/session.py",
        "self._model.shard = entity_vectors(self.backend.shard(), self._features)",
        "self._model.shard = self.backend.shard()",
        ORACLE,
    ),
    Fault(
        "a loaded run has the raw rows",
        "training/session.py",
        "shard = entity_vectors(EntityShard(rows, start, count), features)",
        "shard = EntityShard(rows[: store.num_entities], start, store.num_entities)",
        f"{TESTS} -k cold_items",
    ),
    Fault(
        "items without a triple are left out",
        FEATURES,
        "return pa.concat_arrays([entities, new]) if len(new) else entities",
        "return entities",
        f"{TESTS} -k store_has",
    ),
    Fault(
        "a weight of 0 is accepted",
        FEATURES,
        "wrong = ~(np.isfinite(weights) & (weights > 0))",
        "wrong = ~np.isfinite(weights)",
        f"{TESTS} -k bad_files",
    ),
    Fault(
        "stores of other features look the same",
        "data/store/__init__.py",
        "for array in () if features is None else features[1:]:",
        "for array in ():",
        f"{TESTS} -k fingerprint",
    ),
    Fault(
        "a race has training types that take no features",
        "tuning/race.py",
        'if store.has_features and chosen.negatives.regime != "sampled":',
        "if False:",
        f"{TESTS} -k races",
    ),
    Fault(
        "a plan forgets the rows of features",
        "planning/workload.py",
        "counts = store.num_rows, store.num_relations",
        "counts = store.num_entities, store.num_relations",
        f"{TESTS} -k plan_of_all_rows",
    ),
]
