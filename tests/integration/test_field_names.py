"""A refusal names the field at fault as the client spelled it. The tests cover every field of every
route.

The fields are those of the structs that the routes declare for their documentation, so a new route
or a new field is tested as soon as it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from msgspec import inspect

from gateway.api.ollama.requests import OllamaChatBody, OllamaGenerateBody
from gateway.api.openai.requests import BatchBody
from gateway.api.render.requests import DerenderChat, DerenderCompletion
from gateway.app import operations
from protocol.wire.errors import ErrorInfo
from tests.support import http
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
RESPONSE = {
    "output_mode": "tokens",
    "request_id": "generate-tokens-1",
    "model": "scripted",
    "created": 0,
    "choices": [{"index": 0, "token_ids": [1], "finish_reason": "stop"}],
}
BESIDE: dict[type, dict[str, Any]] = {
    BatchBody: {"messages": [HI]},
    DerenderChat: {"generate_response": RESPONSE},
    DerenderCompletion: {"generate_responses": [RESPONSE]},
    OllamaChatBody: {"model": "scripted", "messages": HI},
    OllamaGenerateBody: {"model": "scripted", "prompt": "hi"},
}
"""Fields that a body needs in addition to those that its struct requires."""
VALID: dict[str, Any] = {
    "messages": HI,
    "prompt": "hi",
    "input": "hi",
    "chat_request": {"messages": HI},
    "completion_request": {"prompt": "hi"},
    "documents": ["hi"],
    **dict.fromkeys(("queries", "text_1", "text_2", "data_1", "data_2"), "hi"),
}
"""Values of required fields for which the struct alone does not determine a valid value."""
FREE: dict[str, Any] = {
    "audio": {"voice": "alloy"},
    "best_of": 7,
    "content_parts": [{}],
    "context_management": [{}],
    "conversation": "x",
    "ec_transfer_params": {"x": 1},
    "extra_args": {"x": 1},
    "features": {"x": 1},
    "flat_logprobs": True,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "grammar_lazy": True,
    "grammar_triggers": [{"value": "x"}],
    "guided_whitespace_pattern": " ",
    "messages": HI,
    "modalities": ["audio"],
    "moderation": {"x": 1},
    "n": 2,
    "prompt": {"id": "x"},
    "prompt_logprob_start": 1,
    "prompt_logprob_token_ids": [1],
    "repetition_detection": {"x": 1},
    "routed_experts_prompt_start": 1,
    "stream_interval": 2,
    "suffix": "end",
    "thinking_token_budget": "many",
    "trace_decode_token_ids": [1],
    "watermarking": True,
}
"""Values that are refused in fields of type Any. Other such fields refuse `WRONG`."""
WRONG = 5
WITHOUT_EFFECT = {
    *("cache_control", "metadata", "service_tier"),  # for a service that bills
    *("container", "mcp_servers"),  # for services that this server does not have
    *("output_kind", "spaces_between_special_tokens", "token_offsets"),  # of the peer
    *("mm_placeholders", "metrics", "prompt_token_id_logprobs"),  # what a peer's answer may hold
    *("routed_experts", "sampling_mask", "weight_versions"),
}
"""Fields of type Any that accept any value."""
MAX_ITEMS = 1 << 16
"""A list that may have this many items or more is not tested with too many items."""
OTHERS = {"text": "x", "number": 5, "list": [], "object": {}}
"""A JSON value of each kind in `KINDS`."""
KINDS: dict[type, str] = {
    inspect.StrType: "text",
    inspect.LiteralType: "text",
    inspect.IntType: "number",
    inspect.FloatType: "number",
    inspect.ListType: "list",
    inspect.DictType: "object",
    inspect.StructType: "object",
}
JSON_TYPE = "application/json"
Put = Callable[[Any], Any]
Fault = tuple[str, Any]
"""(path of the value at fault, the body)"""
Outer = tuple[type, ...]
"""The structs around a value. A recursive struct is visited once."""


def members_of(kind: inspect.Type) -> list[inspect.Type]:
    """Return the members of a union, or a type that is no union as the only member. Null is left
    out of a union, because it means the same as an absent field."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if not isinstance(kind, inspect.UnionType):
        return [kind]
    inner = [member for outer in kind.types for member in members_of(outer)]
    return [m for m in inner if not isinstance(m, inspect.NoneType)]


