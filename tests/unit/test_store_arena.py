"""The allocator behind registered memory."""

import random
import threading

import pytest

from specfleet.store.arena import ALIGNMENT, Arena


def test_blocks_never_overlap_and_everything_comes_back() -> None:
    arena = Arena(1 << 30, 64 * ALIGNMENT)
    chooser = random.Random(0)
    held: dict[int, int] = {}
    for _ in range(5000):
        size = chooser.randrange(1, 12 * ALIGNMENT)
        address = arena.try_acquire(size)
        if address is not None:
            assert address % ALIGNMENT == 0
            assert arena.contains(address, size)
            for other, length in held.items():
                assert address + size <= other or other + length <= address
            held[address] = size
        if address is None or chooser.random() < 0.3:
            victim = chooser.choice(list(held))
            del held[victim]
            chooser.choice([arena.release, arena.release_later])(victim)
    for address in held:
        arena.release(address)
    assert arena.in_use() == 0
    assert arena.try_acquire(64 * ALIGNMENT) == 1 << 30  # merged into one


def test_acquire_waits_for_a_release() -> None:
    arena = Arena(0, 2 * ALIGNMENT)
    first = arena.acquire(2 * ALIGNMENT, 1)
    got = []
    waiter = threading.Thread(target=lambda: got.append(arena.acquire(ALIGNMENT, 30)))
    waiter.start()
    arena.release(first)
    waiter.join(30)
    assert got == [0]


def test_what_cannot_fit_fails_at_once_and_what_stays_busy_in_time() -> None:
    arena = Arena(0, ALIGNMENT)
    with pytest.raises(ValueError, match="do not fit"):
        arena.acquire(ALIGNMENT + 1, 60)
    arena.acquire(1, 1)
    with pytest.raises(TimeoutError):
        arena.acquire(1, 0.01)
