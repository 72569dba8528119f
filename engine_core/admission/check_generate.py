"""Checks a request that generates, and creates it. `Admission` does the rest."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

from engine_core.grammar.matcher import Matcher, MatcherTemplate
from engine_core.requests.adapter import EngineAdapter
from engine_core.requests.request import Request
from engine_core.requests.stage_timer import EngineClock, StageTimer
from engine_core.requests.whole_runs import last_end, whole_runs_of
from protocol.engine.kv_window import max_held_blocks
from protocol.engine.messages import Generate, Limits
from protocol.engine.model_card import ModelCard
from protocol.engine.sampling import (
    SamplingParams,
    check_token_ids,
    check_vocabulary,
    first_mu,
    uses_mirostat,
)
from protocol.wire.errors import ContextExcess, ContextTooLong, InvalidRequest


def check_request(prompt: list[int], message: Generate, model: ModelCard, limits: Limits) -> None:
    """Raise InvalidRequest if a token id is outside the vocabulary, and ContextTooLong if the
    prompt leaves no room for an answer. `max_tokens` may be larger than the room that is left."""
    check_token_ids(prompt, model.vocab_size, "prompt")
    check_vocabulary(message.params, model.vocab_size)
    longest, is_of_key = context_limit(message, limits)
    max_tokens = message.params.max_tokens
    answer_tokens = 0 if max_tokens == 0 else 1  # an answer has at least one token
    if len(prompt) + answer_tokens > longest:
        excess = ContextExcess(num_tokens=len(prompt), max_tokens=longest, is_of_key=is_of_key)
        raise ContextTooLong.of(excess, "prompt")
    if message.answer is not None:
        _check_answer(message.answer.tolist(), message, model, longest - len(prompt))


def check_images(message: Generate, prompt: list[int], model: ModelCard, limits: Limits) -> None:
    """Raise InvalidRequest if the model reads no images, if an image has more rows than there is
    memory for, if it lacks the grid that the model needs, or if a position of it does not have the
    id of the placeholder."""
    if model.images is None or model.images.reason or not limits.image_rows:
        why = "" if model.images is None else model.images.reason
        raise InvalidRequest.at("attachments", why or f"{model.name} reads no images")
    for number, image in enumerate(message.attachments):
        path = f"attachments[{number}]"
        if image.num_tokens > limits.image_rows:
            raise InvalidRequest.at(
                path, f"{image.num_tokens:,} tokens exceed the {limits.image_rows:,} of one image"
            )
        if model.images.needs_grid and image.grid is None:
            raise InvalidRequest.at(
                f"{path}.grid", f"{model.name} needs the rows and columns of each image"
            )
        for first, count in image.runs:
            if prompt[first : first + count] != [model.images.token_id] * count:
                raise InvalidRequest.at(
                    path, f"positions {first} to {first + count - 1} are not all placeholders"
                )
    if model.images.sees_whole_runs:
        _check_whole_runs(message, len(prompt), limits)


def _check_whole_runs(message: Generate, prompt_tokens: int, limits: Limits) -> None:
    """Raise InvalidRequest if there is a run of an image that no step can compute as a whole."""
    most = message.params.max_tokens
    most = limits.max_len if most is None else min(prompt_tokens + most, limits.max_len)
    for number, image in enumerate(message.attachments):
        path = f"attachments[{number}]"
        longest = max(count for _, count in image.runs)
        if longest > limits.max_whole_run:
            raise InvalidRequest.at(
                path,
                f"{longest:,} tokens are computed in one step, and exceed the "
                f"{limits.max_whole_run:,} of one request; the operator can raise --token-budget",
            )
        needed = max_held_blocks(
            most,
            longest,
            block_tokens=limits.block_tokens,
            window=limits.kv_window,
            groups=limits.kv_groups,
        )
        if needed > limits.num_blocks - 1:
            raise InvalidRequest.at(
                path,
                f"{longest:,} tokens are computed in one step, which needs {needed:,} blocks of "
                f"the {limits.num_blocks - 1:,} in the K/V cache",
            )


def _check_answer(tokens: list[int], message: Generate, model: ModelCard, room: int) -> None:
    """Raise InvalidRequest if these tokens cannot be the start of the answer to `message`.

    room   most tokens that fit after the prompt
    """
    check_token_ids(tokens, model.vocab_size, "answer")
    if tokens and (message.kv_readers or message.kv_handle):
        raise InvalidRequest("answer cannot be combined with K/V transfer", param="answer")
    if tokens and uses_mirostat(message.params):
        _check_mu(message.mirostat_mu)
    max_tokens = message.params.max_tokens
    most = room if max_tokens is None else min(max_tokens, room)
    if tokens and len(tokens) >= most:
        raise InvalidRequest(
            f"answer has {len(tokens):,} tokens already; it can have at most {most:,}",
            param="answer",
        )


def _check_mu(mu: float | None) -> None:
    """Raise InvalidRequest if Mirostat cannot continue with this state."""
    if mu is None or not math.isfinite(mu):
        raise InvalidRequest(
            "mirostat_mu: must be a finite number if an answer with mirostat is continued; "
            f"got {'none' if mu is None else mu}",
            param="mirostat_mu",
        )


def context_limit(message: Generate, limits: Limits) -> tuple[int, bool]:
    """Return the maximum of prompt and answer tokens together, and whether it is the limit of the
    caller's key."""
    if message.account is not None and 0 < message.account.max_len < limits.max_len:
        return message.account.max_len, True
    return limits.max_len, False


