"""Speed and memory of one card: FB15k-237's size, Freebase's size, ranking, a checkpoint."""

from __future__ import annotations

import time

import pytest
import torch
from gpu_runs import (
    OF_SIZE,
    RandomGraph,
    Steps,
    config_of,
    preset_of,
    rows_drawn_on_the_device,
    scorer_of,
    synchronize,
    triples_of,
)
from torch.profiler import ProfilerActivity, profile

from kge_torchrec.distributed.processes import processes
from kge_torchrec.embeddings.entity_shard import EntityShard
from kge_torchrec.planning.devices import PRESETS, Cluster
from kge_torchrec.planning.plan import Plan
from kge_torchrec.planning.sizes import Sizes
from kge_torchrec.planning.step import Step
from kge_torchrec.ranking.blocks import ModelScores
from kge_torchrec.ranking.ranks import rank_triples
from kge_torchrec.training.assembly import build_backend
from kge_torchrec.training.checkpoints import Checkpoints
from kge_torchrec.training.state import TrainState

ENTITIES, RELATIONS, DIM = 86_000_000, 14_824, 100


def of_size(on_card: bool, large: int, small: int) -> int:
    return large if on_card else small


def entities_that_fit(device: torch.device, bytes_of_row: int) -> int:
    """At most Freebase's."""
    if device.type == "cpu":
        return 5000
    return min(ENTITIES, int(0.85 * torch.cuda.mem_get_info(device)[0] / bytes_of_row))


@pytest.mark.parametrize("optimizer, bytes_of_row", [("rowwise_adagrad", 404), ("adam", 1200)])
def test_freebase_trains_three_million_triples_per_second_in_the_planned_memory(
    device, note, optimizer, bytes_of_row
):
    on_card = device.type == "cuda"
    graph = RandomGraph(
        entities_that_fit(device, bytes_of_row), RELATIONS, of_size(on_card, 15_000_000, 20_000)
    )
    note("entities", graph.num_entities)
    keys = {"model__dim": DIM, "train__optimizer": optimizer}
    batches = (8192, 65_536) if on_card else (256, 1024)
    with processes(device.type) as ranks, rows_drawn_on_the_device():
        engine = None
        for batch in batches:
            config = config_of(device, None, OF_SIZE, train__batch_size=batch, **keys)
            steps = Steps(config, graph, ranks, engine)
            engine, rate = steps.engine, steps.rate(of_size(on_card, 100, 5))
            note(f"batch {batch:,}", rate, "triples/s")
    if on_card:
        card = preset_of(device) or PRESETS["H200-141GB"]
        sizes = Sizes.of_counts(graph.num_entities, RELATIONS, len(graph.train), skew=0.0)
        plan = Plan.of(config, sizes, Cluster(card, 1))
        planned = plan.total.device - plan.memory["process"].device
        note("a step as planned", 1e3 * Step(plan).seconds, "ms")
        assert torch.cuda.max_memory_allocated(device) == pytest.approx(planned, rel=0.1)
        assert rate > 3e6


