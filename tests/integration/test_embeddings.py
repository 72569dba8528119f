"""Embeddings, rerank and score over HTTP, with a scripted engine."""

from __future__ import annotations

import base64
import math
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.engine.encoding import MAX_INPUTS, EncodingCard, PairPrompt
from protocol.wire.errors import ErrorInfo
from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, error_of, json_of, metric_of, send_post
from tests.support.scripted_engine import ScriptedEngine, ids_of, scripted_card, scripted_vector
from tests.support.waiting import eventually

SIZE, MAX_TOKENS = 6, 64
ENCODING = EncodingCard(
    task="embed",
    max_tokens=MAX_TOKENS,
    size=SIZE,
    pooling="mean",
    normalizes=True,
    prompts={"query": "Q: ", "other": "O: "},
)
ENGINE = {"card": scripted_card(encoding=ENCODING)}
EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def scorer(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ScriptedEngine, GatewayProcess]]:
    """A model that scores pairs: the first of its results is the score."""
    encoding = EncodingCard(task="score", max_tokens=MAX_TOKENS, size=2)
    card = scripted_card(encoding=encoding, generates=False)
    address = f"ipc://{tmp_path_factory.mktemp('scorer') / 'engine.sock'}"
    with (
        ScriptedEngine(address, card=card) as engine,
        GatewayProcess(engine=address) as gateway,
    ):
        yield engine, gateway.await_ready()


PROMPT = PairPrompt(
    prefix="[", body="{instruction}: {query}? {document}", suffix="]=", instruction="Find"
)


@pytest.fixture(scope="module")
def prompted(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ScriptedEngine, GatewayProcess]]:
    """A model that scores pairs with a prompt."""
    encoding = EncodingCard(task="score", max_tokens=MAX_TOKENS, size=1, pair_prompt=PROMPT)
    card = scripted_card(encoding=encoding, generates=False)
    address = f"ipc://{tmp_path_factory.mktemp('prompted') / 'engine.sock'}"
    with (
        ScriptedEngine(address, card=card) as engine,
        GatewayProcess(engine=address) as gateway,
    ):
        yield engine, gateway.await_ready()


def vector(text: str) -> list[float]:
    return scripted_vector(ids_of(text), SIZE)


def unit(numbers: list[float]) -> list[float]:
    return [number / math.hypot(*numbers) for number in numbers]


def embed(gateway: GatewayProcess, value: Any, **fields: Any) -> Any:
    return json_of(gateway.post(EMBEDDINGS, {"input": value, **fields}))


@pytest.mark.parametrize("value", ["sea", ["sea"], ids_of("sea"), [ids_of("sea")]])
def test_each_form_of_the_input_gives_the_same_vector(gateway: GatewayProcess, value: Any) -> None:
    (found,) = embed(gateway, value)["data"]
    assert found["object"] == "embedding"
    assert found["index"] == 0
    assert found["embedding"] == pytest.approx(vector("sea"), abs=1e-6)


def test_vectors_are_in_the_order_of_the_inputs_and_tokens_are_counted(
    gateway: GatewayProcess,
) -> None:
    found = embed(gateway, ["sea", "a", "harbour"], model="scripted", user="me")
    for item, text in zip(found["data"], ["sea", "a", "harbour"], strict=True):
        assert item["embedding"] == pytest.approx(vector(text), abs=1e-6)
    assert found["object"] == "list"
    assert found["model"] == "scripted"
    assert found["usage"] == {"prompt_tokens": 11, "total_tokens": 11}
    assert "ignored_params" not in found


@pytest.mark.parametrize("fields", [{}, {"task": "embed"}, {"encoding_format": "base64"}])
def test_pooling_has_the_vectors_of_embeddings_in_vllms_form(
    gateway: GatewayProcess, fields: dict[str, Any]
) -> None:
    given = {name: value for name, value in fields.items() if name != "task"}
    embedded = embed(gateway, ["sea", "a"], **given)
    pooled = json_of(gateway.post("/pooling", {"input": ["sea", "a"], **fields}))
    assert pooled["object"] == "list"
    assert pooled["id"].startswith("pool-")
    assert pooled["usage"] == embedded["usage"]
    assert pooled["data"] == [
        {"object": "pooling", "index": item["index"], "data": item["embedding"]}
        for item in embedded["data"]
    ]


