"""The histories of requests: the open ones that had a slot, and the last that have ended."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from engine_core.requests.request import Request
from protocol.engine.timeline import AbortReason, Stage
from protocol.engine.usage import Usage
from protocol.shared.request_ids import begins

MAX_ENDED = 1000
"""Most ended requests that are remembered."""
MAX_ENDED_S = 900.0
"""Seconds for which an ended request is remembered."""
MAX_NAMES = 8
MAX_NAME_CHARS = 512
"""An ended request is found by at most this many names, none of which is longer."""
MAX_BINDS = 64
"""Most slots of a request that are remembered, the last ones: one, and another after each
preemption."""
MAX_OWNERS = 4096
"""Most former owners of slots that are remembered, beside the last owner of each slot."""


@dataclass(slots=True)
class SlotBind:
    """A request has a slot in the steps [first, until). `until` is the first step of the slot's
    next owner; infinity: there is none yet."""

    first: int
    slot: int
    until: float = inf


@dataclass(slots=True, eq=False)
class RequestHistory:
    """The history of one request. It holds no token."""

    #: `Request.order`.
    order: int
    name: str
    names: Sequence[str]
    client: bytes
    account: str
    prompt_tokens: int
    #: Number of images in the prompt, and of their tokens.
    images: int
    image_tokens: int
    arrived_at: float
    #: Shared with the request's StageTimer, which extends the list.
    spans: Sequence[tuple[Stage, float]]
    #: The slots that the request had, oldest first.
    binds: list[SlotBind] = field(default_factory=list)
    first_token_at: float | None = None
    #: "" while the request is open; the next two are then None.
    finish: str = ""
    ended_at: float | None = None
    usage: Usage | None = None
    #: As in `EngineTimeline`.
    abort_reason: AbortReason = ""

    @classmethod
    def from_request(cls, request: Request) -> RequestHistory:
        return cls(
            order=request.order,
            name=request.name,
            names=request.labels or (request.name,),
            client=request.client,
            account=request.account.name if request.account is not None else "",
            prompt_tokens=request.prompt_tokens,
            images=len(request.images),
            image_tokens=sum(image.num_tokens for image in request.images),
            arrived_at=request.arrived_at,
            spans=request.stage_timer.spans,
        )

    def snapshot(self) -> RequestHistory:
        """Return a copy that shows the request as it is now, even if it continues."""
        return replace(self, spans=list(self.spans), binds=list(self.binds))

    def slot_in(self, step: int) -> int | None:
        """Return the slot that the request had in this step; None if it had none."""
        for bind in self.binds:
            if bind.first <= step < bind.until:
                return bind.slot
        return None


class RequestHistories:
    """The histories of the requests that had a slot, and of the last that have ended."""

    def __init__(self) -> None:
        #: By `Request.order`.
        self._open: dict[int, RequestHistory] = {}
        self._ended: deque[RequestHistory] = deque()
        self._ended_by_name: dict[str, list[RequestHistory]] = {}
        #: Slot -> each request that had it and the time for which, oldest first.
        self._owners: dict[int, list[tuple[SlotBind, RequestHistory]]] = {}
        #: The slots of the last binds, oldest first.
        self._bound: deque[int] = deque()

    def get(self, request: Request) -> RequestHistory:
        """Return the history of an open request. One that never had a slot has none yet, so that
        waiting costs nothing; a new one is returned then, but not kept."""
        return self._open.get(request.order) or RequestHistory.from_request(request)

    def on_bound(self, request: Request, step: int) -> None:
        """Record that a request has a slot from `step` on. Its former owner has it no more."""
        assert request.slot is not None
        history = self._open.setdefault(request.order, self.get(request))
        bind = SlotBind(step, request.slot)
        history.binds.append(bind)
        del history.binds[:-MAX_BINDS]
        owners = self._owners.setdefault(request.slot, [])
        if owners:
            owners[-1][0].until = step
        owners.append((bind, history))
        self._bound.append(request.slot)
        if len(self._bound) > MAX_OWNERS:
            oldest = self._owners[self._bound.popleft()]
            if len(oldest) > 1:  # else the slot's last owner, which its next owner replaces
                del oldest[0]

    def owner(self, slot: int, step: int) -> RequestHistory | None:
        """Return the request that had `slot` in this step; None if that is forgotten. It takes
        O(log owners), because a report asks for each prompt of each step."""
        owners = self._owners.get(slot, [])
        index = bisect_right(owners, step, key=lambda owner: owner[0].first) - 1
        return owners[index][1] if index >= 0 else None

    def on_end(
        self,
        request: Request,
        finish: str,
        usage: Usage | None,
        abort_reason: AbortReason,
        *,
        now: float,
    ) -> None:
        history = self._open.pop(request.order, None) or RequestHistory.from_request(request)
        history.finish, history.usage, history.ended_at = finish, usage, now
        history.abort_reason = abort_reason
        history.names = [n for n in history.names[:MAX_NAMES] if len(n) <= MAX_NAME_CHARS]
        self._ended.append(history)
        for name in history.names:
            self._ended_by_name.setdefault(name, []).append(history)
        self.forget_old(now)

    def forget_old(self, now: float) -> None:
        """Forget the ended requests that are too many or too old."""
        while self._ended and (
            len(self._ended) > MAX_ENDED or now - (self._ended[0].ended_at or now) > MAX_ENDED_S
        ):
            oldest = self._ended.popleft()
            for name in oldest.names:
                same = self._ended_by_name[name]
                same.remove(oldest)
                if not same:
                    del self._ended_by_name[name]

    def ended(self, name: str) -> Iterator[RequestHistory]:
        """Yield the remembered ended requests with this name, the last first."""
        return reversed(self._ended_by_name.get(name, []))

    def begun(self, text: str) -> Iterator[RequestHistory]:
        """Yield the remembered ended requests one of whose names begins with `text`, the last
        first."""
        for history in reversed(self._ended):
            if any(begins(name, text) for name in history.names):
                yield history
