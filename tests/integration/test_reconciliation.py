"""A random mix of requests that end in all ways. The clients, the access log and `/metrics` must
agree on their numbers, to the token."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from protocol.engine.messages import Generate
from protocol.wire.errors import ErrorInfo
from tests.support.anthropic import prompt_tokens
from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, events_of, read_head, send_post
from tests.support.scripted_engine import Reply, ScriptedEngine, TokenReply, text_of, text_reply
from tests.support.waiting import eventually

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, GENERATE = "/v1/responses", "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
FREED = "tidegate_disconnect_to_free_seconds_count"
"""This series is complete last: it grows when the engine has released a lost client's resources."""
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
OPTIONS: dict[str, Any] = {"log_format": "json", "response_store": "none"}
NUM_CLIENTS, ROUNDS = 4, 3


def script(generate: Generate) -> Reply:
    """Reply as the words of the prompt require."""
    prompt = text_of(generate.prompt.tolist())
    if "refuse" in prompt:
        return ErrorInfo(code="overloaded", message="full", retry_after_s=3)
    if "fail" in prompt:
        return text_reply(
            "some words", finish="error", error=ErrorInfo(code="step_failed", message="x")
        )
    if "endless" in prompt:
        return TokenReply([[97]] * 20_000)  # ten seconds at least
    return text_reply("one two three four", size=3)


@dataclass
class CountingClient:
    """A client, and what it has counted.

    seen    (route, status) -> requests
    usage   request id -> (prompt tokens, generated tokens), if they were reported
    ends    the way in which requests ended -> requests
    """

    gateway: GatewayProcess
    seen: Counter[tuple[str, int]] = field(default_factory=Counter)
    usage: dict[str, tuple[int, int]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)

    def post(self, path: str, body: Any, end: str) -> requests.Response:
        response = self.gateway.post(path, body)
        self.seen[path, response.status_code] += 1
        self.ends[end] += 1
        return response

    def note_usage(self, response: requests.Response, usage: dict[str, int], *names: str) -> None:
        prompt, generated = (usage[name] for name in names)
        self.usage[response.headers["x-request-id"]] = (prompt, generated)


OPENAI = ("prompt_tokens", "completion_tokens")
ANTHROPIC = ("input_tokens", "output_tokens")


def messages_of(words: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": words}]


def whole_chat(client: CountingClient, dice: random.Random) -> None:
    body = {"messages": messages_of("hi"), "n": dice.randint(1, 3)}
    if dice.random() < 0.5:
        body["max_tokens"] = dice.randint(1, 6)
    response = client.post(CHAT, body, "finished")
    client.note_usage(response, response.json()["usage"], *OPENAI)


def streamed_completion(client: CountingClient, dice: random.Random) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"prompt": ["some", "prompts"][: dice.randint(1, 2)], "max_tokens": 9, **options}
    if dice.random() < 0.5:
        body["stop"] = ["two"]
    response = client.post(COMPLETIONS, body, "finished")
    client.note_usage(response, events_of(response.content)[-1]["usage"], *OPENAI)


def message(client: CountingClient, dice: random.Random) -> None:
    response = client.post(MESSAGES, {"messages": messages_of("x"), "max_tokens": 5}, "finished")
    usage = response.json()["usage"]
    usage["input_tokens"] = prompt_tokens(usage)
    client.note_usage(response, usage, *ANTHROPIC)


def response(client: CountingClient, dice: random.Random) -> None:
    answer = client.post(RESPONSES, {"input": "hi", "store": False}, "finished")
    client.note_usage(answer, answer.json()["usage"], *ANTHROPIC)


def tokens(client: CountingClient, dice: random.Random) -> None:
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": dice.randint(1, 9)}}
    answer = client.post(GENERATE, body, "finished")
    client.note_usage(answer, answer.json()["usage"], *OPENAI)


def refused_by_the_engine(client: CountingClient, dice: random.Random) -> None:
    assert client.post(CHAT, {"messages": messages_of("refuse")}, "refused").status_code == 429


def refused_by_the_gateway(client: CountingClient, dice: random.Random) -> None:
    assert client.post(COMPLETIONS, {"prompt": 5}, "refused").status_code == 400


def failed(client: CountingClient, dice: random.Random) -> None:
    streams = dice.random() < 0.5
    answer = client.post(CHAT, {"messages": messages_of("fail"), "stream": streams}, "error")
    # A stream may have failed before its head was sent.
    assert answer.status_code in ((200, 500) if streams else (500,))


def hung_up(client: CountingClient, dice: random.Random) -> None:
    with connect(client.gateway.port) as sock, sock.makefile("rb") as file:
        send_post(sock, CHAT, {"messages": messages_of("endless"), "stream": True})
        assert read_head(file)[0] == 200
        for _ in range(dice.randint(1, 20)):
            file.readline()
    client.seen[CHAT, 200] += 1
    client.ends["disconnected"] += 1


