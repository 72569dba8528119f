"""Converts the engine's log-probabilities of tokens to the shapes of OpenAI's and vLLM's APIs.

JSON has no infinity. So the logprob of an impossible token (-inf) and an unknown logprob (NaN)
become -9999.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.text.detokenizer import Detokenizer, DetokenizerState
from gateway.text.tokenizer import Tokenizer
from protocol.engine.logprobs import TokenLogprobs

IMPOSSIBLE = -9999.0


class TopLogprob(msgspec.Struct, frozen=True):
    """A token and its logprob. If the token is only part of a character, only `bytes` is exact."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob, frozen=True):
    """The chosen token and its logprob. `top_logprobs` has the most likely tokens, best first, then
    the requested ones."""

    top_logprobs: list[TopLogprob] = []


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists with one item per token. A prompt's first token has no logprobs (null)."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def chat_logprobs(
    tokenizer: Tokenizer,
    entries: Sequence[TokenLogprobs],
    *,
    num_top: int,
    extra_ids: Sequence[int] = (),
) -> list[ChatLogprob]:
    """Return the logprobs of generated tokens, one item per token.

    entries    the engine's logprobs of each token
    num_top    number of most likely tokens; the engine may have sent more
    extra_ids  the request's `logprob_token_ids`; these tokens follow the most likely ones
    """
    return [_chat_logprob(tokenizer, entry, num_top, extra_ids) for entry in entries]


def likely(entry: TokenLogprobs, num_top: int, extra_ids: Sequence[int]) -> list[tuple[int, float]]:
    """Return (id, logprob) of the `num_top` most likely tokens, best first. The tokens `extra_ids`
    follow, except those that are among the most likely ones."""
    top = dict(zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False))
    if not extra_ids:
        return list(top.items())
    extra = zip(extra_ids, entry.asked_logprobs, strict=False)
    return [*top.items(), *((i, logprob) for i, logprob in extra if i not in top)]


def _chat_logprob(
    tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int, extra_ids: Sequence[int]
) -> ChatLogprob:
    top = likely(entry, num_top, extra_ids)
    chosen = _top(tokenizer, entry.token_id, entry.logprob)
    tops = [_top(tokenizer, token_id, logprob) for token_id, logprob in top]
    return ChatLogprob(chosen.token, chosen.logprob, chosen.bytes, tops)


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    text, numbers = tokenizer.spelling(token_id)
    return TopLogprob(text, json_logprob(logprob), numbers)


class TextOffsets:
    """Computes the offset of each token in the answer's text, in characters.

    A token that only completes a character has the offset of that character.

    detokenizer  a new detokenizer with the same options as the one that makes the answer's text
    start        offset of the first token
    """

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._offset = start

    def state(self) -> tuple[DetokenizerState, int]:
        """Return the detokenizer's state, and the current offset."""
        return self._detokenizer.state(), self._offset

    def next(self, token_id: int) -> int:
        """Return the offset of the next token, whose id is `token_id`."""
        offset = self._offset
        self._offset += len(self._detokenizer.push([token_id]))
        return offset


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    *,
    offsets: TextOffsets,
    num_top: int,
    extra_ids: Sequence[int] = (),
) -> CompletionLogprobs:
    """Return the logprobs of `token_ids` in the shape of the completions API.

    entries    the engine's logprobs of each token; None for a prompt's first token
    offsets    computes the offsets of the tokens
    num_top    number of most likely tokens; the engine may have sent more
    extra_ids  the request's `logprob_token_ids`
    """
    return CompletionLogprobs(
        text_offset=[offsets.next(token_id) for token_id in token_ids],
        token_logprobs=[json_logprob(entry.logprob) if entry else None for entry in entries],
        tokens=[_token_key(tokenizer, token_id) for token_id in token_ids],
        top_logprobs=[
            _tops(tokenizer, entry, num_top, extra_ids) if entry else None for entry in entries
        ],
    )


def _tops(
    tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int, extra_ids: Sequence[int]
) -> dict[str, float]:
    """Return the logprobs of the most likely tokens, the requested ones and the chosen one."""
    pairs = likely(entry, num_top, extra_ids)
    pairs.append((entry.token_id, entry.logprob))
    return {_token_key(tokenizer, token_id): json_logprob(logprob) for token_id, logprob in pairs}


def _token_key(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's key in a JSON object: its text, or its bytes if they are not valid UTF-8. So
    two tokens that spell different parts of a character have different keys."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_token_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], num_top: int
) -> list[Any]:
    """Return the logprobs of a prompt in vLLM's shape: for each token, an object with token ids as
    keys. The first item is null, because the first token has no logprobs.

    entries  the engine's logprobs of each token but the first
    num_top  number of most likely tokens; the engine may have sent more
    """
    return [None, *(_by_token_id(tokenizer, entry, num_top) for entry in entries)]


def _by_token_id(
    tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int
) -> dict[int, dict[str, Any]]:
    """Return the logprob, rank and text of the most likely tokens and of the prompt's own token."""
    tops = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
    ranked = {i: (logprob, rank) for rank, (i, logprob) in enumerate(tops, start=1)}
    ranked[entry.token_id] = (entry.logprob, entry.rank)
    return {
        token_id: {
            "logprob": json_logprob(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, (logprob, rank) in ranked.items()
    }


def json_logprob(logprob: float) -> float:
    """Return a logprob as a JSON number: -9999 for infinity and NaN."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