def test_other_tasks_of_pooling_are_refused(
    gateway: GatewayProcess, scorer: tuple[ScriptedEngine, GatewayProcess]
) -> None:
    error = error_of(gateway.post("/pooling", {"input": "sea", "task": "token_embed"}))
    assert error["param"] == "task"
    assert error_of(scorer[1].post("/pooling", {"input": "sea"}))["param"] == "model"


def test_base64_has_the_bytes_of_the_numbers(gateway: GatewayProcess) -> None:
    (found,) = embed(gateway, "sea", encoding_format="base64")["data"]
    numbers = struct.unpack(f"<{SIZE}f", base64.b64decode(found["embedding"]))
    assert list(numbers) == pytest.approx(vector("sea"), abs=1e-6)


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_fewer_dimensions_are_the_first_ones_at_length_one(
    gateway: GatewayProcess, encoding_format: str
) -> None:
    (found,) = embed(gateway, "sea", dimensions=3, encoding_format=encoding_format)["data"]
    numbers = found["embedding"]
    if encoding_format == "base64":
        numbers = struct.unpack("<3f", base64.b64decode(numbers))
    kept = vector("sea")[:3]
    length = math.hypot(*kept)
    assert list(numbers) == pytest.approx([number / length for number in kept], abs=1e-6)


def test_a_prompt_is_put_before_each_text(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    embed(gateway, ["sea", "bay"], prompt_name="query")
    assert engine.encodes[0].inputs.tokens.tolist() == ids_of("Q: seaQ: bay")


def test_too_long_inputs_are_named_with_their_tokens_and_the_limit(gateway: GatewayProcess) -> None:
    error = error_of(gateway.post(EMBEDDINGS, {"input": ["a", "b" * 65]}))
    assert error["param"] == "input[1]"
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        "This model's maximum context length is 64 tokens. However, input[1] is too long: "
        "65 tokens > 64 maximum"
    )
    error = error_of(gateway.post(EMBEDDINGS, {"input": [1] * 65}))
    assert "However, input is too long: 65 tokens" in error["message"]


