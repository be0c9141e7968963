"""Plans of more and more ranks, slower ranks and other links."""

from __future__ import annotations

from functools import partial

import pytest
from planned_runs import clustered, planned, workload

from kge_torchrec.commands import run_verb
from kge_torchrec.config import ConfigError
from kge_torchrec.planning.devices import Straggler, link_speed
from kge_torchrec.planning.step import ETHERNET_EFFICIENCY, LATENCY

run = partial(run_verb, "plan")
SIZES = {"entities": 200_000, "relations": 50, "triples": 10**6}
FLAGS = [*(f"--{name}={size}" for name, size in SIZES.items()), "--model.dim=64", "--seed=1"]
CONFIG = {"model.dim": 64, "seed": 1}


def test_a_slow_rank_slows_computation_only():
    work = workload(20_000, train__batch_size=4096)
    even = planned(work, "4xCPU", 2)
    cluster = clustered("4xCPU", 2)
    slow = planned(work, "4xCPU", 2, straggler=Straggler(1.5))
    assert cluster.slowdown == 1
    changed = {part for part, seconds in slow.times.items() if seconds != even.times[part]}
    assert changed == {
        "starting operations", "making batches", "lookup", "scoring", "table optimizer"
    }  # fmt: skip
    assert all(slow.times[part] == pytest.approx(1.5 * even.times[part]) for part in changed)


def test_more_ranks_are_more_often_slow():
    sometimes = Straggler.parse("3:0.1")
    assert sometimes.slowdown(1) == pytest.approx(1 + 2 * 0.1)
    assert sometimes.slowdown(2) == pytest.approx(1 + 2 * (1 - 0.9**2))
    assert sometimes.slowdown(1000) == pytest.approx(3)
    assert [Straggler.parse("3").slowdown(n) for n in (1, 1000)] == [3, 3]


def test_links_change_what_they_name():
    work = workload(20_000, train__batch_size=4096)
    usual = planned(work, "8xH100", 2)
    for place, factor in (("within", 0.5), ("between", 0.1)):
        device = usual.cluster.device
        speed = factor * {"within": device.within_host, "between": device.between_hosts}[place]
        other = planned(work, "8xH100", 2, **{place: speed})
        sends = dict(zip(("within", "between"), usual.traffic.of_ranks("rows"), strict=True))
        more = sends[place].max() / 0.7 * (1 / speed - factor / speed)
        part = "exchange of rows"
        assert other.times[part] - usual.times[part] == pytest.approx(more, rel=1e-6)
        assert other.times["scoring"] == usual.times["scoring"]


def test_a_plan_says_how_slow_a_rank_is(capsys):
    run(["--devices", "2xCPU-64GB", *FLAGS, "--straggler", "1.5"])
    assert "all ranks wait for one that computes 1.5 times as long" in capsys.readouterr().out
    run(["--devices", "2xCPU-64GB", *FLAGS])
    assert "all ranks wait" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "speed"),
    [("1Gbit", 1.25e8), ("100 Mbit/s", 1.25e7), ("12.5GB/s", 1.25e10), ("10gbe", 1.25e9),
     ("HDR", 2.5e10), ("40Gbit/s", 5e9)],
)  # fmt: skip
def test_speeds_of_links(text, speed):
    assert link_speed(text) == pytest.approx(speed)


def test_ethernet_between_cpus():
    """A rank sends half of its rows to the other one, and both do so at the same time."""
    plan = planned(workload(20_000, train__batch_size=4096), "2xCPU", 2, between=1.25e8)
    size = plan.traffic.of_ranks("rows")[1].max()
    assert plan.times["exchange of rows"] == pytest.approx(size / 1.25e8 / ETHERNET_EFFICIENCY)


def test_a_rank_that_receives_most_decides():
    """A table on one rank: it sends the rows of the others, and receives their gradients."""
    plan = planned(workload(8000, model__dim=64), "4xH100", sharding="table_wise")
    assert plan.times["exchange of gradients"] == pytest.approx(plan.times["exchange of rows"])


def test_collectives_of_many_ranks_have_more_messages():
    work = workload(20_000, train__batch_size=4096)
    starts = [
        planned(work, f"{ranks}xCPU", ranks).times["starting collectives"] for ranks in (2, 66)
    ]
    further = 64 * (5 * 1e-4 + 2 * LATENCY["between"])
    assert starts[1] - starts[0] == pytest.approx(further)


def test_sums_against_all_entities_go_around_a_ring():
    work = workload(2000, negatives__regime="1vsall", train__batch_size=16)
    starts = [
        planned(work, f"{ranks}xCPU", ranks).times["starting collectives"] for ranks in (2, 6)
    ]
    assert starts[0] == pytest.approx(4 * LATENCY["between"])
    assert starts[1] == pytest.approx(4 * (1 + 2 * 4) * LATENCY["between"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--straggler", "0.5"], "--straggler must be a number >= 1"),
        (["--straggler", "2:1.5"], "chance from 0 to 1"),
        (["--straggler", "slow"], "--straggler must be"),
        (["--between-hosts", "fast"], "a link is a speed such as 1Gbit"),
        (["--within-host", "0Gbit"], "a link is a speed such as 1Gbit"),
    ],
)
def test_bad_input_is_rejected(arguments, said):
    with pytest.raises(ConfigError, match=said):
        run(["--devices", "2xCPU-64GB", *FLAGS, *arguments])
