"""Embeddings, rerank and scores of a whole server: a real model, the libraries that people use, and
the end of a server while requests are open."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ollama
import pytest
import requests
import torch
import transformers
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI

from tests.support.encoder_models import random_encoder, write_encoder
from tests.support.http import error_of, metric_of
from tests.support.model import minilm
from tests.support.rerankers import (
    INSTRUCTION,
    probabilities,
    prompt_ids,
    random_reranker,
    write_reranker,
)
from tests.support.server import Server

pytestmark = pytest.mark.long

TEXTS = [
    "How do I bake sourdough bread?",
    "Mix flour and water, and let the dough rise overnight.",
    "The harbour was closed because of the storm.",
    "Ein Satz auf Deutsch, mit Umlauten: äöü.",
    "a",
    "The quick brown fox jumps over the lazy dog. " * 20,
]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--served-name", "minilm", model=str(minilm())) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def wanted() -> torch.Tensor:
    """Return the vectors of TEXTS, from transformers: the mean of the hidden states, at length
    1."""
    tokenizer, model = (
        transformers.AutoTokenizer.from_pretrained(minilm()),
        transformers.AutoModel.from_pretrained(minilm()),
    )
    rows = []
    for text in TEXTS:
        ids = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            rows.append(model(**ids).last_hidden_state[0].mean(0))
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


def difference(found: list[list[float]], wanted: torch.Tensor) -> float:
    return float((torch.tensor(found) - wanted).abs().max())


def test_the_openai_library_gets_the_vectors_of_transformers(
    client: OpenAI, wanted: torch.Tensor
) -> None:
    """The library asks for base64 by default."""
    found = client.embeddings.create(model="minilm", input=TEXTS)
    assert difference([item.embedding for item in found.data], wanted) < TOLERANCE
    assert found.usage.prompt_tokens == found.usage.total_tokens > 200
    plain = client.embeddings.create(model="minilm", input=TEXTS[0], encoding_format="float")
    assert difference([plain.data[0].embedding], wanted[:1]) < TOLERANCE


def test_langchain_embeds_documents_and_queries(server: Server, wanted: torch.Tensor) -> None:
    library = OpenAIEmbeddings(
        model="minilm",
        base_url=f"{server.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        check_embedding_ctx_length=False,  # otherwise it sends OpenAI's own token ids
    )
    assert difference(library.embed_documents(TEXTS), wanted) < TOLERANCE
    assert difference([library.embed_query(TEXTS[0])], wanted[:1]) < TOLERANCE


def test_ollamas_client_embeds_texts(server: Server, wanted: torch.Tensor) -> None:
    with ollama.Client(server.url) as library:
        found = library.embed("minilm", TEXTS)
    assert difference([list(each) for each in found.embeddings], wanted) < TOLERANCE


def test_a_query_finds_its_document(server: Server) -> None:
    body: dict[str, Any] = {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 1}
    found = requests.post(f"{server.url}/v1/rerank", json=body, timeout=60).json()
    (result,) = found["results"]
    assert result["document"]["text"] == TEXTS[1]


def test_many_clients_get_the_vectors_of_their_own_texts(
    client: OpenAI, wanted: torch.Tensor
) -> None:
    def ask(number: int) -> float:
        places = [(number + step) % len(TEXTS) for step in range(1 + number % 5)]
        found = client.embeddings.create(model="minilm", input=[TEXTS[place] for place in places])
        return difference([item.embedding for item in found.data], wanted[places])

    with ThreadPoolExecutor(16) as pool:
        assert max(pool.map(ask, range(80))) < TOLERANCE


def test_a_drain_finishes_the_open_requests() -> None:
    patient = ("--drain-s", "300")  # other programs may use the cores
    with Server("--served-name", "minilm", *patient, model=str(minilm())) as server:
        url = f"{server.url}/v1/embeddings"

        def ask(number: int) -> int:
            body = {"input": [f"text {number} {place} " * 30 for place in range(60)]}
            return requests.post(url, json=body, timeout=300).status_code

        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, number) for number in range(4)]
            while metric_of(server.url, "tidegate_open_answers") < 4 and not any(
                each.done() for each in answers
            ):
                pass
            server.process.send_signal(signal.SIGTERM)
            assert [answer.result() for answer in answers] == [200] * 4


def test_a_chat_model_generates_and_embeds_at_the_same_time() -> None:
    with (
        Server("--served-name", "chat", "--pooling", "mean") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        chat = [{"role": "user", "content": "Count to five."}]

        def answer() -> str:
            said = client.chat.completions.create(
                model="chat",
                messages=chat,
                max_tokens=24,
                temperature=0,  # type: ignore[arg-type]
            )
            return said.choices[0].message.content or ""

        alone = answer()
        first = client.embeddings.create(model="chat", input=TEXTS).data
        with ThreadPoolExecutor(2) as pool:
            chats = [pool.submit(answer) for _ in range(2)]
            vectors = client.embeddings.create(model="chat", input=TEXTS * 10).data
            assert [each.result() for each in chats] == [alone] * 2
        for place, item in enumerate(vectors):
            found, same = torch.tensor(item.embedding), first[place % len(TEXTS)].embedding
            assert float((found - torch.tensor(same)).abs().max()) < 2e-2  # bfloat16


def test_a_cross_encoder_orders_documents_as_transformers_does(tmp_path: Path) -> None:
    model = random_encoder("bert", scores=True, num_labels=1)
    write_encoder(tmp_path, model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    query, documents = "w1 w2 w3", ["w4 w5", "w6", "w7 w8 w9 w10 w11", "w2 w1"]
    scores = []
    for document in documents:
        ids = tokenizer(query, document, return_tensors="pt")
        ids["token_type_ids"] = torch.tensor(
            [tokenizer.backend_tokenizer.encode(query, document).type_ids]
        )
        with torch.no_grad():
            scores.append(float(model(**ids).logits[0, 0].sigmoid()))
    with Server(model=str(tmp_path)) as server:
        body = {"query": query, "documents": documents}
        found = requests.post(f"{server.url}/v1/rerank", json=body, timeout=60).json()
        by_place = {each["index"]: each["relevance_score"] for each in found["results"]}
        assert [by_place[place] for place in range(4)] == pytest.approx(scores, abs=TOLERANCE)
        order = sorted(range(4), key=lambda place: -scores[place])
        assert [each["index"] for each in found["results"]] == order
        refused = requests.post(f"{server.url}/v1/embeddings", json={"input": "w1"}, timeout=60)
        assert "has no embeddings" in error_of(refused, 400)["message"]


def test_a_reranker_is_recognised_and_orders_documents_as_transformers_does(tmp_path: Path) -> None:
    model = random_reranker()
    path = write_reranker(tmp_path / "Qwen3-Reranker-0.6B", model)
    query, documents = "When is the harbour closed?", ["In a storm.", "Bread rises.", "no " * 60]
    with Server("--dtype", "float32", model=str(path)) as server:
        for instruction in (INSTRUCTION, "Find the cause"):
            fields = {} if instruction == INSTRUCTION else {"instruction": instruction}
            prompts = [prompt_ids(query, each, instruction) for each in documents]
            scores = probabilities(model, prompts).flatten().tolist()
            body = {"query": query, "documents": documents, **fields}
            found = requests.post(f"{server.url}/v1/rerank", json=body, timeout=60).json()
            by_place = {each["index"]: each["relevance_score"] for each in found["results"]}
            assert [by_place[place] for place in range(3)] == pytest.approx(scores, abs=TOLERANCE)
            pairs = {"text_1": query, "text_2": documents, **fields}
            found = requests.post(f"{server.url}/v1/score", json=pairs, timeout=60).json()
            assert [each["score"] for each in found["data"]] == pytest.approx(scores, abs=TOLERANCE)
        chat = {"messages": [{"role": "user", "content": "a"}]}
        refused = requests.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60)
        assert "does not generate text" in error_of(refused, 400)["message"]