def valid(kind: inspect.Type) -> Any:
    kind = members_of(kind)[0]
    match kind:
        case inspect.StrType():
            return "x" * (kind.min_length or 1)
        case inspect.IntType() | inspect.FloatType():
            return max(kind.ge or 0, (kind.gt or -1) + 1)
        case inspect.BoolType():
            return True
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.ListType():
            return [valid(kind.item_type)] * (kind.min_length or 0)
        case inspect.DictType():
            return {}
        case inspect.StructType():
            return required(kind)
    return {}


def required(struct: inspect.StructType) -> dict[str, Any]:
    """Return a value of the struct with only its required fields and those in `BESIDE`."""
    value = {struct.tag_field: struct.tag} if struct.tag_field else {}
    for field in struct.fields:
        if field.required:
            name = field.encode_name
            value[name] = VALID[name] if name in VALID else valid(field.type)
    return value | BESIDE.get(struct.cls, {})


def faults(kind: inspect.Type, at: str, put: Put, outer: Outer = ()) -> Iterator[Fault]:
    """Yield a Fault for every way in which a value of this kind can be wrong.

    at    path of the value
    put   returns the body with a given value at that path
    """
    members = members_of(kind)
    accepted = {KINDS.get(type(member), "") for member in members}
    if not any(isinstance(member, inspect.AnyType) for member in members):
        wrong = next(value for name, value in OTHERS.items() if name not in accepted)
        yield at, put(wrong)
    for member in members:
        yield from bounds(member, at, put, outer)


def bounds(kind: inspect.Type, at: str, put: Put, outer: Outer) -> Iterator[Fault]:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            for value in _beyond(kind):
                yield at, put(value)
        case inspect.StrType():
            if kind.min_length:
                yield at, put("x" * (kind.min_length - 1))
            if kind.max_length is not None:
                yield at, put("x" * (kind.max_length + 1))
            if kind.pattern is not None:
                yield at, put("\n")
        case inspect.LiteralType():
            yield at, put("no such value")
        case inspect.ListType():
            if kind.min_length:
                yield at, put([])
            if kind.max_length is not None and kind.max_length < MAX_ITEMS:
                yield at, put([valid(kind.item_type)] * (kind.max_length + 1))
            if isinstance(kind.item_type, inspect.AnyType):
                yield f"{at}[0]", put([5])
            else:
                yield from faults(kind.item_type, f"{at}[0]", lambda value: put([value]), outer)
        case inspect.DictType():
            if not isinstance(kind.value_type, inspect.AnyType):
                inside = faults(kind.value_type, f"{at}.1", lambda value: put({"1": value}), outer)
                yield from inside
            if isinstance(kind.key_type, inspect.IntType):
                yield f"{at}.x", put({"1": valid(kind.value_type), "x": valid(kind.value_type)})
        case inspect.StructType():
            if kind.cls not in outer:
                yield from faults_of_struct(kind, f"{at}.", put, outer)


def _beyond(kind: inspect.IntType | inspect.FloatType) -> Iterator[float]:
    for bound, step in ((kind.ge, -1), (kind.gt, 0), (kind.le, 1), (kind.lt, 0)):
        if bound is not None:
            yield bound + step


def faults_of_struct(
    struct: inspect.StructType, at: str, put: Put, outer: Outer = ()
) -> Iterator[Fault]:
    whole = required(struct)
    for field in struct.fields:
        name = field.encode_name

        def put_field(value: Any, name: str = name) -> Any:
            return put({**whole, name: value})

        if any(isinstance(member, inspect.AnyType) for member in members_of(field.type)):
            if name not in WITHOUT_EFFECT:
                yield f"{at}{name}", put_field(FREE.get(name, WRONG))
        else:
            yield from faults(field.type, f"{at}{name}", put_field, (*outer, struct.cls))


