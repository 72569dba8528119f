"""The model's tokenizer. It is made once from the model card and shared by all greenlets.

The tokenizer is immutable. In particular truncation and padding are never set, because changing a
shared tokenizer while it is used silently yields wrong ids. Encoding a long text is slow, so the
caller may run it in a thread (`offload`). The thread calls `encode_batch_fast`, which releases the
GIL. `encode` does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, cast

import tokenizers

from gateway.text.breakers import FIELD, MAX_CACHED, TokenIndex, find_breakers
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
from protocol.engine.model_card import ModelCard
from protocol.engine.sampling import DryBreaker
from protocol.wire.errors import ContextExcess, ContextTooLong, InvalidRequest, ServingError

Offload = Callable[[Callable[[], list[int]]], list[int]]
"""Runs a function elsewhere, such as in a thread pool, and returns its result."""

INLINE_BYTES = 8_000
"""Texts with fewer bytes are not encoded in a thread. Encoding them takes less than 2 ms."""
USUAL_BYTES_PER_TOKEN = 4
"""Bytes per token of ordinary text, by which the tokens of a text that is not encoded are
estimated."""
BYTES_PER_TOKEN = 8 * USUAL_BYTES_PER_TOKEN
"""Maximum length of a text in bytes, for each token of the model's context. Longer texts are
refused before they are encoded, because encoding a megabyte of the worst input takes more than half
a second."""
MAX_SPELLINGS = 1 << 14
"""Maximum number of tokens whose `spelling` is cached: about 6 MB."""


class Tokenizer:
    """The model's tokenizer, and facts about its tokens.

    card            the model card, which contains tokenizer.json
    max_text_bytes  longest text that is encoded; None: BYTES_PER_TOKEN for each token of the
                    context

    The constructor raises ValueError if the card has no valid tokenizer.json.
    """

    def __init__(self, card: ModelCard, *, max_text_bytes: int | None = None) -> None:
        self._inner = _load(card.tokenizer)
        self.context_tokens = card.context_tokens
        self.eos_token_ids = frozenset(card.eos_token_ids)
        self.max_text_bytes = max_text_bytes or BYTES_PER_TOKEN * card.context_tokens
        added = self._inner.get_added_tokens_decoder()
        #: Id -> text of each added token. These are searched for in a text before the rest of the
        #: text is tokenized.
        self.added_tokens = {i: token.content for i, token in added.items()}
        #: Ids of the added tokens that have no text if `skip_special_tokens` is set.
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        #: The decoder, if it converts each token to bytes independently; otherwise None.
        self.codec = _codec_of(self._inner)
        self._tables = self._make_tables(self.codec) if self.codec else None
        self._vocab_size = card.vocab_size
        #: Return a token's `token_text` and its `token_bytes` as a list. The list is cached, so it
        #: must not be changed.
        self.spelling = lru_cache(MAX_SPELLINGS)(self._spelling)
        #: Return the sequence breakers of DRY for a tuple of texts (gateway/text/breakers.py). The
        #: sequence is cached, so it must not be changed.
        self.breakers = lru_cache(MAX_CACHED)(self._breakers)

    def _make_tables(self, codec: ByteCodec) -> dict[bool, TokenTable]:
        """Return the table for each value of `skip_special_tokens`."""
        spelling = self._inner.id_to_token
        return {
            False: TokenTable(codec, spelling, frozenset()),
            True: TokenTable(codec, spelling, self.special_ids),
        }

    @property
    def inner(self) -> tokenizers.Tokenizer:
        """The tokenizer of the library. It is shared, and must not be changed."""
        return self._inner

    def encode(
        self,
        text: str,
        add_special_tokens: bool,
        *,
        offload: Offload | None = None,
        param: str = "prompt",
    ) -> list[int]:
        """Return the token ids of a text.

        offload  runs the encoding of a long text in a thread; None: encode in this thread
        param    the request's field, for errors

        Raises ContextTooLong if the text is too long. Raises InvalidRequest if the tokenizer cannot
        encode it, or if the model does not have one of the tokens.
        """
        num_bytes = self.check_length(text, param)
        with library_failures(param):
            if offload is None or num_bytes < INLINE_BYTES:
                ids = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                ids = offload(lambda: self._encode_long(text, add_special_tokens))
        self._check_ids(ids, param)
        return ids

    def encode_pieces(
        self, pieces: Sequence[str], *, offload: Offload | None = None, param: str = "prompt"
    ) -> list[list[int]]:
        """Return the token ids of each piece of a text, encoded on its own and without special
        tokens at its ends. Raises the errors of `encode` about the whole text."""
        num_bytes = self.check_length("".join(pieces), param)
        found: list[list[int]] = []

        def encode() -> list[int]:
            found.extend(
                each.ids
                for each in self._inner.encode_batch_fast([*pieces], add_special_tokens=False)
            )
            return []

        with library_failures(param):
            if offload is None or num_bytes < INLINE_BYTES:
                encode()
            else:
                offload(encode)
        for ids in found:
            self._check_ids(ids, param)
        return found

    def check_length(self, text: str, param: str) -> int:
        """Return the length of a text in bytes. Raises ContextTooLong if it is too long."""
        num_bytes = text_bytes(text, param)
        if num_bytes > self.max_text_bytes:
            raise text_too_long(
                param, num_bytes, self.context_tokens, self.max_text_bytes, what="your prompt"
            )
        return num_bytes

    def _check_ids(self, ids: list[int], param: str) -> None:
        """Raise InvalidRequest if the tokenizer returned an id that the model does not have."""
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
        """Return the text of `ids`, decoded all at once by the library `tokenizers`.

        This is the slow reference for `detokenizer`. Unknown ids have no text.
        """
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        state: DetokenizerState | None = None,
    ) -> Detokenizer:
        """Return a detokenizer for one choice.

        continues  the ids follow other text, so the blank before a first word is kept
        state      the state of another detokenizer, from which this one continues; None: a new one
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
        return WindowDetokenizer(decode, self._any_word if continues else ())

    @cached_property
    def _any_word(self) -> Sequence[int]:
        """The id of the first token that is a word, which stands for the text before an answer; no
        id if no token is a word."""
        decode = self._inner.decode
        words = (
            i for i in range(self._vocab_size) if decode([i]).isalpha() and " " in decode([i, i])
        )
        return [*islice(words, 1)]

    def token_piece(self, token_id: int) -> str:
        """Return a token's string in the vocabulary, such as "Ġworld"; "" for an unknown id."""
        return self._inner.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; an unknown id adds none.

        At the start of a text, the first token may have other bytes.
        """
        if self._tables is not None:
            return self._tables[False][token_id]
        return self._inner.decode([token_id], skip_special_tokens=False).encode()

    def _breakers(self, texts: tuple[str, ...]) -> Sequence[DryBreaker]:
        for place, text in enumerate(texts):
            text_bytes(text, f"{FIELD}[{place}]")
        return find_breakers(
            texts, self._token_index, lambda text: self.encode(text, False, param=FIELD)
        )

    @cached_property
    def _token_index(self) -> TokenIndex:
        """The index of all tokens: about 20 MB for a vocabulary of 150,000 tokens."""
        return TokenIndex(map(self.token_bytes, range(self._vocab_size)))

    def _spelling(self, token_id: int) -> tuple[str, list[int]]:
        data = self.token_bytes(token_id)
        return data.decode("utf-8", "replace"), list(data)

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD for bytes that are not whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this string in the vocabulary; None if there is none."""
        return self._inner.token_to_id(token)


