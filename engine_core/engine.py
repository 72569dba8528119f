"""The engine: one pure object with four verbs, and two more for answers that a grammar constrains.

    add(client, Generate)   -> Accepted or Refused, at once; None: its grammar is a job to be done
    settle(Compiled)        -> what became of such a job: Accepted or Refused for all who waited
    abort(client, numbers)  -> the ends of those that were open
    abort_named(names)      -> the ends of those that have one of these labels, and which names
    plan()                  -> the next StepPlan, or None if there is nothing to compute
    masks()                 -> what the plan's masked rows may say, while it is being computed
    commit(StepResult)      -> news per client

No socket, no clock (times are arguments), no torch. At most `steps_in_flight` plans are out at a
time (flight.py): the next one is planned while the tokens of the one before are on their way. What
a step in flight may still write (a slot, blocks) is never given to somebody else before that step
has committed, so requests that end in flight are kept aside until then.

Laws, checked by `check()` and the property tests: every block is free or held, a block's holders
are the requests that list it, findable content was written by a committed step, slots are unique,
and each accepted request gets exactly one end.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain

from engine_core.admission import check_load, check_request, new_request
from engine_core.answer import NOTHING, Taken, end_of, news_of, take
from engine_core.flight import Flights
from engine_core.grammar.book import Compiled, GrammarBook, Job
from engine_core.grammar.masks import fill
from engine_core.invariants import check_invariants
from engine_core.open_requests import OpenRequests
from engine_core.outcome import Outcome
from engine_core.planning import build_plan, matchers_of, work_of
from engine_core.request import Event, Phase, Request
from engine_core.scheduler import Scheduler
from engine_core.speculation import Speculation
from engine_core.speed import Speed
from protocol.config import EngineConfig
from protocol.errors import Draining, InvalidRequest, ServingError
from protocol.grammar import Grammar
from protocol.grammar_check import check_grammar
from protocol.messages import (
    Accepted,
    FinishReason,
    Generate,
    Limits,
    Output,
    Outputs,
    Refused,
)
from protocol.model_card import ModelCard
from protocol.stats import EngineStats
from protocol.steps import Masks, StepPlan, StepResult


def draw_seed() -> int:
    return secrets.randbits(63)


class Engine:
    """One replica's decisions. `draw_seed` is called for requests that bring no seed of their
    own.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelCard,
        limits: Limits,
        *,
        draw_seed: Callable[[], int] = draw_seed,
    ) -> None:
        self.is_draining = False
        self.limits = limits
        self._config = config
        self._model = model
        self._speculation = Speculation(config)
        self._scheduler = Scheduler(limits, model.digest, self._speculation.propose)
        self._grammars = GrammarBook()
        self._open = OpenRequests()
        self._flights = Flights(config.steps_in_flight)
        self._ended_in_flight: list[Request] = []  # own slot and blocks until no step has them
        self._generations: Counter[int] = Counter()  # slot -> how often it was bound
        self._draw_seed = draw_seed
        self._step = 0
        self._order = 0
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._speed = Speed()

    # ---- add

    def add(self, client: bytes, message: Generate) -> Accepted | Refused | None:
        """Queue a request, or say why not. None: `settle` will say it, see `take_jobs`."""
        try:
            request = self._admit(client, message)
            if message.grammar is None:
                return self._accept(request)
            return self._constrain(request, message.grammar)
        except ServingError as error:
            return self._refuse(message.request, error)

    def take_jobs(self) -> list[Job]:
        """Grammars to compile. Each is answered by one `settle`, in any order."""
        jobs, self._grammars.jobs = self._grammars.jobs, []
        return jobs

    def settle(self, compiled: Compiled) -> list[tuple[bytes, Accepted | Refused]]:
        """A grammar is compiled, or cannot be: (client, what to tell it), for all who waited."""
        news: list[tuple[bytes, Accepted | Refused]] = []
        for request in self._grammars.settle(compiled):
            if isinstance(compiled.result, ServingError):
                self._open.remove(request)
                request.move(Event.FINISH)
                news.append((request.client, self._refuse(request.number, compiled.result)))
            else:
                request.matcher = compiled.result.start()
                news.append((request.client, self._accept(request)))
        return news

    def _constrain(self, request: Request, grammar: Grammar) -> Accepted | None:
        check_grammar(grammar)
        request.grammar, template = self._grammars.find(grammar)
        if template is None:
            self._grammars.wait(request, request.grammar, grammar)
            self._open.add(request)
            return None
        request.matcher = template.start()
        return self._accept(request)

    def _accept(self, request: Request) -> Accepted:
        request.move(Event.ACCEPT)
        self._speculation.start(request)
        self._open.add(request)
        self._scheduler.waiting.push(request)
        self._counts["accepted"] += 1
        return Accepted(request=request.number)

    def _refuse(self, number: int, error: ServingError) -> Refused:
        self._counts["refused"] += 1
        return Refused(request=number, error=error.info())

    def _admit(self, client: bytes, message: Generate) -> Request:
        if self.is_draining:
            raise Draining("this server is shutting down and takes no new requests")
        if self._open.find(client, message.request) is not None:
            raise InvalidRequest(f"request number {message.request} is in use", param="request")
        if message.kv_readers or message.kv_handle:
            raise InvalidRequest("this engine hands over no K/V", param="kv_transfer_params")
        prompt = message.prompt.tolist()
        check_request(prompt, message, self._model, self.limits)
        waiting = self._scheduler.waiting
        check_load(
            len(prompt),
            len(waiting) + self._grammars.num_waiting,
            waiting.tokens,
            self._config.max_waiting,
            self._config.max_waiting_tokens,
            self._speed.tokens_per_s,
        )
        self._order += 1
        return new_request(
            client, message, prompt, self._order, self._draw_seed, self._model, self.limits
        )

    # ---- abort

    def abort(self, client: bytes, numbers: Iterable[int]) -> list[Output]:
        """End these of `client`'s requests; numbers that are not open (any more) are no error."""
        found = (self._open.find(client, number) for number in numbers)
        return [self._end(request, "abort") for request in found if request is not None]

    def abort_named(
        self, names: Iterable[str]
    ) -> tuple[dict[bytes, list[Output]], dict[str, bool]]:
        """End every request that has one of these labels: what to tell the client of each, and
        whether any had it, by name. Two names of one request are both known."""
        found = {name: self._open.labelled(name) for name in names}
        ends: dict[bytes, list[Output]] = {}
        for request in dict.fromkeys(chain.from_iterable(found.values())):
            ends.setdefault(request.client, []).append(self._end(request, "abort"))
        return ends, {name: bool(requests) for name, requests in found.items()}

    def drop(self, client: bytes) -> None:
        """`client` is gone: abort all it has, with nobody to tell."""
        for request in self._open.of(client):
            self._end(request, "abort")

    # ---- plan

    @property
    def num_in_flight(self) -> int:
        """Plans that are out; `commit` comes for each, in their order."""
        return len(self._flights)

    @property
    def is_idle(self) -> bool:
        return not self._open and not self._flights

    def plan(self) -> StepPlan | None:
        """Decide the next step and take what it needs. None: there is nothing to compute, or what
        is out must commit first."""
        if self._flights.is_full or not self._scheduler.has_work:
            return None
        if self._flights and self._must_await():
            return None
        schedule = self._scheduler.schedule()
        work = work_of(schedule)
        if not work:
            return None
        self._counts["preemptions"] += len(schedule.preempted)
        for request in schedule.admitted:
            assert request.slot is not None
            self._generations[request.slot] += 1
            if not request.num_preemptions:
                self._counts["prompt_tokens"] += request.prompt_tokens
                self._counts["cached_tokens"] += request.num_cached
        self._step += 1
        plan = build_plan(self._step, schedule, self._scheduler.released_slots, self._generations)
        self._scheduler.released_slots.clear()
        self._flights.depart(plan, work)
        return plan

    def _must_await(self) -> bool:
        """Whether the next step depends on what is out: it may have to preempt, or to draft."""
        scheduler = self._scheduler
        return (
            not scheduler.can_continue()
            or self._flights.has_drafts
            or self._speculation.awaits(scheduler.running, len(scheduler.running))
        )

    def masks(self) -> Masks | None:
        """For the oldest plan that is out, once: what comes before its tokens is known only now.
        None where no grammar constrains any of its rows."""
        flight = self._flights.oldest
        if flight is None or not flight.needs_masks:
            return None
        flight.needs_masks = False
        matchers = matchers_of(flight.plan, flight.work)
        return Masks(step=flight.plan.step, bits=fill(matchers, self._model.vocab_size))

    # ---- commit

    def commit(self, result: StepResult, elapsed_s: float) -> dict[bytes, Outputs]:
        """Take in the result of the oldest plan that is out; the worker took `elapsed_s` for it.

        Raises RuntimeError when the result is not of that plan.
        """
        work, outcomes = self._flights.land(result)
        self._speed.measure(sum(count for _, count in work), elapsed_s)
        self._let_go()
        news: dict[bytes, list[Output]] = {}
        for (request, count), outcome in zip(work, outcomes, strict=True):
            if request.phase is Phase.RUNNING and (output := self._take(request, count, outcome)):
                news.setdefault(request.client, []).append(output)
        return {
            client: Outputs(step=result.step, outputs=outputs) for client, outputs in news.items()
        }

    def _let_go(self) -> None:
        """Take back what belonged to requests that no step in flight has any more."""
        still = []
        for request in self._ended_in_flight:
            if request.num_in_flight:
                still.append(request)
            else:
                self._scheduler.finish(request)
        self._ended_in_flight = still

    def _take(self, request: Request, count: int, outcome: Outcome) -> Output | None:
        """What a committed step means for one request: its news, or None while its prompt is
        computed.
        """
        taken = take(request, count, outcome)
        self._counts["generated_tokens"] += len(taken.tokens)
        self._counts["draft_tokens"] += outcome.num_drafts
        self._counts["accepted_tokens"] += taken.num_accepted
        self._scheduler.advance(request, taken.num_valid)
        if taken.finish is not None:
            return self._end(request, taken.finish, taken)
        if taken.tokens:
            return news_of(request, taken)
        is_whole = request.num_computed == len(request.tokens)
        return self._end(request, "length") if is_whole and not request.samples else None

    def _end(self, request: Request, finish: FinishReason, taken: Taken = NOTHING) -> Output:
        """The one way a request ends; its last news, with what the last step brought."""
        last = end_of(request, finish, taken, self._model)
        self._open.remove(request)
        if request.grammar is not None:
            self._leave_grammar(request)
        self._finished[finish] += 1
        request.move(Event.FINISH)
        if request.num_in_flight:
            self._ended_in_flight.append(request)
        else:
            self._scheduler.finish(request)
        return last

    def _leave_grammar(self, request: Request) -> None:
        assert request.grammar is not None
        if request.phase is Phase.ARRIVED:
            self._grammars.leave(request)
            self._counts["accepted"] += 1  # it was taken in, and has its end
        elif request.matcher is not None and request.matcher.error is not None:
            self._grammars.forget(request.grammar)

    # ---- what others may know

    def stats(self, *, clients: int = 0, wire_errors: int = 0) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running) - len(self._ended_in_flight),
            waiting=len(scheduler.waiting) + self._grammars.num_waiting,
            waiting_tokens=scheduler.waiting.tokens,
            free_blocks=scheduler.pool.num_free,
            total_blocks=scheduler.pool.total,
            clients=clients,
            num_steps=self._step,
            num_accepted=self._counts["accepted"],
            num_refused=self._counts["refused"],
            num_finished=dict(self._finished),
            num_prompt_tokens=self._counts["prompt_tokens"],
            num_cached_tokens=self._counts["cached_tokens"],
            num_generated_tokens=self._counts["generated_tokens"],
            num_preemptions=self._counts["preemptions"],
            num_draft_tokens=self._counts["draft_tokens"],
            num_accepted_tokens=self._counts["accepted_tokens"],
            num_wire_errors=wire_errors,
            busy_s=self._speed.busy_s,
        )

    def check(self) -> None:
        """Every law of slots, blocks and the prefix cache, by brute force; for tests."""
        check_invariants(self._scheduler, self._open, self._ended_in_flight)
