"""A replica that runs the real engine: its worker and its clock are simulated.

`EngineReplica` does what the loop of an engine process does (engine_core/loop.py): it commits a
result, reads the messages of clients, and sends plans until the engine has no more. A step takes
the time that a step-time model returns, and its result contains the tokens that the requests'
answers are made of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from engine_core.engine import Engine
from protocol.config.engine import EngineConfig
from protocol.engine.messages import Accepted, Generate, Limits
from protocol.engine.model_card import ModelCard
from protocol.engine.sampling import SamplingParams
from protocol.engine.stats import EngineLoad
from protocol.tools.simulation import StateFigures
from protocol.wire.arrays import Int32
from protocol.wire.errors import ErrorInfo
from protocol.worker.steps import StepPlan, StepResult
from simulator.figures import LoadRecorder
from simulator.requests import VOCAB_SIZE, Segment, SimulatedRequest, prompt_of, segment_tokens
from simulator.steps import StepTimeModel, StepWork, chunk_pairs

CLIENT = b"gateway"
NO_TOKENS = Int32.of([])
OnRefused = Callable[[SimulatedRequest, ErrorInfo], None]


class SimulatedReplica(Protocol):
    """One engine of the simulated cluster. Times are seconds since the start of the workload."""

    @property
    def busy_s(self) -> float:
        """Seconds spent on steps so far."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do and no request on the way."""
        ...

    @property
    def load(self) -> EngineLoad:
        """The load that the replica reports to the gateways."""
        ...

    def state_figures(self) -> StateFigures:
        """Return what became of the checkpoints of recurrent states so far."""
        ...

    def push(self, request: SimulatedRequest) -> None:
        """Let a request arrive at `request.sent_at`. Requests may be pushed in any order, but not
        earlier than the end of the last `advance`."""
        ...

    def advance(self, until: float) -> None:
        """Simulate everything that happens before `until`."""
        ...


def simulated_card() -> ModelCard:
    """Return the card of the simulated model. It has no end token: answers end by their length."""
    return ModelCard(
        name="simulated",
        architecture="Simulated",
        digest="00",
        vocab_size=VOCAB_SIZE,
        context_tokens=1 << 24,
        tokenizer=b"",
        eos_token_ids=[],
    )


class Inbox:
    """Requests on the way to a replica, by time of arrival."""

    def __init__(self) -> None:
        self._requests: list[SimulatedRequest] = []
        self._next = 0
        self._is_sorted = True

    def __len__(self) -> int:
        return len(self._requests) - self._next

    def push(self, request: SimulatedRequest) -> None:
        self._requests.append(request)
        self._is_sorted = False

    @property
    def next_at(self) -> float:
        """When the next request arrives; infinite if there is none."""
        if not self._is_sorted:
            del self._requests[: self._next]
            self._next, self._is_sorted = 0, True
            self._requests.sort(key=lambda request: (request.sent_at, request.number))
        return self._requests[self._next].sent_at if self._next < len(self._requests) else inf

    def pop(self) -> SimulatedRequest:
        """Return the next request; call `next_at` first."""
        request = self._requests[self._next]
        self._next += 1
        return request


@dataclass(slots=True)
class _SlotRow:
    """The request that owns a slot of the simulated worker."""

    request: SimulatedRequest
    #: Its answer, if a later prompt contains it; else any tokens do.
    answer: list[int] | None
    num_generated: int