def test_too_long_inputs_are_truncated_on_request(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    embed(gateway, ["a", "b" * 65], truncate_prompt_tokens=-1)
    assert engine.encodes[-1].inputs.lengths.tolist() == [1, 64]
    embed(gateway, ["abcdef", "gh"], truncate_prompt_tokens=4)
    assert engine.encodes[-1].inputs.tokens.tolist() == ids_of("abcdgh")
    embed(gateway, [[1, 2, 3], [4]], truncate_prompt_tokens=2)
    assert engine.encodes[-1].inputs.tokens.tolist() == [1, 2, 4]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an empty list": ({"input": []}, "input"),
    "an empty text": ({"input": ["a", ""]}, "input[1]"),
    "empty ids": ({"input": [[1], []]}, "input[1]"),
    "a number among texts": ({"input": ["a", 1]}, "input[1]"),
    "a text among ids": ({"input": [1, "a"]}, "input"),
    "mixed items": ({"input": [[1], "a"]}, "input[1]"),
    "an object": ({"input": {"text": "a"}}, "input"),
    "a token outside the vocabulary": ({"input": [[1], [259]]}, "input[1][0]"),
    "a negative token": ({"input": [-1]}, "input[0]"),
    "too many inputs": ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
    "too many dimensions": ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
    "no dimensions": ({"input": "a", "dimensions": 0}, "dimensions"),
    "an unknown prompt": ({"input": "a", "prompt_name": "x"}, "prompt_name"),
    "a prompt of ids": ({"input": [1], "prompt_name": "query"}, "prompt_name"),
    "no tokens to keep": ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "too many to keep": ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
    "an unknown model": ({"input": "a", "model": "x"}, "model"),
    "a field that may not be ignored": ({"input": "a", "zz": 1, "strict_params": True}, "zz"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_a_4xx_that_names_the_field(
    name: str, gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    body, param = BAD[name]
    error = error_of(gateway.post(EMBEDDINGS, body), 404 if name == "an unknown model" else 400)
    assert error["param"] == param
    assert param in error["message"]
    assert not engine.encodes


def test_unknown_fields_are_listed(gateway: GatewayProcess) -> None:
    response = gateway.post(EMBEDDINGS, {"input": "a", "zz": 1})
    assert response.json()["ignored_params"] == ["zz"]
    assert response.headers["x-ignored-fields"] == "zz"


# ---- rerank and score


def cosine(one: str, other: str) -> float:
    return sum(a * b for a, b in zip(vector(one), vector(other), strict=True))


DOCUMENTS = ["harbour", "zz", "seas"]


def test_a_model_with_vectors_ranks_by_similarity(gateway: GatewayProcess) -> None:
    body = {"query": "sea", "documents": [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}]}
    found = gateway.post("/v1/rerank", body).json()
    scores = [cosine("Q: sea", document) for document in DOCUMENTS]
    order = sorted(range(3), key=lambda place: -scores[place])
    assert [result["index"] for result in found["results"]] == order
    assert [result["document"]["text"] for result in found["results"]] == [
        DOCUMENTS[place] for place in order
    ]
    wanted = [scores[place] for place in order]
    assert [each["relevance_score"] for each in found["results"]] == pytest.approx(wanted, abs=1e-6)
    assert found["id"].startswith("rerank-")
    assert found["usage"]["total_tokens"] == len("Q: sea" + "".join(DOCUMENTS))


@pytest.mark.parametrize(
    ("path", "fields", "has_text"),
    [
        ("/v1/rerank", {}, True),
        ("/rerank", {}, True),
        ("/v2/rerank", {}, False),
        ("/v1/rerank", {"return_documents": False}, False),
        ("/v2/rerank", {"return_documents": True}, True),
    ],
)
def test_results_have_their_document_as_the_api_says(
    path: str, fields: dict[str, Any], has_text: bool, gateway: GatewayProcess
) -> None:
    body = {"query": "sea", "documents": DOCUMENTS, "top_n": 2, **fields}
    results = gateway.post(path, body).json()["results"]
    assert ["document" in result for result in results] == [has_text] * 2


def test_a_model_that_scores_gets_pairs(scorer: tuple[ScriptedEngine, GatewayProcess]) -> None:
    engine, gateway = scorer
    found = gateway.post("/v1/rerank", {"query": "sea", "documents": DOCUMENTS}).json()
    inputs = engine.encodes[-1].inputs
    assert inputs.tokens.tolist() == ids_of("".join("sea" + each for each in DOCUMENTS))
    assert inputs.lengths.tolist() == [10, 5, 7]
    scores = {each["index"]: each["relevance_score"] for each in found["results"]}
    wanted = [scripted_vector(ids_of("sea" + each), 2)[0] for each in DOCUMENTS]
    assert [scores[place] for place in range(3)] == pytest.approx(wanted, abs=1e-6)


def test_the_longer_text_of_a_pair_is_truncated_first(
    scorer: tuple[ScriptedEngine, GatewayProcess],
) -> None:
    engine, gateway = scorer
    gateway.post(
        "/v2/rerank", {"query": "sea", "documents": ["x" * 90, "y"], "max_tokens_per_doc": 20}
    )
    assert engine.encodes[-1].inputs.tokens.tolist() == ids_of("sea" + "x" * 17 + "seay")


RERANK = {"query": "sea", "documents": ["{query}", {"text": "b"}]}
SCORE = {"text_1": "sea", "text_2": ["{query}", "b"]}


@pytest.mark.parametrize(("path", "body"), [("/v1/rerank", RERANK), ("/v1/score", SCORE)])
@pytest.mark.parametrize(
    ("fields", "instruction"),
    [({}, "Find"), ({"instruction": "Judge"}, "Judge"), ({"instruct": ""}, "")],
)
def test_a_model_with_a_prompt_gets_each_pair_in_it(
    path: str,
    body: dict[str, Any],
    fields: dict[str, Any],
    instruction: str,
    prompted: tuple[ScriptedEngine, GatewayProcess],
) -> None:
    engine, gateway = prompted
    response = gateway.post(path, {**body, **fields})
    assert response.status_code == 200, response.text
    inputs = engine.encodes[-1].inputs
    texts = [f"[{instruction}: sea? {document}]=" for document in ("{query}", "b")]
    assert inputs.tokens.tolist() == ids_of("".join(texts))
    assert inputs.lengths.tolist() == [len(text) for text in texts]
    assert response.json()["usage"]["total_tokens"] == sum(map(len, texts))


def test_a_prompt_is_truncated_at_the_end_of_its_document(
    prompted: tuple[ScriptedEngine, GatewayProcess],
) -> None:
    engine, gateway = prompted
    body = {"query": "sea", "documents": ["x" * 90], "truncate_prompt_tokens": 20}
    gateway.post("/v1/rerank", body)
    assert engine.encodes[-1].inputs.tokens.tolist() == ids_of("[Find: sea? xxxxxx]=")
    without = {"query": "sea", "documents": ["x" * 90]}
    for field, tokens in [("truncate_prompt_tokens", 3), ("max_tokens_per_doc", 14)]:
        error = error_of(gateway.post("/v1/rerank", {**without, field: tokens}))
        assert error["param"] == field
        assert f"{tokens} tokens leave no room beside the model's prompt" in error["message"]
    error = error_of(gateway.post("/v1/rerank", {"query": "sea", "documents": ["a", "x" * 90]}))
    assert error["param"] == "documents[1]"


def test_texts_that_have_the_prompt_are_only_joined(
    prompted: tuple[ScriptedEngine, GatewayProcess],
) -> None:
    engine, gateway = prompted
    gateway.post("/v1/score", {"text_1": "[Q: sea? ", "text_2": "harbour]="})
    assert engine.encodes[-1].inputs.tokens.tolist() == ids_of("[Q: sea? harbour]=")


def test_two_instructions_are_refused(prompted: tuple[ScriptedEngine, GatewayProcess]) -> None:
    _, gateway = prompted
    error = error_of(gateway.post("/v1/rerank", {**RERANK, "instruction": "a", "instruct": "b"}))
    assert error["param"] == "instruct"


@pytest.mark.parametrize("field", ["instruction", "instruct"])
def test_a_model_without_instructions_refuses_one(
    field: str, gateway: GatewayProcess, scorer: tuple[ScriptedEngine, GatewayProcess]
) -> None:
    for each in (gateway, scorer[1]):
        error = error_of(each.post("/v1/rerank", {**RERANK, field: "Find"}))
        assert error["param"] == field
        assert "takes no instruction" in error["message"]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    ("body", "pairs"),
    [
        ({"text_1": "a", "text_2": "b"}, [("a", "b")]),
        ({"text_1": "a", "text_2": ["b", "cd"]}, [("a", "b"), ("a", "cd")]),
        ({"queries": ["a", "b"], "documents": ["c", "d"]}, [("a", "c"), ("b", "d")]),
        ({"data_1": ["a"], "data_2": ["b"]}, [("a", "b")]),
    ],
)
def test_scores_come_in_the_order_of_the_pairs(
    path: str,
    body: dict[str, Any],
    pairs: list[tuple[str, str]],
    scorer: tuple[ScriptedEngine, GatewayProcess],
) -> None:
    _, gateway = scorer
    found = gateway.post(path, body).json()
    wanted = [scripted_vector(ids_of(one + other), 2)[0] for one, other in pairs]
    assert [each["score"] for each in found["data"]] == pytest.approx(wanted, abs=1e-6)
    assert [each["index"] for each in found["data"]] == list(range(len(pairs)))
    assert found["object"] == "list"


BAD_PAIRS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no documents": ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    "a number": ("/v1/rerank", {"query": "a", "documents": ["a", 1]}, "documents[1]"),
    "no text": ("/v1/rerank", {"query": "a", "documents": [{"title": "a"}]}, "documents[0].text"),
    "no query": ("/v1/rerank", {"documents": ["a"]}, "query"),
    "no results": ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
    "too long": ("/v1/rerank", {"query": "a", "documents": ["b", "c" * 65]}, "documents[1]"),
    "nothing to score": ("/v1/score", {}, "text_1"),
    "one side": ("/v1/score", {"text_1": "a"}, "text_2"),
    "two forms": ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "text_1"),
    "other numbers": ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1"),
    "a number in a side": ("/v1/score", {"text_1": "a", "text_2": ["b", 3]}, "text_2[1]"),
}


