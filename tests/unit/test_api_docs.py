"""The pages of the APIs name every field of their requests, and what answers may say.
tests/e2e/test_docs_blocks.py runs the examples of the pages."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from gateway.api.anthropic.requests import CountBody
from gateway.api.anthropic.responses import ERROR_TYPES, StopReason
from gateway.api.encode.requests import (
    SIDES,
    EmbeddingsBody,
    EncodeFields,
    PoolingBody,
    RerankBody,
)
from gateway.api.infill.requests import InfillBody
from gateway.api.infill.responses import InfillAnswer, StopType
from gateway.api.llama_cpp.requests import LlamaCompletionBody
from gateway.api.llama_cpp.responses import LlamaCompletionAnswer
from gateway.api.ollama.requests import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaOptions,
)
from gateway.api.ollama.responses import AnswerLine, DoneReason
from gateway.api.openai.prepare import LEFT_OUT
from gateway.api.openai.requests import ChatBody, FormFields, SamplingFields
from gateway.api.tokens.requests import REFUSED, REFUSED_SAMPLING, GenerateBody, GenerateSampling
from gateway.app import operations
from gateway.formats.event_builder import INVALID_ARGUMENTS
from gateway.prompt.infill import INFILL_MARKERS
from tests.support.processes import ROOT
from worker.checkpoint.gguf_roles import INFILL_KEYS


def page(name: str) -> str:
    return (ROOT / "docs" / "use" / f"api-{name}.md").read_text()


def section(name: str, title: str) -> str:
    return page(name).split(f"## {title}\n")[1].split("\n## ")[0]


def words(text: str) -> set[str]:
    """Return the words in code type."""
    return set(re.findall(r"`(\w[\w ./-]*)`", text))


def rows(text: str) -> dict[str, set[str]]:
    """Return the words of the first column of each table, by the column's name."""
    found: dict[str, set[str]] = {}
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *cells = [re.split(r"(?<!\\)\|", line)[1].strip() for line in table.splitlines()]
        found[head] = words(" ".join(cells))
    return found


def first_words(text: str) -> set[str]:
    return set[str]().union(*rows(text).values())


def fields_of(*structs: type) -> set[str]:
    return {name for struct in structs for name in struct.__struct_fields__}  # type: ignore[attr-defined]


# ---- chats
def test_every_field_of_the_table_of_chats_exists() -> None:
    assert first_words(section("chat", "Additional fields")) <= fields_of(ChatBody)


# ---- the Messages API
RARE = {"chat_template", "include_stop_str_in_output", "output_format", "skip_special_tokens"}
"""Fields that the page omits because they are rarely useful. The OpenAPI document has them."""


def test_every_field_of_messages_is_named() -> None:
    fields = fields_of(CountBody) - RARE
    # docs/use/structured-output.md has the fields of forms, except for `structured_outputs`.
    elsewhere = fields_of(FormFields) - fields_of(SamplingFields) - {"structured_outputs"}
    assert fields - elsewhere <= words(page("messages"))
    assert first_words(section("messages", "The request")) <= fields


def test_what_messages_may_say_is_named() -> None:
    found = first_words(section("messages", "The answer"))
    assert found - {"stop_reason"} == set(get_args(StopReason))
    for status, kind in ERROR_TYPES.items():
        assert re.search(rf"^\| {status} \| `{kind}`", page("messages"), re.MULTILINE)
    assert {LEFT_OUT, INVALID_ARGUMENTS} <= words(page("messages"))


# ---- vectors
@pytest.mark.parametrize(
    ("title", "fields"),
    [
        ("Embeddings", fields_of(EmbeddingsBody)),
        ("Pooling", fields_of(PoolingBody) - fields_of(EmbeddingsBody)),
        *(
            (title, fields_of(body) - fields_of(EncodeFields))
            for title, body in (("Rerank", RerankBody), *(("Score", side) for side in SIDES))
        ),
    ],
)
def test_every_field_of_the_routes_that_encode_is_listed(title: str, fields: set[str]) -> None:
    assert fields <= words(section("embeddings", title))


# ---- tokens
def test_every_field_of_tokens_is_in_the_table_of_its_struct_or_named_as_refused() -> None:
    request, sampling = page("tokens").split("## The request")[1].split("### `sampling_params`")
    sampling = sampling.split("## Streams")[0]
    assert first_words(request) | set(REFUSED) == fields_of(GenerateBody)
    others = words(sampling.rpartition("Without effect:")[2])
    assert set(REFUSED_SAMPLING) < others
    assert first_words(sampling) | others == fields_of(GenerateSampling)


# ---- Ollama, and filling in the middle
def test_every_route_of_ollama_is_listed() -> None:
    routes = {f"{op.method.upper()} {op.rule}" for op in operations() if op.tag == "Ollama"}
    assert rows(section("ollama", "Routes"))["route"] == routes


def test_every_field_and_member_of_ollama_is_listed() -> None:
    found = rows(section("ollama", "Requests"))
    assert found["field"] == fields_of(OllamaChatBody, OllamaGenerateBody) - {"options"}
    assert found["option"] == fields_of(OllamaOptions)
    assert found["member"] == fields_of(OllamaEmbedBody) - {"model", "keep_alive", "options"}
    members = fields_of(AnswerLine) - {"model", "created_at", "done", "logprobs"}
    assert rows(section("ollama", "Answers"))["member"] == members | {"context"}
    assert set(get_args(DoneReason)) <= words(page("ollama"))


def test_every_field_and_member_of_infill_is_listed() -> None:
    found = rows(section("infill", "llama.cpp's /infill"))
    assert found["field"] == fields_of(InfillBody)
    assert found["member"] == fields_of(InfillAnswer) - {"ignored_params"}
    assert set(get_args(StopType)) <= words(page("infill"))


def test_every_field_and_member_of_llama_cpps_completion_is_listed() -> None:
    found = rows(section("llama-cpp", "/completion"))
    assert found["field"] == fields_of(LlamaCompletionBody)
    assert found["member"] == fields_of(LlamaCompletionAnswer) - fields_of(InfillAnswer)


def test_every_route_of_llama_cpp_is_listed() -> None:
    routes = {f"{op.method.upper()} {op.rule}" for op in operations() if op.tag == "llama.cpp"}
    shared = {"POST /tokenize", "POST /detokenize"}
    assert rows(page("llama-cpp").partition("## ")[0])["route"] == routes | shared


def test_the_page_of_infill_has_the_tokens_of_every_family() -> None:
    models = section("infill", "Models")
    table = re.findall(r"^\| (.*?`.*?) \| (\w+ first) \|", models, re.MULTILINE)
    listed = [(re.findall(r"`(.*?)`", cell.replace("\\|", "|")), order) for cell, order in table]
    expected = [
        ([each for each in (m.prefix, m.suffix, m.middle) if each], m.order) for m in INFILL_MARKERS
    ]
    assert listed == expected
    newest = {names[0] for names in INFILL_KEYS.values()}
    assert newest <= set(re.findall(r"fim_\w{3}", models))
