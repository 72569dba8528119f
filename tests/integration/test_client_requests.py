"""Every recorded request of a real client is answered, or refused in the way its client expects.

An API is added with its paths in PATHS, and with a row of REFUSED for each request that it refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.client_requests import FOLDER, ClientRequest, client_requests
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, text_reply, thinking_card

PATHS = {
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"),
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/responses", "/v1/responses/compact"),
    *("/api/chat", "/api/generate", "/api/show", "/api/embed"),
}


@dataclass(frozen=True)
class Refusal:
    """How a request is refused, and why that is right. `has` is a part of the answer that the
    client or its user needs."""

    status: int
    has: str
    why: str


IMAGE = Refusal(400, "text", "the user's image cannot be read, and must not be lost silently")
THREAD = Refusal(400, "thread_unsupported_request", "the SDK then sends all messages itself")
NOT_STORED = Refusal(400, "is stored", "the item is one of the server that was recorded")
NO_MODEL = Refusal(404, "model", "the client asks for a model of its own vendor")
REFUSED: dict[str, Refusal] = {
    "aisdk-anthropic-image-0": IMAGE,
    "aisdk-compat-image-0": IMAGE,
    "llmcli-4": IMAGE,
    "oc-tg_qwen3-coder-VIEW_IMAGE-2": IMAGE,
    "oc-tg_qwen3-coder-attach-0": IMAGE,
    "oc-tg_qwen3-coder-attach-1": IMAGE,
    "py-lc_openai_image-0": IMAGE,
    "py-pyd_openai-4": IMAGE,
    "aisdk-openaiResponses-image-0": IMAGE,
    "codex-VIEW_resume-0": IMAGE,
    "py-pyd_openai-3": IMAGE,
    "aisdk-openaiResponses-stream-tools-1": NOT_STORED,
    "aisdk-openaiResponses-tools-1": NOT_STORED,
    "aisdk-tool-with-image-result-1": NOT_STORED,
    "py-openai_ws-4": Refusal(
        405, "not allowed", "the server compacts no conversation; the client names the route"
    ),
    "anthropic-threads-0": THREAD,
    "anthropic-threads-1": THREAD,
    "anthropic-threads-4": THREAD,
    "anthropic-threads-refused-0": THREAD,
    "js-sdks-2": THREAD,
    "js-sdks-3": THREAD,
    "py-anthropic_sdk-0": THREAD,
    "anthropic-threads-refused-3": Refusal(
        404, "there is no route", "Anthropic's batches are not served; the client names the route"
    ),
    "claude-default-0": NO_MODEL,
    "py-ollama_py-2": NO_MODEL,
    "js-sdks-4": Refusal(400, "no embeddings", "the model generates and does not encode"),
}
"""Name of a request -> how it is refused. Images are refused until models that read them are
served; each of them is listed here by name."""

REQUESTS = client_requests(PATHS)
UNKNOWN = {request.model for request in REQUESTS if REFUSED.get(request.name) is NO_MODEL}
MODELS = sorted({request.model for request in REQUESTS if request.model} - UNKNOWN)
ENGINE = {"card": thinking_card(context_tokens=1 << 20), "max_len": 1 << 20}
GATEWAY: dict[str, Any] = {"served_name": MODELS or ["scripted"]}

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"{FOLDER}, the requests of clients, is not here"
)


@pytest.mark.parametrize("recorded", REQUESTS, ids=lambda recorded: recorded.name)
def test_a_clients_request_is_answered_or_refused_as_it_expects(
    recorded: ClientRequest, gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    engine.script = lambda generate: text_reply("ok", size=2)
    answer = gateway.post(recorded.target, recorded.body, headers=dict(recorded.headers))
    expected = REFUSED.get(recorded.name)
    if expected is None:
        assert answer.status_code == 200, answer.text
        assert '"error"' not in answer.text.replace('"error":null', "")
        return
    assert answer.status_code == expected.status, answer.text
    assert expected.has in answer.text


def test_every_refusal_is_of_a_recorded_request() -> None:
    assert {request.name for request in REQUESTS} >= REFUSED.keys()
