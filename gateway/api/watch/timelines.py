"""Collects the timelines of one request from all engines of this server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import gevent

from gateway.api.watch.responses import ChoiceTimeline, Kept, TimelineAnswer
from gateway.auth.caller import Caller
from gateway.engine.client import ConnectedEngine
from gateway.service import Service
from protocol.engine.messages import RequestTimelines
from protocol.engine.timeline import ClientTimes, EngineTimeline, redacted
from protocol.shared.explain import ended, explain, headline
from protocol.wire.errors import EngineError, Overloaded, ServingError, UnknownRequest

OTHER_PROCESS = "another process of this server has handled the request, or it was too long ago"
MAX_SHOWN_CHARS = 64
CLOCK_SLACK_S = 0.1
"""The two times that `of_last_request` compares are read at slightly different moments."""


@dataclass(frozen=True, slots=True)
class AskedEngine:
    """An engine, and its reply; None if it cannot be reached."""

    model: str
    number: int
    connection: ConnectedEngine
    reply: RequestTimelines | None


def timeline_answer(service: Service, caller: Caller, name: str) -> TimelineAnswer:
    """Return the timeline of the request with the public id `name`.

    A caller with the scope `admin` sees all requests and all names, any other its own requests
    without the names of others. Raises UnknownRequest if no engine knows the request, Overloaded if
    too many requests for timelines wait at an engine, and the server's trouble if no engine can be
    reached.
    """
    label = caller.abort_label(name)
    sources = list(_ask_all(service, label))
    kept = _kept(service, sources)
    is_admin = "admin" in caller.scopes
    times = service.runner.recent.find(label)
    found = [
        (source, timeline)
        for source in sources
        if source.reply is not None
        for timeline in source.reply.timelines
    ]
    if not found:
        raise _unknown(name, kept, is_admin=is_admin)
    choices = [
        _choice(source, timeline if is_admin else redacted(timeline), times)
        for source, timeline in of_last_request(found, times)
    ]
    slowest = max(choices, key=lambda choice: choice.timeline.took_s)
    took_s = slowest.timeline.took_s if times is None else times.took_s
    return TimelineAnswer(
        id=name,
        headline=headline(slowest.explanation, took_s),
        gateway=times,
        gateway_note=OTHER_PROCESS if times is None else None,
        choices=choices,
        kept=kept,
    )


def of_last_request(
    found: list[tuple[AskedEngine, EngineTimeline]], times: ClientTimes | None
) -> list[tuple[AskedEngine, EngineTimeline]]:
    """Return the timelines that belong to the request with these times in the gateway.

    Clients may use an id again. The gateway knows the last request with it. Timelines that began
    before it was sent belong to earlier ones.
    """
    if times is None or times.sent_s is None:
        return found
    sent_ago_s = times.arrived_ago_s - times.sent_s + CLOCK_SLACK_S
    last = [
        (source, timeline)
        for source, timeline in found
        if timeline.took_s + timeline.ended_ago_s <= sent_ago_s
    ]
    return last or found


def _ask_all(service: Service, label: str) -> Iterator[AskedEngine]:
    """Ask all engines at once, and yield each with its reply. Raises Overloaded if too
    many requests for timelines wait at one of them."""
    places = [
        (host.name, number, connection)
        for host in service.hosts
        for number, connection in enumerate(host.engine.connections)
    ]
    asked = [gevent.spawn(_ask, connection, label) for _, _, connection in places]
    gevent.joinall(asked)
    for (model, number, connection), greenlet in zip(places, asked, strict=True):
        reply = greenlet.value
        if isinstance(reply, Overloaded):
            raise reply
        yield AskedEngine(model, number, connection, reply)


def _ask(connection: ConnectedEngine, label: str) -> RequestTimelines | Overloaded | None:
    try:
        return connection.client.get_timelines([label])
    except EngineError:  # it is loading, unloaded or lost
        return None
    except Overloaded as error:  # returned, because gevent prints the errors of greenlets
        return error


def _kept(service: Service, sources: list[AskedEngine]) -> Kept:
    """Return how long the engines keep timelines. If no engine has replied, raise the reason why
    the server is not ready."""
    replies = [source.reply for source in sources if source.reply is not None]
    if not replies:
        trouble: ServingError | None = service.trouble()
        raise trouble or UnknownRequest("request_id: this server has no engine", param="request_id")
    return Kept(
        requests=min(reply.kept for reply in replies),
        seconds=min(reply.kept_s for reply in replies),
    )


def _choice(
    source: AskedEngine, timeline: EngineTimeline, times: ClientTimes | None
) -> ChoiceTimeline:
    return ChoiceTimeline(
        model=source.model,
        role=source.connection.role,
        engine=source.number,
        ended=ended(timeline),
        explanation=explain(timeline, times),
        timeline=timeline,
    )


def _unknown(name: str, kept: Kept, *, is_admin: bool) -> UnknownRequest:
    whose = "" if is_admin else " of this API key"
    shown = repr(name[:MAX_SHOWN_CHARS])
    return UnknownRequest(
        f"request_id: no request{whose} with the id {shown} is open or has ended recently; an "
        f"engine keeps the last {kept.requests:,} requests after their end, each for up to "
        f"{kept.seconds / 60:.0f} minutes",
        param="request_id",
    )
