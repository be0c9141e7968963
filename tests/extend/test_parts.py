"""A loss, a regularizer, a draw and a reader of another package do what they say."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from extended import BERNOULLI, JSON_LINES, LP, SQUARED
from scorer_cases import SCORERS
from training_runs import config_of, random_triples

from kge_torchrec import (
    DataError,
    Reader,
)
from kge_torchrec.config import LossConfig
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.models.over_all import BlockAnswers
from kge_torchrec.training.assembly import (
    build_batches,
    build_loss,
    build_regularizers,
)

HERE = __name__  # parts below are of this module


# The loss


def test_all_forms_of_the_loss_are_equal(folder):
    """Values and gradients agree by hand, by autograd, and over all entities in blocks."""
    torch.manual_seed(0)
    loss = build_loss(LossConfig(name=SQUARED, options={"rest": 0.3}))
    scores = torch.randn(3, 7, requires_grad=True)
    answers = torch.zeros(3, 7, dtype=torch.bool)
    answers[[0, 1, 1, 2], [2, 0, 6, 3]] = True
    expected = torch.where(answers, (1 - scores) ** 2, 0.3 * scores**2).sum(1)
    query, column = answers.nonzero().T
    positive, others = scores[answers], ~answers
    torch.testing.assert_close(loss(positive, query, scores, others), expected)
    single_answer = [0, 2]  # queries with one answer
    one = loss(scores[answers][[0, 3]], None, scores[single_answer], others[single_answer])
    torch.testing.assert_close(one, expected[single_answer])
    (gradient,) = torch.autograd.grad(0.5 * expected.sum(), scores)
    full, parts = loss.over_all(7), []
    for start, stop in ((0, 4), (4, 7)):
        here = (column >= start) & (column < stop)
        share = 1 / answers.sum(1)[query[here]]
        block = BlockAnswers(query[here], column[here] - start, share, answers.sum(1))
        block_scores = scores.detach()[:, start:stop].clone()
        parts.append((block_scores, full.partial_statistics(block_scores, block), block))
    statistics = full.reduce(torch.stack([part[1] for part in parts]))
    torch.testing.assert_close(full.loss(statistics), expected.detach())
    for block_scores, of_block, block in parts:
        full.backward(block_scores, of_block, block, torch.full((3,), 0.5))
    torch.testing.assert_close(torch.cat([part[0] for part in parts], 1), gradient)


# The regularizer


def test_penalty_is_added_to_the_loss(folder):
    rows = torch.tensor([[1.0, -4.0], [0.0, 9.0]])

    def of(options):
        built = build_regularizers(LossConfig(regularizers={LP: options}))
        return built.of_entities(SCORERS["complex"](1, 2), rows)

    torch.testing.assert_close(of(0.5), torch.tensor([2.5, 4.5]))
    torch.testing.assert_close(of({"weight": 0.5, "p": 1.5}), torch.tensor([4.5, 13.5]))


def test_penalty_of_whole_triples_is_added_to_the_loss(folder):
    built = build_regularizers(LossConfig(regularizers={"my_parts.apart:Apart": 0.5}))
    anchor, answer = torch.tensor([[1.0, -4.0, 7.0, 8.0]]), torch.tensor([[3.0, -1.0, 0.0, 9.0]])
    scorer = SCORERS["complex"](1, 2, biases=True)  # the last two elements are biases
    penalty = built.of_triples(scorer, anchor, torch.tensor([0]), answer, "tail")
    torch.testing.assert_close(penalty, torch.tensor([0.5 * (4 + 9)]))


# The negative samplers


def batches_of(store, rank=0, world_size=1, **changes):
    ranks = SimpleNamespace(
        rank=rank, world_size=world_size, device=torch.device("cpu"), largest=lambda values: values
    )
    return build_batches(config_of(store, **changes), TripleStore.open(store), ranks)


@pytest.mark.parametrize("in_batch", [False, True])
def test_sampler_may_depend_on_the_relation(folder, store, in_batch):
    """Bernoulli: heads and tails of a relation count in proportion to its two cardinalities."""
    keys = {"negatives__sampling": BERNOULLI, "negatives__count": 40, "negatives__chunk_size": 8,
            "negatives__in_batch": in_batch}  # fmt: skip
    graph, whole = TripleStore.open(store), next(batches_of(store, **keys).epoch(0))
    width = 40 + (8 if in_batch else 0)
    counted = whole.weight > 0
    for relation in range(graph.num_relations):
        rows = graph.train[graph.train[:, 1] == relation]
        heads, tails = (len(np.unique(rows[:, end])) for end in (0, 2))
        own = counted & (whole.relation == relation)
        assert own.any()
        for side, mask in (("head", whole.known_head), ("tail", whole.known_tail)):
            share = (tails if side == "head" else heads) / (heads + tails)
            assert ((~mask[own]).sum(-1) == round(share * width)).all()
    parts = [next(batches_of(store, rank, 2, **keys).epoch(0)) for rank in (0, 1)]
    for name in ("known_head", "known_tail", "relation"):
        frequencies = torch.cat([getattr(batch, name)[batch.weight > 0] for batch in parts])
        assert torch.equal(frequencies, getattr(whole, name)[counted])


def test_typed_negatives_and_relation_sampler_both_exclude(folder, store):
    keys = {"negatives__count": 12, "negatives__among": "seen", "negatives__chunk_size": 8,
            "negatives__among_share": 0.5}  # fmt: skip
    typed = next(batches_of(store, **keys).epoch(0))
    both = next(batches_of(store, **keys, negatives__sampling=BERNOULLI).epoch(0))
    assert torch.equal(typed.ids.values(), both.ids.values())
    untyped = next(batches_of(store, negatives__sampling=BERNOULLI, **keys | {
        "negatives__among": "all", "negatives__among_share": 1.0}).epoch(0))  # fmt: skip
    for name in ("known_head", "known_tail"):
        expected = getattr(typed, name) | getattr(untyped, name)
        assert torch.equal(getattr(both, name), expected)
    assert (typed.known_tail & ~untyped.known_tail).any()  # every entity is a head of each relation


# The reader


def test_reader_yields_the_triples(folder, tmp_path):
    triples = random_triples(9, 2, 30)
    expected = prepare({"train": triples}, tmp_path / "expected")
    lines = "".join(json.dumps(dict(zip("hrt", triple, strict=True))) + "\n" for triple in triples)
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "train.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    options = {"head": "h", "relation": "r", "tail": "t"}
    data = {"reader": JSON_LINES, "reader_options": options}
    actual = prepare(tmp_path / "graph", tmp_path / "found", data, progress=False)
    assert np.array_equal(actual.train, expected.train)
    labels = [list(store.entities.labels(np.arange(9))) for store in (actual, expected)]
    assert labels[0] == labels[1]
    file = tmp_path / "one.jsonl"
    for line, problem in (('{"h": "a"}', "KeyError"), ("a b c", "JSON"), ("[1]", "TypeError")):
        file.write_text(lines + line)
        with pytest.raises(DataError, match=f"one.jsonl:31: no triple: .*{problem}"):
            prepare(file, tmp_path / "no", data, progress=False)
    assert not (tmp_path / "no").exists()


@dataclass
class Given(Reader):
    """A reader that yields the batches of its constructor."""

    batches: list = field(default_factory=list)

    def read(self, path):
        yield from self.batches


TEXT = pa.array(["a", "b"])
COLUMNS = {"head": TEXT, "relation": TEXT, "tail": TEXT}
INVALID = [
    ({"tail": pa.array(["a", None])}, ": triple 1: the tail is empty"),
    ({"relation": pa.array(["", "r"])}, ": triple 0: the relation is empty"),
    ({"tail": None}, ": 2 columns: .*no column stands for the tail"),
    ({"tail": pa.array([["a"], ["b"]])}, "the tail is no text"),
    ({"head": pa.array([0.0, 1.0])}, "number with a fraction"),
    ({"head": None, "relation": None, "tail": None}, "no record batch"),
    (dict.fromkeys(COLUMNS, TEXT.dictionary_encode()), ""),
]


@pytest.mark.parametrize("changes, problem", INVALID)
def test_batches_of_a_reader_are_checked(tmp_path, monkeypatch, changes, problem):
    columns = {name: x for name, x in {**COLUMNS, **changes}.items() if x is not None}
    given = pa.record_batch([*columns.values()], [*columns]) if columns else ("a", "r", "b")
    monkeypatch.setattr("kge_torchrec.data.reading.make_reader", lambda *_: Given([given]))
    (tmp_path / "graph").write_text("")
    output = {"output": tmp_path / "s", "data": {"split.ratio": (1, 0, 0)}, "progress": False}
    if not problem:
        prepare(tmp_path / "graph", **output)
        return
    with pytest.raises(DataError, match=f"graph: its reader.*{problem}"):
        prepare(tmp_path / "graph", **output)
    with pytest.raises(DataError, match="its reader has no suffixes; name the files"):
        prepare(tmp_path, **output)
