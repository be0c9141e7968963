"""Write the purchases of a made-up shop: 3,000 users, 2,000 items, 200 of them new.

    python shop.py DIRECTORY

A user buys items of the topics that they like, and popular items more often. Purchases of the last
days are in test.txt: there, and there alone, the new items are bought as often as others. An item
has two features: its topic, and its maker, who serves one topic.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

USERS, ITEMS, NEW, TOPICS, MAKERS = 3000, 2000, 200, 20, 100


def main(directory: Path) -> None:
    """Write train.txt, valid.txt, test.txt, types.tsv and features.tsv."""
    random = np.random.default_rng(0)
    topic = random.integers(0, TOPICS, ITEMS)
    popularity = random.permutation((np.arange(ITEMS) + 5.0) ** -0.9)
    popularity[-NEW:] = np.median(popularity)
    taste = random.dirichlet(np.full(TOPICS, 0.15), USERS)
    old, late = [], []
    for user in range(USERS):
        chances = popularity * (0.01 + taste[user, topic])
        size = random.integers(12, 40)
        bought = random.choice(ITEMS, size, replace=False, p=chances / chances.sum())
        late += [(user, item) for item in bought[: size // 5]]
        old += [(user, item) for item in bought[size // 5 :] if item < ITEMS - NEW]
    random.shuffle(old)
    for name, part in ("train", old[2000:]), ("valid", old[:2000]), ("test", late):
        lines = [f"user:{user}\tbuys\titem:{item}\n" for user, item in part]
        (directory / f"{name}.txt").write_text("".join(lines))
    types = [f"user:{n}\tuser\n" for n in range(USERS)] + [
        f"item:{n}\titem\n" for n in range(ITEMS)
    ]
    (directory / "types.tsv").write_text("".join(types))
    makers = topic * (MAKERS // TOPICS) + np.arange(ITEMS) % (MAKERS // TOPICS)
    features = [
        f"item:{item}\ttopic:{one}\nitem:{item}\tmaker:{maker}\n"
        for item, (one, maker) in enumerate(zip(topic, makers, strict=True))
    ]
    (directory / "features.tsv").write_text("".join(features))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    main(target)
