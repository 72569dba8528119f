"""Checks a request that encodes, and creates it. `Admission` does the rest."""

from __future__ import annotations

from array import array

from engine_core.requests.encode_progress import EncodeProgress
from engine_core.requests.request import Request
from engine_core.requests.stage_timer import EngineClock, StageTimer
from protocol.engine.encoding import MAX_REQUEST_TOKENS, MAX_RESULT_NUMBERS
from protocol.engine.messages import Encode, Limits
from protocol.engine.model_card import ModelCard
from protocol.engine.sampling import SamplingParams, check_token_array
from protocol.wire.errors import ContextExcess, ContextTooLong, InvalidRequest


def check_encode(
    message: Encode, lengths: list[int], model: ModelCard, limits: Limits
) -> array[int]:
    """Return the tokens of a request that encodes.

    Raises InvalidRequest if the model does not encode, if there are too many inputs or results, or
    if a token id is outside the vocabulary. Raises ContextTooLong if an input is too long.

    There may be MAX_REQUEST_TOKENS tokens, and streams wait during the check. So no Python loop
    handles single tokens.
    """
    encoding = model.encoding
    if encoding is None:
        raise InvalidRequest(f"{model.name} has no embeddings and no scores", param="model")
    most = MAX_RESULT_NUMBERS // encoding.size
    if len(lengths) > most:
        raise InvalidRequest(
            f"input: {len(lengths):,} inputs; a request can have at most {most:,}", param="input"
        )
    tokens = message.inputs.tokens
    if len(tokens) > MAX_REQUEST_TOKENS:
        raise InvalidRequest(
            f"input: {len(tokens):,} tokens; a request can have at most {MAX_REQUEST_TOKENS:,}",
            param="input",
        )
    longest, is_of_key = min(encoding.max_tokens, limits.max_len), False
    if message.account is not None and 0 < message.account.max_len < longest:
        longest, is_of_key = message.account.max_len, True
    for index, length in enumerate(lengths):
        if length > longest:
            excess = ContextExcess(num_tokens=length, max_tokens=longest, is_of_key=is_of_key)
            at = f"input[{index}]"
            raise ContextTooLong.of(excess, at, what=at)
    check_token_array(tokens, model.vocab_size, "input")
    return tokens.to_array()


def new_encode_request(
    client: bytes,
    message: Encode,
    tokens: array[int],
    lengths: list[int],
    order: int,
    clock: EngineClock,
) -> Request:
    """Create the request of a checked `message`. It samples nothing, and its prompt are the tokens
    of all inputs."""
    splits = message.inputs.splits
    return Request(
        client=client,
        number=message.request,
        order=order,
        namespace="",
        tokens=tokens,
        prompt_tokens=len(tokens),
        params=SamplingParams(max_tokens=0),
        seed=0,
        max_total_tokens=len(tokens),
        stop_ids=frozenset(),
        labels=tuple(dict.fromkeys(message.labels)),
        account=message.account,
        encode=EncodeProgress(lengths, None if splits is None else splits.tolist()),
        stage_timer=StageTimer(clock),
    )
