"""The sentences at the end, for measurements whose meaning is known."""

from __future__ import annotations

import pytest
from comparison_made_up import LEARNING_RATE, comparison, measurement, training

from kge_torchrec.comparison.report import Spread, ratio, triples_per_second, verdict


def repeats(*medians: float) -> list[dict]:
    """A repeat for each median, of three blocks, the outer ones far off."""
    return [measurement(i, 0.5 * rate, rate, 1.5 * rate) for i, rate in enumerate(medians)]


def test_spread_and_ratio():
    ours, base = repeats(200, 260, 220), repeats(100, 104, 100)
    assert triples_per_second(ours) == Spread(220, 200, 260)
    assert ratio(ours, base) == Spread(2.2, 2.0, 2.5)
    assert triples_per_second(repeats(200)[:1]) == Spread(200, 100, 300)  # of its blocks
    assert ratio(ours[:1], base) == Spread(2.0, 2.0, 2.0)


def said_of(ours: list[dict], base: list[dict]) -> str:
    (sentence,) = verdict(comparison(torchrec=base, handrolled=ours))
    return sentence


def test_a_clear_win_of_either():
    fast, slow = repeats(200, 210, 220), repeats(100, 101, 102)
    assert said_of(fast, slow) == (
        "At world size 2, handrolled is about 2.1 times as fast as torchrec, 2.0 to 2.2 over "
        "3 repeats."
    )
    assert said_of(slow, fast) == (
        "At world size 2, torchrec is about 2.1 times as fast as handrolled, 2.0 to 2.2 over "
        "3 repeats."
    )


def test_small_but_steady_difference_is_reported():
    said = said_of(repeats(1050, 1051, 1052), repeats(1000, 1001, 1002))
    assert "handrolled is about 1.05 times as fast as torchrec over 3 repeats" in said


@pytest.mark.parametrize(
    ("ours", "base"),
    [
        (repeats(100, 130, 160), repeats(90, 99, 101)),  # the repeats overlap
        (repeats(1003, 1004), repeats(1000, 1001)),  # they do not, but nothing is left of it
        (repeats(120, 200), repeats(100, 110)),  # handrolled differs more from itself
        (repeats(120), repeats(100)),  # the blocks of a single repeat overlap
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_no_difference_within_the_spread(ours, base, turned):
    said = said_of(*((base, ours) if turned else (ours, base)))
    assert "no difference in speed stands out from the spread" in said
    assert "times as fast" not in said


def test_ranges_are_no_more_precise_than_three_digits():
    said = said_of(repeats(123456, 150000), repeats(120049, 160000))
    assert said.endswith(
        "123,000 to 150,000 triples/s of handrolled and 120,000 to 160,000 of torchrec over "
        "2 repeats."
    )


def test_single_repeat_is_reported():
    ours, base = [measurement(0, 300, 301, 302)], [measurement(0, 100, 101, 102)]
    assert "3.0 times as fast as torchrec in a single repeat" in said_of(ours, base)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (0.0, "handrolled and torchrec have bitwise the same parameters after 20 steps"),
        (3.2e-6, "handrolled trains what torchrec trains: after 20 steps parameters differ by up "
         "to 3e-06, 3e-05 learning rates"),
        (2e-3, "handrolled stays close to torchrec: after 20 steps parameters differ by up to "
         "0.002, 0.02 learning rates"),
        (0.25, "handrolled does not train what torchrec trains: after 20 steps parameters differ "
         "by up to 0.2, 2 learning rates"),
        (3.0, "handrolled does not train what torchrec trains: after 20 steps parameters differ "
         "by up to 3, 30 learning rates"),
        (None, "the parameters of handrolled or torchrec are no numbers any more after 20 steps"),
    ],
)  # fmt: skip
def test_parameters(end, words):
    (said,) = verdict(comparison(training(0.0, end)))
    assert said.startswith(f"At world size 2, {words}; the test MRR is")
    assert LEARNING_RATE == 0.1  # what the words above are relative to


def test_different_initial_values_invalidate_the_comparison():
    (said,) = verdict(comparison(training(1e-3, 1e-3)))
    assert "handrolled does not start where torchrec does (parameters 0.001 apart)" in said
    assert "trains" not in said


def test_metrics_of_each():
    (said,) = verdict(comparison(training(0.0, 0.0, mrr=0.51234)))
    assert said.endswith("; the test MRR is 0.512 for torchrec and 0.512 for handrolled.")


def test_only_initial_values_are_compared():
    results = training(0.0, steps=0) | {"metrics": {}, "split": None}
    said = verdict(comparison(results))
    assert said == [
        "At world size 2, handrolled and torchrec start bitwise the same; nothing was trained."
    ]


def test_missing_results_come_first():
    results = comparison(training(0.0, 0.0), torchrec=repeats(100), handrolled=[])
    results["complete"] = False
    assert verdict(results)[0] == "The comparison is incomplete: it has not come to its end."
    results["failure"] = {
        "phase": "speed (repeat 1)",
        "contender": "handrolled",
        "world_size": 2,
        "rank": 1,
        "reason": "was killed by SIGKILL",
    }
    first, *rest = verdict(results)
    assert first == (
        "The comparison is incomplete: at world size 2, speed (repeat 1) of handrolled: rank 1 "
        "was killed by SIGKILL."
    )
    assert len(rest) == 1 and not any(word in rest[0] for word in ("fast", "speed"))


def test_one_sentence_per_world_size():
    results = comparison(training(0.0, 0.0), torchrec=repeats(100), handrolled=repeats(400))
    results["speed"]["4"] = results["speed"]["2"]
    second, fourth = verdict(results)
    assert second.startswith("At world size 2, handrolled and torchrec have bitwise the same")
    assert "; the test MRR is " in second and "; handrolled is about 4.0 times as fast" in second
    assert fourth.startswith("At world size 4, handrolled is about 4.0 times as fast as torchrec")
