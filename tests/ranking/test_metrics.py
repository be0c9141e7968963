import numpy as np
import pytest

from kge_torchrec.commands.evaluate import results_table
from kge_torchrec.ranking.ranks import Ranks, metrics


def ranks(head, tail):
    """Each side as (optimistic, pessimistic) lists."""
    sides = {"head": head, "tail": tail}
    parts = [{side: np.array(pair[i]) for side, pair in sides.items()} for i in (0, 1)]
    return Ranks(*parts)


EXAMPLE = ranks(head=([1, 2], [2, 4]), tail=([10, 1], [11, 1]))


def test_metrics_match_hand_computed_example():
    results = metrics(EXAMPLE)
    assert set(results) == {"head", "tail", "both"}
    for kinds in results.values():
        assert set(kinds) == {"optimistic", "realistic", "pessimistic"}
    assert results["head"]["optimistic"] == pytest.approx(
        {"mrr": (1 + 1 / 2) / 2, "mr": 1.5, "hits@1": 0.5, "hits@3": 1, "hits@10": 1}
    )
    # Realistic ranks 1.5 and 3: neither is a hit at 1, both are at 3.
    assert results["head"]["realistic"] == pytest.approx(
        {"mrr": (1 / 1.5 + 1 / 3) / 2, "mr": 2.25, "hits@1": 0, "hits@3": 1, "hits@10": 1}
    )
    assert results["head"]["pessimistic"] == pytest.approx(
        {"mrr": (1 / 2 + 1 / 4) / 2, "mr": 3, "hits@1": 0, "hits@3": 0.5, "hits@10": 1}
    )
    # Realistic ranks 10.5 and 1.
    assert results["tail"]["realistic"] == pytest.approx(
        {"mrr": (1 / 10.5 + 1) / 2, "mr": 5.75, "hits@1": 0.5, "hits@3": 0.5, "hits@10": 0.5}
    )
    both = (1 / 1.5 + 1 / 3 + 1 / 10.5 + 1) / 4
    assert results["both"]["realistic"]["mrr"] == pytest.approx(both)
    assert results["both"]["optimistic"]["hits@10"] == 1


def test_metrics_of_no_triples_raise():
    with pytest.raises(ValueError, match="empty"):
        metrics(ranks(([], []), ([], [])))


def test_table_shows_realistic_ranks_and_with_ties_all():
    lines = results_table(metrics(EXAMPLE)).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["head", "tail", "both"]
    assert lines[0].split() == ["side", "mrr", "mr", "hits@1", "hits@3", "hits@10"]
    assert lines[2].split() == ["head", "0.5000", "2.2", "0.0000", "1.0000", "1.0000"]
    lines = results_table(metrics(EXAMPLE), ties=True).splitlines()
    assert len(lines) == 2 + 9
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["side", "ties", "mrr", "mr", "hits@1", "hits@3", "hits@10"]
    assert lines[3].split() == ["head", "realistic", "0.5000", "2.2", "0.0000", "1.0000", "1.0000"]