@pytest.mark.parametrize("name", BAD_PAIRS)
def test_bad_pairs_are_a_400_that_names_the_field(name: str, gateway: GatewayProcess) -> None:
    path, body, param = BAD_PAIRS[name]
    assert error_of(gateway.post(path, body))["param"] == param


# ---- what a model can do


def test_a_model_that_only_encodes_names_what_it_serves(
    scorer: tuple[ScriptedEngine, GatewayProcess],
) -> None:
    _, gateway = scorer
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
    ):
        error = error_of(gateway.post(path, body))
        assert error["param"] == "model"
        assert "does not generate text; it serves /v1/rerank and /v1/score" in error["message"]
    message = error_of(gateway.post(EMBEDDINGS, {"input": "a"}))["message"]
    assert "scores pairs of texts, and has no embeddings" in message


def test_a_chat_model_names_the_option(tmp_path_factory: pytest.TempPathFactory) -> None:
    address = f"ipc://{tmp_path_factory.mktemp('chat') / 'engine.sock'}"
    with ScriptedEngine(address), GatewayProcess(engine=address) as gateway:
        gateway.await_ready()
        message = error_of(gateway.post(EMBEDDINGS, {"input": "a"}))["message"]
        assert "or this one with --pooling mean or --pooling last" in message


# ---- the laws


