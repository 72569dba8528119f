"""One profile at a time: a client asks for it, the worker makes it, the client is told.

    NONE -ask-> WANTED -order-> TRACING -told-> NONE
                WANTED -leave-> NONE
                TRACING -leave-> UNWANTED -order-> ENDING -told-> NONE     UNWANTED -told-> NONE

A client that leaves (it aborts the request, or is gone) ends its profile, so that nobody's profile
slows the worker or bars the way for others for good. Orders must not come between a plan and its
masks; when they may go out is the loop's to know.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from protocol.errors import InvalidRequest, StepFailed
from protocol.messages import Profile, Profiled, Refused
from protocol.steps import Trace, Traced

MAX_STEPS = 10_000


class ProfilingPhase(Enum):
    NONE = auto()
    WANTED = auto()  # asked for; the worker does not know yet
    TRACING = auto()  # the worker was told
    UNWANTED = auto()  # nobody waits for it any more; the worker does not know yet
    ENDING = auto()  # the worker was told to end it


class Profiling:
    def __init__(self) -> None:
        self._phase = ProfilingPhase.NONE
        self._owner = b""
        self._asked = Profile(request=0, steps=0, directory="")

    def ask(self, client: bytes, message: Profile) -> Refused | None:
        """None: it is going to be made."""
        if self._phase is not ProfilingPhase.NONE:
            return _refused(message, "steps", "another profile is being made; try again after it")
        if not 1 <= message.steps <= MAX_STEPS:
            return _refused(message, "steps", f"steps is {message.steps}, not 1 to {MAX_STEPS}")
        if not message.directory.startswith("/") or "\0" in message.directory:
            return _refused(message, "directory", "directory must be an absolute path")
        self._phase, self._owner, self._asked = ProfilingPhase.WANTED, client, message
        return None

    def leave(self, client: bytes, requests: Collection[int] | None = None) -> None:
        """The client gives up these requests; None: all it has."""
        if client != self._owner or (requests is not None and self._asked.request not in requests):
            return
        if self._phase is ProfilingPhase.WANTED:
            self._phase = ProfilingPhase.NONE
        elif self._phase is ProfilingPhase.TRACING:
            self._phase = ProfilingPhase.UNWANTED

    def order(self) -> Trace | None:
        """What the worker is to hear now, if anything; told once."""
        match self._phase:
            case ProfilingPhase.WANTED:
                self._phase = ProfilingPhase.TRACING
                return Trace(steps=self._asked.steps, directory=self._asked.directory)
            case ProfilingPhase.UNWANTED:
                self._phase = ProfilingPhase.ENDING
                return Trace(steps=0)
        return None

    def told(self, traced: Traced) -> tuple[bytes, Profiled | Refused] | None:
        """Whom to tell what, if anybody still waits."""
        awaited, self._phase = self._phase is ProfilingPhase.TRACING, ProfilingPhase.NONE
        if not awaited:
            return None
        request = self._asked.request
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