def aborted_by_name(client: CountingClient, dice: random.Random) -> None:
    name = f"mine-{dice.getrandbits(40)}"
    with connect(client.gateway.port) as sock, sock.makefile("rb") as file:
        body = {"messages": messages_of("endless"), "stream": True}
        send_post(sock, CHAT, body, headers={"X-Request-Id": name})
        assert read_head(file)[0] == 200
        reply = client.post(ABORT, {"request_ids": [f"chatcmpl-{name}"]}, "finished")
        assert reply.json()["aborted"]
        while b"[DONE]" not in file.readline():
            pass
    client.seen[CHAT, 200] += 1
    client.ends["aborted"] += 1


KINDS: list[Callable[[CountingClient, random.Random], None]] = [
    whole_chat,
    streamed_completion,
    message,
    response,
    tokens,
    refused_by_the_engine,
    refused_by_the_gateway,
    failed,
    hung_up,
    aborted_by_name,
]


@dataclass
class ToldUsage:
    """The counts of all clients, the log lines, the samples of `/metrics`, and the engine."""

    clients: list[CountingClient]
    lines: list[dict[str, Any]]
    samples: Samples
    engine: ScriptedEngine

    def metric(self, name: str, **labels: str) -> float:
        return self.samples.get((name, frozenset(labels.items())), 0.0)

    def counted(self, name: str, label: str) -> dict[str, float]:
        """Return the non-zero values of series `name`, by the value of their label `label`."""
        return {
            dict(labels)[label]: value
            for (full, labels), value in self.samples.items()
            if full == name and value
        }

    @property
    def accepted(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("finish", "refused") != "refused"]


@pytest.fixture(scope="module")
def reply(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToldUsage]:
    address = f"ipc://{tmp_path_factory.mktemp('engine') / 'engine.sock'}"
    with (
        ScriptedEngine(address, script=script) as engine,
        GatewayProcess(engine=address, **OPTIONS) as gateway,
    ):
        gateway.await_ready()
        clients = storm(gateway)
        await_lines(gateway, clients)
        gone = sum(client.ends["disconnected"] for client in clients)
        assert eventually(lambda: scraped(gateway).get((FREED, frozenset())) == gone)
        yield ToldUsage(clients, request_lines(gateway), scraped(gateway), engine)


def storm(gateway: GatewayProcess) -> list[CountingClient]:
    clients = [CountingClient(gateway) for _ in range(NUM_CLIENTS)]
    dices = [random.Random(seed) for seed in range(len(clients))]

    def live(client: CountingClient, dice: random.Random) -> None:
        for kind in dice.sample(KINDS * ROUNDS, len(KINDS) * ROUNDS):
            kind(client, dice)

    with ThreadPoolExecutor(len(clients)) as pool:
        for done in [pool.submit(live, *pair) for pair in zip(clients, dices, strict=True)]:
            done.result()
    return clients


def await_lines(gateway: GatewayProcess, clients: list[CountingClient]) -> None:
    """Wait until the log has a line for each request."""
    total = sum(sum(client.seen.values()) for client in clients)
    assert eventually(lambda: len(request_lines(gateway)) == total), len(request_lines(gateway))


def request_lines(gateway: GatewayProcess) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in gateway.log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == "request"]


