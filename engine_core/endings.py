"""`RequestEndings`: every accepted request ends here, exactly once."""

from __future__ import annotations

from engine_core.parts import EngineParts
from engine_core.requests.request import Request, RequestEvent, RequestPhase
from engine_core.schedule.commit import NOTHING_COMMITTED, CommittedTokens, final_output
from protocol.engine.messages import FinishReason, Output
from protocol.engine.timeline import AbortReason


class RequestEndings:
    """Ends requests, and releases what they own once no step or fetch may still write to it.

    in_flight   ended requests that are in a step in flight. They keep their slots and blocks until
                the step commits
    freed       client -> numbers of its aborted requests whose slot and blocks have become free.
                `Engine.pop_freed` takes the dict, and the loop reports the numbers to the clients
    """

    def __init__(self, parts: EngineParts) -> None:
        self.in_flight: list[Request] = []
        self.freed: dict[bytes, list[int]] = {}
        self._parts = parts
        #: Requests aborted by their client that still own their slot and blocks.
        self._aborted: set[Request] = set()

    def abort(self, requests: list[Request], reason: AbortReason) -> list[Output]:
        """End requests that their client has aborted. Their numbers are added to `freed` once their
        slots and blocks are free."""
        self._aborted.update(requests)
        return [self.finish(request, "abort", abort_reason=reason) for request in requests]

    def finish(
        self,
        request: Request,
        finish: FinishReason,
        committed: CommittedTokens = NOTHING_COMMITTED,
        *,
        abort_reason: AbortReason = "",
    ) -> Output:
        """End a request, and return its final Output with the tokens of the last step."""
        parts = self._parts
        if not committed.kv_handle:
            parts.kv_transfers.retract(request)
        last = final_output(request, finish, committed, parts.model)
        parts.open_requests.remove(request)
        parts.deadlines.remove(request)
        parts.admission.on_request_ending(request)
        parts.totals.finished[finish] += 1
        parts.history.on_end(request, finish, last.usage, abort_reason)
        is_fetching = request.phase is RequestPhase.FETCHING
        request.move(RequestEvent.FINISH)
        if is_fetching:
            # `Engine.on_kv_report` releases its slot and blocks.
            parts.kv_transfers.cancel_fetch(request)
        elif request.num_in_flight and request.encode is None:
            self.in_flight.append(request)
        else:
            self.release(request)
        return last

    def release_committed(self) -> None:
        """Release the slots and blocks of ended requests whose steps in flight have committed."""
        still = []
        for request in self.in_flight:
            if request.num_in_flight:
                still.append(request)
            else:
                self.release(request)
        self.in_flight = still

    def release(self, request: Request) -> None:
        """Release the slot and blocks of an ended request. No step or fetch may still write to
        them."""
        if request.encode is None:
            self._parts.scheduler.finish(request)
        else:
            self._parts.encoding.finish(request)
        self._parts.adapters.remove_user(request)
        self._parts.images.content.remove_user(request)
        if request in self._aborted:
            self._aborted.remove(request)
            self.freed.setdefault(request.client, []).append(request.number)
