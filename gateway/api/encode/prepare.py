"""Converts the body of a request that encodes to inputs for the engine, and the engine's
results to numbers."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from operator import mul
from typing import Any, TypeVar, cast

import gevent
import msgspec

from gateway.api.encode.requests import EncodeFields, EncodingFormat
from gateway.generation.request import PromptRequest
from gateway.generation.vectors import VectorParser
from gateway.served_model import ServedModel
from gateway.text.inputs import (
    TRUNCATE_FIELD,
    FramedText,
    InputText,
    InputTokenizer,
    OffloadBatch,
    TokenizedInput,
    Truncation,
    too_long,
)
from protocol.engine.encoding import (
    MAX_INPUTS,
    MAX_REQUEST_TOKENS,
    EncodeInputs,
    EncodingCard,
    PairPrompt,
)
from protocol.engine.sampling import SamplingParams, check_token_ids
from protocol.wire.arrays import Float32, Int32
from protocol.wire.errors import ContextTooLong, InvalidRequest

QUERY_PROMPTS, DOCUMENT_PROMPTS = (
    ("query", "search_query"),
    ("document", "passage", "search_document"),
)
"""Usual names of the prompts of a query, and of those of the texts that are searched."""
TURN_NUMBERS = 1 << 15
"""Quantity of numbers of vectors that are handled before other greenlets run. A response can have
millions, which take about a second."""
_PLACE = re.compile(r"\{(instruction|query|document)\}")
T = TypeVar("T")


class EncodePreparation:
    """Prepares the inputs of one body. Raises InvalidRequest or ContextTooLong, naming the field.

    offload  runs the tokenization of long texts in a thread
    """

    def __init__(self, body: EncodeFields, model: ServedModel, offload: OffloadBatch) -> None:
        encoding = model.card.encoding
        assert encoding is not None  # `check_ability` has refused other models
        self.encoding: EncodingCard = encoding
        self._model = model
        self._offload = offload
        self.max_tokens = min(encoding.max_tokens, model.limits.max_len)
        self._tokenizer = InputTokenizer(
            model.tokenizer.inner, self.max_tokens, model.tokenizer.max_text_bytes
        )
        self._truncation = self._read_truncation(body.truncate_prompt_tokens)

    def _read_truncation(self, wanted: int | None) -> Truncation | None:
        """Return how inputs are truncated; None: they are not."""
        if wanted is None:
            return None
        if wanted == 0:
            raise InvalidRequest.wrong(TRUNCATE_FIELD, "at least 1, or -1", wanted)
        if wanted > self.max_tokens:
            raise InvalidRequest.at(
                TRUNCATE_FIELD,
                f"{wanted:,} exceeds the {self.max_tokens:,} tokens that this model takes",
            )
        return Truncation(self.max_tokens if wanted == -1 else wanted)

    def truncate(self, wanted: int | None, field: str) -> None:
        """Truncate to `wanted` tokens, or to the model's limit if that is lower; None changes
        nothing. `field` is the name of the request's field."""
        if wanted is not None:
            self._truncation = Truncation(min(wanted, self.max_tokens), field)

    def texts(
        self,
        texts: Sequence[InputText],
        params: Sequence[str],
        *,
        adds_special: bool = True,
    ) -> PromptRequest:
        """Return the request that encodes texts, or pairs of them. `params` are their names."""
        return self._request(
            self._tokenizer.encode(
                texts,
                params,
                truncation=self._truncation,
                adds_special=adds_special,
                offload=self._offload,
            )
        )

    def pairs(
        self, pairs: Sequence[tuple[str, str]], params: Sequence[str], instruction: str | None
    ) -> PromptRequest:
        """Return the request that scores pairs of a query and a document. The model must be one
        that scores. `params` are the names of the pairs in errors."""
        prompt = self.encoding.pair_prompt
        if prompt is None:
            return self.texts(pairs, params)
        chosen = prompt.instruction if instruction is None else instruction
        framed = [framed_pair(prompt, *pair, chosen) for pair in pairs]
        return self.texts(framed, params, adds_special=False)

    def check_instruction(self, given: str | None, param: str) -> None:
        """Raise InvalidRequest if a request has an instruction and the model takes none."""
        prompt = self.encoding.pair_prompt
        if given is not None and (prompt is None or not prompt.instruction):
            raise InvalidRequest.at(param, "this model takes no instruction")

    def ids(self, inputs: Sequence[list[int]], params: Sequence[str]) -> PromptRequest:
        """Return the request that encodes lists of token ids."""
        found = []
        for ids, param in zip(inputs, params, strict=True):
            if not ids:
                raise InvalidRequest.wrong(param, "a list of at least 1 token id", ids)
            check_token_ids(ids, self._model.card.vocab_size, param)
            kept = ids if self._truncation is None else ids[: self._truncation.tokens]
            if len(kept) > self.max_tokens:
                raise too_long(param, len(kept), self.max_tokens)
            found.append(TokenizedInput.from_ids(kept))
        return self._request(found)

    def prompt(self, name: str | None) -> str:
        """Return the text of a prompt; "" if `name` is None and the model has no default one."""
        prompts = self.encoding.prompts
        chosen = self.encoding.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in prompts:
            known = ", ".join(map(repr, prompts)) or "none"
            raise InvalidRequest.at(
                "prompt_name", f"this model has no prompt {chosen!r}; it has: {known}"
            )
        return prompts[chosen]

    def usual_prompt(self, names: Sequence[str]) -> str:
        """Return the text of the first of these prompts that the model has; the default prompt if
        it has none of them."""
        name = next((name for name in names if name in self.encoding.prompts), None)
        return self.prompt(name)

    def _request(self, found: list[TokenizedInput]) -> PromptRequest:
        tokens = [token for each in found for token in each.ids]
        if len(tokens) > MAX_REQUEST_TOKENS:
            raise ContextTooLong(
                f"input: {len(tokens):,} tokens; a request can have at most {MAX_REQUEST_TOKENS:,}",
                param="input",
            )
        has_types = any(each.split < len(each.ids) for each in found)
        inputs = EncodeInputs(
            tokens=Int32.of(tokens),
            lengths=Int32.of([len(each.ids) for each in found]),
            splits=Int32.of([each.split for each in found]) if has_types else None,
        )
        params = SamplingParams(max_tokens=0)
        return PromptRequest(tokens, [params], VectorParser(), encode=inputs)


