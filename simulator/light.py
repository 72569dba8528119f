"""A light model of a replica: it follows the scheduler's rules with a few operations per step.

A step costs the same however many requests it computes, because a running answer gets one token in
each step: when its prompt is complete, the step in which it ends is known. The model has no token
ids and no blocks, only their numbers. It follows the engine in these rules:

- decodes first, then chunks of prompts, then newcomers, within one token budget;
- at most `steps_in_flight` plans at once, and none after a long step with prompts;
- a newcomer needs a slot, and blocks for its whole prompt;
- the youngest request is preempted if blocks run out;
- prefixes are found after the step that computed them, and evicted by age;
- the queue's limits, with the engine's own function.

It ignores accounts, priorities, deadlines, drafts and windows, and has no checkpoints of recurrent
states (run.py). The unit tests compare it with the engine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from engine_core.admission.admission import check_load
from engine_core.policy.queue import QueueLoad
from engine_core.policy.throughput import Throughput
from protocol.config.engine import EngineConfig
from protocol.engine.messages import Limits
from protocol.engine.stats import EngineLoad
from protocol.tools.simulation import StateFigures
from protocol.wire.errors import ContextTooLong, Overloaded
from simulator.figures import LoadRecorder
from simulator.light_cache import LightCache
from simulator.replica import Inbox, OnRefused
from simulator.requests import SimulatedRequest, is_answer, own_key
from simulator.steps import StepTimeModel, StepWork, chunk_pairs


@dataclass(slots=True, eq=False)
class LightRequest:
    """A request in the light model."""

    request: SimulatedRequest
    #: Known tokens: the prompt, and what was generated before a preemption.
    num_known: int
    #: Tokens of the answer that are still to be sampled.
    num_left: int
    #: Known tokens that are computed, or planned.
    num_scheduled: int = 0
    #: Of the prompt, at the first admission.
    num_cached: int = 0
    #: Keys of the cached segments that it uses.
    keys: list[int] = field(default_factory=list)
    #: Blocks that it holds and that are not in the cache.
    num_private: float = 0.0
    #: The step that samples the first token after the known ones; 0: not planned yet.
    first_step: int = 0
    #: Whether its first token was reported.
    has_started: bool = False
    is_preempted: bool = False


@dataclass(slots=True)
class LightStep:
    """A step in flight."""

    work: StepWork
    has_prompts: bool
    #: Requests whose known tokens are all computed after this step.
    firsts: list[LightRequest]
    ends: list[LightRequest]

    @property
    def num_tokens(self) -> int:
        return self.work.decodes + self.work.chunk_tokens


class LightReplica:
    """A replica with the light model, whose steps take the times of `steps`."""

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        steps: StepTimeModel,
        recorder: LoadRecorder,
        on_refused: OnRefused,
    ) -> None:
        self.inbox = Inbox()
        self.busy_s = 0.0
        self._limits = limits
        self._max_running = min(limits.max_slots, limits.token_budget)
        self._max_in_flight = config.steps_in_flight
        self._max_load = QueueLoad(config.max_waiting, config.max_waiting_tokens)
        self._steps = steps
        self._recorder = recorder
        self._on_refused = on_refused
        self._cache = LightCache(limits.num_blocks - 1, limits.block_tokens)
        self._throughput = Throughput()
        self._num_admitted_tokens = 0
        self._waiting: deque[LightRequest] = deque()
        self._waiting_tokens = 0
        #: Requests with a slot, by admission.
        self._running: dict[int, LightRequest] = {}
        #: Those whose known tokens are not all planned.
        self._prefills: list[LightRequest] = []
        #: (last step, serial number, request) of each running answer, as a heap. Those of preempted
        #: requests are stale.
        self._ends: list[tuple[int, int, LightRequest]] = []
        #: Number of requests whose prompt was planned to its end.
        self._num_planned = 0
        #: Rows of the next step that decode, and the K/V positions that they will read.
        self._decodes = 0
        self._context = 0
        self._step = 0
        self._in_flight: deque[LightStep] = deque()
        self._started_at = 0.0
        self._ends_at = inf

    @property
    def is_idle(self) -> bool:
        return not (self.inbox or self._running or self._waiting or self._in_flight)

    @property
    def load(self) -> EngineLoad:
        left = sum([request.num_known - request.num_scheduled for request in self._prefills])
        return EngineLoad(len(self._running), len(self._waiting), self._waiting_tokens + left)

    def state_figures(self) -> StateFigures:
        return StateFigures()

    def push(self, request: SimulatedRequest) -> None:
        self.inbox.push(request)

    def advance(self, until: float) -> None:
        inbox = self.inbox
        arrives_at = inbox.next_at
        while True:
            if self._ends_at <= arrives_at:
                if (at := self._ends_at) >= until:
                    return
                self._commit(at)
            else:
                if (at := arrives_at) >= until:
                    return
                self._add(inbox.pop())
                arrives_at = inbox.next_at
            while self._plan():
                pass
            if self._ends_at == inf:
                self._start_step(at)

    def _start_step(self, now: float) -> None:
        if self._in_flight:
            self._started_at = now
            self._ends_at = now + self._steps.seconds(self._in_flight[0].work)

    # ---- arrivals

    def _add(self, request: SimulatedRequest) -> None:
        waiting = QueueLoad(len(self._waiting), self._waiting_tokens)
        num_tokens, longest = request.input_tokens, self._limits.max_len
        try:
            if max(num_tokens + 1, request.output_tokens) > longest:
                raise ContextTooLong(f"the prompt is {num_tokens:,} tokens")
            check_load(
                num_tokens, waiting, waiting, self._max_load, 1, self._throughput.queue_per_s
            )
        except (ContextTooLong, Overloaded) as error:
            self._on_refused(request, error.info())
            return
        num_left = min(request.output_tokens, longest - num_tokens)
        self._waiting.append(LightRequest(request, num_tokens, num_left))
        self._waiting_tokens += num_tokens

    # ---- a step

    def _plan(self) -> bool:
        """Plan a step if one can be planned now. Return whether it was."""
        if not (self._running or self._waiting) or len(self._in_flight) >= self._max_in_flight:
            return False
        if not self._cache.can_grow(self._decodes):
            if self._in_flight:
                return False
            self._preempt()
        prompt_tokens = sum([step.num_tokens for step in self._in_flight if step.has_prompts])
        if prompt_tokens and self._throughput.is_long_step(prompt_tokens):
            return False
        decodes = self._decodes
        step = LightStep(StepWork(decodes, self._context), False, [], [])
        number = self._step + 1
        if decodes:
            self._cache.grow(decodes)
            self._context += decodes
        if self._prefills or self._waiting:
            self._add_prompts(step, number, self._limits.token_budget - decodes)
        if not decodes and not step.has_prompts:
            return False
        self._step = number
        ends = self._ends
        while ends and ends[0][0] <= number:
            _, _, request = heappop(ends)
            if request.is_preempted:
                continue
            step.ends.append(request)
            if request.num_left > 1:  # else it has never decoded
                self._decodes -= 1
                self._context -= request.num_known + request.num_left
        self._in_flight.append(step)
        return True

    def _add_prompts(self, step: LightStep, number: int, budget: int) -> None:
        """Add chunks of prompts, and admit newcomers."""
        chunks = chunk_tokens = pairs = 0
        rows = iter([*self._prefills])
        while budget:
            request = next(rows, None) or self._admit()
            if request is None:
                break
            start = request.num_scheduled
            count = min(request.num_known - start, budget)
            budget -= count
            chunks += 1
            chunk_tokens += count
            pairs += chunk_pairs(start, count)
            request.num_scheduled += count
            if request.num_scheduled == request.num_known:
                self._prefills.remove(request)
                self._on_prompt_planned(request, step, number)
        if chunks:
            step.has_prompts = True
            step.work = StepWork(*step.work[:2], chunks, chunk_tokens, pairs)

    def _on_prompt_planned(self, request: LightRequest, step: LightStep, number: int) -> None:
        step.firsts.append(request)
        request.first_step = number
        self._num_planned += 1
        heappush(self._ends, (number + request.num_left - 1, self._num_planned, request))
        if request.num_left > 1:
            self._decodes += 1
            self._context += request.num_known + 1

    def _admit(self) -> LightRequest | None:
        """Admit the first request of the queue, if there are a slot and blocks for it."""
        if not self._waiting or len(self._running) >= self._max_running:
            return None
        request, size = self._waiting[0], self._limits.block_tokens
        path = request.request.path
        num, tokens = self._cache.match(path) if self._limits.prefix_cache else (0, 0)
        if num == len(path):  # after a preemption, its own answer too
            tokens = request.num_known
        elif num and is_answer(path[num - 1].key):
            tokens -= 1  # the last token of an answer is not computed
        num_cached = min(tokens, request.num_known - 1) // size
        keys = [key for key, _ in path[:num]]
        num_new = -(-request.num_known // size) - num_cached
        if not self._cache.allocate(keys, num_new):
            return None
        self._waiting.popleft()
        self._waiting_tokens -= request.num_known
        self._num_admitted_tokens += request.num_known
        request.keys, request.num_private = keys, num_new
        request.num_scheduled = num_cached * size
        if not request.has_started:
            request.num_cached = min(request.num_scheduled, request.request.input_tokens)
        self._running[request.request.number] = request
        self._prefills.append(request)
        return request

    def _preempt(self) -> None:
        """Preempt the youngest requests until there are enough free blocks for the next token of
        every other one."""
        while not self._cache.can_grow(self._decodes) and len(self._running) > 1:
            _, request = self._running.popitem()
            if request.first_step:
                num_sampled = self._step - request.first_step + 1
                self._decodes -= 1
                self._context -= request.num_known + num_sampled
                request.is_preempted = True
                self._release(request, num_sampled)
                request = LightRequest(
                    request.request,
                    request.num_known + num_sampled,
                    request.num_left - num_sampled,
                    num_cached=request.num_cached,
                    has_started=request.has_started,
                )
            else:
                self._prefills.remove(request)
                self._release(request, 0)
                request.num_scheduled = 0
            self._waiting.appendleft(request)
            self._waiting_tokens += request.num_known
            self._recorder.on_preempted()

    def _commit(self, now: float) -> None:
        step, elapsed_s = self._in_flight.popleft(), self._ends_at - self._started_at
        self._ends_at = inf
        self.busy_s += elapsed_s
        throughput = self._throughput
        throughput.observe(step.num_tokens, elapsed_s, has_prompts=step.has_prompts)
        if self._waiting:
            throughput.admitted.observe(self._num_admitted_tokens, elapsed_s)
        self._num_admitted_tokens = 0
        if step.work.decodes:
            self._recorder.on_gaps(elapsed_s, step.work.decodes)
        for request in step.firsts:
            self._publish(request)
            if not request.has_started:
                request.has_started = True
                self._recorder.on_first_token(request.request, now, request.num_cached)
        for request in step.ends:
            del self._running[request.request.number]
            self._release(request, request.num_left)
            self._recorder.on_end(request.request, now)
        self._start_step(now)

    # ---- the cache

    def _publish(self, request: LightRequest) -> None:
        """Cache the segments of the request's prompt that it has computed."""
        if not self._limits.prefix_cache:
            return
        size, tokens, cached = self._limits.block_tokens, 0, self._cache
        for index, (key, num) in enumerate(request.request.path):
            first, tokens = tokens // size, tokens + num
            if index >= len(request.keys):
                num_blocks = tokens // size - first
                if not cached.publish(key, num_blocks):
                    return
                request.keys.append(key)
                request.num_private -= num_blocks

    def _release(self, request: LightRequest, num_sampled: int) -> None:
        """Release the request's blocks, after it has sampled `num_sampled` more tokens.

        The blocks of its answer stay in the cache, like those of its prompt. The last token that
        was sampled is not computed.
        """
        size, cache = self._limits.block_tokens, self._cache
        num_private = request.num_private + max(num_sampled - 1, 0) / size
        if (
            self._limits.prefix_cache
            and num_sampled
            and len(request.keys) == len(request.request.path)
        ):
            num_computed = request.num_known + num_sampled - 1
            answer = num_computed // size - request.request.input_tokens // size
            key = own_key(request.request.number, is_answer=True)
            if answer > 0 and cache.publish(key, answer):
                request.keys.append(key)
                num_private -= answer
        cache.release(request.keys, num_private)
        request.keys, request.num_private = [], 0.0
