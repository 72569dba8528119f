"""The memory for large bodies is bounded, shared between owners, and never stuck."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import gevent
import pytest

from gateway.http.body_memory import NUM_SHARES, BodyMemory, BodyReservation
from protocol.wire.errors import Overloaded

STEP = 10


def held(memory: BodyMemory, owner: str, size: int, num_bytes: int) -> BodyReservation:
    """Return a body of which `num_bytes` have arrived."""
    body = memory.reservation(owner, size)
    body.grow(num_bytes, 0)
    return body


def test_a_body_holds_what_has_arrived_and_not_what_it_announces() -> None:
    memory = BodyMemory(400)
    for number in range(10):
        held(memory, f"owner {number}", 100, 3)
    assert memory.num_held == 30
    assert held(memory, "another", 100, 100).num_held == 100


def test_an_owner_gets_its_share_and_leaves_the_rest_to_others() -> None:
    memory = BodyMemory(400)
    greedy = [held(memory, "greedy", 100, 100) for _ in range(2)]
    for body in greedy:
        body.keep()
    with pytest.raises(Overloaded):
        held(memory, "greedy", 100, 1)
    assert held(memory, "modest", 100, 100).num_held == 100
    greedy[0].close()
    assert held(memory, "greedy", 100, 100).num_held == 100


def test_a_body_without_memory_waits_and_others_of_its_owner_do_not_pass() -> None:
    memory = BodyMemory(400)
    first = held(memory, "a", 200, 150)
    order: list[str] = []

    def grow(name: str, owner: str, size: int) -> None:
        memory.reservation(owner, size).grow(size, 60)
        order.append(name)

    waiting = [gevent.spawn(grow, "large", "a", 160), gevent.spawn(grow, "other", "b", 160)]
    gevent.sleep(0)
    gevent.sleep(0)
    assert order == ["other"], "it has a share of its own"
    first.close()
    gevent.joinall(waiting, raise_error=True)
    assert order == ["other", "large"]


def test_a_body_that_is_not_given_memory_is_refused_and_leaves_no_trace() -> None:
    memory = BodyMemory(20)
    body = held(memory, "a", 10, 10)
    with pytest.raises(Overloaded):
        held(memory, "a", 10, 1)
    body.close()
    body.close()
    assert memory.num_held == 0
    assert held(memory, "a", 10, 10).num_held == 10


def test_a_body_whose_request_is_killed_while_it_waits_leaves_no_trace() -> None:
    memory = BodyMemory(20)
    body = held(memory, "a", 10, 10)
    second = memory.reservation("a", 10)
    waiting = gevent.spawn(second.grow, 10, 60)
    gevent.sleep(0)
    waiting.kill()
    body.close()
    second.close()
    assert memory.num_held == 0


@pytest.mark.parametrize("seed", range(40))
def test_bodies_that_arrive_in_any_order_never_wait_for_each_other_for_ever(seed: int) -> None:
    """Bodies of several owners grow in random steps, each as soon as it may. All must arrive, and
    the memory must never be exceeded."""
    rng = Random(seed)
    memory = BodyMemory(8 * STEP * NUM_SHARES)
    most = 0

    def arrive(owner: str, size: int, steps: Callable[[], int]) -> None:
        nonlocal most
        body = memory.reservation(owner, size)
        while body.num_missing:
            body.grow(steps(), 60)
            most = max(most, memory.num_held)
            for _ in range(rng.randrange(4)):
                gevent.sleep(0)
        body.keep()
        gevent.sleep(0)
        body.close()

    bodies = [
        gevent.spawn(
            arrive, f"owner {rng.randrange(4)}", rng.randint(1, 8 * STEP), lambda: rng.randint(1, 9)
        )
        for _ in range(40)
    ]
    gevent.joinall(bodies, timeout=60, raise_error=True)
    assert all(body.ready() for body in bodies)
    assert 4 * STEP < most <= 8 * STEP * NUM_SHARES
    assert memory.num_held == 0
