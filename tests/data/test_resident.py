"""Batches made on a device that holds the triples equal those of the loader on the CPU.

A CPU stands for the device; it uses the operations of torch that a GPU takes."""

import logging
import threading
from contextlib import contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kge_torchrec.data.batches import triples
from kge_torchrec.data.negatives import NegativeSampler
from kge_torchrec.data.prepare import prepare
from kge_torchrec.embeddings.torchrec.collection import _evenly
from kge_torchrec.kernels import operators
from kge_torchrec.planning.step import STARTED_BY_MAKER
from kge_torchrec.training import assembly
from kge_torchrec.training.captured_step import shape_of
from tests.training_runs import config_of, random_triples

CPU = torch.device("cpu")
TYPES = "\n".join(f"e{i}\t{'abc'[i % 3]}" for i in range(0, 60, 2))
TWO_TYPES = TYPES + "\ne4\tc\ne8\ta\n"
CASES = {
    "uniform": {},
    "chunks": {"negatives.chunk_size": 5},
    "own": {"negatives.chunk_size": 1, "negatives.sides": "tail", "model.reciprocal": False},
    "head count": {"negatives.head_count": 3},
    "filtered": {"negatives.filtered": True, "negatives.chunk_size": 7},
    "degree": {"negatives.sampling": "degree", "negatives.log_q": True},
    "in batch": {
        "negatives.in_batch": True, "negatives.filtered": True, "negatives.chunk_size": 6,
        "negatives.log_q": True,
    },
    "same relation": {"negatives.in_batch": "same_relation", "negatives.chunk_size": 9},
    "seen": {"negatives.among": "seen", "negatives.chunk_size": 4, "negatives.filtered": True},
    "seen, a share": {
        "negatives.among": "seen", "negatives.among_share": 0.4,
        "negatives.in_batch": True,
    },
    "types": {"negatives.among": "types", "negatives.chunk_size": 8},
    "several types": {"negatives.among": "types", "negatives.chunk_size": 8},
    "accumulation": {"train.accumulation": 3},
    "duplicates": {},
    "another package": {"negatives.sampling": "tests.data.test_resident:Backwards"},
    "features": {"negatives.chunk_size": 5},
    "features with duplicates": {},
}  # fmt: skip


class Backwards(NegativeSampler):
    """A sampler of numpy: it looks at triples, and leaves some candidates out."""

    on_cpu = True

    def __init__(self, store, options):
        self.entities = store.num_entities

    def sample(self, chunks):
        first = (chunks.numbers.numpy() * self.entities).astype(np.int64)
        return torch.from_numpy((first + chunks.triples[:, :1, 0].numpy()) % self.entities)

    def excluded(self, chunks, triples, candidates):
        per_triple = np.repeat(candidates.numpy(), len(triples) // len(candidates), axis=0)
        return torch.from_numpy((per_triple + triples[:, :1].numpy()) % 3 == 0)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resident")
    triples = random_triples(60, 4, 390)
    single = [(f"e{i}", "single", "e7") for i in range(30)]  # one tail
    splits = {"train": triples[:370] + single, "valid": triples[370:380], "test": triples[380:]}
    rows = [f"e{i}\tsome {i % 7}\t{0.5 + i}\n" for i in range(50)]
    rows += [f"e{i}\tmore\t2\n" for i in range(0, 60, 3)]
    texts, stores = {"types": TYPES, "several types": TWO_TYPES, "features": "".join(rows)}, {}
    for name, text in texts.items():
        (file := folder / f"{name}.tsv").write_text(text)
        data = {name.split()[-1]: str(file)}
        stores[name] = prepare(splits, folder / name, data, log_notes=False)
    return SimpleNamespace(store=prepare(splits, folder / "store"), stores=stores)


def batches_of(graph, case, where, rank=0, world=1, duplicates=False):
    """Return the maker of a case's batches."""
    changes = {"train.batch_size": 70, "negatives.count": 6, "seed": 3, **CASES[case]}
    store = graph.stores.get(case.removesuffix(" with duplicates"), graph.store)
    config = config_of(store.path, **changes, **{"train.batches": where})
    ranks = SimpleNamespace(rank=rank, world_size=world, device=CPU, is_first=True)
    made = assembly.build_batches(config, store, ranks)
    if duplicates or case.endswith("duplicates"):
        made.delivery = replace(made.delivery, deduplicate=False)
    return made


def assert_equal(one, other):
    """Compare two batches, with the types of their tensors."""
    for field in fields(one):
        value, expected = getattr(one, field.name), getattr(other, field.name)
        if field.name == "ids":  # a KeyedJaggedTensor
            value, expected = value.values(), expected.values()
        if field.name == "bags" and value is not None:
            assert_equal(value, expected)
            continue
        torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


@contextmanager
def operations_of_a_gpu():
    """Let a CPU do without its own kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(operators.IMPLEMENTATION, "ids", lambda ids: "torch")
        yield


@pytest.mark.parametrize("case", CASES)
def test_they_equal_those_of_the_loader(graph, case):
    compared, world = 0, (1, 2, 4)[list(CASES).index(case) % 3]
    ranks = sorted({0, world - 1})
    for rank in ranks:
        makers = [batches_of(graph, case, where, rank, world) for where in ("device", "cpu")]
        for epoch in (0, 1):
            here, there = (x.epoch(epoch, 1) for x in makers)
            for other in there:
                with operations_of_a_gpu():
                    assert_equal(next(here), other)
                compared += 1
    assert compared >= 2 * 5 * len(ranks)


def test_the_cpu_makes_the_batches_of_a_sampler_that_works_only_there(graph):
    maker = batches_of(graph, "another package", "device")
    assert maker.device == CPU and maker.resident is None


@pytest.mark.parametrize("free, memory, where", [
    (10**9, 8 * 12 * 400, "GPU"), (2 * 12 * 400, 10**9, "GPU"),
    (10**9, 8 * 12 * 400 - 1, "CPU (triples take"), (2 * 12 * 400 - 1, 10**9, "CPU (triples take"),
])  # fmt: skip
def test_a_gpu_makes_batches_if_it_has_the_memory(graph, monkeypatch, caplog, free, memory, where):
    config = config_of(graph.store.path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, memory))
    ranks = SimpleNamespace(rank=0, world_size=1, device=torch.device("cuda"), is_first=True)
    plan = assembly.batch_plan(config, graph.store, ranks)
    with caplog.at_level(logging.INFO):
        chosen = assembly._makes_batches_on_device(config, graph.store, plan, ranks)
    assert chosen == (where == "GPU") and f"batches are made on the {where}" in caplog.text


@pytest.mark.parametrize(
    "case", [name for name in CASES if name != "accumulation" and "features" not in name]
)
def test_batches_with_duplicates_have_one_shape_but_the_last(graph, case):
    """One CUDA graph serves them all."""
    where = ("cpu", "device")[list(CASES).index(case) % 2]
    maker = batches_of(graph, case, where, duplicates=True)
    shapes = [shape_of(batch) for epoch in (0, 1) for batch in maker.epoch(epoch)]
    full, last = shapes[0], shapes[maker.steps_per_epoch - 1]
    assert shapes == [*[full] * (maker.steps_per_epoch - 1), last] * 2 and full != last


class FakeCuda:
    """Stands for ``torch.cuda``: ``events`` are what starts, and who waits, in the host's order."""

    def __init__(self):
        self.events, self._of_thread, self._recorded = [], threading.local(), 0

    @property
    def now(self) -> str:
        """The current stream of this thread."""
        return getattr(self._of_thread, "stream", "main")

    def _stream(self, name: str) -> SimpleNamespace:
        def record() -> int:
            self._recorded += 1
            self.events.append(f"{name} records {self._recorded}")
            return self._recorded

        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.events.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.events.append(f"{name} waits for {event}"),
            record_event=record,
        )

    def Stream(self, device=None):
        return self._stream("aside")

    def current_stream(self, device=None):
        return self._stream(self.now)

    @contextmanager
    def stream(self, stream):
        before, self._of_thread.stream = self.now, stream.name
        yield
        self._of_thread.stream = before


