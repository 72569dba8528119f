"""The arrivals of a workload: random, in bursts, in conversations, or from a trace.

Each gateway has a stream of its own, with its own random numbers. So a workload does not depend on
how many processes simulate it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate

from protocol.tools.simulation import SimulationConfig
from simulator.requests import (
    SHARED_KEYS,
    Segment,
    SimulatedRequest,
    own_key,
    request_number,
)
from simulator.trace import TraceLine


class WorkloadStreams:
    """The arrivals at each gateway, in order, and the later turns of conversations.

    trace   the lines of the trace, for a workload that has one
    """

    def __init__(self, config: SimulationConfig, trace: Sequence[TraceLine] = ()) -> None:
        self._config = config
        self._trace = trace

    def arrivals(self, gateway: int) -> Iterator[SimulatedRequest]:
        """Yield the requests that arrive at one gateway, in order. Those that depend on the end of
        another request are not among them: see `next_turn`."""
        if self._config.trace:
            return self._replay(gateway)
        return self._draw(gateway)

    def next_turn(self, request: SimulatedRequest, ended_at: float) -> SimulatedRequest | None:
        """Return the next turn of a conversation, after the answer to `request` has ended; None if
        the conversation is over."""
        config = self._config
        if not request.num_turns_left:
            return None
        number = request.number + 1
        source = random.Random(f"{config.seed}/{number}")
        at = ended_at + (source.expovariate(1 / config.think_s) if config.think_s else 0.0)
        if at >= config.end_s:
            return None
        answer = Segment(request.answer_key, request.output_tokens)
        return self._turn(
            number, at, (*request.path, answer), source, request.session, request.num_turns_left - 1
        )

    def _draw(self, gateway: int) -> Iterator[SimulatedRequest]:
        config = self._config
        source = random.Random(f"{config.seed}/gateway {gateway}")
        is_chat, turns = config.workload == "chat", 1
        if is_chat:
            turns = config.turns
        rate = config.rate / config.gateways / turns
        length_s = period_s = 0.0
        if config.workload == "bursts":
            length_s, period_s = config.burst_s, config.burst_s + config.pause_s
            rate *= period_s / length_s
        clock_s, count = 0.0, 0
        while True:
            clock_s += source.expovariate(rate)
            at = clock_s
            if period_s:  # the clock runs only in bursts
                bursts, within_s = divmod(clock_s, length_s)
                at = bursts * period_s + within_s
            if at >= config.end_s:
                return
            number = request_number(gateway, count)
            session = f"{gateway}.{count}" if is_chat else ""
            yield self._turn(number, at, self._prefix(source), source, session, turns - 1)
            count += turns

    def _turn(
        self,
        number: int,
        at: float,
        before: tuple[Segment, ...],
        source: random.Random,
        session: str,
        num_turns_left: int,
    ) -> SimulatedRequest:
        config = self._config
        own = Segment(own_key(number), _length(config.input_tokens, config.spread, source))
        path = (*before, own)
        return SimulatedRequest(
            number=number,
            at=at,
            path=path,
            input_tokens=sum([segment.num_tokens for segment in path]),
            output_tokens=_length(config.output_tokens, config.spread, source),
            answer_key=own_key(number, is_answer=True) if num_turns_left else 0,
            session=session,
            num_turns_left=num_turns_left,
        )

    def _prefix(self, source: random.Random) -> tuple[Segment, ...]:
        config = self._config
        if not config.prefix_tokens:
            return ()
        if config.prefixes == 1:
            return self._prefixes[0]
        return source.choices(self._prefixes, cum_weights=self._prefix_weights)[0]

    @cached_property
    def _prefixes(self) -> list[tuple[Segment, ...]]:
        num = self._config.prefix_tokens
        return [(Segment(SHARED_KEYS + index, num),) for index in range(self._config.prefixes)]

    @cached_property
    def _prefix_weights(self) -> list[float]:
        skew = self._config.prefix_skew
        return [*accumulate(1 / (index + 1) ** skew for index in range(self._config.prefixes))]

    def _replay(self, gateway: int) -> Iterator[SimulatedRequest]:
        """Yield every `gateways`-th line of the trace as a request."""
        config, histories = self._config, _Histories()
        start_s = self._trace[0].arrival_s if self._trace else 0.0
        for index, line in enumerate(self._trace):
            at = (line.arrival_s - start_s) / config.speed
            if at >= config.end_s:
                return
            number = request_number(index % config.gateways, index // config.gateways)
            path = histories.path(number, line)  # of every line, as another gateway may need it
            if index % config.gateways == gateway:
                yield SimulatedRequest(
                    number=number,
                    at=at,
                    path=path,
                    input_tokens=sum([segment.num_tokens for segment in path]),
                    output_tokens=line.output_tokens,
                    answer_key=own_key(number, is_answer=True) if line.session else 0,
                    session=line.session,
                )


class _Histories:
    """Makes the prompts of a trace from segments. Prompts that share a beginning share segments."""

    def __init__(self) -> None:
        #: Session -> its last prompt and answer.
        self._sessions: dict[str, tuple[Segment, ...]] = {}
        #: Name of a shared prefix -> its key.
        self._prefixes: dict[str, int] = {}

    def path(self, number: int, line: TraceLine) -> tuple[Segment, ...]:
        """Return the segments of a line's prompt, and remember them for its session."""
        path, left = self._shared(line), line.input_tokens
        fitting: list[Segment] = []
        for segment in path:
            if segment.num_tokens > left:
                break
            fitting.append(segment)
            left -= segment.num_tokens
        if left or not fitting:
            fitting.append(Segment(own_key(number), max(left, 1)))
        if line.session:
            answer = Segment(own_key(number, is_answer=True), line.output_tokens)
            self._sessions[line.session] = (*fitting, answer)
        return tuple(fitting)

    def _shared(self, line: TraceLine) -> Sequence[Segment]:
        """Return the first segments of a line's prompt, which it may share with earlier prompts."""
        if line.session in self._sessions:
            return self._sessions[line.session]
        if line.hash_ids:
            size, num = line.hash_tokens, line.input_tokens
            sizes = [min(size, num - index * size) for index in range(len(line.hash_ids))]
            return [
                Segment(SHARED_KEYS + hash_id, tokens)
                for hash_id, tokens in zip(line.hash_ids, sizes, strict=True)
                if tokens > 0
            ]
        if line.prefix and line.prefix_tokens:
            key = self._prefixes.setdefault(line.prefix, SHARED_KEYS + len(self._prefixes))
            return [Segment(key, line.prefix_tokens)]
        return []


def _length(middle: int, spread: float, source: random.Random) -> int:
    """Return a length between `middle` * (1 - spread) and `middle` * (1 + spread), at least 1."""
    lowest = round(middle * (1 - spread))
    return max(1, lowest + int(source.random() * (round(middle * (1 + spread)) - lowest + 1)))
