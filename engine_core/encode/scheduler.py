"""Requests that encode: their inputs, their queue, and the steps that compute them.

Such a request is a `Request` without a slot and blocks. Its tokens are those of all its inputs. A
step computes whole inputs, of one request or of several, under the token budget; an input that is
longer than the budget is a step by itself.

A request with many inputs takes many steps. So that short requests do not wait for all of them,
steps take turns: one starts requests in the order of the waiting queue, the next continues those
that are started. Whatever room is left goes to the other kind.

While other requests generate, steps that generate and steps that encode take turns as well. If
several accounts send requests, a step that encodes has only the token budget of prompts
(`FairShare.shared_prefill_budget`), so that it does not stretch the time between the tokens of
others. An input that is longer than this budget is followed by several steps that generate, each
of which makes up for one budget.

The results of a request are sent together, when all are computed, and when its client has few
unread bytes. Requests of a client that must read first are held (unsent_results.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from engine_core.encode.unsent_results import UnsentResults
from engine_core.policy.fair_share import FairShare
from engine_core.policy.queue import QueueLoad, WaitingQueue
from engine_core.requests.encode_progress import EncodeProgress
from engine_core.requests.request import AccountUsage, Request, RequestEvent, RequestPhase
from protocol.engine.encoding import MAX_STEP_INPUTS, EncodeInputs
from protocol.wire.arrays import Float32, Int32
from protocol.worker.steps import EncodePlan, EncodeResult

MAX_STARTED = 8
"""Most requests of which some inputs are in plans, and others are not, except that every account
may have one. It bounds the requests that the limits of the waiting queue do not count."""


@dataclass(slots=True)
class EncodeStep:
    """A plan in flight, and the requests whose inputs it contains: (request, number of inputs)."""

    plan: EncodePlan
    parts: list[tuple[Request, int]]

    @property
    def num_tokens(self) -> int:
        return self.plan.inputs.tokens.shape[0]

    def tokens_by_request(self) -> Iterator[tuple[int, int]]:
        """Yield (`Request.order`, number of tokens) of each part."""
        lengths = iter(self.plan.inputs.lengths.tolist())
        return ((request.order, sum(islice(lengths, taken))) for request, taken in self.parts)


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """A step's work for one request.

    is_failed   whether some result is not finite
    """

    request: Request
    is_failed: bool


class EncodeScheduler:
    """The requests that encode: those that wait, those that are started, the steps in flight, and
    the results that are not sent."""

    def __init__(self, fair_share: FairShare, token_budget: int) -> None:
        self.waiting = WaitingQueue(fair_share)
        #: Requests of which some inputs are in plans, and others are not.
        self.started: list[Request] = []
        self.inflight: deque[EncodeStep] = deque()
        self.unsent = UnsentResults()
        #: Client that must read before its requests are started -> its waiting requests, which are
        #: not in `waiting`.
        self.held: dict[bytes, WaitingQueue] = {}
        #: Number of requests that were added and have not ended.
        self.num_open = 0
        #: Tokens of the last step that encodes that steps that generate have not made up for yet.
        self.debt = 0
        #: Whether the next step first continues started requests.
        self.continues = False
        self._fair_share = fair_share
        self._token_budget = token_budget

    @property
    def has_work(self) -> bool:
        return bool(self.started or (len(self.waiting) and not self.unsent.are_too_many))

    @property
    def is_next(self) -> bool:
        """Whether the next step encodes, if there is work of both kinds."""
        return not self.debt

    @property
    def num_started(self) -> int:
        """Number of requests that have left the queue and have not ended."""
        found = {request for step in self.inflight for request, _ in step.parts}
        found.update(self.started)
        is_running = [request.phase is RequestPhase.RUNNING for request in found]
        return sum(is_running) + len(self.unsent)

    @property
    def num_started_tokens(self) -> int:
        """Number of tokens of started requests that are in no plan."""
        return sum(len(each.tokens) - each.num_scheduled for each in self.started)

    @property
    def num_result_bytes(self) -> int:
        """Bytes of all results that are kept: those that are not sent, and those of requests with
        inputs that are not computed. O(started requests)."""
        found = {request for step in self.inflight for request, _ in step.parts}
        found.update(self.started)
        return self.unsent.num_bytes + sum(_progress(each).num_result_bytes for each in found)

    @property
    def waiting_load(self) -> QueueLoad:
        """The load of all requests that wait, held ones included."""
        queues = [self.waiting, *self.held.values()]
        return QueueLoad(sum(map(len, queues)), sum(queue.tokens for queue in queues))

    def account_load(self, usage: AccountUsage) -> QueueLoad:
        """The part of `waiting_load` that belongs to an account."""
        loads = [queue.account_load(usage) for queue in (self.waiting, *self.held.values())]
        return QueueLoad(sum(load.requests for load in loads), sum(load.tokens for load in loads))

    def num_accounts(self, usage: AccountUsage) -> int:
        """Return the number of accounts with waiting requests, counting `usage` in any case."""
        waiting = {usage, *self.waiting.accounts}
        return len(waiting.union(*(queue.accounts for queue in self.held.values())))

    def queue_of(self, client: bytes) -> WaitingQueue:
        """Return the queue in which the requests of a client wait."""
        return self.held.get(client, self.waiting)

    def add(self, request: Request) -> None:
        self.num_open += 1
        self.queue_of(request.client).push(request)

    def update_held(self) -> None:
        """Hold the waiting requests of clients that have unsent results now, and no others. Call it
        before each decision about the next step.

        A held account misses the service of that time. So when its requests return, its service is
        clamped as if it started to wait."""
        clients = self.unsent.clients
        if self.held.keys() == clients:
            return
        for client in [client for client in self.held if client not in clients]:
            for request in self.held.pop(client).requests():
                self.waiting.push(request)
        new = {
            client: WaitingQueue(self._fair_share) for client in clients if client not in self.held
        }
        for request in list(self.waiting.requests()):
            if request.client in new:
                self.waiting.remove(request)
                new[request.client].restore([request])
        self.held |= new

    def finish(self, request: Request) -> None:
        """Remove a request that has ended. Its results of steps in flight are dropped."""
        self.num_open -= 1
        queue = self.queue_of(request.client)
        if request in queue:
            queue.remove(request)
        elif request in self.started:
            self.started.remove(request)
        elif request in self.unsent:
            self.unsent.remove(request)

    def plan(self, step: int, *, is_limited: bool = False) -> EncodePlan:
        """Return the plan of the next step, which is number `step`. There must be work.

        `is_limited` is whether the step has only the token budget of prompts. If it is false, one
        step that generates makes up for this step, whatever its length.
        """
        share = self._fair_share.shared_prefill_budget
        new = _StepInputs(min(share, self._token_budget) if is_limited else self._token_budget)
        turns = (self._continue, self._start)
        for add in turns if self.continues else reversed(turns):
            add(new)
        self.continues = not self.continues
        self.debt = len(new.tokens) if is_limited else 1
        plan = EncodePlan(step=step, inputs=new.inputs())
        self.inflight.append(EncodeStep(plan, new.parts))
        return plan

    def on_generation_planned(self) -> None:
        """Reduce `debt`, the tokens by which encoding is ahead, because a step that generates is
        planned."""
        self.debt = max(0, self.debt - self._fair_share.shared_prefill_budget)

    def _start(self, new: _StepInputs) -> None:
        """Add inputs of waiting requests to a step."""
        while not self.unsent.are_too_many and (request := self.waiting.first()) is not None:
            progress = _progress(request)
            taken = new.num_that_fit(progress)
            is_whole = taken == len(progress.lengths)
            if not taken or (not is_whole and not self._may_start(request)):
                break
            self.waiting.remove(request)
            request.move(RequestEvent.ADMIT)
            self._fair_share.on_scheduled(request.account_usage)
            self._take(new, request, taken)
            if not is_whole:
                self.started.append(request)

    def _may_start(self, request: Request) -> bool:
        """Return whether a request may start although only some of its inputs fit into the step.
        The first such request of an account always may: otherwise the large requests of other
        accounts could delay it for hours."""
        return len(self.started) < MAX_STARTED or not any(
            each.account_usage is request.account_usage for each in self.started
        )

    def _continue(self, new: _StepInputs) -> None:
        """Add inputs of started requests to a step, those of the least served account first."""
        for request in sorted(self.started, key=lambda each: (each.virtual_time, each.rank)):
            if taken := new.num_that_fit(_progress(request)):
                self._take(new, request, taken)
                if _progress(request).is_planned:
                    self.started.remove(request)

    def _take(self, new: _StepInputs, request: Request, taken: int) -> None:
        """Add the next `taken` inputs of a request to a step, and charge its account."""
        num_before = request.num_scheduled
        new.add(request, taken)
        request.account_usage.served += request.num_scheduled - num_before

    def commit(self, result: EncodeResult) -> tuple[EncodeStep, list[EncodedPart]]:
        """Apply the result of the oldest plan in flight. Return its step, and what it has done for
        each request that has not ended.

        Raises RuntimeError if the result belongs to another plan, or does not fit the plan.
        """
        step = self.inflight[0] if self.inflight else None
        if step is None or step.plan.step != result.step:
            raise RuntimeError(
                f"got the result of step {result.step}, which is not the oldest in flight"
            )
        count = len(step.plan.inputs.lengths)
        if len(result.vectors.shape) != 2 or len(result.vectors) != count:
            raise RuntimeError(f"step {result.step} has results of shape {result.vectors.shape}")
        failed = result.failed.tolist()
        if failed and not 0 <= failed[0] <= failed[-1] < count:
            raise RuntimeError(f"step {result.step} has failed inputs that it does not contain")
        self.inflight.popleft()
        width = result.vectors.shape[1] * Float32.itemsize
        done: list[EncodedPart] = []
        first = 0
        for request, taken in step.parts:
            end = first + taken
            request.num_in_flight -= 1
            if request.phase is not RequestPhase.FINISHED:
                progress = _progress(request)
                progress.results.append(bytes(result.vectors.data[first * width : end * width]))
                progress.num_done += taken
                request.num_computed = sum(progress.lengths[: progress.num_done])
                is_failed = any(first <= index < end for index in failed)
                done.append(EncodedPart(request, is_failed))
            first = end
        return step, done


@dataclass(slots=True)
class _StepInputs:
    """The inputs of a step that is being planned."""

    token_budget: int
    tokens: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    splits: list[int] = field(default_factory=list)
    has_splits: bool = False
    parts: list[tuple[Request, int]] = field(default_factory=list)

    def num_that_fit(self, progress: EncodeProgress) -> int:
        """Return how many of a request's next inputs fit; at least one if the step is empty."""
        room, taken = self.token_budget - len(self.tokens), 0
        most = MAX_STEP_INPUTS - len(self.lengths)
        for length in islice(progress.lengths, progress.num_planned, progress.num_planned + most):
            if length > room and (self.lengths or taken):
                break
            room -= length
            taken += 1
        return taken

    def add(self, request: Request, taken: int) -> None:
        """Add the next `taken` inputs of a request, and record that they are in a plan."""
        progress = _progress(request)
        first = progress.num_planned
        lengths = progress.lengths[first : first + taken]
        end = request.num_scheduled + sum(lengths)
        self.tokens.extend(request.tokens[request.num_scheduled : end])
        self.lengths.extend(lengths)
        self.splits.extend((progress.splits or progress.lengths)[first : first + taken])
        self.has_splits = self.has_splits or progress.splits is not None
        self.parts.append((request, taken))
        progress.num_planned += taken
        request.num_charged = request.num_scheduled = end
        request.num_in_flight += 1

    def inputs(self) -> EncodeInputs:
        return EncodeInputs(
            tokens=Int32.of(self.tokens),
            lengths=Int32.of(self.lengths),
            splits=Int32.of(self.splits) if self.has_splits else None,
        )


def _progress(request: Request) -> EncodeProgress:
    assert request.encode is not None
    return request.encode