def framed_pair(prompt: PairPrompt, query: str, document: str, instruction: str) -> FramedText:
    """Return the text that a pair becomes. A client may already have written the model's prompt
    around its texts, as other servers require; then the two texts are only joined."""
    prefix, suffix = prompt.prefix, prompt.suffix
    is_framed = prefix and suffix and query.startswith(prefix) and document.endswith(suffix)
    if is_framed:
        body = query[len(prefix) :] + document[: len(document) - len(suffix)]
        return FramedText(prefix, body, suffix)
    values = {"instruction": instruction, "query": query, "document": document}
    before, place, after = prompt.body.partition("{document}")
    start, end = (
        _PLACE.sub(lambda found: values[found[1]], part) for part in (before, place + after)
    )
    return FramedText(prefix, start + end, suffix, must_reach=len(start))


def read_input(value: Any) -> tuple[list[str], None] | tuple[None, list[list[int]]]:
    """Return the texts or the token ids of `input`. Raises InvalidRequest, naming the item, if it
    has another shape, or too many items."""
    if isinstance(value, str):
        return [value], None
    if not isinstance(value, list) or not value:
        raise InvalidRequest.wrong("input", "a string, or a list that is not empty", value)
    if type(value[0]) is int:
        return None, [_ids(value, "input")]
    check_count(value, "input")
    if isinstance(value[0], str):
        return read_texts(value, "input"), None
    return None, [_ids(item, f"input[{place}]") for place, item in enumerate(value)]


def _ids(value: Any, param: str) -> list[int]:
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise InvalidRequest.wrong(
            param, "a string or a list of token ids, as the first item is", value
        )
    return value


def check_count(items: Sequence[Any], param: str) -> None:
    """Raise InvalidRequest if a request has more than MAX_INPUTS inputs."""
    if len(items) > MAX_INPUTS:
        raise InvalidRequest.at(
            param, f"{len(items):,} items; a request can have at most {MAX_INPUTS:,}"
        )


def read_texts(value: Any, param: str) -> list[str]:
    """Return a text, or a list of texts, as a list. Raises InvalidRequest naming the item."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequest.wrong(param, "a string, or a list of strings that is not empty", value)
    check_count(value, param)
    for place, item in enumerate(value):
        if not isinstance(item, str):
            raise InvalidRequest.wrong(f"{param}[{place}]", "a string", item)
    return value


def read_documents(value: Any) -> list[str]:
    """Return the texts of `documents`. Raises InvalidRequest naming the item."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest.wrong("documents", "a list that is not empty", value)
    check_count(value, "documents")
    texts = []
    for place, item in enumerate(value):
        at = f"documents[{place}]"
        if isinstance(item, dict):
            text, at, words = item.get("text"), f"{at}.text", "a string"
        else:
            text, words = item, "a string, or an object with the member text"
        if not isinstance(text, str):
            raise InvalidRequest.wrong(at, words, text)
        texts.append(text)
    return texts


# ---- results


def rows_of(vectors: Float32) -> list[memoryview]:
    """Return the bytes of each row."""
    width = vectors.shape[1] * Float32.itemsize
    return [vectors.data[place * width : (place + 1) * width] for place in range(len(vectors))]


def in_turns(items: Iterable[T], width: int) -> Iterator[T]:
    """Yield the items. Other greenlets run after each TURN_NUMBERS numbers.

    width  quantity of numbers in an item
    """
    num_done = 0
    for item in items:
        yield item
        num_done += width
        if num_done >= TURN_NUMBERS:
            num_done = 0
            gevent.sleep(0)


def written_in_turns(items: Iterable[T], width: int) -> list[T]:
    """Return the items for a field of a response. They are made and encoded as JSON one by one, and
    other greenlets run meanwhile, as with `in_turns`."""
    # The encoder copies a `Raw` into the response as it is.
    written = [msgspec.Raw(msgspec.json.encode(item)) for item in in_turns(items, width)]
    return cast(list[T], written)


def numbers_of(row: memoryview) -> list[float]:
    numbers: list[Any] = row.cast("f").tolist()
    return numbers


def encoded_vector(
    row: memoryview, encoding_format: EncodingFormat | None, dimensions: int | None
) -> list[float] | str:
    """Return a vector as it is in the response."""
    if dimensions is not None:
        kept = unit(numbers_of(row)[:dimensions])
        row = memoryview(Float32.of(kept).data).cast("B")
    if encoding_format == "base64":
        return b64encode(row).decode()
    return numbers_of(row)


def unit(vector: list[float]) -> list[float]:
    """Return the vector, scaled to length 1; a vector of zeros stays as it is."""
    length = math.sqrt(sum(map(mul, vector, vector)))
    return [number / length for number in vector] if length else vector


def similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the inner product of two vectors."""
    return float(sum(map(mul, one, other)))
