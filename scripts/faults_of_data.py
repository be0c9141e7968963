"""The deliberate faults of check_mutations.py in what comes from data: weights, types, readers."""

from __future__ import annotations

from faults import Fault

DATA_FAULTS = [
    # weights
    Fault(
        "weights over the mean of a rank's part",
        "data/loader.py",
        "self.weights[order(np.arange(start, start + size))].mean(dtype=np.float64)",
        "self.weights[index].mean(dtype=np.float64)",
        "tests/training/test_weighted_triples.py",
    ),
    Fault(
        "weights of a micro-batch instead of the step",
        "data/queries.py",
        "of_step = self._examples.weights[self._places(order, first, first + size)]",
        "of_step = self._examples.weights[self._places(order, start, stop)]",
        "tests/training/test_weighted_triples.py",
    ),
    Fault(
        "penalties of anchors without their weight",
        "training/query_shards.py",
        "of_anchors = to_device(self._weight[self._query_of_anchor[found]], self.device)",
        "pass",
        "tests/training/test_weighted_triples.py",
    ),
    Fault(
        "weights of answers and anchors mixed up",
        "training/query_shards.py",
        "self._weight[self._query_of_anchor[found]]",
        "self._weight[: len(anchor)]",
        "tests/training/test_weighted_triples.py",
    ),
    Fault(
        "slopes against all entities without weights",
        "training/query_shards.py",
        "        return self.weight * weight\n",
        "        return torch.full_like(self.weight, weight)\n",
        "tests/training/test_weighted_triples.py",
    ),
    Fault(
        "a repeated triple keeps its first weight",
        "data/prepare.py",
        "np.maximum.at(own, first, own[again])",
        "pass",
        "tests/data/test_weights.py",
    ),
    Fault(
        "weights in the order of the input",
        "data/prepare.py",
        "_taken(weights[WHOLE], split_of) if",
        "_taken(weights[WHOLE][::-1], split_of) if",
        "tests/data/test_weights.py",
    ),
    Fault(
        "an epoch's draw has no offset",
        "data/weighted_draw.py",
        "(order(positions) + offset)",
        "(order(positions) + 0.0)",
        "tests/data/test_weights.py",
    ),
    Fault(
        "infinite weights are read",
        "data/weights.py",
        "np.isfinite(weights) & (weights > 0)",
        "~(weights <= 0)",
        "tests/data/test_weights.py",
    ),
    # negatives that suit
    Fault(
        "negatives suit the part of a chunk that a rank has",
        "data/loader.py",
        "of_chunks = self.triples[order(start + self._chunk_positions(share, size))]",
        "of_chunks = rows",
        "tests/training/test_suited_negatives.py",
    ),
    Fault(
        "shared negatives count for triples that they do not suit",
        "data/loader.py",
        "mask |= self.suited.unsuited(side, rows, ids, self.drawn[side])",
        "pass",
        "tests/training/test_suited_negatives.py",
    ),
    Fault(
        "heads suit where tails were seen",
        "data/suited_negatives.py",
        'index = store.side_index("train", OTHER[side])',
        'index = store.side_index("train", side)',
        "tests/training/test_suited_negatives.py",
    ),
    Fault(
        "what suits in one chunk suits in all",
        "data/suited_negatives.py",
        "pairs = chunk * (int(keys.max()) + 1) + keys",
        "pairs = keys",
        "tests/training/test_suited_negatives.py",
    ),
    Fault(
        "the last type of an entity is never drawn from",
        "data/suited_negatives.py",
        "low, total = self._before[first], self._before[last] - self._before[first]",
        "low, total = self._before[first], self._before[last - 1] - self._before[first]",
        "tests/training/test_suited_negatives.py",
    ),
    Fault(
        "own negatives that are true",
        "data/suited_negatives.py",
        "triples = triples[~true[:, 0]]",
        "pass",
        "tests/training/test_suited_negatives.py",
    ),
    Fault(
        "types of triples that stay come from test too",
        "data/type_triples.py",
        'self._of_train(entities, relations, triples["train"])',
        "self._of_train(entities, relations, np.concatenate([*triples.values()]))",
        "tests/data/test_type_triples.py",
    ),
    Fault(
        "who has only a type is an entity",
        "data/type_triples.py",
        "batch = batch.filter(pc.invert(found))",
        "pass",
        "tests/data/test_type_triples.py",
    ),
    # readers
    Fault(
        "nameless nodes by the parser's names",
        "data/rdf.py",
        'return f"_:{self._file}#{self._numbers.setdefault(name, len(self._numbers))}"',
        'return f"_:{name}"',
        "tests/data/test_rdf.py",
    ),
    Fault(
        "labels of a library in the order of its mapping",
        "data/catalogues.py",
        "sorted(ids, key=lambda label: ids[label])",
        "list(ids)",
        "tests/data/test_catalogues.py",
    ),
    Fault(
        "both queries of a triple in one step",
        "data/queries.py",
        "lag = self.examples * np.arange(each)[:, None] // each",
        "lag = 0 * np.arange(each)[:, None]",
        "tests/data/test_queries.py -k half_an_epoch",
    ),
    Fault(
        "queries of a step weigh as the triples of its first side",
        "data/queries.py",
        "of_step = self._examples.weights[self._places(order, first, first + size)]",
        "of_step = 2 * self._examples.weights[self._places(order, first, first + size)[0]]",
        "tests/training/test_weighted_triples.py",
    ),
    Fault(
        "texts after the first thousands are not encoded",
        "data/texts.py",
        "part = list(islice(rest, _TEXTS))",
        "part = []",
        "tests/data/test_texts.py",
    ),
    Fault(
        "a label may have two texts",
        "data/texts.py",
        "seen[label] = number",
        "pass",
        "tests/data/test_texts.py",
    ),
]
