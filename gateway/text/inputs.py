"""Tokenizes texts and pairs of texts for models that encode.

The inputs of a request are encoded in groups, in a thread if they are long. An input that is too
long is an error, or is truncated: the text is shortened, and the special tokens around it stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import tokenizers

from gateway.text.tokenizer import INLINE_BYTES, library_failures, text_bytes, text_too_long
from protocol.engine.encoding import MAX_REQUEST_TOKENS
from protocol.wire.errors import ContextExcess, ContextTooLong, InvalidRequest

TRUNCATE_FIELD = "truncate_prompt_tokens"


@dataclass(frozen=True, slots=True)
class FramedText:
    """A text between two others, which are kept if the text is truncated.

    must_reach  some text after this many characters of the body must be kept, too
    """

    prefix: str
    body: str
    suffix: str
    must_reach: int = 0

    @property
    def parts(self) -> tuple[str, str, str]:
        return self.prefix, self.body, self.suffix


@dataclass(frozen=True, slots=True)
class Truncation:
    """The number of tokens to which inputs are truncated, and the field of the request that says
    so."""

    tokens: int
    field: str = TRUNCATE_FIELD


InputText = str | tuple[str, str] | FramedText
"""A text, a pair of texts, or a framed text."""
OffloadBatch = Callable[[Callable[[], "list[TokenizedInput]"]], "list[TokenizedInput]"]
"""Runs a function elsewhere, such as in a thread pool, and returns its result."""
TRUNCATES = f"{TRUNCATE_FIELD}: -1"
"""The remedy that an error of a long input names."""
MIN_TEXT_BYTES = 1 << 16
"""A text of up to this size is encoded even if it must be too long, so that it can be truncated."""

MAX_REQUEST_BYTES = 1 << 25
"""Most bytes of all texts of a request. The first text of a pair counts in each of its pairs, so a
short request with a long query and many documents is much more text than its body."""
GROUP_BYTES = 1 << 18
"""Size of the texts that are encoded in one call. The library's result of a text is about a hundred
times as large as the text, so results of many long texts are not held at the same time."""


@dataclass(frozen=True, slots=True)
class TokenizedInput:
    """The tokens of one input. `split` is the number of leading tokens of type 0; the others have
    type 1."""

    ids: list[int]
    split: int

    @classmethod
    def from_ids(cls, ids: list[int]) -> TokenizedInput:
        return cls(ids, len(ids))


@dataclass(frozen=True, slots=True)
class InputTokenizer:
    """Tokenizes the inputs of models that encode.

    inner           the model's tokenizer, which is shared and never changed
    max_tokens      most tokens of an input
    max_text_bytes  longest text that is encoded
    """

    inner: tokenizers.Tokenizer
    max_tokens: int
    max_text_bytes: int

    def encode(
        self,
        texts: Sequence[InputText],
        params: Sequence[str],
        *,
        truncation: Truncation | None = None,
        adds_special: bool = True,
        offload: OffloadBatch,
    ) -> list[TokenizedInput]:
        """Return the tokens of the inputs.

        params        name of each input, for errors
        truncation    how inputs are truncated; None: longer ones than the model takes are errors
        adds_special  add the model's special tokens
        offload       runs the work in a thread if the texts are long

        Raises ContextTooLong or InvalidRequest, naming the input.
        """
        sizes = [self._size(text, param) for text, param in zip(texts, params, strict=True)]
        if (total := sum(sizes)) > MAX_REQUEST_BYTES:
            raise ContextTooLong(
                f"{params[-1]}: the texts of this request are {total:,} bytes long, with a query "
                f"counted once for each of its documents; at most {MAX_REQUEST_BYTES:,} bytes are "
                "accepted",
                param=params[-1],
            )

        def work() -> list[TokenizedInput]:
            return self._encode(texts, params, sizes, truncation, adds_special=adds_special)

        return work() if total < INLINE_BYTES else offload(work)

    def _size(self, text: InputText, param: str) -> int:
        """Return the size of an input in bytes. Raises ContextTooLong if it is not encoded."""
        size = sum(text_bytes(part, param) for part in parts_of(text))
        most = max(self.max_text_bytes, MIN_TEXT_BYTES)
        if size > most:
            raise text_too_long(param, size, self.max_tokens, most, what=param)
        return size

    def _encode(
        self,
        texts: Sequence[InputText],
        params: Sequence[str],
        sizes: Sequence[int],
        truncation: Truncation | None,
        *,
        adds_special: bool,
    ) -> list[TokenizedInput]:
        most = self.max_tokens
        if truncation is not None:
            most = min(truncation.tokens, most)
        done: list[TokenizedInput] = []
        num_tokens = 0
        with library_failures(params[0]):
            for group in _groups(sizes):
                found = self.inner.encode_batch_fast(
                    [whole_text(text) for text in texts[group.start : group.stop]],
                    add_special_tokens=adds_special,
                )
                for index, whole in zip(group, found, strict=True):
                    kept, count = whole, len(whole.ids)
                    if count > most:
                        if truncation is None:
                            raise too_long(params[index], count, most)
                        to = replace(truncation, tokens=most)
                        kept = self._truncated(texts[index], to, adds_special=adds_special)
                    done.append(tokens_of(kept, params[index]))
                    num_tokens += len(done[-1].ids)
                    if num_tokens > MAX_REQUEST_TOKENS:
                        raise too_many_tokens(params[index])
        return done

    def _truncated(
        self, text: InputText, to: Truncation, *, adds_special: bool
    ) -> tokenizers.Encoding:
        """Return the encoding of an input, with at most `to.tokens` tokens, special tokens
        included. Of a pair, the longer text is shortened first."""
        if isinstance(text, FramedText):
            return self._truncated_body(text, to)
        num_special = 0
        if adds_special:
            num_special = self.inner.num_special_tokens_to_add(not isinstance(text, str))
        room = to.tokens - num_special
        if room < 1:
            raise InvalidRequest.at(
                to.field,
                f"{to.tokens} tokens leave no room for text beside {num_special} special tokens",
            )
        parts = [
            self.inner.encode(part, add_special_tokens=False)
            for part in ([text] if isinstance(text, str) else text)
        ]
        sizes = shortened([len(part.ids) for part in parts], room)
        for part, size in zip(parts, sizes, strict=True):
            part.truncate(size)
        pair = parts[1] if len(parts) > 1 else None
        return self.inner.post_process(parts[0], pair, adds_special)

    def _truncated_body(self, text: FramedText, to: Truncation) -> tokenizers.Encoding:
        prefix, body, suffix = (
            self.inner.encode(part, add_special_tokens=False) for part in text.parts
        )
        num_kept = len(prefix.ids) + len(suffix.ids)
        body.truncate(max(to.tokens - num_kept, 0))
        if not body.ids or body.offsets[-1][1] <= text.must_reach:
            beside = f"the {num_kept} tokens of the model's prompt"
            if text.must_reach:
                beside = "the model's prompt, the instruction and the query"
            raise InvalidRequest.at(to.field, f"{to.tokens} tokens leave no room beside {beside}")
        return tokenizers.Encoding.merge([prefix, body, suffix])


def parts_of(text: InputText) -> Sequence[str]:
    """Return the texts of which an input consists."""
    match text:
        case str():
            return [text]
        case FramedText():
            return text.parts
    return text


def whole_text(text: InputText) -> str | tuple[str, str]:
    """Join a FramedText into one string; return other inputs unchanged, because the tokenizer
    accepts them."""
    return "".join(text.parts) if isinstance(text, FramedText) else text


def _groups(sizes: Sequence[int]) -> Iterator[range]:
    """Yield the indices of inputs that are encoded in one call: as many as have GROUP_BYTES bytes
    in total, and at least one."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > GROUP_BYTES:
            yield range(start, index)
            start, total = index, 0
        total += size
    yield range(start, len(sizes))


