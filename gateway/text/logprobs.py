"""Token log-probabilities from the engine, in the shapes of OpenAI's APIs.

JSON has no infinity: an impossible token (-inf) or an unknown value (NaN) is shown as -9999.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.text.detokenizer import Detokenizer, DetokenizerState
from gateway.text.tokenizer import Tokenizer
from protocol.messages import TokenLogprobs

IMPOSSIBLE = -9999.0


class TopLogprob(msgspec.Struct, frozen=True):
    """One likely token. `bytes` are exact even if `token` cannot be."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob, frozen=True):
    """The chosen token, and the most likely ones, best first."""

    top_logprobs: list[TopLogprob] = []


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists, one item per token; null for a prompt's first token, which nothing
    predicts.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def chat_logprobs(
    tokenizer: Tokenizer,
    entries: Sequence[TokenLogprobs],
    *,
    num_top: int,
    asked_ids: Sequence[int] = (),
) -> list[ChatLogprob]:
    """Return one item per token. `num_top` may be less than the engine sent.

    The tokens `asked_ids` of the request follow the most likely ones.
    """
    return [_chat_logprob(tokenizer, entry, num_top, asked_ids) for entry in entries]


def likely(entry: TokenLogprobs, num_top: int, asked_ids: Sequence[int]) -> list[tuple[int, float]]:
    """Return (id, logprob) of the most likely tokens, best first, then of the requested ones not
    among them.
    """
    top = dict(zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False))
    if not asked_ids:
        return list(top.items())
    asked = zip(asked_ids, entry.asked_logprobs, strict=False)
    return [*top.items(), *((i, logprob) for i, logprob in asked if i not in top)]


def _chat_logprob(
    tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int, asked_ids: Sequence[int]
) -> ChatLogprob:
    top = likely(entry, num_top, asked_ids)
    chosen = _top(tokenizer, entry.token_id, entry.logprob)
    tops = [_top(tokenizer, token_id, logprob) for token_id, logprob in top]
    return ChatLogprob(chosen.token, chosen.logprob, chosen.bytes, tops)


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    data = tokenizer.token_bytes(token_id)
    return TopLogprob(data.decode("utf-8", "replace"), shown(logprob), list(data))


class TextOffsets:
    """The offset of each token in the answer's text, in characters, however the tokens are cut.

    A token that only completes a character has that character's offset. `detokenizer` must be a
    fresh one with the answer's own options.
    """

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._offset = start

    def state(self) -> tuple[DetokenizerState, int]:
        """Return the detokenizer's state, and the current offset."""
        return self._detokenizer.state(), self._offset

    def next(self, token_id: int) -> int:
        """Return the offset of `token_id`, the next token."""
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
    asked_ids: Sequence[int] = (),
) -> CompletionLogprobs:
    """Return OpenAI's lists. `entries[i]` belongs to `token_ids[i]`; None if nothing predicts
    it.
    """
    return CompletionLogprobs(
        text_offset=[offsets.next(token_id) for token_id in token_ids],
        token_logprobs=[shown(entry.logprob) if entry else None for entry in entries],
        tokens=[_spelled(tokenizer, token_id) for token_id in token_ids],
        top_logprobs=[
            _tops(tokenizer, entry, num_top, asked_ids) if entry else None for entry in entries
        ],
    )


def _tops(
    tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int, asked_ids: Sequence[int]
) -> dict[str, float]:
    """Return the most likely tokens, the requested ones and the chosen one."""
    pairs = likely(entry, num_top, asked_ids)
    pairs.append((entry.token_id, entry.logprob))
    return {_spelled(tokenizer, token_id): shown(logprob) for token_id, logprob in pairs}


def _spelled(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token as a key: its text, or its bytes if it holds only part of a character.

    Different parts must have different keys.
    """
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_chances(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], num_top: int
) -> list[Any]:
    """Return the likely tokens by id for each prompt token; null for the first, which nothing
    predicts.

    `num_top` may be less than the engine sent.
    """
    return [None, *(_chances(tokenizer, entry, num_top) for entry in entries)]


def _chances(tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int) -> dict[int, dict[str, Any]]:
    tops = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
    told = {i: (logprob, rank) for rank, (i, logprob) in enumerate(tops, start=1)}
    told[entry.token_id] = (entry.logprob, entry.rank)
    return {
        token_id: {
            "logprob": shown(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, (logprob, rank) in told.items()
    }


def shown(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