def new_request(
    client: bytes,
    message: Generate,
    prompt: list[int],
    order: int,
    draw_seed: Callable[[], int],
    model: ModelCard,
    limits: Limits,
    clock: EngineClock,
    adapter: EngineAdapter | None = None,
) -> Request:
    """Create the request of a checked `message`.

    If other engines will read the K/V (`kv_readers`), the request samples nothing and computes its
    prompt except the last token, which each reader computes. If the model has a recurrent state, it
    computes whole blocks only, because a state is saved after a block. It does not cut a run that
    is computed as a whole. If nothing remains of the
    prompt, the request has no readers, because there is nothing to hand over. A continued request
    starts with the tokens of its prompt and of its answer so far, as after a preemption.
    """
    params, readers, runs = message.params, 0, whole_runs_of(message.attachments)
    if model.images is None or not model.images.sees_whole_runs:
        runs = ()
    if message.kv_readers:
        params = SamplingParams(max_tokens=0)
        size = limits.block_tokens if limits.state_bytes else 1
        num_shared = len(prompt) - 1
        while (end := last_end(runs, num_shared // size * size)) < num_shared:
            num_shared = end
        readers = message.kv_readers if num_shared else 0
        prompt = prompt[: num_shared or last_end(runs, len(prompt) - 1)] or prompt
    room = context_limit(message, limits)[0] - len(prompt)
    stop_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= frozenset(model.eos_token_ids)
    answer = [] if message.answer is None else message.answer.tolist()
    stage_timer = StageTimer(clock)
    if answer:
        stage_timer.on_first_token()
    return Request(
        client=client,
        number=message.request,
        order=order,
        namespace=message.namespace,
        tokens=array("i", prompt + answer),
        prompt_tokens=len(prompt),
        params=params,
        mirostat_mu=first_mu(params) if message.mirostat_mu is None else message.mirostat_mu,
        seed=draw_seed() if params.seed is None else params.seed,
        max_total_tokens=len(prompt)
        + (room if params.max_tokens is None else min(params.max_tokens, room)),
        stop_ids=stop_ids,
        kv_readers=readers,
        adapter=adapter,
        labels=tuple(dict.fromkeys(message.labels)),
        account=message.account,
        images=tuple(image for image in message.attachments if image.first < len(prompt)),
        whole_runs=tuple(run for run in runs if run[0] < len(prompt)),
        stage_timer=stage_timer,
    )


def start_matcher(template: MatcherTemplate, request: Request) -> Matcher:
    """Return the matcher of a request, after the tokens of its answer so far. Raises InvalidRequest
    if the grammar does not admit these tokens."""
    matcher = template.start()
    for token in request.tokens[request.prompt_tokens :]:
        matcher.consume(token)
    if matcher.error is not None or (request.num_generated and matcher.is_complete):
        why = matcher.error or "it is complete"
        raise InvalidRequest(f"answer cannot be continued in this grammar: {why}", param="answer")
    return matcher
