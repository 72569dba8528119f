"""Token ids to text, one delta at a time, in linear time.

However the ids are cut, the joined deltas equal the text of all ids decoded at once, and no delta
ends inside a character. Bytes that can still become a character wait. Bytes that no longer can, or
that are left at the end, become U+FFFD. Each choice has one detokenizer; its state is plain data.

`ByteDetokenizer` joins bytes from a table. `WindowDetokenizer` serves tokenizers without a
`ByteCodec`: it decodes a short window of ids through `tokenizers` and emits the text that the
newest ids added.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from gateway.text.codec import ByteCodec

Decode = Callable[[Sequence[int]], str]

MAX_WINDOW_TOKENS = 16
"""A character takes at most four bytes, so fewer tokens. A character unfinished after these
stays broken.
"""


class ByteState(msgspec.Struct, frozen=True, tag="bytes"):
    """State of a `ByteDetokenizer`.

    pending     bytes of an unfinished character
    started     a first token has been read
    strip_left  blanks that may still be stripped from the start of the text
    """

    pending: bytes
    started: bool
    strip_left: int


class WindowState(msgspec.Struct, frozen=True, tag="window"):
    """State of a `WindowDetokenizer`: `context` tokens whose text is out, then tokens whose text
    may change.
    """

    ids: list[int]
    context: int


DetokenizerState = ByteState | WindowState


class Detokenizer(Protocol):
    def push(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` complete."""

    def finish(self) -> str:
        """Return the remaining bytes as U+FFFD: no more tokens follow."""

    def state(self) -> DetokenizerState: ...


class TokenTable(dict[int, bytes]):
    """Token id -> bytes, computed on first use. Shared by all choices, because it only caches.

    spelling  returns the token's string in the vocabulary, or None if the id has no text
    """

    def __init__(
        self, codec: ByteCodec, spelling: Callable[[int], str | None], dropped: frozenset[int]
    ) -> None:
        super().__init__()
        self.codec = codec
        self._spelling = spelling
        self._dropped = dropped

    def spelling(self, token_id: int) -> str | None:
        return None if token_id in self._dropped else self._spelling(token_id)

    def __missing__(self, token_id: int) -> bytes:
        text = self.spelling(token_id)
        if text is None:
            return b""  # not kept: a caller may name any number of ids that do not exist
        self[token_id] = data = self.codec.token(text)
        return data


class ByteDetokenizer:
    """Joins bytes from a table.

    If `continues`, the ids follow other text, so the rules for the start of a text (a leading blank
    is stripped) do not apply.
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
        """Decode like the fast path, with the rules for the first token that has text."""
        for i, token_id in enumerate(ids):
            text = self._table.spelling(token_id)
            if text is not None:
                self._started = True
                rest = map(self._bytes_of, ids[i + 1 :])
                return self._table.codec.first_token(text) + b"".join(rest)
        return b""

    def _stripped(self, text: str) -> str:
        start, blank = 0, self._table.codec.strip
        while start < len(text) and self._strip_left and text[start] == blank:
            start += 1
            self._strip_left -= 1
        if start < len(text):
            self._strip_left = 0
        return text[start:]


class WindowDetokenizer:
    """Decodes `context + new` ids and the context alone; the difference is the new text.

    decode  all ids -> text through `tokenizers`, with special tokens kept or skipped as configured
    """

    __slots__ = ("_context", "_decode", "_ids")

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0

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
        self._ids.append(token_id)
        text = self._new_text()
        if not text or (
            text[-1] == "\ufffd" and len(self._ids) - self._context < MAX_WINDOW_TOKENS
        ):
            if not text:  # a dropped token: it must not become the context
                self._ids.pop()
            return ""
        self._forget()
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._context = len(self._ids)
        return text

    def _new_text(self) -> str:
        """Return the text of the new ids. One token of context suffices for all blank rules in
        use.
        """
        before = self._decode(self._ids[: self._context])
        return self._decode(self._ids)[len(before) :]

    def _forget(self) -> None:
        """Keep only the context: all text so far is out."""
        self._ids = self._ids[self._context :]
        self._context = len(self._ids)
