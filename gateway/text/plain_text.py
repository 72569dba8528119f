"""Encodes text in which no control token may be recognised.

A tokenizer recognises its added tokens in any text. In a prompt that is put together from token ids
and from text of the user, such as the content of a file, that would let the text end a section of
the prompt. So the text is cut after the first character of each place where it spells a control
token, and the pieces are encoded one by one. Other text is encoded as usual.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from gateway.text.tokenizer import Offload, Tokenizer
from protocol.wire.errors import InvalidRequest

SPACE = "\u2581"
"""SentencePiece's visible replacement for a space."""
_ANCHOR = "\u263a"
"""A character that SentencePiece does not merge with its neighbours. Code Llama uses the same one
for this purpose."""
_CONTROL = re.compile(r"<\|.+\|>|<\uff5c.+\uff5c>", re.DOTALL)
"""Matches added tokens that are control tokens even if the tokenizer does not mark them as special:
those of Qwen and of DeepSeek."""

MAX_SPELLED_CHARS = 64
"""Text counts as a spelled token if this many of its characters, or all of them, match."""


class PlainTextEncoder:
    """Encodes text without control tokens.

    markers  ids of tokens that are control tokens in addition to those that the tokenizer marks
    """

    def __init__(self, tokenizer: Tokenizer, markers: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens
        self._control = frozenset(
            {*markers, *tokenizer.special_ids, *tokenizer.eos_token_ids}
            | {token_id for token_id, text in added.items() if _CONTROL.fullmatch(text)}
        )
        pieces = [tokenizer.token_piece(token_id) for token_id in self._control]
        pieces += [piece.replace(SPACE, " ") for piece in pieces]
        self._spellings = prefix_pattern({piece for piece in pieces if len(piece) > 1})
        self._anchor = self._anchor_ids()

    def _anchor_ids(self) -> list[int] | None:
        """Return the ids of `_ANCHOR` if the tokenizer adds a space before a text, otherwise
        None."""
        first = self._tokenizer.encode("a", False)[:1]
        if not first or not self._tokenizer.token_piece(first[0]).startswith(SPACE):
            return None
        return self._tokenizer.encode(_ANCHOR, False)

    def encode(
        self,
        text: str,
        *,
        continues: bool = False,
        offload: Offload | None = None,
        param: str = "prompt",
    ) -> list[int]:
        """Return the token ids of a text.

        continues  add no space before the text, whatever the tokenizer usually does
        offload    runs the encoding of a long text in a thread; None: encode in this thread
        param      the request's field, for errors

        Raises ContextTooLong if the text is too long. Raises InvalidRequest if it cannot be encoded
        without a control token.
        """
        self._tokenizer.check_length(text, param)  # cutting a text of megabytes takes seconds
        pieces = self._cut(text)
        anchored = [bool(self._anchor) and (continues or place > 0) for place in range(len(pieces))]
        encoded = self._tokenizer.encode_pieces(
            [_ANCHOR + p if has else p for p, has in zip(pieces, anchored, strict=True)],
            offload=offload,
            param=param,
        )
        ids: list[int] = []
        for part, has_anchor in zip(encoded, anchored, strict=True):
            ids += self._without_anchor(part) if has_anchor else part
        if not self._control.isdisjoint(ids):  # for example after a normalisation
            token_id = next(each for each in ids if each in self._control)
            raise InvalidRequest.at(
                param,
                "the tokenizer turns this text into the control token "
                f"{self._tokenizer.token_piece(token_id)!r}",
            )
        return ids

    def _cut(self, text: str) -> list[str]:
        """Return the pieces of a text, none of which spells a control token."""
        if self._spellings is None or not text:
            return [text] if text else []
        ends = [found.start() + 1 for found in self._spellings.finditer(text)]
        return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]

    def _without_anchor(self, ids: list[int]) -> list[int]:
        assert self._anchor is not None
        length = len(self._anchor)
        return ids[length:] if ids[:length] == self._anchor else ids


def prefix_pattern(texts: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches, with no width, every place at which one of `texts` starts;
    None if there are none.

    The texts form a tree of their common beginnings. So the time of a search does not grow with
    their number, as that of `a|b|...` does.
    """
    if not texts:
        return None
    tree: dict[str, Any] = {}
    for text in sorted((text[:MAX_SPELLED_CHARS] for text in texts), key=len):
        node = tree
        for letter in text[:-1]:
            node = node.setdefault(letter, {})
            if node is _LEAF:  # a shorter text is found at the same place
                break
        else:
            node[text[-1]] = _LEAF
    return re.compile(f"(?={_pattern(tree)})")


_LEAF: dict[str, Any] = {}


def _pattern(tree: dict[str, Any]) -> str:
    branches = [
        re.escape(letter) + (_pattern(below) if below is not _LEAF else "")
        for letter, below in tree.items()
    ]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