def scraped(gateway: GatewayProcess) -> Samples:
    text = requests.get(gateway.url + "/metrics", timeout=9).text
    families = text_string_to_metric_families(text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def summed(lines: list[dict[str, Any]], name: str) -> float:
    return float(sum(line.get(name, 0) for line in lines))


def check_lines(reply: ToldUsage) -> None:
    seen = sum((client.seen for client in reply.clients), Counter())
    assert Counter((line["route"], line["status"]) for line in reply.lines) == seen
    assert len({line["request_id"] for line in reply.lines}) == len(reply.lines)
    for (route, status), count in seen.items():
        assert reply.metric("tidegate_requests_total", route=route, status=str(status)) == count


def check_tokens(reply: ToldUsage, count: int) -> None:
    lines = {line["request_id"]: line for line in reply.lines}
    told_usage = {name: usage for client in reply.clients for name, usage in client.usage.items()}
    assert len(told_usage) == count
    for name, usage in told_usage.items():
        assert (lines[name]["prompt_tokens"], lines[name]["generated_tokens"]) == usage


def check_totals(reply: ToldUsage) -> None:
    for name in ("prompt_tokens", "generated_tokens", "cached_tokens"):
        assert reply.metric(f"tidegate_{name}_total") == summed(reply.lines, name)
    for name in ("prompt_tokens", "generated_tokens"):
        assert reply.metric(f"tidegate_request_{name}_sum") == summed(reply.accepted, name)
        assert reply.metric(f"tidegate_request_{name}_count") == len(reply.accepted)
    refused = [line for line in reply.lines if line["end"] == "refused"]
    assert summed(refused, "prompt_tokens") == summed(refused, "generated_tokens") == 0


def check_open(reply: ToldUsage) -> None:
    assert reply.metric("tidegate_open_answers") == 0


def test_each_request_has_one_line_and_is_counted_by_route_and_status(reply: ToldUsage) -> None:
    check_lines(reply)


def test_ends_are_those_that_clients_brought_about(reply: ToldUsage) -> None:
    ends = sum((client.ends for client in reply.clients), Counter())
    assert Counter(line["end"] for line in reply.lines) == ends
    assert set(ends) == {"finished", "aborted", "disconnected", "refused", "error"}
    assert reply.counted("tidegate_request_ends_total", "end") == ends


def test_the_log_counts_the_tokens_that_clients_received(reply: ToldUsage) -> None:
    check_tokens(reply, 5 * NUM_CLIENTS * ROUNDS)


def test_totals_are_the_sums_over_requests(reply: ToldUsage) -> None:
    check_totals(reply)


def test_no_answer_is_open_after_all_have_ended(reply: ToldUsage) -> None:
    check_open(reply)


def test_answers_and_choices_are_counted_by_how_they_ended(reply: ToldUsage) -> None:
    answers = Counter(line["finish"] for line in reply.lines if "finish" in line)
    assert reply.counted("tidegate_answers_total", "finish") == answers
    choices = Counter(finish for line in reply.accepted for finish in line["finishes"])
    assert reply.counted("tidegate_choices_total", "finish") == choices
    assert {"stop", "length", "abort", "error", "disconnected"} <= set(choices)
    refused = sum("refuse" in text_of(g.prompt.tolist()) for g in reply.engine.generates)
    assert sum(choices.values()) == len(reply.engine.generates) - refused


def test_times_are_counted_once_for_each_answer_that_has_them(reply: ToldUsage) -> None:
    spoke = [line for line in reply.accepted if "first_token_s" in line]
    assert reply.metric("tidegate_time_to_first_token_seconds_count") == len(spoke)
    total = reply.metric("tidegate_time_to_first_token_seconds_sum")
    assert total == pytest.approx(summed(spoke, "first_token_s"), abs=1e-3)
    routes = Counter(line["route"] for line in reply.accepted)
    for route, count in routes.items():
        assert reply.metric("tidegate_request_seconds_count", route=route) == count
    for stage, name in (("queue", "queued_s"), ("prefill", "prefill_s"), ("decode", "decode_s")):
        told_sum = reply.metric("tidegate_stage_seconds_sum", stage=stage)
        assert told_sum == pytest.approx(summed(reply.accepted, name), abs=1e-3)


def test_resources_of_abandoned_requests_are_free_again(reply: ToldUsage) -> None:
    gone = [line for line in reply.lines if line["end"] == "disconnected"]
    assert reply.metric(FREED) == len(gone) > 0


def test_the_vllm_metric_names_have_the_same_values(reply: ToldUsage) -> None:
    model = {"model_name": "scripted"}
    generated = reply.metric("tidegate_generated_tokens_total")
    assert reply.metric("vllm:generation_tokens_total", **model) == generated
    count = reply.metric("vllm:e2e_request_latency_seconds_count", **model)
    assert count == len(reply.accepted)
    choices = reply.counted("tidegate_choices_total", "finish")
    aborted = reply.metric("vllm:request_success_total", finished_reason="abort", **model)
    assert aborted == choices["abort"] + choices["disconnected"]


def test_a_log_line_has_no_text_of_a_request(reply: ToldUsage) -> None:
    text = json.dumps(reply.lines)
    assert not re.search("endless|a{12}|refuse\\b(?!d)|some prompts|three", text)


def test_counts_agree_after_the_engine_restarts(tmp_path: Path) -> None:
    """Open answers fail, requests during the restart are refused, and later ones are answered."""
    address = f"ipc://{tmp_path / 'engine.sock'}"
    with GatewayProcess(engine=address, **OPTIONS) as gateway:
        clients = [CountingClient(gateway) for _ in range(NUM_CLIENTS)]
        with ScriptedEngine(address, script=script) as engine:
            gateway.await_ready()
            with ThreadPoolExecutor(NUM_CLIENTS) as pool:
                lost = [pool.submit(endless, client) for client in clients]
                engine.await_generates(NUM_CLIENTS)
                engine.await_read()  # that they are accepted: otherwise they count as refused
                engine.kill()
                assert [done.result() for done in lost] == [503] * NUM_CLIENTS
        assert endless(clients[0]) == 503
        with ScriptedEngine(address, script=script):
            gateway.await_ready()
            for client in clients:
                whole_chat(client, random.Random(7))
        await_lines(gateway, clients)
        reply = ToldUsage(clients, request_lines(gateway), scraped(gateway), engine)
    check_lines(reply)
    check_tokens(reply, NUM_CLIENTS)
    check_totals(reply)
    check_open(reply)
    ends = {"error": NUM_CLIENTS, "refused": 1, "finished": NUM_CLIENTS}
    assert Counter(line["end"] for line in reply.lines) == ends
    assert reply.counted("tidegate_request_ends_total", "end") == ends


def endless(client: CountingClient) -> int:
    """Send a request whose answer is endless, wait for the response, and return its status."""
    return client.post(CHAT, {"messages": messages_of("endless")}, "").status_code
