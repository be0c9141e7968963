"""Batches that are made ahead of a GPU, in threads of their own."""

from __future__ import annotations

import threading

import pytest
import torch

from kge_torchrec.data.batches import BATCH_WORKERS, prefetched


@pytest.fixture
def threads():
    """Sets the number, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def in_a_new_thread(function):
    """Return what a function returns in a new thread."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("cores, workers, share", [(1, 1, 1), (6, 6, 1), (16, BATCH_WORKERS, 2)])
def test_workers_share_the_cpus_and_other_threads_keep_theirs(threads, cores, workers, share):
    threads(cores)
    together, most = threading.Barrier(workers), 3 * workers

    def build(number: int) -> tuple[int, int]:
        together.wait(timeout=10)  # only as many workers as there should be come through
        return number, torch.get_num_threads(), threading.get_ident()

    results = list(prefetched(build, range(most)))
    assert [number for number, _, _ in results] == list(range(most))
    assert {number for _, number, _ in results} == {share}
    assert len({ident for _, _, ident in results}) == workers
    assert torch.get_num_threads() == in_a_new_thread(torch.get_num_threads) == cores


def test_number_of_prebuilt_batches_is_bounded(threads):
    threads(2)
    made = []
    batches = prefetched(lambda number: made.append(number) or number, range(100))
    assert next(batches) == 0
    batches.close()
    assert len(made) <= 4
    assert torch.get_num_threads() == 2


def test_error_is_raised_at_its_batch(threads):
    threads(2)
    batches = prefetched(lambda number: 1 / (number - 3), range(10))
    assert [next(batches) for _ in range(3)] == [-1 / 3, -1 / 2, -1]
    with pytest.raises(ZeroDivisionError):
        next(batches)