BODIES = [
    (op.method, op.rule, kind)
    for op in operations()
    for kind in op.takes
    if op.takes_type == JSON_TYPE
]
"""The fields of forms are tested in batches/test_files.py."""


GATEWAY = {"file_store": "files.db"}


@pytest.mark.parametrize(
    ("method", "path", "kind"), BODIES, ids=[f"{path} {kind.__name__}" for _, path, kind in BODIES]
)
def test_every_refusal_names_the_field_as_it_was_spelled(
    method: str, path: str, kind: type, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    struct = inspect.type_info(kind)
    assert isinstance(struct, inspect.StructType)
    wrong: list[Any] = []
    with requests.Session() as session:
        for at, body in faults_of_struct(struct, "", lambda value: value):
            answer = session.request(method, gateway.url + path, json=body, timeout=20)
            error = answer.json().get("error", {})
            if isinstance(error, str):  # Ollama's errors have no `param`
                error = {"param": at, "message": error}
            named = (answer.status_code, error.get("param"))
            if named != (400, at) or at not in error["message"]:
                wrong.append((at, str(body)[:120], answer.status_code, error))
    assert wrong == []
    assert engine.generates == []


CHAT, MESSAGES = {"messages": HI}, {"messages": HI, "max_tokens": 9}
GENERATE: dict[str, Any] = {"token_ids": [1]}
LENGTHS = [
    ("/v1/chat/completions", CHAT, "max_tokens"),
    ("/v1/chat/completions", CHAT, "max_completion_tokens"),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 99}, "max_completion_tokens"),
    ("/v1/chat/completions/batch", {"messages": [HI]}, "max_completion_tokens"),
    ("/v1/completions", {"prompt": "x"}, "max_tokens"),
    ("/v1/responses", {"input": "x"}, "max_output_tokens"),
    ("/v1/messages", MESSAGES, "max_tokens"),
    ("/v1/chat/completions/render", CHAT, "max_completion_tokens"),
    ("/v1/responses/render", {"input": "x"}, "max_output_tokens"),
    ("/inference/v1/generate", GENERATE, "sampling_params.max_tokens"),
]
LENGTHS_IDS = [f"{path} {field}" for path, _, field in LENGTHS]


def with_field(body: dict[str, Any], at: str, value: Any) -> dict[str, Any]:
    """Return `body` with another value of the field `at`. "a.b" is the field b of the object a."""
    outer, _, inner = at.rpartition(".")
    return {**body, outer: {**body.get(outer, {}), inner: value}} if outer else {**body, at: value}


def error_of(gateway: GatewayProcess, path: str, body: Any) -> tuple[str | None, str]:
    error = http.error_of(gateway.post(path, body))
    return error.get("param"), error["message"]


@pytest.mark.parametrize(("path", "body", "field"), LENGTHS, ids=LENGTHS_IDS)
def test_a_limit_below_min_tokens_is_named_as_it_was_spelled(
    path: str, body: dict[str, Any], field: str, gateway: GatewayProcess
) -> None:
    least = field.replace(field.rpartition(".")[2], "min_tokens")
    body = with_field(with_field(body, least, 8), field, 5)
    named, message = error_of(gateway, path, body)
    assert named == field
    assert message == f"{field}: must be at least min_tokens (8); got 5"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [case for case in LENGTHS if not case[0].endswith("/render")],
    ids=[name for name in LENGTHS_IDS if "/render" not in name],
)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_limit_that_the_engine_refuses_is_named_as_it_was_spelled(
    path: str,
    body: dict[str, Any],
    field: str,
    is_stream: bool,
    engine: ScriptedEngine,
    gateway: GatewayProcess,
) -> None:
    engine.script = lambda generate: ErrorInfo(
        code="context_length_exceeded",
        message="max_tokens is 9,000; this model takes 512 tokens",
        param="max_tokens",
    )
    body = with_field(body, field, 9)
    if is_stream and not path.endswith("/batch"):
        body["stream"] = True
    assert error_of(gateway, path, body) == (
        field,
        f"{field} is 9,000; this model takes 512 tokens",
    )
    engine.generates.clear()
