"""The choice of a replica: prefixes, load, sessions, and what is forgotten."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.routing import (
    MAX_HOLDERS,
    RUNNING_TOKENS,
    SCAN_LIMIT,
    PrefixHash,
    PrefixRouter,
    ReplicaLoad,
    prefix_hashes,
)
from protocol.engine.stats import EngineLoad
from protocol.wire.arrays import Int32

BLOCK = 16


def hashes(tokens: list[int], namespace: str = "") -> list[PrefixHash]:
    return prefix_hashes(Int32.of(tokens), namespace, BLOCK)


def router(num_replicas: int = 2, **options: int) -> PrefixRouter:
    made = PrefixRouter(**options)
    for number in range(num_replicas):
        made.set_usable(made.add(f"replica-{number}"), is_usable=True)
    return made


def send(made: PrefixRouter, tokens: list[int], namespace: str = "", session: str = "") -> int:
    """Route a prompt, and let the replica accept it and finish it. Return the replica."""
    found = hashes(tokens, namespace)
    decision = made.choose(found, session=session)
    assert decision is not None
    made.on_sent(found, decision.replica, len(tokens), prompt_tokens=len(tokens), session=session)
    made.loads[decision.replica].on_answered(len(tokens), is_accepted=True)
    made.loads[decision.replica].on_report(EngineLoad(0, 0, 0))
    return decision.replica


# ---- hashes


def test_boundaries_are_four_per_doubling() -> None:
    ends = [end // BLOCK for end, _ in hashes(list(range(1000)))]
    assert ends == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56]


def test_a_prompt_shorter_than_a_block_has_no_hash() -> None:
    assert hashes([1] * (BLOCK - 1)) == []


@given(st.lists(st.integers(0, 1), max_size=80), st.lists(st.integers(0, 1), max_size=80))
def test_two_prompts_share_the_hashes_of_their_common_blocks(a: list[int], b: list[int]) -> None:
    common = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), 99)
    for first, second in zip(hashes(a), hashes(b), strict=False):
        assert (first == second) == (first.num_tokens <= common)


def test_namespaces_share_no_hash() -> None:
    assert hashes([1] * BLOCK, "a") != hashes([1] * BLOCK, "b")


# ---- the choice


def test_a_prompt_goes_to_the_replica_that_has_its_prefix() -> None:
    made = router(8)
    first = send(made, [1] * 100)
    assert {send(made, [1] * 100 + [9] * n) for n in range(20)} == {first}
    assert made.choose(hashes([1] * 64 + [2] * 64)) == (first, 64, "prefix")


def test_prompts_without_a_common_prefix_are_spread() -> None:
    made = router(4)
    counts = Counter(send(made, [group] * 50) for group in range(200))
    assert len(counts) == 4
    assert min(counts.values()) > 25


def test_two_routers_that_share_nothing_choose_the_same_replica() -> None:
    one, other = router(6), router(6)
    assert all(send(one, [g] * 50) == send(other, [g] * 50) for g in range(30))


def test_load_outweighs_a_prefix() -> None:
    made = router()
    first = send(made, [1] * 64)
    made.loads[first].on_report(EngineLoad(0, 0, 128 - 1))
    assert made.choose(hashes([1] * 64)) == (first, 64, "prefix")
    made.loads[first].on_report(EngineLoad(0, 0, 128 + 1))
    assert made.choose(hashes([1] * 64)) == (1 - first, 0, "load")


def test_an_unusable_replica_is_not_chosen() -> None:
    made = router()
    first = send(made, [1] * 64)
    made.set_usable(first, is_usable=False)
    assert made.choose(hashes([1] * 64)) == (1 - first, 0, "load")
    made.set_usable(1 - first, is_usable=False)
    assert made.choose(hashes([1] * 64)) is None
    made.set_usable(first, is_usable=True)
    assert made.choose(hashes([1] * 64)) == (first, 64, "prefix")


def test_an_excluded_replica_is_not_chosen() -> None:
    made = router()
    first = send(made, [1] * 64, session="s")
    decision = made.choose(hashes([1] * 64), session="s", exclude={first})
    assert decision == (1 - first, 0, "load")
    assert made.choose(hashes([1] * 64), exclude={0, 1}) is None


def test_a_restarted_replica_has_no_prefixes() -> None:
    made = router()
    first = send(made, [1] * 64)
    made.remove(first)
    again = made.add(f"replica-{first}")
    made.set_usable(again, is_usable=True)
    decision = made.choose(hashes([1] * 64))
    assert decision is not None
    assert decision.num_cached == 0


def test_a_session_stays_with_its_replica_although_another_has_the_prefix() -> None:
    made = router()
    own = send(made, [1] * 64, session="s")
    made.loads[own].on_report(EngineLoad(0, 0, 1000))
    other = send(made, [2] * 64)
    made.loads[own].on_report(EngineLoad(0, 0, 1000))
    assert other != own
    assert made.choose(hashes([2] * 64), session="s") == (own, 0, "session")
    made.set_usable(own, is_usable=False)
    assert send(made, [1] * 64, session="s") == other
    made.set_usable(own, is_usable=True)
    decision = made.choose(hashes([1] * 64), session="s")
    assert decision == (other, 64, "session")


# ---- load


def test_a_request_counts_once_between_sending_and_the_next_report() -> None:
    load = ReplicaLoad()
    load.on_sent(100)
    assert load.tokens == 100 + RUNNING_TOKENS
    load.on_report(EngineLoad(0, 0, 0))  # sent before the replica received the request
    assert load.tokens == 100 + RUNNING_TOKENS
    load.on_answered(100, is_accepted=True)
    assert load.tokens == 100 + RUNNING_TOKENS
    load.on_report(EngineLoad(1, 0, 40))
    assert load.tokens == 40 + RUNNING_TOKENS


def test_a_refused_request_does_not_count() -> None:
    load = ReplicaLoad()
    load.on_sent(100)
    load.on_answered(100, is_accepted=False)
    assert load.tokens == 0


# ---- bounds


def known(made: PrefixRouter, token: int) -> int:
    """Return how many tokens of a prompt of equal tokens some replica probably holds."""
    decision = made.choose(hashes([token] * 4 * BLOCK))
    assert decision is not None
    return decision.num_cached


def test_the_least_recently_used_prefixes_are_forgotten() -> None:
    made = router(1, max_entries=8)
    for token in (1, 2, 1, 3):
        send(made, [token] * 4 * BLOCK)
    assert len(made) == 8
    assert [known(made, token) for token in (1, 2, 3)] == [64, 0, 64]


def test_what_a_cache_cannot_hold_is_forgotten_from_its_end() -> None:
    made = PrefixRouter()
    made.set_usable(made.add("small", cache_tokens=10 * BLOCK), is_usable=True)
    for token in (1, 2, 1, 3):
        send(made, [token] * 4 * BLOCK)
    assert [known(made, token) for token in (1, 2, 3)] == [64, 32, 64]


def test_the_ends_of_prompts_take_space_as_well() -> None:
    made = PrefixRouter()
    made.set_usable(made.add("small", cache_tokens=10 * BLOCK), is_usable=True)
    send(made, [1] * 4 * BLOCK)
    for token in range(2, 9):
        send(made, [token] * (BLOCK - 1))  # no full block
    assert known(made, 1) == 48


def test_a_removed_replica_leaves_nothing_behind() -> None:
    made = router(2)
    for token in range(20):
        send(made, [token] * 64)
    made.remove(0)
    made.remove(1)
    assert len(made) == 0


def test_a_prefix_remembers_only_its_latest_replicas() -> None:
    made, found = router(2 * MAX_HOLDERS), hashes([1] * BLOCK)
    for replica in range(2 * MAX_HOLDERS):
        made.on_sent(found, replica, 0)
    for replica in range(2 * MAX_HOLDERS):
        others = set(range(2 * MAX_HOLDERS)) - {replica}
        decision = made.choose(found, exclude=others)
        assert decision is not None
        assert (decision.num_cached > 0) == (replica >= MAX_HOLDERS)


def test_among_many_replicas_the_prefix_is_found_and_load_is_balanced() -> None:
    made = router(10 * SCAN_LIMIT)
    owner = send(made, [1] * 64)
    assert all(send(made, [1] * 64 + [n] * 64) == owner for n in range(50))
    made = router(10 * SCAN_LIMIT)
    for number in range(20 * SCAN_LIMIT):
        found = hashes([number] * 64)
        decision = made.choose(found)
        assert decision is not None
        made.on_sent(found, decision.replica, 64)
    assert max(load.num_sent for load in made.loads.values()) <= 4  # the mean is 2
