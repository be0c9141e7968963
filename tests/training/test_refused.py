"""Keys of training that contradict each other, or the data: refused before anything starts."""

from __future__ import annotations

import pytest
from cached_tables import CACHED, tables_with_a_cache
from disk_runs import DISK
from training_runs import config_of, fit, random_triples

from kge_torchrec.config import ConfigError
from kge_torchrec.data.prepare import prepare
from kge_torchrec.errors import DataError

FULL, KVS = {"negatives__regime": "1vsall"}, {"negatives__regime": "kvsall"}
SAMPLE = {"negatives__regime": "kvssample"}
TYPED = {"negatives__among": "types"}
SEEN = {"negatives__among": "seen"}
OPERATOR = {"model__scorer": "operator"}
# keys, and words of the error
REFUSED = [
    # steps
    ({"train__accumulation": 0}, "train.accumulation must be an integer >= 1"),
    ({"train__accumulation": 2, "entities__engine": "handrolled", "entities__preset": "dgl"},
     "train.accumulation: .*use entities.preset fbgemm"),
    *(({"train__clip": {name: value}}, rf"train.clip.{name} must be a number > 0")
      for name in ("norm", "value") for value in (0.0, -1.0, float("nan"))),
    ({"train__precision": "fp8"}, "train.precision must be one of auto, fp32, tf32, bf16, fp16"),
    ({"data__weights": "loss", **KVS}, "data.weights loss: queries of .* use sampled or 1vs"),
    ({"data__weights": "loss", **SAMPLE}, "data.weights loss: queries of .* use sampled or 1vs"),
    # candidates
    ({**SEEN, **KVS}, "takes every entity, or with types every entity of a type, as a"),
    ({**SEEN, **SAMPLE}, "draws for all queries of a batch together"),
    ({**SEEN, "negatives__log_q": True}, "negatives.log_q: with negatives.among seen"),
    ({**SEEN, "negatives__sampling": "degree"}, "draws uniformly; set uniform, or negatives.am"),
    ({"negatives__among": "none"}, "negatives.among must be one of"),
    ({**SEEN, "negatives__among_share": 0.0}, "negatives.among_share"),
    ({"negatives__in_batch": "same_relation", "negatives__log_q": True},
     "negatives.log_q: with negatives.in_batch same"),
    ({"negatives__in_batch": True, "negatives__chunk_size": 1}, "leaves a chunk no other triples"),
    ({**KVS, **TYPED, "loss__name": "foreign_parts:CrossEntropy"},
     "only loss.name softmax and bce can leave entities out"),
    ({**KVS, **TYPED, "loss__options": {"label_smoothing": 0.1}}, "without label_smoothing"),
    ({**KVS, **TYPED, "loss__name": "bce", "loss__options": {"reduction": "mean"}},
     "with reduction sum"),
    ({**KVS, **TYPED, "negatives__among_share": 0.5}, "negatives.among_share: negatives.regime"),
    ({**SAMPLE, "loss__options": {"answers": "sum"}},
     "loss.options.answers sum: negatives.regime kvssample does not sum answers; use kvsall"),
    ({**KVS, **TYPED, "loss__options": {"answers": "max"}},
     "loss.options.answers must be one of mean, sum"),
    # all entities
    ({**KVS, "loss__name": "margin"},
     "margin has no closed form .* use negatives.regime sampled or kvssample"),
    ({**FULL, "negatives__filtered": True}, "negatives.filtered: 1vsall takes every entity"),
    ({**FULL, "train__pipeline": "sparse_dist"}, "train.pipeline: with negatives.regime 1vsall"),
    ({**FULL, "dense__compile": True}, "dense.compile: with negatives.regime 1vsall"),
    ({"negatives__regime": "allvsall"}, "loss.name: softmax has nothing to learn"),
    ({**KVS, "loss__relation_weight": 1.0}, "loss.relation_weight"),
    ({**SAMPLE, "negatives__chunk_size": 8}, "negatives.chunk_size"),
    ({"negatives__regime": "all"}, "negatives.regime must be one of"),
    # scorers
    ({**OPERATOR, "model__options": {"head": "rotation"}}, "model.options.head must be one of ide"),
    ({**OPERATOR, "model__options": {"tail": "x"}}, "model.options.tail must be one of"),
    ({**OPERATOR, "model__options": {"comparator": "l1"}}, "model.options.comparator must be one"),
    ({**OPERATOR, "model__options": {"temperature": 0}}, "temperature must be a number > 0"),
    ({**OPERATOR, "model__options": {"comparator": "l2"}, "model__dropout__hidden": 0.1},
     "model.dropout.hidden has no meaning for operator"),
    # the place of the table
    *(({**DISK, key.replace(".", "__"): value}, key) for key, value in (
        ("negatives.regime", "1vsall"), ("negatives.sampling", "degree"),
        ("negatives.among", "seen"), ("entities.tables", {"user": {}}),
        ("train.extension", {"freeze": "old"}), ("train.averaging", "ema"),
        ("train.pipeline", "sparse_dist"), ("train.batches", "device"),
        ("entities.placement_options", {"parts": 3, "buffer": 4}))),
    *(({**CACHED, key.replace(".", "__"): value}, key) for key, value in (
        ("entities.engine", "handrolled"), ("negatives.regime", "1vsall"),
        ("negatives.regime", "kvsall"), ("entities.tables", {"user": {}}),
        ("train.averaging", "ema"), ("entities.placement_options.cache_ratio", 1.0))),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "words"), REFUSED, ids=lambda x: str(x)[:60])
def test_keys_that_contradict_each_other_are_refused(keys, words):
    with pytest.raises(ConfigError, match=words):
        config_of("unused", **keys)


def test_missing_weights_are_reported(tmp_path):
    """Missing weights are reported for a store and for files, with the key that adds them."""
    store = prepare({"train": random_triples(9, 2, 20)}, tmp_path / "store")
    with pytest.raises(DataError, match=r"data.weights loss: the store has no weights"):
        fit(config_of(store.path, tmp_path / "run", data__weights="loss"))
    (tmp_path / "x.tsv").write_text("a\tr\tb\t0.5\n")
    with pytest.raises(DataError, match=r"data.columns weight=3 reads it$"):
        fit(config_of(tmp_path / "x.tsv", tmp_path / "other"))


FEATURED = {"managed_caching": CACHED, "disk": DISK}


@pytest.mark.parametrize("place", FEATURED)
def test_tables_of_features_stay_in_memory(tmp_path, place):
    """Their sums are of all rows."""
    (tmp_path / "f.tsv").write_text("e1\tred\n")
    triples = {"train": [("e1", "r", "e2"), ("e2", "r", "e3")]}
    store = prepare(triples, tmp_path / "s", {"features": tmp_path / "f.tsv"}, log_notes=False)
    with tables_with_a_cache(), pytest.raises(ConfigError, match=rf"{place}: .* has features"):
        fit(config_of(store.path, tmp_path / "run", **FEATURED[place]))