@pytest.mark.parametrize(
    "batch, keys",
    [(1024, {}), (8192, {}), (8192, {"train__pipeline": "loop"}),
     (8192, {"train__clip__norm": 1.0})],
    ids=str,
)  # fmt: skip
def test_a_step_hardly_waits(device, note, batch, keys):
    """14,541 x 256 with Adam. TorchRec reads two splits and sends an order."""
    on_card = device.type == "cuda"
    graph = RandomGraph(*((14_541, 237, 33 * 8192) if on_card else (500, 7, 5000)))
    batch = of_size(on_card, batch, batch // 16)
    keys = {"model__dim": 256, "train__optimizer": "adam", "train__batch_size": batch, **keys}
    with processes(device.type) as ranks:
        steps = Steps(config_of(device, None, OF_SIZE, **keys), graph, ranks)
        note("speed", steps.rate(of_size(on_card, 100, 5)), "triples/s")
        if on_card:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
                for _ in range(10):
                    steps()
                synchronize(device)
            counts = {event.key: event.count / 10 for event in watched.key_averages()}
            waits = sum(n for name, n in counts.items() if name.endswith("Synchronize")) - 0.1
            note("kernel launches", sum(n for name, n in counts.items() if "LaunchKernel" in name))
            note("synchronizations", waits, "a step")
            assert "train__clip__norm" in keys or waits < 3.2


def test_compiled_steps_have_the_losses_of_plain_ones(device, note):
    if device.type == "cpu":
        pytest.skip("takes a minute of a CPU")
    graph, losses = RandomGraph(14_541, 237, 33 * 8192), []
    keys = {"model__dim": 256, "train__optimizer": "adam", "train__batch_size": 8192}
    for compiled in (False, True):
        with processes(device.type) as ranks:
            config = config_of(device, None, OF_SIZE, dense__compile=compiled, **keys)
            steps = Steps(config, graph, ranks)
            note(f"dense.compile {compiled}", steps.rate(50), "triples/s")
            losses.append(float(steps()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_ranking_at_freebases_size_takes_no_more_than_four_ipus(device, note):
    """BESS-KGE's exact ranking: 2.3e10 scores/s."""
    entities = entities_that_fit(device, 4 * DIM)
    count = of_size(device.type == "cuda", 1024, 64)
    rows = torch.empty(entities, DIM, device=device).normal_()
    shard, triples = EntityShard(rows, 0, entities), triples_of(count, entities, RELATIONS)
    rates = {}
    for name in ("complex", "transe_l1"):  # products, and a kernel of ours
        scorer = scorer_of(name, DIM, RELATIONS).to(device)
        rank_triples(ModelScores(scorer, shard), triples[:64], None)
        synchronize(device)
        start = time.perf_counter()
        rank_triples(ModelScores(scorer, shard), triples, None)
        synchronize(device)
        rates[name] = 2 * count * entities / (time.perf_counter() - start)
        note(name, rates[name], "scores/s")
    assert device.type == "cpu" or rates["complex"] > 2.3e10


def test_checkpoint_of_a_million_rows_comes_back_bit_for_bit(device, note, tmp_path):
    config = config_of(device, None, OF_SIZE, model__dim=DIM, train__optimizer="adam")
    graph = RandomGraph(of_size(device.type == "cuda", 1_000_000, 2000), RELATIONS, 1000)
    with processes(device.type) as ranks, rows_drawn_on_the_device():
        engine, kept = build_backend(config, graph, ranks), Checkpoints(tmp_path, ranks)
        start = time.perf_counter()
        kept.save(engine.state(), TrainState())
        note("writing", time.perf_counter() - start, "s")
        before = engine.shard().rows.clone()
        engine.shard().rows.zero_()
        state, start = engine.state(), time.perf_counter()
        kept.load(kept.names(), lambda checkpoint: state)
        synchronize(device)
        note("reading", time.perf_counter() - start, "s")
        assert torch.equal(engine.shard().rows, before)


@pytest.mark.parametrize("ratio", [None, 0.5, 0.1], ids=["card", "half", "tenth"])
def test_cached_rows_at_ten_million_entities(device, note, ratio):
    if device.type == "cpu":
        pytest.skip("a CPU has no cache")
    options = {"entities__placement_options": {"cache_ratio": ratio}}
    place = {"entities__placement": "managed_caching", **options} if ratio else {}
    keys = {"model__dim": DIM, "train__optimizer": "adam", "train__batch_size": 8192, **place}
    config, graph = config_of(device, None, OF_SIZE, **keys), RandomGraph(10**7, RELATIONS, 10**6)
    with processes(device.type) as ranks, rows_drawn_on_the_device():
        note("speed", Steps(config, graph, ranks).rate(60), "triples/s")
