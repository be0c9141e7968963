"""Deliberate faults in features of entities."""

from faults import Fault

FEATURES, TESTS = "data/features.py", "tests/training/test_features.py"
ORACLE, BAGS = f"{TESTS} -k oracle", "data/batches/triples.py"
GROWTH, EXTENDED = "training/growth.py", "tests/growth/test_extended_features.py"
ROWS, FULL = "embeddings/feature_rows.py", "training/full_candidates.py"

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
        ROWS,
        "pairs = slice(starts[0], starts[-1])",
        "pairs = slice(0, starts[-1] - starts[0])",
        ORACLE,
    ),
    Fault(
        "a rank with features in its block takes them for entities",
        ROWS,
        "self._rows = shard.rows[: len(bags.own)]",
        "self._rows = shard.rows",
        ORACLE,
    ),
    Fault(
        "features get the gradients of their own rank's entities only",
        ROWS,
        "dist.all_reduce(of_features)",
        "pass",
        ORACLE,
    ),
    Fault(
        "every rank steps the first features",
        ROWS,
        "of_features[slice(*self._features)]",
        "of_features[: self._features[1] - self._features[0]]",
        ORACLE,
    ),
    Fault(
        "steps against all entities score the vectors of the first step",
        FULL,
        "                self._shard = vectors.shard",
        "                self._shard = self.__dict__.setdefault('first', vectors.shard)",
        ORACLE,
    ),
    Fault(
        "labels are smoothed over features as well",
        "training/assembly.py",
        "loss.over_all(num_entities)",
        "loss.over_all(backend.shard().num_entities)",
        ORACLE,
    ),
    Fault(
        "queries with sampled candidates look up no features",
        "models/query_objective.py",
        "rows = batch.bags.composed(rows)",
        "pass",
        ORACLE,
    ),
    Fault(
        "validations rank the raw rows",
        "training/session.py",
        "self._model.shard = entity_vectors(self.backend.shard(), self.features)",
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
        "a plan forgets the rows of features",
        "planning/workload.py",
        "counts = store.num_rows, store.num_relations",
        "counts = store.num_entities, store.num_relations",
        f"{TESTS} -k plan_of_all_rows",
    ),
    Fault(
        "a piece with rows of entities and of features stays whole",
        GROWTH,
        'if not 0 < count < piece["size"][0]:',
        "if True:",
        f"{EXTENDED} -k rows_of_features",
    ),
    Fault(
        "rows of new entities go behind those of features",
        GROWTH,
        "for name, entry in self._index.items() if self.old.features else ():",
        "for name, entry in ():",
        f"{EXTENDED} -k rows_of_features",
    ),
    Fault(
        "frozen features step",
        GROWTH,
        "range(count, count + base.features)",
        "range(0)",
        "tests/growth/test_extend.py -k features_goes_on",
    ),
    Fault(
        "placing writes vectors as rows",
        "growth/__init__.py",
        "            rows = self._moved(vectors)",
        "            model.shard.rows.add_(before)",
        f"{EXTENDED} -k placed",
    ),
    Fault(
        "a file takes the features of all other entities away",
        FEATURES,
        "stays = ~np.isin(before, entity)",
        "stays = before < 0",
        f"{EXTENDED} -k keep_their_features",
    ),
    Fault(
        "an entity keeps its features beside those of a file",
        FEATURES,
        "stays = ~np.isin(before, entity)",
        "stays = before >= 0",
        f"{EXTENDED} -k file_replaces",
    ),
    Fault(
        "features of deleted entities stay in the store",
        FEATURES,
        "used, ids = np.unique(self.ids[pairs], return_inverse=True)",
        "used, ids = np.arange(len(self.names)), self.ids[pairs]",
        f"{EXTENDED} -k along",
    ),
]
