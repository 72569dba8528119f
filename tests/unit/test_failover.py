"""One request over several replicas: its state table, its usage, and the list of engines."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from gateway.fleet.engine_list import EngineList
from gateway.fleet.failover import (
    FAILOVER_MACHINE,
    Failover,
    FailoverAction,
    FailoverEvent,
    FailoverState,
    usage_after_moves,
)
from protocol.engine.account_limits import LIMITS, has_part, limit_part
from protocol.engine.messages import Account, Times, Usage

Step = tuple[FailoverState, FailoverEvent]
LIVE = [state for state in FailoverState if state is not FailoverState.ENDED]


def test_every_live_state_can_be_aborted_and_given_up() -> None:
    for state, event in itertools.product(LIVE, (FailoverEvent.ABORT, FailoverEvent.GIVEN_UP)):
        assert FAILOVER_MACHINE.rows[state, event] is FailoverState.ENDED


def test_an_ended_request_ignores_all_events() -> None:
    request = Failover()
    request.on(FailoverEvent.FINISHED)
    for event in FailoverEvent:
        assert request.on(event) is FailoverAction.NONE
        assert request.state is FailoverState.ENDED


def test_a_client_gets_one_reply_and_one_end_whatever_happens() -> None:
    """An action PLACE succeeds, or is followed by UNPLACED."""
    actions = FAILOVER_MACHINE.actions
    found: list[tuple[FailoverState, list[Step], list[FailoverEvent]]]
    found = [(FailoverState.SENT, [], [])]
    for _ in range(7):
        longer = []
        for state, events, emitted in found:
            for (before, event), after in FAILOVER_MACHINE.rows.items():
                action = actions[before, event]
                is_after_place = bool(events) and actions[events[-1]] is FailoverAction.PLACE
                if before is not state or (event is FailoverEvent.UNPLACED and not is_after_place):
                    continue
                more = [event] if action is FailoverAction.EMIT else []
                longer.append((after, [*events, (before, event)], [*emitted, *more]))
        found = longer
        for state, events, emitted in found:
            assert emitted.count(FailoverEvent.ACCEPTED) <= 1, events
            ends = [e for e in emitted if e not in (FailoverEvent.ACCEPTED, FailoverEvent.TOKENS)]
            was_aborted = bool(events) and events[-1][1] is FailoverEvent.ABORT
            is_ended = state is FailoverState.ENDED
            assert len(ends) == (1 if is_ended and not was_aborted else 0), events
            if FailoverEvent.TOKENS in emitted:
                assert emitted[0] is FailoverEvent.ACCEPTED


def test_the_times_of_a_moved_request_add_up_to_its_age() -> None:
    first = Usage(
        prompt_tokens=9, generated_tokens=1, cached_tokens=4, times=Times(queued_s=1, prefill_s=2)
    )
    last = Usage(
        prompt_tokens=9, generated_tokens=30, cached_tokens=9, times=Times(prefill_s=1, decode_s=5)
    )
    merged = usage_after_moves(last, first, elapsed_s=20)
    assert (merged.generated_tokens, merged.cached_tokens) == (30, 4)
    assert merged.times == Times(queued_s=1, prefill_s=2, decode_s=17)


def test_a_move_before_the_first_token_counts_as_time_in_the_queue() -> None:
    last = Usage(prompt_tokens=9, generated_tokens=1, times=Times(queued_s=1, prefill_s=2))
    assert usage_after_moves(last, None, elapsed_s=10).times == Times(queued_s=8, prefill_s=2)


# ---- limits of accounts


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_the_parts_of_a_limit_add_up_to_it(parts: int) -> None:
    for limit in range(20):
        accounts = [Account(name="a", part=part, parts=parts) for part in range(parts)]
        assert sum(limit_part(limit, account) for account in accounts) == limit


@pytest.mark.parametrize("name", LIMITS)
def test_an_engine_whose_part_is_nothing_serves_no_request_of_the_account(name: str) -> None:
    account = Account(name="a", **{name: 1})
    assert [has_part(account, part, 2) for part in range(2)] == [True, False]
    assert has_part(Account(name="a", max_len=1), 1, 2)


# ---- the list of engines


def test_a_changed_file_changes_the_list(tmp_path: Path) -> None:
    file = tmp_path / "engines"
    engines = EngineList(["ipc:///a"], str(file))
    assert engines.poll() == ["ipc:///a"]  # there is no file yet
    file.write_text("ipc:///b  # the second one\n\n# nothing\nipc:///a\n")
    assert engines.poll() == ["ipc:///a", "ipc:///b"]
    other = tmp_path / "other"
    other.write_text("ipc:///c\n")
    os.replace(other, file)
    assert engines.poll() == ["ipc:///a", "ipc:///c"]


def test_a_bad_file_leaves_the_list_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "engines"
    file.write_text("ipc:///b\n")
    engines = EngineList([], str(file))
    assert engines.poll() == ["ipc:///b"]
    file.write_text("tcp://far:1\n")  # needs a cluster key
    assert engines.poll() == engines.poll() == ["ipc:///b"]
    assert len(caplog.records) == 1
    file.unlink()
    assert engines.poll() == ["ipc:///b"]


def test_a_bad_address_in_the_options_is_refused() -> None:
    with pytest.raises(ValueError, match="cluster"):
        EngineList(["tcp://far:1"])
