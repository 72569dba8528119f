"""How a request comes in: refused at once, or taken in, and then it will have an end.

One that brings a grammar is taken in when that has been compiled; until then it is among the open
requests, and its client has not heard of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from engine_core.grammar.cache import CompiledGrammar, CompileJob, GrammarCache
from engine_core.grammar.matcher import MatcherTemplate
from engine_core.kv.transfers import KVTransfers
from engine_core.open_requests import OpenRequests
from engine_core.policy.accounts import Accounts
from engine_core.policy.admission import check_load, check_request, new_request, retry_after
from engine_core.policy.deadlines import Deadlines, hopeless
from engine_core.policy.fair_share import AccountUsage, FairShare, squash
from engine_core.policy.queue import QueueLoad, WaitingQueue
from engine_core.policy.throughput import Throughput
from engine_core.request import Request, RequestEvent, RequestPhase
from engine_core.speculation.drafting import Speculation
from engine_core.stage_timer import EngineClock
from protocol.config.engine import EngineConfig
from protocol.errors import Draining, InvalidRequest, ServingError
from protocol.grammar import Grammar
from protocol.grammar_check import check_grammar
from protocol.messages import Accepted, Generate, Limits, Refused
from protocol.model_card import ModelCard


class Door:
    """Those who pass are put into `open_requests` and `waiting`."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelCard,
        limits: Limits,
        *,
        exchange: KVTransfers,
        open_requests: OpenRequests,
        waiting: WaitingQueue,
        speculation: Speculation,
        speed: Throughput,
        accounts: Accounts,
        shares: FairShare,
        draw_seed: Callable[[], int],
        clock: EngineClock,
        deadlines: Deadlines,
    ) -> None:
        self.is_draining = False
        self.num_accepted = 0
        self.num_refused = 0
        self._config = config
        self._model = model
        self._limits = limits
        self._exchange = exchange
        self._open = open_requests
        self._waiting = waiting
        self._speculation = speculation
        self._speed = speed
        self._accounts = accounts
        self._shares = shares
        self._draw_seed = draw_seed
        self._clock = clock
        self._deadlines = deadlines
        self._grammars = GrammarCache()
        self._order = 0

    @property
    def num_waiting(self) -> int:
        """Also those that wait for their grammar."""
        return len(self._waiting) + self._grammars.num_waiting

    @property
    def templates(self) -> Mapping[bytes, MatcherTemplate]:
        """Compiled grammars, by their digest."""
        return self._grammars.templates

    def add(self, client: bytes, message: Generate) -> Accepted | Refused | None:
        try:
            request = self._admit(client, message)
            if message.grammar is None or message.kv_readers:  # for readers nothing is said
                return self._accept(request)
            return self._constrain(request, message.grammar)
        except ServingError as error:
            return self._refuse(message.request, error)

    def take_jobs(self) -> list[CompileJob]:
        jobs, self._grammars.jobs = self._grammars.jobs, []
        return jobs

    def settle(self, compiled: CompiledGrammar) -> list[tuple[bytes, Accepted | Refused]]:
        news: list[tuple[bytes, Accepted | Refused]] = []
        for request in self._grammars.settle(compiled):
            if isinstance(compiled.result, ServingError):
                self._open.remove(request)
                self._deadlines.forget(request)
                request.move(RequestEvent.FINISH)
                news.append((request.client, self._refuse(request.number, compiled.result)))
            else:
                request.matcher = compiled.result.start()
                news.append((request.client, self._accept(request)))
        return news

    def leave(self, request: Request) -> None:
        """It is about to end: what it had to do with grammars ends, too."""
        if request.grammar is None:
            return
        if request.phase is RequestPhase.ARRIVED:
            self._grammars.leave(request)
            self.num_accepted += 1  # it was taken in, and has its end
        elif request.matcher is not None and request.matcher.error is not None:
            self._grammars.forget(request.grammar)

    def _constrain(self, request: Request, grammar: Grammar) -> Accepted | None:
        check_grammar(grammar)
        request.grammar, template = self._grammars.find(grammar)
        if template is None:
            self._grammars.wait(request, request.grammar, grammar)
            self._open.add(request)
            self._deadlines.watch(request)
            return None
        request.matcher = template.start()
        return self._accept(request)

    def _accept(self, request: Request) -> Accepted:
        request.move(RequestEvent.ACCEPT)
        self._speculation.start(request)
        self._open.add(request)
        self._deadlines.watch(request)
        self._waiting.push(request)
        self.num_accepted += 1
        return Accepted(request=request.number)

    def _refuse(self, number: int, error: ServingError) -> Refused:
        self.num_refused += 1
        return Refused(request=number, error=error.info())

    def _admit(self, client: bytes, message: Generate) -> Request:
        if self.is_draining:
            raise Draining("this server is shutting down and takes no new requests")
        if self._open.find(client, message.request) is not None:
            raise InvalidRequest(f"request number {message.request} is in use", param="request")
        self._exchange.check(message)
        prompt = message.prompt.tolist()
        check_request(prompt, message, self._model, self._limits)
        if message.account is not None:
            num_open = self._open.num_of(message.account.name)
            self._accounts.check(message.account, num_open, is_first=message.is_first)
        account = "" if message.account is None else message.account.name
        share = self._shares.of(account, self._open.num_of)
        self._shares.note(share, self._clock.now)
        self._check_load(len(prompt), share)
        self._order += 1
        request = new_request(
            client,
            message,
            prompt,
            self._order,
            self._draw_seed,
            self._model,
            self._limits,
            self._clock,
        )
        self._place(request, message, share)
        self._check_time(request)
        if message.kv_handle:
            request.handle = self._exchange.read(message.kv_handle, request)
        if message.account is not None:
            self._accounts.take_in(message.account, len(prompt), is_first=message.is_first)
        return request

    def _place(self, request: Request, message: Generate, share: AccountUsage) -> None:
        """In which order it is served, and until when."""
        now = self._clock.now
        request.share = share
        request.place = now + squash(message.priority) * self._config.priority_s
        request.lead = squash(message.priority) * self._shares.burst
        request.arrived_at = now
        request.begin_by = now + message.queue_timeout_s if message.queue_timeout_s else inf
        request.end_by = now + message.timeout_s if message.timeout_s else inf

    def _check_time(self, request: Request) -> None:
        """Raises QueueTimeout where it cannot be begun in time, as fast as the queue moves."""
        per_s, waiting = self._speed.queue_per_s, self._waiting
        in_time = per_s * (min(request.begin_by, request.end_by) - request.arrived_at)
        if not per_s or waiting.tokens <= in_time or waiting.most_before(request) <= in_time:
            return  # nearly always; what follows looks at all of its account's that wait
        if (before := waiting.tokens_before(request)) > in_time:
            raise hopeless(request, before / per_s, self.retry_after_s)

    @property
    def retry_after_s(self) -> float:
        return retry_after(self._waiting.tokens, self._speed.queue_per_s)

    def _check_load(self, num_tokens: int, share: AccountUsage) -> None:
        waiting, config = self._waiting, self._config
        own = waiting.load_of(share)
        check_load(
            num_tokens,
            QueueLoad(self.num_waiting, waiting.tokens),
            own,
            QueueLoad(config.max_waiting, config.max_waiting_tokens),
            waiting.num_shares + (not own.requests),
            self._speed.queue_per_s,
        )
