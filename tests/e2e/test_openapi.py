"""Sends requests that are generated from our OpenAPI document to a complete server. Every answer
must match the document, and none may be a 500."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.examples import examples
from tests.support.server import Server
from tests.support.tiny_checkpoint import write_tiny_llama

pytestmark = pytest.mark.long

REFUSED = {
    "/sleep",  # it keeps its only model loaded
    "/v1/load_lora_adapter",  # it has no adapters
    "/v1/unload_lora_adapter",
    "/infill",  # which has no tokens for that
    *("/api/push", "/api/create", "/api/copy", "/api/delete"),  # and is the operator's
    "/v1/library",
}
"""Routes that this server refuses."""
NAMING = "/api/"
"""Routes with this prefix need the name of a model."""
ENDLESS = {"/v1/watch"}
"""Routes whose streams end only with the connection; tests/integration/test_watch.py reads them."""
EXAMPLES, EXAMPLES_LIKE_A_CHAT = examples(8, 32), examples(4, 16)
"""Number of requests per operation. Operations with the body of a chat get fewer, because the body
takes long to generate, and POST /v1/chat/completions tests it with the full number."""
MOST_SEEDS = 8
"""The most sets of requests for an operation, if all requests of the sets before are refused."""
LIKE_A_CHAT = tuple(f"/v1/chat/completions/{name}" for name in ("batch", "input_tokens", "render"))
CLOCKS = {"timeout_s", "queue_timeout_s"}
FILED = "/v1/batches"
"""The route whose body needs the id of an uploaded file."""
PAIRED = ("/v1/chat/completions/derender", "/v1/completions/derender")
"""Routes whose bodies contain a request and its answer, which cannot be generated to match."""
CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)
    template = folder / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}w1")
    stores = [f"--{name}-store={folder / name}.db" for name in ("response", "file")]
    options = ("--chat-template", str(template), "--pooling", "last", *stores)
    with Server(*options, model=str(folder)) as server:
        yield server


def required_by(operation: Any, document: dict[str, Any]) -> set[str]:
    """Return the fields that at least one form of the operation's body requires."""
    content = operation.definition.raw.get("requestBody", {}).get("content", {})
    names: set[str] = set()
    for kind in content.values():
        for form in kind["schema"].get("anyOf", [kind["schema"]]):
            name = form["$ref"].rpartition("/")[2]
            names.update(document["components"]["schemas"][name].get("required", []))
    return names


def slimmed(body: dict[str, Any], num_optional: int, required: set[str]) -> dict[str, Any]:
    """Return the body with at most `num_optional` optional fields. With many, some would always
    contradict each other."""
    optional = [name for name in body if name not in required]
    return {name: body[name] for name in body if name not in optional[num_optional:]}


def exercise(operation: Any, required: set[str], model: str, number: int) -> Counter[int]:
    """Send generated requests, and check each answer against the document. Return how many answers
    had each status.

    number   seed of the requests
    """
    statuses: Counter[int] = Counter()
    is_like_a_chat = operation.path in LIKE_A_CHAT

    @seed(number)
    @settings(
        max_examples=EXAMPLES_LIKE_A_CHAT if is_like_a_chat else EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(), num_optional=st.integers(0, 6))
    def check(case: Any, num_optional: int) -> None:
        if isinstance(case.body, dict):
            case.body = slimmed(case.body, num_optional, required)
            # Some bodies without the name are refused, but not all of an operation's.
            names = {"model", "name"} & case.body.keys() or num_optional % 2
            if operation.path.startswith(NAMING) and names:
                case.body["model"] = model
            for name in CLOCKS & case.body.keys():
                case.body[name] = 600  # an answer that runs out of time is rightly a 504
        response = case.call(timeout=30)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    check()
    return statuses


@pytest.mark.timeout(300)
def test_answers_match_the_openapi_document(server):
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    model = requests.get(f"{server.url}/v1/models", timeout=20).json()["data"][0]["id"]
    found: Any = document.get_all_operations()
    operations = [each for each in (one.ok() for one in found) if each.path not in ENDLESS]
    for operation in operations:
        may_fail = "{" in operation.path or operation.path in {*PAIRED, *REFUSED, FILED}
        required = required_by(operation, document.raw_schema)
        statuses: Counter[int] = Counter()
        try:
            # Which requests are generated also depends on the modules that are imported. All of a
            # few may be refused, so there are more until one is not.
            for number in range(1, MOST_SEEDS + 1):
                statuses += exercise(operation, required, model, number)
                if statuses[200] > 0 or may_fail:
                    break
        except BaseException:
            print(
                f"{operation.label} failed; the server's last words:", *server.err[-80:], sep="\n"
            )
            raise
        result = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
        print(f"{operation.label:48} {result}")
        assert statuses[200] > 0 or may_fail
    exercised = {operation.path for operation in operations}
    assert exercised > set(LIKE_A_CHAT)
    assert exercised == set(document.raw_schema["paths"]) - {"/openapi.json", *ENDLESS}
