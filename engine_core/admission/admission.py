"""Admission: checks each new request, and either refuses it at once or accepts and queues it.

A request is refused if it can never run, or if it would wait too long. Every accepted request gets
exactly one final Output. A request with a grammar is accepted when the grammar is compiled; until
then it is open, but its client has no reply yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from math import inf

from engine_core.adapters import AdapterRegistry
from engine_core.admission.check_encode import check_encode, new_encode_request
from engine_core.admission.check_generate import (
    check_images,
    check_request,
    new_request,
    start_matcher,
)
from engine_core.admission.grammar_cache import CachedGrammar, GrammarCache, account_name
from engine_core.encode.scheduler import EncodeScheduler
from engine_core.grammar.jobs import CompiledGrammar, CompileJob
from engine_core.grammar.matcher import MatcherTemplate
from engine_core.images.rows import ImageRows
from engine_core.kv.transfers import KVTransfers
from engine_core.policy.accounts import MAX_REPEAT_S, Accounts
from engine_core.policy.deadlines import Deadlines, queue_timeout_error
from engine_core.policy.fair_share import FairShare, squash
from engine_core.policy.queue import QueueLoad, WaitingQueue
from engine_core.policy.throughput import Throughput
from engine_core.requests.open_requests import OpenRequests
from engine_core.requests.request import AccountUsage, Request, RequestEvent, RequestPhase
from engine_core.requests.stage_timer import EngineClock
from engine_core.speculation.draft_policy import Speculation
from protocol.config.engine import EngineConfig
from protocol.engine.grammar import Grammar, check_grammar
from protocol.engine.messages import Accepted, Account, Encode, Generate, Limits, Refused
from protocol.engine.model_card import ModelCard
from protocol.wire.errors import (
    Draining,
    InvalidRequest,
    Overloaded,
    ServingError,
)

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
REPEAT_DIVISOR = 20
"""A gateway may repeat a refusal until about 1 / REPEAT_DIVISOR of the waiting tokens has left the
queue.
"""
SMALL_PROMPT_DIVISOR = 64
"""A queue without room for a prompt of `max_load.tokens // SMALL_PROMPT_DIVISOR` tokens counts as
full for every request.
"""


class Admission:
    """Checks new requests, and adds the accepted ones to `open_requests` and `waiting`."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelCard,
        limits: Limits,
        *,
        kv_transfers: KVTransfers,
        open_requests: OpenRequests,
        waiting: WaitingQueue,
        encoding: EncodeScheduler,
        speculation: Speculation,
        throughput: Throughput,
        accounts: Accounts,
        fair_share: FairShare,
        draw_seed: Callable[[], int],
        clock: EngineClock,
        deadlines: Deadlines,
        adapters: AdapterRegistry,
        images: ImageRows,
    ) -> None:
        self.is_draining = False
        self.num_accepted = 0
        self.num_refused = 0
        self._config = config
        self._model = model
        self._limits = limits
        self._kv_transfers = kv_transfers
        self._open = open_requests
        self._waiting = waiting
        self._encoding = encoding
        self._speculation = speculation
        self._throughput = throughput
        self._accounts = accounts
        self._fair_share = fair_share
        self._draw_seed = draw_seed
        self._clock = clock
        self._deadlines = deadlines
        self._adapters = adapters
        self._images = images
        self._grammars = GrammarCache()
        self._order = 0

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, including those whose grammar is still being compiled."""
        num_waiting = len(self._waiting) + self._grammars.num_waiting
        if self._encoding.num_open:
            num_waiting += self._encoding.waiting_load.requests
        return num_waiting

    @property
    def cached_grammars(self) -> Mapping[bytes, CachedGrammar]:
        """The cached compiled grammars, by digest."""
        return self._grammars.cached

    @property
    def num_dropped_grammar_bytes(self) -> int:
        """Total size of the compiled grammars that were dropped."""
        return self._grammars.num_dropped_bytes

    def add(self, client: bytes, message: Generate) -> Accepted | Refused | None:
        """Accept or refuse a request. Return None if its grammar must be compiled first."""
        try:
            request = self._check_and_create(client, message)
            if message.grammar is None or message.kv_readers:  # with readers, nothing is sampled
                return self._accept(request)
            return self._constrain(request, message.grammar)
        except ServingError as error:
            return self._refuse(message.request, error)

    def add_encode(self, client: bytes, message: Encode) -> Accepted | Refused:
        """Accept or refuse a request that encodes."""
        try:
            request = self._check_and_create_encode(client, message)
        except ServingError as error:
            return self._refuse(message.request, error)
        request.move(RequestEvent.ACCEPT)
        self._open.add(request)
        self._deadlines.add(request)
        self._encoding.add(request)
        self.num_accepted += 1
        return Accepted(request=request.number)

    def drain_compile_jobs(self) -> list[CompileJob]:
        """Return the compile jobs added since the last call."""
        jobs, self._grammars.jobs = self._grammars.jobs, []
        return jobs

    def on_grammar_compiled(
        self, compiled: CompiledGrammar
    ) -> list[tuple[bytes, Accepted | Refused]]:
        """Apply a compilation's outcome, and return (client, reply) for each request that waited
        for it: accepted, or refused with the compiler's error."""
        replies: list[tuple[bytes, Accepted | Refused]] = []
        for request in self._grammars.on_grammar_compiled(compiled):
            try:
                if isinstance(compiled.result, ServingError):
                    raise compiled.result
                self._start_matcher(request, compiled.digest, compiled.result)
            except ServingError as error:
                self._open.remove(request)
                self._deadlines.remove(request)
                self._adapters.remove_user(request)
                self._images.content.remove_user(request)
                request.move(RequestEvent.FINISH)
                replies.append((request.client, self._refuse(request.number, error)))
            else:
                replies.append((request.client, self._accept(request)))
        self._grammars.shrink()
        return replies

    def on_request_ending(self, request: Request) -> None:
        """Update the grammar cache for a request that is about to end. The request stops waiting
        for its grammar, or using it. A grammar that failed is compiled again."""
        if request.grammar is None:
            return
        if request.phase is RequestPhase.ARRIVED:
            self._grammars.remove_waiter(request)
            self.num_accepted += 1  # the caller counts its end as that of an accepted request
        elif request.matcher is not None:
            has_failed = request.matcher.error is not None
            self._grammars.remove_user(request.grammar, has_failed=has_failed)

    def _constrain(self, request: Request, grammar: Grammar) -> Accepted | None:
        check_grammar(grammar)
        digest, template = self._grammars.find(grammar, account_name(request))
        request.grammar = digest
        if template is None:
            self._grammars.add_waiter(request, digest, grammar)
            self._open.add(request)
            self._deadlines.add(request)
            self._adapters.add_user(request)
            self._images.content.add_user(request)
            return None
        self._start_matcher(request, digest, template)
        return self._accept(request)

    def _start_matcher(self, request: Request, digest: bytes, template: MatcherTemplate) -> None:
        """Give the request a matcher of a cached grammar. Raises InvalidRequest or Overloaded."""
        matcher = start_matcher(template, request)
        self._grammars.add_user(digest)
        request.matcher = matcher

    def _accept(self, request: Request) -> Accepted:
        request.move(RequestEvent.ACCEPT)
        self._speculation.start(request)
        self._open.add(request)
        self._deadlines.add(request)
        self._adapters.add_user(request)
        self._images.content.add_user(request)
        self._waiting.push(request)
        self.num_accepted += 1
        if request.adapter is not None:
            request.adapter.num_requests += 1
        return Accepted(request=request.number)

    def _refuse(self, number: int, error: ServingError) -> Refused:
        self.num_refused += 1
        return Refused(request=number, error=error.info())

    def _check_new(self, client: bytes, number: int) -> None:
        """Raise an error if no request, or none with this number, may be added now."""
        if self.is_draining:
            raise Draining("this server is shutting down and accepts no new requests")
        if self._open.find(client, number) is not None:
            raise InvalidRequest(f"request number {number} is already in use", param="request")

    def _usage(self, account: Account | None) -> AccountUsage:
        """Return the usage of an account that has sent a request now."""
        name = "" if account is None else account.name
        usage = self._fair_share.get(name, self._open.num_for_account)
        self._fair_share.on_request(usage, self._clock.now)
        return usage

    def _check_and_create_encode(self, client: bytes, message: Encode) -> Request:
        self._check_new(client, message.request)
        lengths = message.inputs.lengths.tolist()
        tokens = check_encode(message, lengths, self._model, self._limits)
        is_new, account = not message.is_moved, message.account
        if account is not None and is_new:
            num_open = self._open.num_for_account(account.name)
            self._accounts.check(account, num_open, is_first=True)
        usage = self._usage(account)
        if is_new:
            self._check_encode_load(len(tokens), usage)
        self._order += 1
        request = new_encode_request(client, message, tokens, lengths, self._order, self._clock)
        self._set_order(request, message, usage)
        if is_new:
            self._check_time(request, self._encoding.waiting, self._throughput.encoded.per_s)
            if account is not None:
                self._accounts.charge_request(account, len(tokens), is_first=True)
        return request

    def _check_and_create(self, client: bytes, message: Generate) -> Request:
        self._check_new(client, message.request)
        if not self._model.generates:
            raise InvalidRequest(f"{self._model.name} does not generate text", param="model")
        adapter = None
        if message.adapter:
            adapter = self._adapters.get(message.adapter, message.adapter_digest)
        self._kv_transfers.check(message)
        prompt = message.prompt.tolist()
        check_request(prompt, message, self._model, self._limits)
        if message.attachments:
            check_images(message, prompt, self._model, self._limits)
            self._images.content.check(message.attachments)
        is_new = message.answer is None
        if message.account is not None and is_new:
            num_open = self._open.num_for_account(message.account.name)
            self._accounts.check(message.account, num_open, is_first=message.is_first)
        usage = self._usage(message.account)
        if is_new:
            self._check_load(len(prompt), usage)
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
            adapter,
        )
        self._set_order(request, message, usage)
        if is_new:
            self._check_time(request, self._waiting, self._throughput.queue_per_s)
        if message.kv_handle:
            request.handle = self._kv_transfers.open_handle(message.kv_handle, request)
        if message.account is not None and is_new:
            self._accounts.charge_request(message.account, len(prompt), is_first=message.is_first)
        return request

    def _set_order(self, request: Request, message: Generate | Encode, usage: AccountUsage) -> None:
        """Set the request's order and deadlines."""
        now = self._clock.now
        request.account_usage = usage
        request.queue_time = now + squash(message.priority) * self._config.priority_s
        request.priority_credit = squash(message.priority) * self._fair_share.max_credit
        request.arrived_at = now
        request.start_deadline = now + message.queue_timeout_s if message.queue_timeout_s else inf
        request.deadline = now + message.timeout_s if message.timeout_s else inf

    def _check_time(self, request: Request, waiting: WaitingQueue, rate: float) -> None:
        """Raise QueueTimeout if the request is not expected to leave its queue, at `rate` tokens
        per second, by its deadlines."""
        max_tokens_ahead = rate * (
            min(request.start_deadline, request.deadline) - request.arrived_at
        )
        if (
            not rate
            or waiting.tokens <= max_tokens_ahead
            or waiting.max_tokens_before(request) <= max_tokens_ahead
        ):
            return  # the usual case; the exact count below is O(waiting requests of the account)
        if (num_ahead := waiting.tokens_before(request)) > max_tokens_ahead:
            raise queue_timeout_error(request, num_ahead / rate, self.retry_after_s(request))

    def _check_encode_load(self, num_tokens: int, usage: AccountUsage) -> None:
        encoding, config = self._encoding, self._config
        waiting = encoding.waiting_load
        check_load(
            num_tokens,
            QueueLoad(waiting.requests, waiting.tokens + encoding.num_started_tokens),
            encoding.account_load(usage),
            QueueLoad(config.max_waiting, config.max_waiting_tokens),
            encoding.num_accounts(usage),
            self._throughput.encoded.per_s,
        )

    def retry_after_s(self, request: Request) -> float:
        """Return after how many seconds a client should try again that has missed a deadline."""
        if request.encode is not None:
            tokens = self._encoding.waiting_load.tokens
            return retry_after(tokens, self._throughput.encoded.per_s)
        return retry_after(self._waiting.tokens, self._throughput.queue_per_s)

    def _check_load(self, num_tokens: int, usage: AccountUsage) -> None:
        waiting, config = self._waiting, self._config
        own = waiting.account_load(usage)
        check_load(
            num_tokens,
            QueueLoad(len(waiting) + self._grammars.num_waiting, waiting.tokens),
            own,
            QueueLoad(config.max_waiting, config.max_waiting_tokens),
            waiting.num_accounts + (not own.requests),
            self._throughput.queue_per_s,
        )


