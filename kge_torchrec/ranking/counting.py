"""How many scores of a block lie below a query's true score, and how many equal it.

Comparisons with NaN are false, so a NaN is counted neither as less nor as equal: whoever takes
the rest for better candidates lets a NaN count against the model.

Shapes: B queries, n candidates.
"""

from __future__ import annotations

import numba
from torch import Tensor


def count_block(scores: Tensor, true: Tensor, less: Tensor, equal: Tensor) -> None:
    """Adds the counts of one block to the running counts, in place.

    scores: (B, n) float32, contiguous; true: (B,) float32; less, equal: (B,) int64.
    """
    if scores.device.type == "cpu":
        _count(scores.numpy(), true.numpy(), less.numpy(), equal.numpy())
    else:
        less += (scores < true[:, None]).sum(1)
        equal += (scores == true[:, None]).sum(1)


# One thread on purpose: a pass over scores still in cache takes a few percent of the matrix
# product that made them, while a second thread pool beside torch's slows both down.
@numba.njit(nogil=True, cache=True)
def _count(scores, true, less, equal):
    for i in range(scores.shape[0]):
        threshold = true[i]
        below = 0
        same = 0
        for j in range(scores.shape[1]):
            below += scores[i, j] < threshold
            same += scores[i, j] == threshold
        less[i] += below
        equal[i] += same
