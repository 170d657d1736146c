"""How many tokens go to servers at once: grows while that pays, then holds."""

import pytest

from specfleet.capture.concurrency import Concurrency

SIZE = 64


def play(concurrency: Concurrency, server_tokens: int, rounds: int) -> None:
    """A server that finishes up to `server_tokens` of work in each second, first come first served; always enough prompts."""
    queue: list[int] = []
    now = 0.0
    for _ in range(rounds):
        while concurrency.admit(SIZE, now):
            queue.append(SIZE)
        now += 1.0
        done = 0
        while queue and done + SIZE <= server_tokens:
            done += queue.pop(0)
            concurrency.finish(SIZE)


@pytest.mark.parametrize(("server", "holds"), [(256, 256), (1024, 1024), (4096, 4096)])
def test_the_window_becomes_what_the_server_can_use(server: int, holds: int) -> None:
    concurrency = Concurrency(128, 1 << 20)
    play(concurrency, server, rounds=400)
    assert concurrency.limit_tokens == holds
    play(concurrency, server, rounds=400)
    assert concurrency.limit_tokens == holds


def test_the_window_never_exceeds_what_the_servers_hold() -> None:
    concurrency = Concurrency(128, 600)
    play(concurrency, 1 << 20, rounds=400)
    assert concurrency.limit_tokens == 600
    assert Concurrency(4096, 600).limit_tokens == 600


def test_a_window_that_is_never_full_says_nothing() -> None:
    concurrency = Concurrency(128, 1 << 20)
    for second in range(100):
        assert concurrency.admit(SIZE, second)
        concurrency.finish(SIZE)
    assert concurrency.limit_tokens == 128


def test_one_prompt_larger_than_the_window_passes_alone() -> None:
    concurrency = Concurrency(128, 128)
    assert concurrency.admit(500, 0.0)
    assert not concurrency.admit(1, 0.0)
    concurrency.finish(500)
    assert concurrency.tokens == 0
    assert concurrency.admit(1, 1.0)
