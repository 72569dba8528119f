"""A client's session: each request ends exactly once, in any order of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from protocol.engine import session as sessions
from protocol.engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortByLabel,
    Aborted,
    Accepted,
    EngineStopped,
    Goodbye,
    Hello,
    Limits,
    Loading,
    Output,
    Outputs,
    Ping,
    Pong,
    Probe,
    Profiled,
    Refused,
    SessionLost,
    ToClient,
    ToEngine,
    Welcome,
)
from protocol.engine.sampling import SamplingParams
from protocol.engine.session import Session
from protocol.engine.stats import EngineStats
from protocol.sdk.client import Client
from protocol.wire import codec, sockets
from protocol.wire.errors import EngineLost, EngineNotReady, ErrorInfo
from tests.support.engines import a_card
from tests.support.waiting import HANG_S

LIMITS = Limits(
    max_len=64, max_slots=2, block_tokens=4, num_blocks=9, token_budget=8, prefix_cache=True
)
OVERLOADED = ErrorInfo(code="overloaded", message="later")
STOPPED = EngineStopped(error=ErrorInfo(code="engine_lost", message="worker died"))


def welcome(epoch: str = "e1", protocol: int = PROTOCOL_VERSION) -> Welcome:
    return Welcome(protocol=protocol, epoch=epoch, model=a_card(), limits=LIMITS)


def connected() -> Session:
    session = Session("test", lease_s=6.0)
    session.on_connected()
    assert isinstance(session.tick(0.0)[0][0], Hello)
    session.receive(welcome(), 0.0)
    return session


def opened(session: Session) -> int:
    return session.generate([1, 2], SamplingParams()).request


def ends(news: Sequence[tuple[int, Any]]) -> dict[int, str]:
    """Return the code of the error that ended each request, by the number of the request."""
    return {
        request: output.error.code
        for request, output in news
        if isinstance(output, Output) and output.error is not None
    }


def test_a_request_before_the_welcome_is_refused() -> None:
    session = Session("test")
    assert not session.is_ready
    with pytest.raises(EngineNotReady):
        opened(session)


def test_the_welcome_brings_the_model_and_the_limits() -> None:
    session = connected()
    assert session.is_ready
    assert (session.model, session.limits) == (a_card(), LIMITS)


def test_an_engine_that_speaks_another_protocol_is_not_used() -> None:
    session = Session("test")
    session.receive(welcome(protocol=99), 0.0)
    assert not session.is_ready
    assert "protocol 99" in session.not_ready_error.message


def test_news_reach_their_requests_in_order_until_the_end() -> None:
    session = connected()
    one, two = opened(session), opened(session)
    first = Output(request=one, tokens=[5])
    last = Output(request=one, tokens=[6], finish="stop")
    other = Output(request=two, tokens=[7])
    assert session.receive(Accepted(request=one), 0.1) == [(one, Accepted(request=one))]
    news = session.receive(Outputs(step=1, outputs=[first, other]), 0.2)
    assert news == [(one, first), (two, other)]
    assert session.receive(Outputs(step=2, outputs=[last]), 0.3) == [(one, last)]
    assert list(session.open) == [two]


def test_nothing_comes_after_an_end_or_an_abort() -> None:
    session = connected()
    one, two, three = opened(session), opened(session), opened(session)
    session.receive(Outputs(step=1, outputs=[Output(request=one, finish="stop")]), 0.1)
    session.receive(Refused(request=two, error=OVERLOADED), 0.1)
    stop = Abort(requests=[three], reason="disconnected")
    assert session.request_abort(three, "disconnected") == stop
    assert session.abort(three, "disconnected") == stop
    late = [Output(request=number, tokens=[5]) for number in (one, two, three)]
    assert session.receive(Outputs(step=2, outputs=late), 0.2) == []
    assert session.receive(Accepted(request=three), 0.2) == []
    assert session.receive(Refused(request=three, error=OVERLOADED), 0.2) == []


def test_a_second_abort_sends_nothing() -> None:
    session = connected()
    request = opened(session)
    assert session.abort(request) is not None
    assert session.abort(request) is None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (STOPPED, "worker died"),
        (SessionLost(why="the connection to the engine broke"), "to the engine broke"),
        (Pong(epoch="e2", stats=EngineStats()), ""),
        (Refused(request=-1, error=OVERLOADED), ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_lost_engine_ends_every_open_request_and_is_sent_hello(
    message: ToClient, words: str
) -> None:
    session = connected()
    requests = [opened(session), opened(session)]
    news: Any = session.receive(message, 0.1)
    assert ends(news) == dict.fromkeys(requests, "engine_lost")
    assert words in news[0][1].error.message
    with pytest.raises(EngineLost, match=words or "engine"):
        opened(session)
    if message is not STOPPED:
        assert isinstance(session.tick(0.2)[0][0], Hello)


def test_silence_beyond_the_lease_ends_every_open_request_once() -> None:
    session = connected()
    request = opened(session)
    for tenth in range(1, 60):
        assert session.tick(tenth / 10)[1] == []
    assert ends(session.tick(6.1)[1]) == {request: "engine_lost"}
    assert session.tick(7.0)[1] == []


def test_a_connection_that_breaks_ends_every_open_request_at_once() -> None:
    session = connected()
    request = opened(session)
    assert ends(session.on_disconnected()) == {request: "engine_lost"}
    assert session.on_disconnected() == []
    session.tick(1.0)
    assert session.tick(1.1)[0] == []
    session.on_connected()
    assert isinstance(session.tick(1.2)[0][0], Hello), "Hello is sent at once"


def test_a_failed_attempt_to_connect_ends_nothing_though_it_is_noticed_late() -> None:
    """A busy process may read the engine's answer before the event that its first attempt to
    connect has failed."""
    session = Session("test")
    assert isinstance(session.tick(0.0)[0][0], Hello)
    session.receive(welcome(), 0.1)
    request = opened(session)
    assert session.on_disconnected() == []
    session.on_connected()
    assert session.tick(0.2)[0] == [Ping()]
    assert session.is_ready
    assert ends(session.on_disconnected()) == {request: "engine_lost"}


def test_the_reason_of_engine_stopped_survives_a_broken_connection() -> None:
    session = connected()
    session.receive(STOPPED, 0.1)
    session.on_disconnected()
    assert session.not_ready_error.message == "worker died"


def test_an_exit_of_the_engine_ends_every_open_request_before_the_connection_breaks() -> None:
    session = connected()
    request = opened(session)
    session.tick(1.0)
    assert ends(session.on_exited()) == {request: "engine_lost"}
    assert session.on_exited() == []
    assert not session.is_ready
    assert isinstance(session.tick(1.1)[0][0], Hello), "Hello is sent at once"
    assert session.on_disconnected() == []
    session.on_connected()
    assert isinstance(session.tick(1.2)[0][0], Hello), "the new engine has not received the first"
    session.receive(welcome("e2"), 1.3)
    assert session.is_ready


def test_the_reason_of_engine_stopped_survives_an_exit_that_is_reported_later() -> None:
    session = connected()
    session.receive(STOPPED, 0.1)
    session.on_exited()
    assert session.not_ready_error.message == "worker died"


def test_a_client_that_slept_does_not_take_the_engine_for_silent() -> None:
    session = connected()
    session.tick(0.5)
    request = opened(session)
    assert session.tick(60.0)[1] == [], "no ping was sent meanwhile"
    news = [each for tenth in range(601, 680) for each in session.tick(tenth / 10)[1]]
    assert ends(news) == {request: "engine_lost"}


def test_the_session_sends_hello_after_a_silence() -> None:
    session = connected()
    messages = [each for tenth in range(1, 66) for each in session.tick(tenth / 10)[0]]
    assert isinstance(messages[-1], Hello)
    session.receive(welcome(), 6.2)
    assert session.is_ready


def test_each_hello_says_how_many_welcomes_were_read() -> None:
    session = Session("test")
    session.on_connected()
    for number in range(3):
        for second in range(3):
            (hello,), _ = session.tick(10.0 * number + second)
            assert isinstance(hello, Hello)
            assert hello.num_welcomes == number
        session.receive(welcome(), 10.0 * number + 3)
        session.receive(SessionLost(why="x"), 10.0 * number + 4)


@pytest.mark.parametrize("epoch", ["e1", "e2"])
def test_a_late_pong_does_not_change_the_reported_cause_of_a_loss(epoch: str) -> None:
    """Until the next Welcome, requests are refused with the first cause: silence, or the reason in
    EngineStopped. A Pong does not replace it, even if it has the epoch of a restarted engine."""
    silent, ended = connected(), connected()
    for tenth in range(1, 66):
        silent.tick(tenth / 10)
    ended.receive(STOPPED, 0.1)
    for session, why in ((silent, "silent for"), (ended, "worker died")):
        assert session.receive(Pong(epoch=epoch, stats=EngineStats()), 6.6) == []
        with pytest.raises(EngineLost, match=why):
            opened(session)
        assert isinstance(session.tick(6.6)[0][0], Hello), "it is there: it is greeted at once"


def test_a_pong_before_the_first_welcome_is_no_loss() -> None:
    session = Session("test")
    assert session.receive(Pong(epoch="e1", stats=EngineStats()), 0.1) == []
    with pytest.raises(EngineNotReady):
        opened(session)


def test_a_welcome_of_another_epoch_ends_open_requests() -> None:
    session = connected()
    request = opened(session)
    assert ends(session.receive(welcome("e2"), 1.0)) == {request: "engine_lost"}
    assert session.is_ready
    assert opened(session) != request


def test_leaving_ends_the_session_and_sends_goodbye() -> None:
    session = connected()
    request = opened(session)
    assert session.goodbye() == Goodbye()
    assert not session.is_ready
    assert session.receive(Outputs(step=1, outputs=[Output(request=request)]), 0.1) == []


def test_an_abort_by_name_is_answered_once_and_like_any_request_lost_with_the_engine() -> None:
    session = connected()
    asked, lost = session.abort_by_label(["a", "b"]), session.abort_by_label(["a"])
    assert asked == AbortByLabel(request=1, names=["a", "b"])
    reply = Aborted(request=1, aborted=["a"], unknown=["b"])
    assert session.receive(reply, 0.1) == [(1, reply)]
    assert session.receive(reply, 0.1) == []
    assert ends(session.receive(EngineStopped(error=OVERLOADED), 0.2)) == {
        lost.request: "engine_lost"
    }
    with pytest.raises(EngineLost):
        session.abort_by_label(["a"])


def test_pings_are_sent_about_twice_a_second() -> None:
    session = connected()
    messages = [message for i in range(40) for message in session.tick(i / 10)[0]]
    assert all(isinstance(message, Ping) for message in messages)
    assert 6 <= len(messages) <= 8


def test_a_pong_brings_the_statistics() -> None:
    session = connected()
    session.receive(Pong(epoch="e1", stats=EngineStats(running=3)), 1.0)
    assert session.stats.running == 3


def test_a_reply_of_the_wrong_kind_is_dropped() -> None:
    session = connected()
    generation, aborting = opened(session), session.abort_by_label(["x"]).request
    profiling = session.profile(3, "/tmp").request
    profiled = Profiled(request=0, file="f", steps=1, began=0.0, ended=1.0)
    messages: list[tuple[int, ToClient]] = [
        (generation, Aborted(request=generation)),
        (generation, replace(profiled, request=generation)),
        (aborting, Accepted(request=aborting)),
        (aborting, Outputs(step=1, outputs=[Output(request=aborting, finish="stop")])),
        (profiling, Aborted(request=profiling)),
    ]
    for request, foreign in messages:
        assert session.receive(foreign, 1.0) == []
        assert request in session.open
    answer = replace(profiled, request=profiling)
    assert session.receive(answer, 1.0) == [(profiling, answer)]


def test_early_refusals_are_reported_once_with_the_next_ping() -> None:
    session = connected()
    session.num_refused_early += 3
    pings = [message for now in (50.0, 60.0) for message in session.tick(now)[0]]
    assert pings == [Ping(num_early=3), Ping()]


def test_session_lost_does_not_hide_the_reason_of_engine_stopped() -> None:
    session = connected()
    session.receive(STOPPED, 0.1)
    assert session.receive(SessionLost(why="the connection to the engine broke"), 0.2) == []
    assert session.not_ready_error.message == "worker died"


def test_while_the_model_is_loading_requests_are_refused_with_the_time_so_far() -> None:
    session = connected()
    session.on_disconnected()
    for elapsed_s, retry_after_s in ((0.2, 1.0), (4.0, 4.0), (70.0, 10.0)):
        session.receive(Loading(elapsed_s=elapsed_s), 1.0)
        with pytest.raises(EngineNotReady, match="the model is loading") as caught:
            opened(session)
        assert f"{elapsed_s:.0f} s so far" in caught.value.message
        assert caught.value.retry_after_s == retry_after_s
    session.receive(welcome("e2"), 2.0)
    assert opened(session)


def test_an_engine_that_dies_while_loading_is_reported_as_lost() -> None:
    session = Session("test")
    session.on_connected()
    session.receive(Loading(elapsed_s=3.0), 1.0)
    session.on_disconnected()
    with pytest.raises(EngineLost, match="connection"):
        opened(session)


def test_a_ping_reports_the_bytes_read() -> None:
    session = connected()
    session.receive(Pong(epoch="e1", stats=EngineStats(), sent_bytes=700), 1.0)
    session.receive(Pong(epoch="e1", stats=EngineStats()), 1.1)  # not requested
    assert session.tick(50.0)[0] == [Ping(read_bytes=700)]
    session.receive(welcome("e2"), 51.0)
    assert session.tick(60.0)[0] == [Ping()]


def test_a_probe_is_answered_with_the_next_tick() -> None:
    session = connected()
    session.tick(10.0)
    assert session.tick(10.1)[0] == []
    session.receive(Probe(), 10.1)
    assert session.tick(10.2)[0] == [Ping()]


def test_the_stats_are_requested_right_after_the_welcome() -> None:
    session = Session("test")
    session.tick(0.0)
    session.receive(welcome(), 0.01)
    assert session.is_ready
    assert not session.has_stats
    assert session.tick(0.02)[0] == [Ping()]
    session.receive(Pong(epoch="e1", stats=EngineStats(running=3)), 0.03)
    assert session.has_stats
    session.receive(welcome("e2"), 1.0)
    assert not session.has_stats


# ---- the blocking client
QUIET_MS = 300


@pytest.fixture
def address(tmp_path: Path) -> str:
    (tmp_path / "run").mkdir(mode=0o700)
    return f"ipc://{tmp_path}/run/engine.sock"


def sent_to(router: zmq.Socket[bytes]) -> Iterator[ToEngine]:
    """Yield the messages that have arrived, until none arrives for QUIET_MS after the first."""
    decoder: codec.Decoder[ToEngine] = codec.Decoder(ToEngine)
    timeout_ms = int(HANG_S * 1000)
    while router.poll(timeout_ms):
        _, *frames = router.recv_multipart()
        yield decoder.decode(frames)
        timeout_ms = QUIET_MS


def test_a_client_that_gives_up_sends_nothing_after_its_goodbye(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "PING_EVERY_S", 0.0)  # each tick greets
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = sockets.bind_router(context, address)
    with pytest.raises(EngineNotReady):
        Client(address, wait_s=0)
    *greetings, last = sent_to(router)
    context.destroy(linger=0)
    assert all(isinstance(message, Hello) for message in greetings)
    assert isinstance(last, Goodbye)
