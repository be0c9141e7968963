"""Plans of more and more ranks, slower ranks and other links."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
from planned_runs import clustered, planned, workload

from kge_torchrec.commands import run_verb
from kge_torchrec.commands.plan import DOES_NOT_FIT, plan
from kge_torchrec.config import ConfigError
from kge_torchrec.planning.curve import curve, curve_content, curve_text
from kge_torchrec.planning.devices import Straggler, link_speed
from kge_torchrec.planning.layout import Layout
from kge_torchrec.planning.picture import draw_curve
from kge_torchrec.planning.step import ETHERNET_EFFICIENCY, LATENCY

run = partial(run_verb, "plan")
SIZES = {"entities": 200_000, "relations": 50, "triples": 10**6}
FLAGS = [*(f"--{name}={size}" for name, size in SIZES.items()), "--model.dim=64", "--seed=1"]
CONFIG = {"model.dim": 64, "seed": 1}


def points(capsys, *arguments: str) -> list[dict]:
    run([*arguments, *FLAGS, "--format", "json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("devices", "ranks", "hosts"), [("1xCPU-64GB", 64, 64), ("8xH100", 64, 8), ("4xH100", 8, 1)]
)
@pytest.mark.first_tier("4xH100-8-1")
def test_points_are_those_of_single_plans(capsys, devices, ranks, hosts):
    options = ["--straggler", "1.5:0.01", "--between-hosts", "1Gbit"]
    curve_of = {point["ranks"]: point for point in points(capsys, "--devices", devices, *options,
                                                          "--curve", "ranks")}  # fmt: skip
    first = int(devices.partition("x")[0])
    assert list(curve_of) == [first * 2**n for n in range(11) if first * 2**n <= 1024]
    point = curve_of[ranks]
    content = plan(
        {**CONFIG, "train.batch_size": curve_of[first]["batch_size"]},
        devices=devices.replace(str(first), str(ranks), 1), hosts=hosts, straggler="1.5:0.01",
        between_hosts="1Gbit", **SIZES,
    )  # fmt: skip
    step, sent = content["step"], content["traffic"]["sent"]["all"]
    assert point["hosts"] == hosts == content["world"]["hosts"]
    assert point["step_seconds"] == step["seconds"] and point["fits"] == content["fits"]
    start = step["parts"]["starting collectives"]
    assert point["exchange_seconds"] == pytest.approx(step["busy"]["links"] + start)
    place = "main" if "CPU" in devices else "device"
    assert point["memory_of_rank"] == max(rank["total"][place] for rank in content["memory"])
    for where in ("within", "between"):
        mean = sent[f"{where}_hosts"] / ranks
        assert mean <= point[f"sent_{where}_of_rank"] + 1 <= 3 * (mean + 1)
    speed = point["examples_per_second"] / curve_of[first]["examples_per_second"]
    assert point["efficiency"] == pytest.approx(speed * first / ranks)


@pytest.mark.slow
def test_compute_and_exchange_of_a_cpu_are_the_step(capsys):
    for point in points(capsys, "--devices", "2xCPU-64GB", "--hosts", "2", "--curve", "ranks"):
        parts = point["compute_seconds"] + point["exchange_seconds"]
        assert point["step_seconds"] == pytest.approx(parts) and point["hosts"] == point["ranks"]


def test_the_compute_of_a_gpu_leaves_sending_out():
    point = planned(workload(200_000, train__batch_size=8192), "16xH100", 2)
    busy, start = point.busy, point.times["starting collectives"]
    assert point.exchange_seconds == busy["links"] + start
    assert point.compute_seconds == max(busy["host"] - start, busy["loader"], busy["device"])


@pytest.mark.slow
def test_batches_stay_or_grow_with_the_ranks(capsys):
    devices = ["--devices", "2xCPU-64GB", "--train.batch_size=512"]
    (first, *_, last) = points(capsys, *devices, "--curve", "ranks")
    assert (first["batch_size"], last["batch_size"]) == (512, 512)
    (first, *_, last) = points(capsys, *devices, "--curve", "ranks-and-batch")
    assert (first["batch_size"], last["batch_size"]) == (512, 512 * 512)


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
    assert slow.compute_seconds == pytest.approx(1.5 * even.compute_seconds)
    assert slow.exchange_seconds == pytest.approx(even.exchange_seconds)


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


@pytest.mark.slow
def test_text_and_picture_show_what_does_not_fit(tmp_path, capsys):
    arguments = ["--devices", "1xCPU-4GB", "--entities=20M", "--relations=5", "--triples=30M"]
    picture = tmp_path / "curve.svg"
    assert run([*arguments, "--model.dim=64", "--curve=ranks", "--picture", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"1 +1 +no, .* GiB over ", lines[4]) and re.match(r"8 +8 +yes ", lines[7])
    words = " ".join(re.findall(r"<!-- (.*?) -->", picture.read_text()))
    for word in ("does not fit", "exchange", "1,024", "efficiency of 100 %"):
        assert word in words
    arguments[-1] = "--triples=30M"
    assert run([*arguments, "--model.dim=64000", "--curve=ranks"]) == DOES_NOT_FIT


def test_notes_say_what_is_expected_of_slow_ranks():
    cluster = clustered("512xCPU", 512, straggler=Straggler(2, 0.001))
    plans = curve(lambda _: workload(2000), cluster, Layout(), False)
    assert "computes 1.4 to 1.64 times as long (expected)" in curve_text(plans)
    assert curve_content(plans)[1]["slowdown"] == pytest.approx(1.641, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--straggler", "0.5"], "--straggler must be a number >= 1"),
        (["--straggler", "2:1.5"], "chance from 0 to 1"),
        (["--straggler", "slow"], "--straggler must be"),
        (["--between-hosts", "fast"], "a link is a speed such as 1Gbit"),
        (["--within-host", "0Gbit"], "a link is a speed such as 1Gbit"),
        (["--devices", "2000xCPU-64GB", "--curve", "ranks"], "ends at 1,024 ranks"),
    ],
)
def test_bad_input_is_rejected(arguments, said):
    with pytest.raises(ConfigError, match=said):
        run(["--devices", "2xCPU-64GB", *FLAGS, *arguments])


@pytest.mark.slow
def test_draws_a_png(tmp_path):
    plans = curve(lambda _: workload(2000), clustered("512xCPU", 512), Layout(), True)
    draw_curve(plans, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000
