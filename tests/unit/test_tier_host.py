"""Places of host memory: what is held stays, what was used least goes, none is lost."""

from __future__ import annotations

import random

import pytest

from worker.kv.tiers.host import HostTier


def filled(tier: HostTier, *contents: bytes) -> list[int]:
    """The place of each."""
    places = []
    for content in contents:
        place = tier.reserve()
        assert place is not None
        tier.publish(content, place)
        places.append(place)
    tier.check()
    return places


def test_what_was_published_is_found_where_it_is() -> None:
    tier = HostTier(2)
    a, b = filled(tier, b"a", b"b")
    assert {a, b} == {0, 1}
    assert (tier.hold(b"a"), tier.hold(b"b"), tier.hold(b"c")) == (a, b, None)


def test_a_place_that_is_being_filled_is_not_found_and_not_given_away() -> None:
    tier = HostTier(1)
    place = tier.reserve()
    assert place is not None
    assert (tier.reserve(), len(tier)) == (None, 0)
    tier.give_back(place)
    assert tier.reserve() == place


def test_the_least_recently_used_makes_way_and_that_is_told() -> None:
    tier = HostTier(2)
    a, b = filled(tier, b"a", b"b")
    tier.touch(b"a")
    assert filled(tier, b"c") == [b]
    assert tier.drain_changes() == ([b"a", b"c"], [b"b"])
    assert tier.hold(b"a") == a
    assert tier.drain_changes() == ([], [])


def test_what_is_held_does_not_make_way_until_its_last_holder_is_gone() -> None:
    tier = HostTier(1)
    (place,) = filled(tier, b"a")
    tier.hold(b"a")
    tier.hold(b"a")
    tier.release(b"a")
    assert tier.reserve() is None
    tier.release(b"a")
    assert tier.reserve() == place
    assert b"a" not in tier


def test_the_same_content_has_one_place() -> None:
    tier = HostTier(2)
    filled(tier, b"a", b"a")
    assert len(tier) == 1
    tier.hold(b"a")
    assert tier.reserve() is not None


def test_places_that_were_never_used_are_taken_last() -> None:
    tier = HostTier(100)
    place = tier.reserve()
    assert place is not None
    tier.give_back(place)
    assert tier.reserve() == place


def test_a_tier_without_places_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        HostTier(0)


@pytest.mark.parametrize("seed", range(5))
def test_under_a_storm_places_are_free_or_filled_or_found(seed: int) -> None:
    rng, tier = random.Random(seed), HostTier(6)
    filling: list[int] = []
    held: list[tuple[bytes, int]] = []
    for _ in range(2000):
        content = bytes([rng.randrange(20)])
        match rng.randrange(6):
            case 0 | 1 if (place := tier.reserve()) is not None:
                filling.append(place)
            case 2 if filling:
                tier.publish(content, filling.pop(rng.randrange(len(filling))))
            case 3 if filling:
                tier.give_back(filling.pop())
            case 4 if (place := tier.hold(content)) is not None:
                held.append((content, place))
            case 5 if held:
                tier.release(held.pop(rng.randrange(len(held)))[0])
        tier.check()
        assert all(tier.hold(content) == place for content, place in held)
        for content, _ in held:
            tier.release(content)
