"""Parts of the execution of batches: the slots that jobs share, and on whose behalf lines run."""

from __future__ import annotations

from typing import Any

import gevent
import pytest

from gateway.api.batches.job import LineSlot, LineSlots
from gateway.auth.caller import Caller
from gateway.auth.gate import Forbidden, Gate, RequestHead, Scopes
from gateway.auth.keys import Keyring, KeyWatch
from gateway.http.body_memory import BodyMemory
from gateway.http.internal_call import (
    InternalOrigin,
    call_internally,
    internal_environ,
    internal_origin,
)
from protocol.config.gateway import GatewayConfig
from protocol.shared.api_keys import KeyEntry, Scope, digest_of


def test_jobs_take_turns_with_the_slots() -> None:
    slots = LineSlots(lambda: 2)
    order: list[str] = []

    def take(name: str) -> None:
        assert slots.acquire(60)
        order.append(name)

    assert slots.acquire(60)
    assert slots.acquire(60)
    waiting = [gevent.spawn(take, name) for name in "abab"]
    gevent.sleep(0)
    assert order == []
    for _ in waiting:
        slots.release()
        gevent.sleep(0)
    gevent.joinall(waiting, raise_error=True)
    assert order == list("abab")


def test_a_job_that_stops_waiting_loses_no_slot() -> None:
    slots = LineSlots(lambda: 1)
    assert slots.acquire(60)
    assert not slots.acquire(0.001)
    slots.release()
    assert slots.acquire(60)


def test_a_killed_job_loses_no_slot() -> None:
    slots = LineSlots(lambda: 1)
    assert slots.acquire(60)
    waiting = gevent.spawn(slots.acquire, 60)
    gevent.sleep(0)
    waiting.kill()
    admitted = gevent.spawn(slots.acquire, 60)
    gevent.sleep(0)
    slots.release()
    admitted.kill()
    if admitted.value is True:  # it had the slot already
        slots.release()
    assert slots.acquire(60)


def test_the_slot_and_the_memory_of_a_line_are_free_while_the_line_pauses() -> None:
    slots, memory = LineSlots(lambda: 1), BodyMemory(20)
    slot = LineSlot(slots, memory, "key a", 8)
    assert slot.acquire(60)
    assert memory.num_held == 8
    slot.release()
    slot.release()
    assert memory.num_held == 0
    assert slots.acquire(60)
    again = gevent.spawn(slot.acquire, 60)
    gevent.sleep(0)
    assert not again.dead
    slots.release()
    again.join(60)
    assert not slots.acquire(0.001), "held again"
    slot.release()


def test_a_line_without_memory_takes_no_slot() -> None:
    slots, memory = LineSlots(lambda: 2), BodyMemory(20)
    first, second = (LineSlot(slots, memory, "key a", 8) for _ in range(2))
    assert first.acquire(0)
    assert not second.acquire(0)
    assert slots.acquire(0), "the second slot is free"
    slots.release()
    first.release()
    assert second.acquire(0)


def test_the_number_of_slots_may_change_and_is_never_zero() -> None:
    limit = 0
    slots = LineSlots(lambda: limit)
    assert slots.acquire(60)
    assert not slots.acquire(0.001)
    limit = 3
    assert slots.acquire(60)


def keyring(*scopes: Scope) -> Keyring:
    entry = KeyEntry(digest=digest_of("secret"), scopes=list(scopes), concurrency=3)
    return Keyring({"alice": entry})


def test_a_caller_is_found_by_the_name_of_its_key() -> None:
    caller = keyring("inference").named("alice")
    assert caller == keyring("inference").find("secret")
    assert keyring("inference").named("bob") is None


def test_without_keys_a_line_runs_for_its_owner_without_admin_rights() -> None:
    caller = KeyWatch(GatewayConfig()).caller_named("", "owner")
    assert (caller.owner, "admin" in caller.scopes) == ("owner", False)


def test_with_keys_a_batch_of_no_key_is_nobodys() -> None:
    watch = KeyWatch(GatewayConfig(api_key=["secret"]))
    assert watch.caller_named("", "owner") is None
    assert watch.caller_named("api-key", "key:api-key").owner == "key:api-key"


class Rule:
    rule = "/v1/completions"
    methods: set[str] | None = {"POST"}


class Declared:
    rule, method, scope = "/v1/completions", "post", "inference"


def admitted(*scopes: Scope) -> Caller:
    declared: Any = Declared()
    gate = Gate(GatewayConfig(), Scopes([Rule()], [declared]), lambda: None)
    head = RequestHead("POST", Rule.rule, "HTTP/1.1", Rule.rule, "127.0.0.1", {})
    caller = keyring(*scopes).named("alice")
    assert caller is not None
    return gate.admit_as(head, caller)


def test_a_key_that_has_lost_its_scope_runs_no_more_lines() -> None:
    assert admitted("inference").name == "alice"
    with pytest.raises(Forbidden, match="lacks the scope 'inference'"):
        admitted("metrics")


def test_an_internal_request_has_its_origin_and_a_client_cannot_forge_one() -> None:
    origin = InternalOrigin(Caller("", frozenset(), "o"), is_background=True)
    seen: list[Any] = []

    def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        seen.append(internal_origin(environ))
        data = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        start_response("200 OK", [("X-Request-Id", "7")])
        return [b"got ", data]

    answer = call_internally(application, internal_environ("/v1/x", b"body", origin))
    assert (answer.status, answer.headers, answer.body) == (200, {"x-request-id": "7"}, b"got body")
    assert seen == [origin]
    assert internal_origin({"HTTP_TIDEGATE_ORIGIN": "o", "HTTP_TIDEGATE.ORIGIN": "o"}) is None