# ---- the load of a queue


def check_load(
    num_tokens: int,
    waiting: QueueLoad,
    own: QueueLoad,
    max_load: QueueLoad,
    num_accounts: int,
    rate: float,
) -> None:
    """Raise Overloaded if the queue is full for this account.

    - waiting: the present load of the queue
    - own: the account's part of `waiting`
    - max_load: the limits of the queue
    - num_accounts: number of accounts that wait, including this one
    - rate: tokens per second that leave the queue; 0 if unknown

    An account that has less than an equal part of the queue is accepted even if the queue is full,
    until the queue has twice its limits. So no account can fill the queue for others. A prompt
    larger than the limit may wait if the queue is empty.
    """
    if _accepts(num_tokens, waiting, own, max_load, num_accounts):
        return
    small_prompt = min(num_tokens, max_load.tokens // SMALL_PROMPT_DIVISOR)
    is_full = not _accepts(small_prompt, waiting, own, max_load, num_accounts)
    raise Overloaded(
        f"{waiting.requests:,} requests with {waiting.tokens:,} tokens are already waiting; "
        "try again later",
        retry_after_s=retry_after(waiting.tokens, rate),
        stands_s=repeat_s(waiting.tokens, rate) if is_full else 0.0,
    )


def _accepts(
    num_tokens: int, waiting: QueueLoad, own: QueueLoad, max_load: QueueLoad, num_accounts: int
) -> bool:
    if _has_room(num_tokens, waiting, max_load):
        return True
    equal_part = QueueLoad(max_load.requests // num_accounts, max_load.tokens // num_accounts)
    doubled = QueueLoad(2 * max_load.requests, 2 * max_load.tokens)
    return (
        num_accounts > 1
        and _has_room(num_tokens, own, equal_part)
        and _has_room(num_tokens, waiting, doubled)
    )


def _has_room(num_tokens: int, waiting: QueueLoad, max_load: QueueLoad) -> bool:
    if waiting.requests >= max_load.requests:
        return False
    return not waiting.requests or waiting.tokens + num_tokens <= max_load.tokens


def retry_after(waiting_tokens: int, rate: float) -> float:
    """Return after how many whole seconds a refused client should try again: when about half of the
    waiting tokens have left the queue, at `rate` tokens per second. The result is between
    MIN_RETRY_S and MAX_RETRY_S, and MIN_RETRY_S if the rate is 0 (unknown)."""
    if rate <= 0:
        return MIN_RETRY_S
    return float(math.ceil(min(max(waiting_tokens / rate / 2, MIN_RETRY_S), MAX_RETRY_S)))


def repeat_s(waiting_tokens: int, rate: float) -> float:
    """Return for how many seconds a gateway may repeat an Overloaded refusal from its cache.

    - waiting_tokens: tokens of the waiting requests
    - rate: tokens per second that leave the queue; 0 if unknown, and then the result is 0

    In that time 1 / REPEAT_DIVISOR of the waiting tokens leaves the queue, so the engine does not
    run out of work while gateways refuse requests. The maximum is MAX_REPEAT_S.
    """
    return min(waiting_tokens / rate / REPEAT_DIVISOR, MAX_REPEAT_S) if rate > 0 else 0.0
