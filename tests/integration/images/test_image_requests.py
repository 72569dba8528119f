"""Images in the requests of every API, sent to an engine that records what arrives."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from msgspec.structs import replace

from gateway.images.limits import MAX_IMAGES
from tests.support.gateway_process import GatewayProcess
from tests.support.http import metrics_of
from tests.support.image_models import SMOLVLM, picture
from tests.support.scripted_engine import ScriptedEngine, scripted_card
from tests.torture.attacks import send
from tests.torture.images import IMAGE_ATTACKS, LOCAL_HOSTS

pytestmark = pytest.mark.long

DATA = base64.b64encode(picture(120, 90)).decode()
URL = f"data:image/png;base64,{DATA}"
BAD = "data:image/png;base64,AAAA"
PART = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
ASK = {"type": "text", "text": "What is this?"}


ATTACKS = (
    "half of a JPEG",
    "10,000 images",
    "deep data: URLs",
    "the metadata of a cloud",
    "this machine",
    "another host",
    "a file",
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    address = f"ipc://{tmp_path_factory.mktemp('engine')}/engine"
    card = SMOLVLM.card(name="tiny", context_tokens=512)
    with ScriptedEngine(address, card=card) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(engine: ScriptedEngine) -> Iterator[GatewayProcess]:
    with GatewayProcess(
        engine=engine.address, tried_tokenizer="", image_urls=[*LOCAL_HOSTS]
    ) as running:
        running.await_ready()
        yield running


@pytest.fixture(autouse=True)
def fresh(engine: ScriptedEngine) -> None:
    engine.reset()


def post(gateway: GatewayProcess, path: str, **body: Any) -> requests.Response:
    limit = {"max_tokens": 4} if path == "/v1/messages" else {}
    known: Any = {"model": "tiny", **limit, **body}
    return requests.post(gateway.url + path, json=known, timeout=60)


def chat(gateway: GatewayProcess, *parts: Any, **options: Any) -> requests.Response:
    messages = [{"role": "user", "content": [*parts]}]
    return post(gateway, "/v1/chat/completions", messages=messages, **options)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [user(PART, ASK)]}),
    "a string": (
        "/v1/chat/completions",
        {"messages": [user({"type": "image_url", "image_url": URL})]},
    ),
    "no type": ("/v1/chat/completions", {"messages": [user({"image_url": {"url": URL}})]}),
    "transformers": ("/v1/chat/completions", {"messages": [user({"type": "image", "url": URL})]}),
    "messages": ("/v1/messages", {"messages": [user(BLOCK, ASK)]}),
    "a tool result": (
        "/v1/messages",
        {
            "messages": [
                user(ASK),
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                },
                user({"type": "tool_result", "tool_use_id": "a", "content": [BLOCK]}),
            ]
        },
    ),
    "responses": ("/v1/responses", {"input": [user({"type": "input_image", "image_url": URL})]}),
    "a tool output": (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "x"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": URL}],
                },
            ]
        },
    ),
    "ollama chat": (
        "/api/chat",
        {"messages": [{"role": "user", "content": "x", "images": [DATA]}]},
    ),
    "ollama generate": ("/api/generate", {"prompt": "x", "images": [DATA]}),
}


@pytest.mark.parametrize("name", BODIES)
def test_each_spelling_gives_the_same_image(
    gateway: GatewayProcess, engine: ScriptedEngine, name: str
) -> None:
    path, body = BODIES[name]
    assert chat(gateway, PART).ok
    assert post(gateway, path, **body).ok
    first, second = engine.generates
    (own,), (other,) = first.attachments, second.attachments
    assert own.digest == other.digest
    pad = SMOLVLM.card().images.token_id  # type: ignore[union-attr]
    tokens = second.prompt.tolist()
    positions = [place for place, each in enumerate(tokens) if each == pad]
    assert positions == [at for first, n in other.runs for at in range(first, first + n)]
    assert len(positions) == other.num_tokens > 16


def by_url(url: Any, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **options}}


PARTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "image_url", "image_url": BAD}, "image_url"),
    ({"type": "image_url"}, "image_url"),
    (by_url(URL, detail="x"), "image_url.detail"),
    (by_url(3), "image_url.url"),
    (by_url("file:///etc/passwd"), "image_url.url"),
    (by_url("https://a.test/"), "image_url.url"),
    (by_url("data:image/svg+xml;base64,AAAA"), "image_url.url"),
    (by_url("data:image/png,AAAA"), "image_url.url"),
    (by_url("data:image/png;base64,A"), "image_url.url"),
    ({"type": "image", "file_id": "file-1"}, "file_id"),
]
DAMAGED = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
FILE = {"type": "file", "file_id": "f"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
INPUT: dict[str, Any] = {"type": "input_image"}
ERRORS: list[tuple[str, dict[str, Any], str]] = [
    *(
        (CHAT, {"messages": [user(ASK, part)]}, f"messages[0].content[1].{field}")
        for part, field in PARTS
    ),
    (
        CHAT,
        {"messages": [user(ASK), {"role": "assistant", "content": [PART]}, user(ASK)]},
        "messages[1].content",
    ),
    (
        CHAT,
        {"messages": [user(*[PART] * (MAX_IMAGES + 1))]},
        f"messages[0].content[{MAX_IMAGES}].image_url.url",
    ),
    (
        MESSAGES,
        {"system": "s", "messages": [user(ASK, BLOCK | {"source": DAMAGED})]},
        "messages[0].content[1].source.data",
    ),
    (
        MESSAGES,
        {"messages": [user(BLOCK | {"source": FILE})]},
        "messages[0].content[0].source.file_id",
    ),
    (
        RESPONSES,
        {"instructions": "i", "input": [user(INPUT | {"image_url": BAD})]},
        "input[0].content[0].image_url",
    ),
    (RESPONSES, {"input": [user(INPUT | {"file_id": "f"})]}, "input[0].content[0].file_id"),
]


@pytest.mark.parametrize(("path", "body", "param"), ERRORS)
def test_an_error_names_the_clients_own_field(
    gateway: GatewayProcess, engine: ScriptedEngine, path: str, body: dict[str, Any], param: str
) -> None:
    refused = post(gateway, path, **body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert not engine.generates


def test_an_image_is_sent_once_to_an_engine(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    other = base64.b64encode(picture(100, 130, 5)).decode()
    part = {"type": "image_url", "image_url": f"data:image/png;base64,{other}"}
    assert chat(gateway, part, n=3).ok
    assert chat(gateway, part, ASK, part).ok
    assert len(engine.attached) == 1
    assert [len(each.attachments) for each in engine.generates] == [1, 1, 1, 2]


def test_an_engine_that_has_dropped_an_image_gets_it_again(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    assert chat(gateway, PART).ok
    engine.loses_images = True
    assert chat(gateway, PART).ok
    assert engine.attached[-1] == engine.generates[-1].attachments[0].digest


def test_a_marker_in_a_text_is_no_image(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    assert chat(
        gateway, {"type": "text", "text": "<image>"}, PART, {"type": "text", "text": "<image>"}
    ).ok
    (image,) = engine.generates[0].attachments
    pad = SMOLVLM.card().images.token_id  # type: ignore[union-attr]
    assert engine.generates[0].prompt.tolist().count(pad) == image.num_tokens + 2


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_with_its_field(gateway: GatewayProcess, name: str) -> None:
    """`make torture` sends all of tests/torture/images.py, to a whole server."""
    send(IMAGE_ATTACKS[name], 2, gateway.port, "")
    assert chat(gateway, PART).ok


def test_counts_include_the_tokens_of_images(gateway: GatewayProcess) -> None:
    used = chat(gateway, PART).json()["usage"]["prompt_tokens"]
    messages = [user(PART)]
    assert post(gateway, "/tokenize", messages=messages).json()["count"] == used
    counted = post(gateway, "/v1/messages/count_tokens", messages=[user(BLOCK)]).json()
    assert counted["input_tokens"] == used


def test_no_byte_of_an_image_is_logged(gateway: GatewayProcess) -> None:
    chat(gateway, PART)
    chat(gateway, {"type": "image_url", "image_url": BAD})
    assert DATA[:40] not in gateway.log
    assert "AAAA" not in gateway.log


def test_a_model_without_the_extra_names_the_remedy(tmp_path: Any) -> None:
    card = SMOLVLM.card(name="tiny", context_tokens=512)
    reason = "the server lacks the packages for images; its operator can install the extra 'images'"
    assert card.images is not None
    card = replace(card, images=replace(card.images, reason=reason))
    with (
        ScriptedEngine(f"ipc://{tmp_path}/engine", card=card) as engine,
        GatewayProcess(engine=engine.address, tried_tokenizer="") as gateway,
    ):
        gateway.await_ready()
        refused = chat(gateway, PART)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].endswith(reason)
        path, body = BODIES["a tool result"]
        noted = post(gateway, path, **body)
        assert noted.json()["warnings"][0]["code"] == "content_left_out"


def test_a_text_only_model_refuses_images_as_before(tmp_path: Any) -> None:
    with (
        ScriptedEngine(f"ipc://{tmp_path}/engine", card=scripted_card()) as engine,
        GatewayProcess(engine=engine.address) as gateway,
    ):
        gateway.await_ready()
        refused = chat(gateway, PART, model=None)
        assert refused.json()["error"]["param"] == "messages[0].content[0].type"
        assert "reads text only" in refused.json()["error"]["message"]
        refused = post(gateway, "/v1/messages", messages=[user(BLOCK)], model=None)
        assert refused.json()["error"]["param"] == "messages[0].content[0].type"


def test_images_are_counted_and_logged(gateway: GatewayProcess) -> None:
    name = 'tidegate_images_total{cache="hit"}'
    chat(gateway, PART)
    before = metrics_of(gateway.url)
    used = chat(gateway, PART).json()["usage"]["prompt_tokens"]
    after = metrics_of(gateway.url)
    assert after[name] == before[name] + 1
    tokens = after["tidegate_image_tokens_total"] - before["tidegate_image_tokens_total"]
    assert 16 < tokens < used
    assert after['tidegate_image_seconds_total{stage="decode"}'] > 0
    gateway.line_with(f"image_tokens={tokens:.0f}", on_stderr=True)