def test_a_refusal_for_load_is_a_429_with_its_wait(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    engine.refuses = lambda encode: ErrorInfo(code="overloaded", message="full", retry_after_s=7.0)
    response = gateway.post(EMBEDDINGS, {"input": "a"})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"


def test_a_client_that_disconnects_aborts_its_request(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    engine.is_paused = True
    with connect(gateway.port) as client:
        send_post(client, EMBEDDINGS, {"input": "a"})
        while not engine.encodes:
            threading.Event().wait(0.01)
    engine.await_abort(engine.encodes[0].request)


def test_an_engine_that_is_lost_ends_the_request_with_a_503(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    address = f"ipc://{tmp_path_factory.mktemp('lost') / 'engine.sock'}"
    with GatewayProcess(engine=address) as gateway:
        with ScriptedEngine(address, card=ENGINE["card"], is_paused=True) as engine:
            gateway.await_ready()
            found: list[int] = []
            asking = threading.Thread(
                target=lambda: found.append(gateway.post(EMBEDDINGS, {"input": "a"}).status_code)
            )
            asking.start()
            while not engine.encodes:
                threading.Event().wait(0.01)
        asking.join()
        assert found == [503]


def test_a_request_moves_to_another_replica_if_its_own_is_lost(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("replicas")
    addresses = [f"ipc://{folder / name}.sock" for name in ("a", "b")]
    engines = [ScriptedEngine(each, card=ENGINE["card"], is_paused=True) for each in addresses]
    found: list[Any] = []
    with engines[0], engines[1], GatewayProcess(engines=addresses) as gateway:
        gateway.await_ready()
        asking = threading.Thread(target=lambda: found.append(embed(gateway, ["sea", "bay"])))
        asking.start()
        while not any(engine.encodes for engine in engines):
            threading.Event().wait(0.01)
        lost, other = engines if engines[0].encodes else engines[::-1]
        lost.kill()
        other.is_paused = False
        asking.join()
        assert [encode.is_moved for encode in other.encodes] == [True]
    vectors = [item["embedding"] for item in found[0]["data"]]
    assert vectors == [pytest.approx(vector(text), abs=1e-6) for text in ("sea", "bay")]


def test_a_split_server_refuses_to_encode(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("split")
    addresses = [f"ipc://{folder / name}.sock" for name in ("p", "d")]
    with (
        ScriptedEngine(addresses[0], card=ENGINE["card"]),
        ScriptedEngine(addresses[1], card=ENGINE["card"]),
        GatewayProcess(prefill=addresses[:1], decode=addresses[1:]) as gateway,
    ):
        gateway.await_ready()
        message = error_of(gateway.post(EMBEDDINGS, {"input": "a"}))["message"]
        assert "prefill and decode engines has no embeddings" in message


def test_requests_are_labelled_and_counted(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    response = gateway.post(EMBEDDINGS, {"input": "harbour"}, headers={"X-Request-Id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert engine.encodes[0].labels == ["embd-mine", "mine"]
    assert (
        metric_of(gateway.url, f'tidegate_requests_total{{route="{EMBEDDINGS}",status="200"}}') >= 1
    )
    assert eventually(lambda: "prompt_tokens=7" in gateway.log)


def test_vectors_by_ollamas_api(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    asked = {"model": "scripted:latest", "input": ["sea", "x" * 200], "keep_alive": "5m"}
    response = gateway.post("/api/embed", asked)
    assert response.status_code == 200, response.text
    found = response.json()
    first, second = found["embeddings"]
    assert first == pytest.approx(unit(vector("sea")), abs=1e-6)
    assert len(second) == SIZE
    assert found["prompt_eval_count"] == len(ids_of("sea")) + MAX_TOKENS
    assert found["total_duration"] > 0
    assert response.headers["X-Ignored-Fields"] == "keep_alive"
    one = gateway.post("/api/embeddings", {"model": "scripted", "prompt": "sea"}).json()
    assert one["embedding"] == pytest.approx(vector("sea"), abs=1e-6)


def test_ollamas_dimensions_and_an_absent_input(gateway: GatewayProcess) -> None:
    asked = {"model": "scripted", "input": "sea", "dimensions": 2}
    (found,) = gateway.post("/api/embed", asked).json()["embeddings"]
    assert found == pytest.approx(unit(vector("sea")[:2]), abs=1e-6)
    assert gateway.post("/api/embed", {"model": "scripted"}).json()["embeddings"] == []
    assert gateway.post("/api/embeddings", {"model": "scripted"}).json() == {"embedding": []}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/api/embed", {"input": "x" * 200, "truncate": False}, "(truncate: true shortens"),
        ("/api/embed", {"input": ["a", 1]}, "input[1]"),
        ("/api/embed", {"input": "a", "dimensions": 99}, "dimensions"),
        ("/api/embed", {"input": "a", "keep_alive": "soon"}, "keep_alive"),
    ],
)
def test_refusals_of_ollamas_api_name_the_field(
    gateway: GatewayProcess, path: str, body: dict[str, Any], words: str
) -> None:
    response = gateway.post(path, {"model": "scripted", **body})
    assert response.status_code == 400
    assert words in response.json()["error"]


def test_ollama_clients_learn_that_a_model_has_vectors(gateway: GatewayProcess) -> None:
    shown = gateway.post("/api/show", {"model": "scripted"}).json()
    assert {"completion", "embedding"} <= set(shown["capabilities"])
