"""Estimates of exact metrics from ranks among sampled candidates.

A query has n wrong candidates, k of which score higher than the true answer. Among m of them, drawn
uniformly without replacement, the number j of higher ones is hypergeometric with mean m k / n. So
1 + n j / m is an unbiased estimate of the rank k + 1.

There is no unbiased estimate of 1 / rank or of hits@k: the sample cannot tell rank 1 from rank 2 if
n is much larger than m. Those metrics are estimated by maximum likelihood from the distribution of
j over all queries (Jin et al. 2021, On Estimating Recommendation Evaluation Metrics under
Sampling). The first guess, ranks that are uniform on a logarithmic scale, decides what the sample
leaves open, so the error of these estimates is unknown.

Shapes: Q queries, G ranks of a grid.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kge_torchrec.data import Side

OfSides = Mapping[Side, np.ndarray]

GRID = 400  # ranks, evenly spaced on a logarithmic scale
STEPS = 200  # of expectation maximization; more of them change the third digit


def estimate_exact(
    optimistic: OfSides, pessimistic: OfSides, sizes: OfSides, pools: OfSides
) -> dict[str, dict[str, float]]:
    """Estimate the realistic metrics among all entities from ranks among sampled candidates.

    Args:
        optimistic: Per side (Q,) ranks, from 1.
        pessimistic: Per side (Q,) ranks, from 1.
        sizes: Per side (Q,) m.
        pools: Per side (Q,) n.

    Returns:
        {"head" | "tail" | "both": {"mr", "mr_error", "mrr", "hits@1", "hits@3", "hits@10"}}.
        "mr_error" is the standard error of "mr" over the samples of these triples.
    """
    both = tuple(optimistic)
    sides: dict[str, tuple[Side, ...]] = {**{side: (side,) for side in both}, "both": both}
    results = {}
    for name, of in sides.items():
        pool, size, first, last = (
            np.concatenate([arrays[side] for side in of])
            for arrays in (pools, sizes, optimistic, pessimistic)
        )
        higher = (first + last) / 2 - 1
        results[name] = {
            **_mean_rank(pool, size, higher),
            **_likely_metrics(pool, size, higher),
        }
    return results


def estimate_line(estimate: dict[str, float]) -> str:
    """Return one line of text with the estimates for both sides."""
    return (
        "estimates of the exact figures (both, realistic): "
        f"mr {estimate['mr']:.1f} +- {estimate['mr_error']:.1f}, unbiased; mrr about "
        f"{estimate['mrr']:.2f} and hits@10 about {estimate['hits@10']:.2f}, by maximum likelihood "
        "and with an unknown error"
    )


def _mean_rank(pool: np.ndarray, size: np.ndarray, higher: np.ndarray) -> dict[str, float]:
    """Return the unbiased mean rank and its standard error (Cochran 1977, chapter 3).

    Args:
        pool: (Q,) n of each query.
        size: (Q,) m of each query.
        higher: (Q,) j of each query; a tie counts half.
    """
    some = size > 0
    pool, size, higher = pool[some], size[some], higher[some]
    share = higher / size
    # A single candidate says nothing about its variance, which is 1/4 at most.
    spread = np.where(size > 1, share * (1 - share) / np.maximum(size - 1, 1), 1 / 4)
    variance = (1 - size / pool) * spread
    count = len(some)
    return {
        "mr": float(1 + (pool * share).sum() / count),
        "mr_error": float(np.sqrt((pool**2 * variance).sum()) / count),
    }


def _likely_metrics(pool: np.ndarray, size: np.ndarray, higher: np.ndarray) -> dict[str, float]:
    """Return the metrics of the most likely distribution of realistic ranks.

    All queries count as if they had the mean pool and the largest sample. Queries with an odd
    number of ties have a distribution of their own, whose ranks end in 1/2.

    Args:
        pool: (Q,) n of each query.
        size: (Q,) m of each query.
        higher: (Q,) j of each query; a tie counts half.
    """
    wrong = round(pool.mean())
    drawn = min(int(size.max()), wrong)
    higher = np.minimum(higher, drawn)
    whole = higher.astype(np.int64)
    ranks, shares = np.empty(0), np.empty(0)
    for half in np.unique(higher - whole):
        chosen = whole[higher - whole == half]
        grid, share = _distribution(wrong, drawn, chosen)
        ranks = np.append(ranks, grid + 1 + half)
        shares = np.append(shares, share * len(chosen) / len(higher))
    return {
        "mrr": float(shares @ (1 / ranks)),
        **{f"hits@{k}": float(shares[ranks <= k].sum()) for k in (1, 3, 10)},
    }


def _distribution(wrong: int, drawn: int, higher: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers of higher candidates among all (G,) and their most likely shares (G,).

    Args:
        wrong: n.
        drawn: m.
        higher: (Q,) j of each query, whole numbers.
    """
    seen_higher, counts = np.unique(higher, return_counts=True)
    # Large samples need the ranks that they point at, which may lie between those of the grid.
    places = [np.geomspace(1, wrong + 1, GRID) - 1, seen_higher * (wrong / max(drawn, 1))]
    grid = np.unique(np.concatenate(places).round().astype(np.int64))
    chances = _hypergeometric(wrong, drawn, grid, seen_higher)
    share = np.diff(np.append(grid, wrong + 1)) / (grid + 1)
    for _ in range(STEPS):
        share = share * (chances @ (counts / (share @ chances)))
        share /= share.sum()
    return grid, share


def _hypergeometric(
    pool: int, drawn: int, higher: np.ndarray, seen_higher: np.ndarray
) -> np.ndarray:
    """Return the chance of j higher candidates in a sample if there are k of them: (G, J) float64.

    Args:
        pool: n, the number of wrong candidates.
        drawn: m, the size of the sample.
        higher: (G,) k.
        seen_higher: (J,) j.
    """
    k, j = torch.from_numpy(higher)[:, None], torch.from_numpy(seen_higher)[None]
    n, m = torch.tensor(pool), torch.tensor(drawn)
    return (_log_choose(k, j) + _log_choose(n - k, m - j) - _log_choose(n, m)).exp().numpy()


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    """Return the logarithm of n choose k, -inf where k is not in [0, n]."""
    possible = (k >= 0) & (k <= n)
    k = torch.where(possible, k, 0)
    logs = [torch.lgamma((x + 1).double()) for x in (n.clamp(min=0), k, (n - k).clamp(min=0))]
    return torch.where(possible, logs[0] - logs[1] - logs[2], -torch.inf)
