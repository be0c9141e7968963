"""Compiled loops of item-kNN (``baselines`` imports this file when it needs them).

Shapes: I items, V users, T pairs of a user and an item, K similar items, M pairs of similar items,
U queries, A answers, X items that do not compete.
"""

from __future__ import annotations

import numpy as np

from kge_torchrec.kernels.jit import kernel


@kernel
def similar_items(
    items_at: np.ndarray, items: np.ndarray, users_at: np.ndarray, users: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k items with the largest cosine to each item: ids, -1 for none, and cosines.

    Of equal cosines, the items with the smaller numbers are taken.

    Args:
        items_at: (V + 1,), where the items of each user start in ``items``.
        items: (T,), the items of the users.
        users_at: (I + 1,), where the users of each item start in ``users``.
        users: (T,), the users of the items.
        k: The number of similar items.
    """
    count = len(users_at) - 1
    ids = np.full((count, k), -1, np.int32)
    cosines = np.zeros((count, k), np.float32)
    shared = np.zeros(count, np.int64)
    touched = np.empty(count, np.int64)
    for item in range(count):
        size = 0
        for at in range(users_at[item], users_at[item + 1]):
            user = users[at]
            for other_at in range(items_at[user], items_at[user + 1]):
                other = items[other_at]
                if shared[other] == 0:
                    touched[size] = other
                    size += 1
                shared[other] += 1
        own = users_at[item + 1] - users_at[item]
        others = np.sort(touched[:size])
        values = np.zeros(size, np.float32)
        for place in range(size):
            other = others[place]
            degree = users_at[other + 1] - users_at[other]
            values[place] = shared[other] / np.sqrt(float(own * degree)) if other != item else -1
            shared[other] = 0
        least = np.float32(0)
        if size > k:
            least = np.partition(values, size - k)[size - k]
        filled = 0
        for is_tie in range(2):  # first what is above the least one, then those equal to it
            for place in range(size):
                value = values[place]
                fits = value == least if is_tie else value > least
                if fits and value > 0 and filled < k:
                    ids[item, filled] = others[place]
                    cosines[item, filled] = value
                    filled += 1
    return ids, cosines


@kernel
def compare_sums(
    user: np.ndarray,
    items_at: np.ndarray,
    items: np.ndarray,
    lists_at: np.ndarray,
    listed: np.ndarray,
    cosines: np.ndarray,
    left_at: np.ndarray,
    left: np.ndarray,
    answers_at: np.ndarray,
    answers: np.ndarray,
    pool: np.ndarray,
    better: np.ndarray,
    equal: np.ndarray,
) -> None:
    """Count the candidates with a larger or an equal sum of cosines than each answer.

    A sum is one of float64, in order of the user's items, rounded to float32.

    Args:
        user: (U,), the user of each query, -1 for one without items.
        items_at: (V + 1,), where the items of each user start in ``items``.
        items: (T,), the items of the users.
        lists_at: (I + 1,), where the items start in ``listed`` that an item is similar to.
        listed: (M,), these items.
        cosines: (M,) float32, their cosines.
        left_at: (U + 1,), where the items start in ``left`` that do not compete.
        left: (X,), these items, -1 for entities that are none.
        answers_at: (U + 1,), where the answers of each query start in ``answers``.
        answers: (A,), the items, -1 for entities that are none.
        pool: (U,), the competing candidates.
        better: (A,), to be filled.
        equal: (A,), to be filled.
    """
    count = len(lists_at) - 1
    sums, is_touched = np.zeros(count, np.float64), np.zeros(count, np.bool_)
    touched = np.empty(count, np.int64)
    competes = np.ones(count, np.bool_)
    for query in range(len(user)):
        size = 0
        if user[query] >= 0:
            for at in range(items_at[user[query]], items_at[user[query] + 1]):
                item = items[at]
                for place in range(lists_at[item], lists_at[item + 1]):
                    other = listed[place]
                    if not is_touched[other]:
                        is_touched[other] = True
                        touched[size] = other
                        size += 1
                    sums[other] += cosines[place]
        for at in range(left_at[query], left_at[query + 1]):
            if left[at] >= 0:
                competes[left[at]] = False
        values, filled = np.empty(size, np.float32), 0
        for place in range(size):
            if competes[touched[place]]:
                values[filled] = np.float32(sums[touched[place]])
                filled += 1
        values = np.sort(values[:filled])
        for at in range(answers_at[query], answers_at[query + 1]):
            own = np.float32(0)
            if answers[at] >= 0:
                own = np.float32(sums[answers[at]])
            not_better = np.searchsorted(values, own, "right")
            better[at] = filled - not_better
            equal[at] = not_better - np.searchsorted(values, own, "left")
            if own == 0:
                equal[at] = pool[query] - filled
        for place in range(size):
            is_touched[touched[place]] = False
            sums[touched[place]] = 0
        for at in range(left_at[query], left_at[query + 1]):
            if left[at] >= 0:
                competes[left[at]] = True