def _load(data: bytes) -> tokenizers.Tokenizer:
    """Return the tokenizer in a tokenizer.json, without truncation and padding.

    Many files set both, because they were used in training. Raises ValueError.
    """
    try:
        inner = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise ValueError(f"the model's tokenizer cannot be read: {error}") from error
    inner.no_truncation()
    inner.no_padding()
    return inner


@contextmanager
def library_failures(param: str) -> Iterator[None]:
    """Raise InvalidRequest, naming the field, if the library `tokenizers` fails inside the
    block."""
    try:
        yield
    except BaseException as error:  # foreign code: see `_is_failure`
        if isinstance(error, ServingError) or not _is_failure(error):
            raise
        raise InvalidRequest(
            f"{param}: the model's tokenizer cannot encode this text: {error}", param=param
        ) from None


def _is_failure(error: BaseException) -> bool:
    """Return whether an exception is a failure of the library `tokenizers`.

    The library raises bare Exceptions. It also raises panics, which are not derived from Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _codec_of(inner: tokenizers.Tokenizer) -> ByteCodec | None:
    """Return the codec for the tokenizer's decoder; None if it has no decoder or no codec."""
    if inner.decoder is None:
        return None
    state = cast(Any, inner.decoder).__getstate__()
    return codec_of(json.loads(state))


def text_too_long(
    param: str, num_bytes: int, max_tokens: int, max_bytes: int, *, what: str
) -> ContextTooLong:
    """Return the error of a text that is too long to be tokenized. Its tokens are estimated.

    max_tokens  most tokens of a text
    max_bytes   most bytes of a text that is tokenized
    what        the text, in words
    """
    tokens = max(num_bytes // USUAL_BYTES_PER_TOKEN, max_tokens + 1)
    excess = ContextExcess(num_tokens=tokens, max_tokens=max_tokens, is_estimate=True)
    note = f"{param} is {num_bytes:,} bytes long; more than {max_bytes:,} bytes are not tokenized"
    return ContextTooLong.of(excess, param, what=what, note=note)


def text_bytes(text: str, param: str) -> int:
    """Return the length of a text in UTF-8. Raises InvalidRequest for half a surrogate pair."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{param}: holds half of a surrogate pair, which is not a character", param=param
        ) from None
