"""State machine for profiles of the worker: a client requests a profile, the worker records it.

Only one profile is made at a time.

    IDLE -request-> REQUESTED -pop_command-> TRACING -on_traced-> IDLE
                    REQUESTED -cancel-> IDLE
                    TRACING -cancel-> CANCELLED -pop_command-> ENDING -on_traced-> IDLE
                                      CANCELLED -on_traced-> IDLE

If the client aborts its profile or leaves, the profile is cancelled, so that it does not slow the
worker or block other profiles. The loop calls `pop_command` when a command may be sent: never
between a plan and its masks.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from protocol.engine.messages import Profile, Profiled, Refused
from protocol.wire.errors import InvalidRequest, StepFailed
from protocol.worker.steps import Trace, Traced

MAX_STEPS = 10_000


class ProfilingPhase(Enum):
    IDLE = auto()
    REQUESTED = auto()  # by a client; not sent to the worker yet
    TRACING = auto()  # the worker has the command
    CANCELLED = auto()  # by the client; not sent to the worker yet
    ENDING = auto()  # the worker has the command to end it


class Profiling:
    """The current profile, if there is one, and its client."""

    def __init__(self) -> None:
        self._phase = ProfilingPhase.IDLE
        self._owner = b""
        self._message = Profile(request=0, steps=0, directory="")

    def request(self, client: bytes, message: Profile) -> Refused | None:
        """Start a profile. Return None if it was accepted, else the refusal, which names the
        field."""
        if self._phase is not ProfilingPhase.IDLE:
            return _refused(
                message, "steps", "another profile is being made; try again when it is done"
            )
        if not 1 <= message.steps <= MAX_STEPS:
            return _refused(
                message, "steps", f"steps is {message.steps}; it must be 1 to {MAX_STEPS}"
            )
        if not message.directory.startswith("/") or "\0" in message.directory:
            return _refused(message, "directory", "directory must be an absolute path")
        self._phase, self._owner, self._message = ProfilingPhase.REQUESTED, client, message
        return None

    def cancel(self, client: bytes, requests: Collection[int] | None = None) -> None:
        """Cancel the profile if `client` requested it, with one of the numbers `requests`. If
        `requests` is None, the number does not matter."""
        if client != self._owner or (
            requests is not None and self._message.request not in requests
        ):
            return
        if self._phase is ProfilingPhase.REQUESTED:
            self._phase = ProfilingPhase.IDLE
        elif self._phase is ProfilingPhase.TRACING:
            self._phase = ProfilingPhase.CANCELLED

    def pop_command(self) -> Trace | None:
        """Return the command to send to the worker now, or None. Each command is returned once."""
        match self._phase:
            case ProfilingPhase.REQUESTED:
                self._phase = ProfilingPhase.TRACING
                return Trace(steps=self._message.steps, directory=self._message.directory)
            case ProfilingPhase.CANCELLED:
                self._phase = ProfilingPhase.ENDING
                return Trace(steps=0)
        return None

    def on_traced(self, traced: Traced) -> tuple[bytes, Profiled | Refused] | None:
        """Return (client, reply) for a finished trace, or None if the profile was cancelled."""
        is_awaited, self._phase = self._phase is ProfilingPhase.TRACING, ProfilingPhase.IDLE
        if not is_awaited:
            return None
        request = self._message.request
        if traced.error:
            error = StepFailed(f"no profile: {traced.error}").info()
            return self._owner, Refused(request=request, error=error)
        return self._owner, Profiled(
            request=request,
            file=traced.file,
            steps=traced.steps,
            began=traced.began,
            ended=traced.ended,
        )


def _refused(message: Profile, field: str, why: str) -> Refused:
    return Refused(request=message.request, error=InvalidRequest(why, param=field).info())