class EngineReplica:
    """A replica with the real engine, whose steps take the times of `steps`."""

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        steps: StepTimeModel,
        recorder: LoadRecorder,
        on_refused: OnRefused,
    ) -> None:
        self.engine = Engine(config, simulated_card(), limits, draw_seed=lambda: 0)
        self.inbox = Inbox()
        self.busy_s = 0.0
        self._steps = steps
        self._recorder = recorder
        self._on_refused = on_refused
        self._in_flight: deque[StepPlan] = deque()
        self._work = StepWork(0, 0)
        #: When the oldest step in flight started, and when it will end.
        self._started_at = 0.0
        self._ends_at = inf
        #: Number of an open request in the engine -> the request.
        self._requests: dict[int, SimulatedRequest] = {}
        self._slots: dict[int, _SlotRow] = {}
        self._num_sent = 0

    @property
    def is_idle(self) -> bool:
        return not self.inbox and self.engine.is_idle

    @property
    def load(self) -> EngineLoad:
        return self.engine.load

    def state_figures(self) -> StateFigures:
        stats = self.engine.stats()
        return StateFigures(
            num_uncovered_tokens=stats.num_uncovered_tokens,
            num_evicted=stats.num_evicted_checkpoints,
        )

    def push(self, request: SimulatedRequest) -> None:
        self.inbox.push(request)

    def advance(self, until: float) -> None:
        while True:
            arrives_at = self.inbox.next_at
            at = min(arrives_at, self._ends_at)
            if at >= until:
                return
            self.engine.tick(at)
            if self._ends_at <= arrives_at:
                self._commit(at)
            else:
                self._add(self.inbox.pop())
            self._send_plans(at)

    def _add(self, request: SimulatedRequest) -> None:
        self._num_sent += 1
        number = self._num_sent
        message = Generate(
            request=number,
            prompt=prompt_of(request.path),
            # The seed is the only field of a request that its slot contains.
            params=SamplingParams(max_tokens=request.output_tokens, ignore_eos=True, seed=number),
        )
        reply = self.engine.add(CLIENT, message)
        if isinstance(reply, Accepted):
            self._requests[number] = request
        else:
            assert reply is not None
            self._on_refused(request, reply.error)

    def _send_plans(self, now: float) -> None:
        while (plan := self.engine.plan()) is not None:
            assert isinstance(plan, StepPlan), "no simulated request encodes"
            self._in_flight.append(plan)
        self._start_step(now)

    def _start_step(self, now: float) -> None:
        if self._in_flight and self._ends_at == inf:
            self._work = work_of(self._in_flight[0])
            self._started_at = now
            self._ends_at = now + self._steps.seconds(self._work)

    def _commit(self, now: float) -> None:
        plan = self._in_flight.popleft()
        elapsed_s = self._ends_at - self._started_at
        self._ends_at = inf
        self.busy_s += elapsed_s
        num_decodes = self._work.decodes
        outputs = self.engine.commit(self._execute(plan), elapsed_s).get(CLIENT)
        self._start_step(now)
        if num_decodes:
            self._recorder.on_gaps(elapsed_s, num_decodes)
        if outputs is None:
            return
        for output in outputs.outputs:
            if output.usage is None:
                continue  # neither the first nor the last tokens of an answer
            request = self._requests[output.request]
            if output.usage.generated_tokens == len(output.tokens):
                self._recorder.on_first_token(request, now, output.usage.cached_tokens)
            if output.finish is not None:
                del self._requests[output.request]
                for _ in range(output.usage.preemptions):
                    self._recorder.on_preempted()
                self._recorder.on_end(request, now)

    def _execute(self, plan: StepPlan) -> StepResult:
        """Return the result of a step: the next token of each answer."""
        slots = self._slots
        for released in plan.release:
            del slots[released.slot]
        for init in plan.bind:
            request = self._requests[init.seed]
            answer = None
            if request.answer_key:
                answer = segment_tokens(Segment(request.answer_key, request.output_tokens))
            slots[init.slot] = _SlotRow(request, answer, len(init.tokens) - init.prompt_tokens)
        tokens = []
        for slot, samples in zip(plan.row_slots.tolist(), plan.row_samples.tolist(), strict=True):
            if samples:
                row = slots[slot]
                tokens.append(0 if row.answer is None else row.answer[row.num_generated])
                row.num_generated += 1
        return StepResult(step=plan.step, tokens=Int32.of(tokens), failed=NO_TOKENS)


def work_of(plan: StepPlan) -> StepWork:
    """Return how much a step computes: its decodes, prompt chunks, and the positions that they
    read."""
    starts, counts = plan.row_starts.tolist(), plan.row_tokens.tolist()
    num = plan.num_decodes
    context = sum(starts[:num]) + num
    if num == len(counts):
        return StepWork(num, context)
    chunks = [*zip(starts[num:], counts[num:], strict=True)]
    return StepWork(
        num,
        context,
        len(chunks),
        sum([count for _, count in chunks]),
        sum([chunk_pairs(start, count) for start, count in chunks]),
    )