def tokens_of(encoding: tokenizers.Encoding, param: str) -> TokenizedInput:
    """Return the tokens of an encoding. Raises InvalidRequest if there are none, or if their types
    are not a run of 0 and then a run of 1."""
    ids, types = encoding.ids, encoding.type_ids
    split = len(types) - sum(types)
    if not ids:
        raise InvalidRequest.at(param, "must not be empty")
    if any(types[:split]):
        raise InvalidRequest.at(param, "this model's tokenizer has other token types than 0 and 1")
    return TokenizedInput(ids, split)


def shortened(sizes: Sequence[int], room: int) -> list[int]:
    """Return sizes of one or two texts that add up to at most `room`. Of two, the longer one is
    lowered first, as `tokenizers` does with the strategy "longest first"."""
    if sum(sizes) <= room:
        return list(sizes)
    if len(sizes) == 1:
        return [room]
    short = min(sizes)
    if short <= room // 2:
        return [size if size == short else room - short for size in sizes]
    half = room // 2
    return [half, room - half] if sizes[0] <= sizes[1] else [room - half, half]


def too_many_tokens(param: str) -> ContextTooLong:
    """Return the error of a request whose inputs up to `param` have too many tokens."""
    return ContextTooLong(
        f"{param}: the inputs up to this one have more than {MAX_REQUEST_TOKENS:,} tokens, the "
        "most of one request",
        param=param,
    )


def too_long(param: str, count: int, limit: int) -> ContextTooLong:
    """Return the error of an input of `count` tokens."""
    excess = ContextExcess(num_tokens=count, max_tokens=limit)
    return ContextTooLong.of(excess, param, what=param, note=f"{TRUNCATES} shortens longer ones")
