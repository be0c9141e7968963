"""Rows of ids on disk: dropping repeats, and splitting at random, in bounded memory.

The results are those of `sort.drop_repeats` and `split.divide`.

Rows have the ids of a triple, and the bits of its weight where the split has weights.

Shapes: T triples, W columns (3 or 4), P partitions, B places of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

from kge_torchrec.data import HEAD, RELATION, SPLITS, TAIL
from kge_torchrec.data.large.work import NpyFile, WorkFolder, npy_writer
from kge_torchrec.data.readers.files import WHOLE
from kge_torchrec.data.sort import CHUNK, repeats
from kge_torchrec.data.split import held_out
from kge_torchrec.data.store import weights_name
from kge_torchrec.errors import DataError
from kge_torchrec.kernels.jit import kernel

MOST_PARTITIONS = 256  # open files
BOUND = np.uint32(0xFFFFFFFF)  # the place of a triple that must be in train
Write = Callable[[np.ndarray], None]


@contextmanager
def _written(path: Path, count: int, width: int) -> Iterator[Write]:
    """Open the files of a split's triples and weights, to which rows (M, W) are appended.

    ``whole.npy`` is no file of a store, and keeps weights as a column.
    """
    whole = path.stem == WHOLE
    with ExitStack() as stack:
        shape = (count, width if whole else 3)
        parts = [(slice(shape[1]), stack.enter_context(npy_writer(path, shape, np.int32)))]
        if width > shape[1]:
            weights = path.with_name(weights_name(path.stem))
            out = stack.enter_context(npy_writer(weights, (count,), np.float32))
            parts.append((slice(3, width), out))

        def write(rows: np.ndarray) -> None:
            for columns, out in parts:
                np.ascontiguousarray(rows[:, columns]).tofile(out)

        yield write


class _Spread:
    """How rows are spread over P files: by a sum of their ids, in order.

    The sum gives the low bits of the tail, so that a partition's keys are shorter.
    """

    def __init__(self, total: int, most_rows: int):
        self.bits = max(0, -(-total // most_rows) - 1).bit_length()
        self.count = 1 << min(self.bits, MOST_PARTITIONS.bit_length() - 1)
        self.bits = self.count.bit_length() - 1

    def order(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows by partition, and where the rows of each start and the last end."""
        part = (rows[:, HEAD] + rows[:, RELATION] + rows[:, TAIL]) & (self.count - 1)
        order = np.argsort(part.astype(np.uint16), kind="stable")
        ends = np.cumsum(np.bincount(part, minlength=self.count))
        return order, np.concatenate([[0], ends])


def drop_repeats(
    rows: NpyFile, target: Path, sizes: tuple[int, int], most_rows: int, work: WorkFolder
) -> int:
    """Write each triple once, at its first place, with the largest of its weights.

    Args:
        rows: (T, W) the triples.
        target: The file of the distinct triples.
        sizes: Numbers of entities and relations.
        most_rows: Rows in memory.
        work: The folder for partitions.

    Returns:
        The number of repeats.
    """
    spread = _Spread(len(rows), most_rows)
    name = f"repeats {target.stem}"
    with work.bar(name, 2 * len(rows) + spread.count * most_rows, " triples") as bar:
        parts = [work.path / f"part-{place}" for place in range(spread.count)]
        with ExitStack() as stack:
            outs = [stack.enter_context(part.open("wb")) for part in parts]
            for _, chunk in rows.chunks(CHUNK):
                order, bounds = spread.order(chunk)
                chunk = chunk[order]
                for place, out in enumerate(outs):
                    chunk[bounds[place] : bounds[place + 1]].tofile(out)
                bar.update(len(chunk))
        kept = []
        for part in parts:
            kept.append(_kept(part, rows.shape[1], sizes, spread.bits))
            bar.update(most_rows)
        count = sum(int(flags.sum(dtype=np.int64)) for flags in map(np.unpackbits, kept))
        _write_kept(rows, target, (spread, kept, count), parts, bar)
    for part in parts:
        part.unlink()
    return len(rows) - count


def _kept(part: Path, width: int, sizes: tuple[int, int], bits: int) -> np.ndarray:
    """Return which rows of a partition are no repeats, as bits; change the weights of those."""
    rows = np.fromfile(part, np.int32).reshape(-1, width)
    columns = rows[:, HEAD], rows[:, RELATION], rows[:, TAIL] >> bits
    again, first = repeats(columns, (*sizes, (sizes[0] - 1 >> bits) + 1))
    if width > 3:
        own = rows.view(np.float32)[:, 3]
        np.maximum.at(own, first, own[again])
        rows.tofile(part)
    kept = np.ones(len(rows), bool)
    kept[again] = False
    return np.packbits(kept)


