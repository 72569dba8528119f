"""Converts token ids to text, one delta at a time, in linear time.

However the ids are cut into deltas, the joined texts equal the text of all ids decoded at once. The
bytes of an unfinished character are held back, so no text ends inside a character. Bytes that are
not UTF-8 become U+FFFD. An unfinished character at the end of the answer becomes U+FFFD, too.

Each choice has one detokenizer, whose state is plain data. `ByteDetokenizer` joins bytes from a
table. `WindowDetokenizer` is for tokenizers without a `ByteCodec`: it decodes the last few ids with
the library `tokenizers` and returns the text that the newest id has added.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from gateway.text.codec import ByteCodec

Decode = Callable[[Sequence[int]], str]

MAX_WINDOW_TOKENS = 16
"""A character that is not finished after this many tokens becomes U+FFFD. A character has at most
four bytes, so finishing one needs fewer tokens."""


class ByteState(msgspec.Struct, frozen=True, tag="bytes"):
    """The state of a `ByteDetokenizer`."""

    #: Bytes of an unfinished character.
    pending: bytes
    #: Whether the text has a first token already.
    started: bool
    #: Number of blanks that may still be stripped from the start of the text.
    strip_left: int


class WindowState(msgspec.Struct, frozen=True, tag="window"):
    """The state of a `WindowDetokenizer`."""

    #: The last token ids: first `context` ids whose text was returned, then ids whose text is not
    #: final.
    ids: list[int]
    #: Number of ids whose text was returned.
    context: int


DetokenizerState = ByteState | WindowState


class Detokenizer(Protocol):
    """Converts the token ids of one choice to text."""

    def push(self, ids: Sequence[int]) -> str:
        """Return the text of the characters that `ids` complete."""

    def finish(self) -> str:
        """Return the text that was held back, because no more tokens follow. The bytes of an
        unfinished character become U+FFFD."""

    def state(self) -> DetokenizerState:
        """Return the state, from which another detokenizer can continue."""


class TokenTable(dict[int, bytes]):
    """A cache of each token id's bytes, which are computed on first use. All choices share it.

    spelling  returns a token's string in the vocabulary; None if the id has no token
    dropped   ids of the tokens whose text is left out
    """

    def __init__(
        self, codec: ByteCodec, spelling: Callable[[int], str | None], dropped: frozenset[int]
    ) -> None:
        super().__init__()
        self.codec = codec
        self._spelling = spelling
        self._dropped = dropped

    def spelling(self, token_id: int) -> str | None:
        """Return the token's string in the vocabulary; None if the token has no text."""
        return None if token_id in self._dropped else self._spelling(token_id)

    def __missing__(self, token_id: int) -> bytes:
        text = self.spelling(token_id)
        if text is None:
            return b""  # not cached, so that many unknown ids cannot fill the memory
        self[token_id] = data = self.codec.token(text)
        return data


class ByteDetokenizer:
    """A `Detokenizer` that looks up the bytes of each token in a table, and joins them.

    continues  the ids follow other text, so the rules for the start of a text do not apply: no
               leading blanks are stripped
    """

    __slots__ = ("_bytes_of", "_pending", "_started", "_strip_left", "_table")

    def __init__(self, table: TokenTable, *, continues: bool = False) -> None:
        self._table = table
        self._bytes_of = table.__getitem__
        self._pending = b""
        self._started = continues
        self._strip_left = 0 if continues else table.codec.strip_max

    @classmethod
    def from_state(cls, table: TokenTable, state: ByteState) -> ByteDetokenizer:
        self = cls(table)
        self._pending, self._started, self._strip_left = msgspec.structs.astuple(state)
        return self

    def state(self) -> ByteState:
        return ByteState(self._pending, self._started, self._strip_left)

    def push(self, ids: Sequence[int]) -> str:
        data = b"".join(map(self._bytes_of, ids)) if self._started else self._start(ids)
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._stripped(text) if self._strip_left else text

    def finish(self) -> str:
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return self._stripped(text) if self._strip_left else text

    def _start(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of the first `ids` of a text. The first token that has text is decoded
        by the codec's rules for a first token."""
        for i, token_id in enumerate(ids):
            text = self._table.spelling(token_id)
            if text is not None:
                self._started = True
                rest = map(self._bytes_of, ids[i + 1 :])
                return self._table.codec.first_token(text) + b"".join(rest)
        return b""

    def _stripped(self, text: str) -> str:
        """Return `text` without the blanks that are stripped from the start of the whole text."""
        start, blank = 0, self._table.codec.strip
        while start < len(text) and self._strip_left and text[start] == blank:
            start += 1
            self._strip_left -= 1
        if start < len(text):
            self._strip_left = 0
        return text[start:]


class WindowDetokenizer:
    """A `Detokenizer` that decodes the last ids with and without the new ones. The difference is
    the new text.

    decode  returns the text of a list of ids, decoded at once by the library `tokenizers`
    before  ids of text that is not returned; the new ids follow it
    """

    __slots__ = ("_context", "_decode", "_ids")

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids: list[int] = [*before]
        self._context = len(before)

    @classmethod
    def from_state(cls, decode: Decode, state: WindowState) -> WindowDetokenizer:
        self = cls(decode)
        self._ids, self._context = list(state.ids), state.context
        return self

    def state(self) -> WindowState:
        return WindowState(list(self._ids), self._context)

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push(token_id) for token_id in ids])

    def _push(self, token_id: int) -> str:
        """Return the text that one more id adds; "" if its last character may be unfinished."""
        self._ids.append(token_id)
        text = self._new_text()
        if not text or (
            text[-1] == "\ufffd" and len(self._ids) - self._context < MAX_WINDOW_TOKENS
        ):
            if not text:  # a token without text must not become the context
                self._ids.pop()
            return ""
        self._forget()
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._context = len(self._ids)
        return text

    def _new_text(self) -> str:
        """Return the text that the new ids add to the text of the context.

        One token of context is enough: in the tokenizers in use, whether a token's blank is kept
        depends on no more than one token before it.
        """
        before = self._decode(self._ids[: self._context])
        return self._decode(self._ids)[len(before) :]

    def _forget(self) -> None:
        """Keep only the ids whose text was just returned, as the context for decoding later ids."""
        self._ids = self._ids[self._context :]
        self._context = len(self._ids)
