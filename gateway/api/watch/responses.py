"""The response with the timeline of a request."""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.engine.timeline import ClientTimes, EngineTimeline
from protocol.shared.explain import Reason


class ChoiceTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of one choice in one engine.

    model        main name of the model
    role         the engine's role: replica, prefill or decode; empty if there is only one engine
    engine       number of the engine in the server's list, from 0
    ended        how the request ended in this engine, in words; "open" before that
    explanation  where the time went, in order
    timeline     the stages and steps; times are seconds since the request arrived at the engine
    """

    model: str
    role: str
    engine: int
    ended: str
    explanation: list[Reason]
    timeline: EngineTimeline


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """How long timelines are kept: those of the last ended `requests`, for up to `seconds`."""

    requests: int
    seconds: float


class TimelineAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of a request.

    headline      how long it took, and the largest part of it
    gateway       times in the gateway, in seconds since the HTTP request arrived; null if they are
                  not known
    gateway_note  why `gateway` is null
    choices       one entry for each choice and each engine that computed it
    """

    object: Literal["request.timeline"] = "request.timeline"
    id: str
    headline: str
    gateway: ClientTimes | None
    gateway_note: str | None
    choices: list[ChoiceTimeline]
    kept: Kept
