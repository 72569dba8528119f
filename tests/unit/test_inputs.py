"""Inputs of models that encode: bounds of a request's text, and groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from gateway.text import inputs
from gateway.text.inputs import (
    GROUP_BYTES,
    FramedText,
    InputText,
    InputTokenizer,
    TokenizedInput,
    Truncation,
)
from gateway.text.tokenizer import text_bytes
from protocol.wire.errors import ContextTooLong, InvalidRequest
from tests.support.scripted_engine import byte_tokenizer

Work = Callable[[], list[TokenizedInput]]


class CountingTokenizer:
    """A tokenizer that records how many bytes each call encodes."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.inner = inner
        self.calls: list[int] = []

    def encode_batch_fast(self, texts: list[str | tuple[str, str]], **options: Any) -> Any:
        parts = [[text] if isinstance(text, str) else text for text in texts]
        self.calls.append(sum(text_bytes(part, "") for pair in parts for part in pair))
        return self.inner.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def pair_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = byte_tokenizer(["<s>"])
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", start)]
    )
    return tokenizer


def encoded(
    inner: Any, texts: list[InputText], limit: int | None = None, max_tokens: int = 1 << 20
) -> list[TokenizedInput]:
    tokenizer = InputTokenizer(inner, max_tokens, 1 << 20)
    names = [f"documents[{place}]" for place in range(len(texts))]
    truncation = None if limit is None else Truncation(limit)
    return tokenizer.encode(texts, names, truncation=truncation, offload=lambda work: work())


def test_a_long_query_of_many_documents_is_refused_before_it_is_encoded() -> None:
    inner = CountingTokenizer(pair_tokenizer())
    pairs: list[InputText] = [("q" * 60_000, "d")] * 4096
    for limit in (None, 9):
        with pytest.raises(ContextTooLong, match="once for each of its documents") as refused:
            encoded(inner, pairs, limit)
        assert refused.value.param == "documents[4095]"
    assert inner.calls == []


@pytest.mark.parametrize("limit", [None, 40])
def test_inputs_that_are_encoded_in_groups_equal_those_encoded_one_by_one(
    limit: int | None,
) -> None:
    inner = CountingTokenizer(pair_tokenizer())
    sizes = [1, GROUP_BYTES - 1, 1, GROUP_BYTES + 9, 2, 3, GROUP_BYTES // 2, GROUP_BYTES // 2, 7]
    texts: list[InputText] = ["a" * size for size in sizes]
    texts += [("q" * 90, "d" * size) for size in (1, 50, GROUP_BYTES)]
    together = encoded(inner, texts, limit)
    assert len(inner.calls) > 4
    assert max(inner.calls) <= GROUP_BYTES + 90
    assert together == [encoded(pair_tokenizer(), [text], limit)[0] for text in texts]


def test_the_first_input_that_is_too_long_ends_the_work() -> None:
    inner = CountingTokenizer(pair_tokenizer())
    texts: list[InputText] = ["ok", *["a" * GROUP_BYTES] * 20]
    with pytest.raises(ContextTooLong) as refused:
        encoded(inner, texts, max_tokens=100)
    assert refused.value.param == "documents[1]"
    assert len(inner.calls) == 2


def test_the_tokens_of_a_request_are_counted_while_they_are_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inputs, "MAX_REQUEST_TOKENS", 2 * GROUP_BYTES)
    inner = CountingTokenizer(pair_tokenizer())
    texts: list[InputText] = ["a" * GROUP_BYTES] * 9
    with pytest.raises(ContextTooLong) as refused:
        encoded(inner, texts)
    assert refused.value.param == "documents[1]"
    assert len(inner.calls) == 2


@pytest.mark.parametrize(("limit", "has_room"), [(7, False), (8, False), (9, True), (11, True)])
def test_a_framed_text_keeps_some_text_after_what_it_must_reach(limit: int, has_room: bool) -> None:
    tokenizer = InputTokenizer(byte_tokenizer(), 1 << 20, 1 << 20)
    text = FramedText("<<", "queryéa", ">", must_reach=5)  # the é has two tokens
    truncation = Truncation(limit, "max_tokens_per_doc")

    def encode() -> list[TokenizedInput]:
        return tokenizer.encode(
            [text], ["documents[0]"], truncation=truncation, offload=lambda work: work()
        )

    if has_room:
        (found,) = encode()
        assert found.ids == [*"<<queryéa".encode()[: limit - 1], ord(">")]
    else:
        with pytest.raises(
            InvalidRequest, match="leave no room beside the model's prompt"
        ) as refused:
            encode()
        assert refused.value.param == "max_tokens_per_doc"