def test_training_waits_for_a_batch_that_another_stream_makes(graph, monkeypatch):
    """Its memory is not used again before training has read it."""
    cuda, maker, recorded = FakeCuda(), batches_of(graph, "uniform", "device"), []
    batch = batches_of(graph, "uniform", "device").batch  # on the CPU

    def make(order, epoch, step, part):
        cuda.events.append(f"make {step} on {cuda.now}")
        return batch(order, epoch, step, part)

    used = lambda tensor, s: recorded.append((tensor.data_ptr(), s.name))  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", used)
    monkeypatch.setattr(triples.torch, "cuda", cuda)
    maker.device, maker.batch = torch.device("cuda"), make
    for step, one in enumerate(maker.epoch(0)):
        cuda.events.append(f"train {step}")
        assert_equal(one, batch(maker.order(0), 0, step))
        tensors = [x for x in vars(one).values() if torch.is_tensor(x)] + [one.ids.values()]
        assert {(x.data_ptr(), "main") for x in tensors} <= set(recorded)
        recorded.clear()
    steps = range(maker.steps_per_epoch)
    assert cuda.events[0] == "aside waits for main"  # for the triples
    by_maker = [event for event in cuda.events if event.startswith(("make", "aside records"))]
    assert by_maker == [x for i in steps for x in (f"make {i} on aside", f"aside records {i + 1}")]
    others = [event for event in cuda.events[1:] if event not in by_maker]
    assert others == [x for i in steps for x in (f"main waits for {i + 1}", f"train {i}")]


def test_plans_know_how_many_operations_a_batch_starts(graph):
    """Torch's unique starts about 18 kernels besides, views and empty tensors none."""
    maker = batches_of(graph, "uniform", "device")
    order, maker._there = maker.order(0), torch.Tensor.clone  # a copy to a GPU
    _evenly.cache_clear()  # of lengths, which few batches have in common
    with operations_of_a_gpu(), Operations() as operations:
        maker.batch(order, 0, 1)
    assert operations.count + 18 == STARTED_BY_MAKER


class Operations(TorchDispatchMode):
    """Counts operations that start something on a device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        free = ("view", "slice", "select", "empty", "unbind", "expand", "squeeze")
        self.count += not any(word in name for word in free)
        return function(*args, **(kwargs or {}))
