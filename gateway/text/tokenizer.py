"""The model's tokenizer: made once from the model card, then constant and shared by all greenlets.

Truncation and padding are never set: a shared tokenizer that is changed in use silently returns
wrong ids. Encoding a long text is slow, so it goes through `offload` to run in a thread:
`encode_batch_fast` releases the GIL and `encode` does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import tokenizers

from gateway.text.codec import ByteCodec, codec_of
from gateway.text.detokenizer import (
    ByteDetokenizer,
    ByteState,
    Detokenizer,
    DetokenizerState,
    TokenTable,
    WindowDetokenizer,
    WindowState,
)
from protocol.errors import ContextTooLong, InvalidRequest
from protocol.model_card import ModelCard

Offload = Callable[[Callable[[], list[int]]], list[int]]
"""Runs a function elsewhere, such as in a thread pool, and returns its result."""

INLINE_BYTES = 8_000
"""Below this, encoding takes under 2 ms and a thread costs more than it saves."""
BYTES_PER_TOKEN = 32
"""A text with more bytes than this per token of the context is refused unread. Ordinary text has
four, and encoding a megabyte of the worst input takes over half a second.
"""


class Tokenizer:
    """The model's tokenizer, and all facts about its ids that need no text.

    card            its field `tokenizer` holds tokenizer.json
    max_text_bytes  longest text that is encoded; None: BYTES_PER_TOKEN per token of the context
    added_tokens    id -> text of the tokens outside the vocabulary proper, which are matched in a
                    text before anything else
    special_ids     the added tokens that `skip_special_tokens` leaves out of the text

    Raises ValueError if the card's bytes are not a tokenizer.
    """

    def __init__(self, card: ModelCard, *, max_text_bytes: int | None = None) -> None:
        self._inner = _load(card.tokenizer)
        self.context_tokens = card.context_tokens
        self.eos_token_ids = frozenset(card.eos_token_ids)
        self.max_text_bytes = max_text_bytes or BYTES_PER_TOKEN * card.context_tokens
        added = self._inner.get_added_tokens_decoder()
        self.added_tokens = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.codec = _codec_of(self._inner)
        self._tables = self._make_tables(self.codec) if self.codec else None
        self._vocab_size = card.vocab_size

    def _make_tables(self, codec: ByteCodec) -> dict[bool, TokenTable]:
        """Return skip_special_tokens -> table."""
        spelling = self._inner.id_to_token
        return {
            False: TokenTable(codec, spelling, frozenset()),
            True: TokenTable(codec, spelling, self.special_ids),
        }

    def encode(
        self,
        text: str,
        add_special_tokens: bool,
        *,
        offload: Offload | None = None,
        param: str = "prompt",
    ) -> list[int]:
        """Return the token ids of a text. Raise ContextTooLong or InvalidRequest, naming
        `param`.
        """
        num_bytes = _num_bytes(text, param)
        if num_bytes > self.max_text_bytes:
            raise ContextTooLong(
                f"{param} is {num_bytes:,} bytes long; this model takes "
                f"{self.context_tokens:,} tokens, and texts of more than "
                f"{self.max_text_bytes:,} bytes are rejected",
                param=param,
            )
        try:
            if offload is None or num_bytes < INLINE_BYTES:
                ids = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                ids = offload(lambda: self._encode_long(text, add_special_tokens))
        except BaseException as error:  # foreign code: see `_is_failure`
            if not _is_failure(error):
                raise
            raise InvalidRequest(
                f"{param}: the model's tokenizer cannot encode this text: {error}", param=param
            ) from None
        self._check_ids(ids, param)
        return ids

    def _check_ids(self, ids: list[int], param: str) -> None:
        """Raise InvalidRequest for a token that the tokenizer has and the model does not."""
        worst = max(ids, default=0)
        if worst >= self._vocab_size:
            raise InvalidRequest(
                f"{param}: the text {self._inner.id_to_token(worst)!r} is token {worst}, which "
                f"this model's vocabulary of {self._vocab_size:,} tokens does not have",
                param=param,
            )

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        encoded = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all ids at once, through `tokenizers`: the slow reference of
        `detokenizer`.

        Unknown ids have no text.
        """
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        state: DetokenizerState | None = None,
    ) -> Detokenizer:
        """Return a detokenizer for one choice: a fresh one, or one that continues from `state`.

        If `continues`, the ids follow other text, so the blank before a first word is kept.
        """
        if self._tables is not None:
            table = self._tables[skip_special_tokens]
            if isinstance(state, ByteState):
                return ByteDetokenizer.from_state(table, state)
            return ByteDetokenizer(table, continues=continues)

        def decode(ids: Sequence[int]) -> str:
            return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

        if isinstance(state, WindowState):
            return WindowDetokenizer.from_state(decode, state)
        return WindowDetokenizer(decode)

    def token_piece(self, token_id: int) -> str:
        """Return the vocabulary's own spelling of a token ("Ġworld"); "" for an unknown id."""
        return self._inner.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that this token adds inside a text; an unknown id adds none."""
        if self._tables is not None:
            return self._tables[False][token_id]
        return self._inner.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD for bytes that are not whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling in the vocabulary. Parsers call it once, when
        made.
        """
        return self._inner.token_to_id(token)


def _load(data: bytes) -> tokenizers.Tokenizer:
    try:
        inner = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise ValueError(f"the model's tokenizer cannot be read: {error}") from error
    # Many a tokenizer.json says how its model was trained; this is before anyone shares it.
    inner.no_truncation()
    inner.no_padding()
    return inner


def _is_failure(error: BaseException) -> bool:
    """Return whether `tokenizers` has failed: it raises bare Exceptions, and panics, which are not
    Exceptions."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _codec_of(inner: tokenizers.Tokenizer) -> ByteCodec | None:
    if inner.decoder is None:
        return None
    state = cast(Any, inner.decoder).__getstate__()
    return codec_of(json.loads(state))


def _num_bytes(text: str, param: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{param} holds half of a surrogate pair, which is not a character", param=param
        ) from None