def _write_kept(
    rows: NpyFile,
    target: Path,
    kept: tuple[_Spread, list[np.ndarray], int],
    parts: Sequence[Path],
    bar: tqdm,
) -> None:
    (spread, flags, count), width = kept, rows.shape[1]
    done = np.zeros(spread.count, np.int64)
    with ExitStack() as stack:
        write = stack.enter_context(_written(target, count, width))
        own = [stack.enter_context(part.open("rb")) for part in parts if width > 3]
        for _, chunk in rows.chunks(CHUNK):
            order, bounds = spread.order(chunk)
            sizes = np.diff(bounds)
            stay = np.empty(len(chunk), bool)
            stay[order] = np.concatenate(
                [_bits(flags[p], done[p], done[p] + size) for p, size in enumerate(sizes)]
            )
            done += sizes
            if width > 3:  # only the partitions have the largest weights
                pieces = zip(own, sizes * width, strict=True)
                again = [np.fromfile(file, np.int32, size) for file, size in pieces]
                chunk[order] = np.concatenate(again).reshape(-1, width)
            write(chunk[stay])
            bar.update(len(chunk))


def _bits(packed: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return the bits from ``start`` to ``stop`` - 1 as bool."""
    first = start // 8
    bits = np.unpackbits(packed[first : -(-stop // 8)])
    return bits[start - 8 * first : stop - 8 * first].astype(bool)


@kernel
def _draw(random: np.ndarray, first: int, draws: np.ndarray) -> tuple[int, int]:
    """Fill in numpy's draws for the steps first, first - 1, ... of a shuffle, step ``first`` last.

    Returns:
        How many random numbers were used, and how many draws are done.
    """
    used = 0
    for done in range(len(draws)):
        step = np.uint32(first - done)
        mask = step
        for shift in (1, 2, 4, 8, 16):
            mask |= mask >> np.uint32(shift)
        while True:
            if used == len(random):
                return used, done
            value = random[used] & mask
            used += 1
            if value <= step:
                break
        draws[len(draws) - 1 - done] = value
    return used, len(draws)


def _write_draws(path: Path, total: int, seed: int) -> None:
    """Write the draws (T,) uint32 of ``default_rng(seed).permutation(T)``: step i is place i.

    numpy draws for the steps T - 1, ..., 1, by masked rejection of 32 bits (`random_interval`).
    """
    rng = np.random.default_rng(seed)
    random = np.empty(0, np.uint32)
    out = np.lib.format.open_memmap(path, "w+", np.uint32, (total,))
    step = total - 1
    while step > 0:
        if not len(random):
            random = rng.integers(0, 1 << 32, CHUNK, np.uint32)
        draws = np.empty(min(step, CHUNK), np.uint32)
        used, done = _draw(random, step, draws)
        random = random[used:]
        out[step - done + 1 : step + 1] = draws[len(draws) - done :]
        step -= done


@kernel
def _inside_out(
    block: np.ndarray, low: int, first: int, draws: np.ndarray, values: np.ndarray
) -> None:
    """Do the steps of a shuffle that touch the places of a block.

    Args:
        block: (B,) the contents of the places from ``low`` on.
        low: First place of the block.
        first: First step.
        draws: Draws of the steps.
        values: First contents of the places ``first``, ...; those that come from here are set.
    """
    high = low + len(block)
    for number in range(len(draws)):
        step, draw = first + number, int(draws[number])
        if low <= draw < high:
            if step < high:
                block[step - low] = block[draw - low]
            else:
                values[number] = block[draw - low]
            block[draw - low] = step


def write_places(path: Path, total: int, seed: int, block: int) -> None:
    """Write the place (T,) uint32 of each triple in numpy's ``default_rng(seed).permutation(T)``.

    The permutation swaps places i and draw(i) for i = T - 1, ..., 1.  Its inverse makes the same
    swaps for i = 1, ..., T - 1.  Then place i is untouched until step i, and its first content
    comes from place draw(i) <= i.  So the places are done block by block, and the steps behind a
    block take their first contents out of it.

    Args:
        path: The file.
        total: T.
        seed: The seed.
        block: Places in memory.
    """
    draws_path = path.with_name(f"{path.stem}-draws.npy")
    _write_draws(draws_path, total, seed)
    draws = NpyFile(draws_path)
    places = np.lib.format.open_memmap(path, "w+", np.uint32, (total,))
    for low in range(0, total, block):
        own = np.array(places[low : low + block])
        for first in range(low, total, CHUNK):
            steps = draws.read(first, first + CHUNK)
            values = np.array(places[first : first + CHUNK])
            _inside_out(own, low, first, steps, values)
            places[first : first + CHUNK] = values
        places[low : low + block] = own
    places.flush()
    draws_path.unlink()


def split_at_random(
    whole: NpyFile,
    store: Path,
    sizes: tuple[int, int],
    options: tuple[Sequence[float], int],
    block: int,
    work: WorkFolder,
) -> dict[str, int]:
    """Write the splits of triples without splits, as `split.divide` splits them.

    Args:
        whole: (T, W) the distinct triples.
        store: The folder of ``train.npy``, ...
        sizes: Numbers of entities and relations.
        options: Shares of train, valid and test, and the seed.
        block: Places in memory.
        work: The folder for places.

    Returns:
        The number of triples of each split.
    """  # fmt: skip
    total, (ratio, seed) = len(whole), options
    if total >= BOUND:
        raise DataError(
            f"{total:,} triples without splits: at most {BOUND - 1:,} can be split at random on "
            "disk; split the files"
        )
    path = work.path / "places.npy"
    with work.bar("split", 3 * total, " triples") as bar:
        write_places(path, total, seed, block)
        places = np.load(path, mmap_mode="r+") if total else np.empty(0, np.uint32)
        first = [np.full(size, BOUND) for size in sizes]
        for start, rows in whole.chunks(CHUNK):
            own = np.array(places[start : start + len(rows)])
            for column, of in ((HEAD, first[0]), (TAIL, first[0]), (RELATION, first[1])):
                np.minimum.at(of, rows[:, column], own)
            bar.update(len(rows))
        free = _Free(total)
        for start, rows in whole.chunks(CHUNK):
            own = np.array(places[start : start + len(rows)])
            bound = first[0][rows[:, HEAD]] == own
            bound |= first[0][rows[:, TAIL]] == own
            bound |= first[1][rows[:, RELATION]] == own
            free.take(own[bound])
            own[bound] = BOUND
            places[start : start + len(rows)] = own
            bar.update(len(rows))
        del first
        num_valid, num_test = held_out(total, ratio, free.count)
        cuts = [free.cut(places, number) for number in (num_valid, num_valid + num_test)]
        counts = (total - num_valid - num_test, num_valid, num_test)
        _write_splits(whole, store, places, (cuts, counts), bar)
    path.unlink()
    return dict(zip(SPLITS, counts, strict=True))


class _Free:
    """Counts the places of triples that may leave train, in blocks of places.

    Args:
        total: T.
    """

    WIDTH = 1 << 16

    def __init__(self, total: int):
        self._total = total
        blocks = -(-total // self.WIDTH)
        self._counts = np.full(blocks, self.WIDTH, np.int64)
        if blocks:
            self._counts[-1] = total - (blocks - 1) * self.WIDTH

    def take(self, places: np.ndarray) -> None:
        """Mark places as taken; each place only once."""
        self._counts -= np.bincount(places // self.WIDTH, minlength=len(self._counts))

    @property
    def count(self) -> int:
        """Number of free places."""
        return int(self._counts.sum())

    def cut(self, places: np.ndarray, number: int) -> int:
        """Return the place before which there are ``number`` free ones.

        Args:
            places: (T,) place of each triple, ``BOUND`` where it is taken.
            number: At most ``count``.
        """
        before = np.concatenate([[0], np.cumsum(self._counts)])
        block = int(np.searchsorted(before, number, "right")) - 1
        if number >= before[-1]:
            return self._total
        low = block * self.WIDTH
        inside = [
            part[(part >= low) & (part < low + self.WIDTH) & (part != BOUND)]
            for part in (np.array(places[s : s + CHUNK]) for s in range(0, self._total, CHUNK))
        ]
        return int(np.sort(np.concatenate(inside))[number - before[block]])


def _write_splits(
    whole: NpyFile,
    store: Path,
    places: np.ndarray,
    cut: tuple[Sequence[int], Sequence[int]],
    bar: tqdm,
) -> None:
    """Write triples, and their weights, by the places at which valid and test end."""
    cuts, counts = cut
    with ExitStack() as stack:
        writers = [
            stack.enter_context(_written(store / f"{split}.npy", count, whole.shape[1]))
            for split, count in zip(SPLITS, counts, strict=True)
        ]
        for start, rows in whole.chunks(CHUNK):
            own = np.array(places[start : start + len(rows)])
            split_of = np.where(own < cuts[0], 1, np.where(own < cuts[1], 2, 0))
            for split, write in enumerate(writers):
                write(rows[split_of == split])
            bar.update(len(rows))
