"""Refuse early: what can never run, and what would wait too long. What passes becomes a `Request`.

Pure checks over a `Generate` and the engine's present load. Whatever passes is accepted (once its
grammar is compiled, if it has one) and will end.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

from engine_core.policy.queue import QueueLoad
from engine_core.request import Request
from engine_core.stage_timer import EngineClock, StageTimer
from protocol.errors import ContextTooLong, Overloaded
from protocol.messages import Generate, Limits
from protocol.model_card import ModelCard
from protocol.sampling import SamplingParams, check_token_ids, check_vocabulary

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
MAX_STANDS_S = 0.25
"""Most seconds for which a refusal stands for others. So soon, too, new limits of a key hold."""
LEAVING = 20
"""That the queue is full stands while at most one in so many of those that wait leaves it."""
SMALL = 64
"""A queue that has not room for one in so many of its tokens is full whatever is asked."""


def check_request(prompt: list[int], message: Generate, model: ModelCard, limits: Limits) -> None:
    """Raises InvalidRequest or ContextTooLong for what this engine can never do."""
    check_token_ids(prompt, model.vocab_size, "prompt")
    check_vocabulary(message.params, model.vocab_size)
    longest, whose = longest_of(message, limits)
    wanted = message.params.max_tokens
    room = 0 if wanted == 0 else 1  # an answer has at least one token
    if len(prompt) + room > longest:
        raise ContextTooLong(
            f"the prompt is {len(prompt):,} tokens; {whose} takes {longest:,} tokens of "
            "prompt and answer together",
            param="prompt",
        )
    if wanted is not None and wanted > longest:
        raise ContextTooLong(
            f"max_tokens is {wanted:,}; {whose} takes {longest:,} tokens of prompt and "
            "answer together",
            param="max_tokens",
        )


def longest_of(message: Generate, limits: Limits) -> tuple[int, str]:
    """Most tokens of prompt and answer together, and whose limit that is."""
    if message.account is not None and 0 < message.account.max_len < limits.max_len:
        return message.account.max_len, "this key"
    return limits.max_len, "this model"


def new_request(
    client: bytes,
    message: Generate,
    prompt: list[int],
    order: int,
    draw_seed: Callable[[], int],
    model: ModelCard,
    limits: Limits,
    clock: EngineClock,
) -> Request:
    """What `message` asks for, once it has been checked.

    For others a prompt is computed but for its last token, which those who go on from it compute,
    and nothing is sampled. Of a prompt of one token there is nothing to hand over.
    """
    params, readers = message.params, 0
    if message.kv_readers:
        params = SamplingParams(max_tokens=0)
        readers = message.kv_readers if len(prompt) > 1 else 0
        prompt = prompt[:-1] or prompt
    room = longest_of(message, limits)[0] - len(prompt)
    stop_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= frozenset(model.eos_token_ids)
    return Request(
        client=client,
        number=message.request,
        order=order,
        namespace=message.namespace,
        tokens=array("i", prompt),
        prompt_tokens=len(prompt),
        params=params,
        seed=draw_seed() if params.seed is None else params.seed,
        end=len(prompt) + (room if params.max_tokens is None else min(params.max_tokens, room)),
        stop_ids=stop_ids,
        kv_readers=readers,
        labels=tuple(dict.fromkeys(message.labels)),
        account=message.account,
        watch=StageTimer(clock),
    )


def check_load(
    num_tokens: int,
    waiting: QueueLoad,
    own: QueueLoad,
    most: QueueLoad,
    num_shares: int,
    rate: float,
) -> None:
    """Raises Overloaded when the queue is full for this account, which has `own` in it.

    It is not full for who has less than his part of it in it, of so many accounts that wait
    (`num_shares`, with this one): who fills the queue keeps nobody else out. For that, the queue
    may grow to twice what it may hold. A single prompt larger than all of it may still wait alone:
    it is not the queue that is too long. `rate`: tokens per second that leave the queue, 0 if
    unknown.
    """
    if _is_open(num_tokens, waiting, own, most, num_shares):
        return
    small = min(num_tokens, most.tokens // SMALL)
    is_full = not _is_open(small, waiting, own, most, num_shares)
    raise Overloaded(
        f"{waiting.requests:,} requests with {waiting.tokens:,} tokens are waiting already; "
        "try again later",
        retry_after_s=retry_after(waiting.tokens, rate),
        stands_s=stands(waiting.tokens, rate) if is_full else 0.0,
    )


def _is_open(
    num_tokens: int, waiting: QueueLoad, own: QueueLoad, most: QueueLoad, num_shares: int
) -> bool:
    if _has_room(num_tokens, waiting, most):
        return True
    part = QueueLoad(most.requests // num_shares, most.tokens // num_shares)
    twice = QueueLoad(2 * most.requests, 2 * most.tokens)
    return (
        num_shares > 1
        and _has_room(num_tokens, own, part)
        and _has_room(num_tokens, waiting, twice)
    )


def _has_room(num_tokens: int, waiting: QueueLoad, most: QueueLoad) -> bool:
    if waiting.requests >= most.requests:
        return False
    return not waiting.requests or waiting.tokens + num_tokens <= most.tokens


def retry_after(waiting_tokens: int, rate: float) -> float:
    """Whole seconds until about half of what waits now has been computed."""
    if rate <= 0:
        return MIN_RETRY_S
    return float(math.ceil(min(max(waiting_tokens / rate / 2, MIN_RETRY_S), MAX_RETRY_S)))


def stands(waiting_tokens: int, rate: float) -> float:
    """Seconds for which a full queue may be called full without being asked: it loses little of
    what waits in that time, so nothing runs dry. 0 where nobody knows how fast it moves."""
    return min(waiting_tokens / rate / LEAVING, MAX_STANDS_S) if rate > 0 else 0.0
