"""A gateway with scripted replicas: which one gets which request, and what happens to the requests
of a replica that refuses them, drains or is lost."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Self

import pytest
import requests

from gateway.fleet.engine_fleet import MAX_LOSSES
from protocol.engine.adapters import AdapterInfo
from protocol.engine.messages import AbortByLabel, Generate
from protocol.engine.model_card import ModelCard
from protocol.engine.stats import EngineStats
from protocol.wire.errors import ErrorInfo, Overloaded
from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, metric_of, send_post
from tests.support.image_models import SMOLVLM, picture
from tests.support.scripted_engine import (
    BLOCK_TOKENS,
    Reply,
    ScriptedEngine,
    TokenReply,
    scripted_card,
    text_reply,
)
from tests.support.waiting import eventually

COMPLETIONS = "/v1/completions"
TEXT = "The quick brown fox jumps over the lazy dog."
FULL = Overloaded("the queue is full", retry_after_s=7)


def continued(generate: Generate) -> Reply:
    """Reply with TEXT from the token after those that another replica has sent."""
    start = 0 if generate.answer is None else len(generate.answer)
    return text_reply(TEXT[start:])


def stuck_after(count: int) -> Any:
    """Return a script that sends `count` tokens of TEXT, and then nothing more."""

    def script(generate: Generate) -> Reply:
        start = 0 if generate.answer is None else len(generate.answer)
        steps = [[byte] for byte in TEXT[start : start + count].encode()]
        return TokenReply([*steps, *[[]] * 100_000])

    return script


class Replicas:
    """Replicas and their gateway."""

    def __init__(
        self, folder: Path, count: int = 2, *, card: ModelCard | None = None, **config: Any
    ) -> None:
        self.file = folder / "engines"
        fields = {} if card is None else {"card": card}
        self.engines = [
            ScriptedEngine(f"ipc://{folder}/{n}", continued, **fields) for n in range(count)
        ]
        for engine in self.engines:
            engine.stats = EngineStats()
        self.write_list(self.engines)
        self.gateway = GatewayProcess(engines_file=str(self.file), **config)

    def write_list(self, engines: list[ScriptedEngine]) -> None:
        self.file.write_text("".join(f"{engine.address}\n" for engine in engines))

    def complete(self, prompt: Any = "a prompt", **fields: Any) -> requests.Response:
        headers = fields.pop("headers", {})
        body = {"prompt": prompt, "max_tokens": 100, **fields}
        return self.gateway.post(COMPLETIONS, body, headers=headers)

    def counts(self) -> list[int]:
        """Return the number of requests that each engine has received."""
        return [len(engine.generates) for engine in self.engines]

    def states(self) -> list[dict[str, Any]]:
        facts = requests.get(self.gateway.url + "/readyz", timeout=5).json()
        return facts.get("replicas", [])

    def await_ready(self, count: int) -> None:
        def are_ready() -> bool:
            states = self.states()
            return [state["ready"] for state in states] == [True] * count

        assert eventually(are_ready), self.states()

    def metric(self, line: str) -> float:
        return metric_of(self.gateway.url, line)


@contextmanager
def started(replicas: Replicas) -> Iterator[Replicas]:
    """Start the engines and the gateway for the `with` block."""
    with ExitStack() as stack:
        for engine in replicas.engines:
            stack.enter_context(engine)
        stack.enter_context(replicas.gateway)
        replicas.gateway.await_ready()
        replicas.await_ready(len(replicas.engines))
        yield replicas


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with started(Replicas(tmp_path_factory.mktemp("replicas"))) as replicas:
        yield replicas


@pytest.fixture
def kept(shared: Replicas) -> Replicas:
    """Return replicas that tests share: a test must leave them alive and idle, and use a prompt of
    its own."""
    for engine in shared.engines:
        engine.await_idle()
        engine.reset()
        engine.stats = EngineStats()
    assert eventually(lambda: all(state["waiting"] == 0 for state in shared.states()))
    return shared


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Replicas]:
    with started(Replicas(tmp_path)) as replicas:
        yield replicas


class Asked:
    """A whole answer that a thread requests during the `with` block."""

    def __init__(self, replicas: Replicas, **fields: Any) -> None:
        self.response: requests.Response
        self._thread = threading.Thread(target=self._ask, args=(replicas, fields))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.join()

    def _ask(self, replicas: Replicas, fields: dict[str, Any]) -> None:
        self.response = replicas.complete(**fields)

    @property
    def text(self) -> str:
        return str(self.response.json()["choices"][0]["text"])


# ---- where requests go


def test_prompts_with_a_common_prefix_go_to_one_replica(kept: Replicas) -> None:
    before = kept.metric('tidegate_routed_requests_total{reason="prefix"}')
    prefix = "x" * 4 * BLOCK_TOKENS
    for number in range(6):
        assert kept.complete(prefix + str(number)).status_code == 200
    assert sorted(kept.counts()) == [0, 6]
    assert kept.metric('tidegate_routed_requests_total{reason="prefix"}') == before + 5


def test_all_choices_of_a_prompt_go_to_one_replica(kept: Replicas) -> None:
    assert kept.complete("y" * 100, n=5).status_code == 200
    assert sorted(kept.counts()) == [0, 5]


def test_a_session_stays_on_its_replica(kept: Replicas) -> None:
    for number in range(6):
        kept.complete(f"session {number}" * 10, headers={"X-Session-ID": "abc"})
    assert sorted(kept.counts()) == [0, 6]
    assert kept.metric('tidegate_routed_requests_total{reason="session"}') == 5


def test_a_busy_replica_is_avoided(kept: Replicas) -> None:
    kept.engines[0].stats = EngineStats(waiting=50, waiting_tokens=90_000)
    assert eventually(lambda: kept.states()[0]["waiting"] == 50)
    for number in range(4):
        kept.complete(f"busy {number}" * 20)
    assert kept.counts() == [0, 4]


# ---- refusals


def test_a_request_that_a_full_replica_refuses_is_sent_to_another(kept: Replicas) -> None:
    before = kept.metric('tidegate_moved_requests_total{cause="refused"}')
    kept.engines[0].script = lambda generate: FULL.info()
    answers = [kept.complete(f"{number:x}" * 100) for number in range(16)]
    assert [answer.status_code for answer in answers] == [200] * 16
    assert kept.counts()[0] > 0
    refused = kept.metric('tidegate_moved_requests_total{cause="refused"}')
    assert refused == before + kept.counts()[0]


def test_if_all_refuse_the_client_gets_the_shortest_wait(kept: Replicas) -> None:
    waits = iter([9, 3])
    for engine in kept.engines:
        wait_s = next(waits)
        engine.script = lambda g, wait_s=wait_s: Overloaded("full", retry_after_s=wait_s).info()  # type: ignore[misc]
    refused = kept.complete()
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "3")
    assert kept.counts() == [1, 1]


def test_a_standing_refusal_is_repeated_only_if_all_replicas_refuse(two: Replicas) -> None:
    standing = Overloaded("full", retry_after_s=1, stands_s=60).info()
    for engine in two.engines:
        engine.script = lambda generate: standing
    assert two.complete().status_code == 429
    assert two.complete().status_code == 429
    assert two.counts() == [1, 1]


def test_what_every_replica_would_refuse_is_sent_to_one(kept: Replicas) -> None:
    for engine in kept.engines:
        engine.script = lambda g: ErrorInfo(code="invalid_request", message="no", param="prompt")
    assert kept.complete().status_code == 400
    assert sorted(kept.counts()) == [0, 1]


# ---- losses


def test_a_stream_continues_on_another_replica_from_its_tokens(two: Replicas) -> None:
    for engine in two.engines:
        engine.script = stuck_after(5)
    with Asked(two, temperature=1.0, mirostat=2) as asked:
        assert eventually(lambda: sum(two.counts()) == 1)
        owner = two.engines[two.counts().index(1)]
        (other,) = [engine for engine in two.engines if engine is not owner]
        owner.await_steps(8)
        other.script = continued
        owner.kill()
        other.await_generates(1)
    assert asked.text == TEXT
    before, after = owner.generates[0], other.generates[0]
    assert (before.mirostat_mu, after.mirostat_mu) == (None, 5.0)
    assert after.answer is not None
    assert bytes(after.answer.tolist()).decode() == TEXT[:5]
    assert after.prompt == before.prompt
    assert after.params == before.params
    assert after.params.seed is not None
    usage = asked.response.json()["usage"]
    assert usage["completion_tokens"] == len(TEXT) + 1
    assert two.metric('tidegate_moved_requests_total{cause="continued"}') == 1


def test_another_replica_gets_the_images_of_a_request(tmp_path: Path) -> None:
    card = SMOLVLM.card(name="tiny", context_tokens=512)
    url = f"data:image/png;base64,{base64.b64encode(picture(60, 40)).decode()}"
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
    replicas = Replicas(tmp_path, card=card, tried_tokenizer="")
    for engine in replicas.engines:
        engine.script = stuck_after(5)
    body = {"messages": messages, "max_tokens": 100, "stream": True}
    with started(replicas), connect(replicas.gateway.port) as client:
        send_post(client, "/v1/chat/completions", body)
        assert eventually(lambda: sum(replicas.counts()) == 1)
        owner = replicas.engines[replicas.counts().index(1)]
        (other,) = [engine for engine in replicas.engines if engine is not owner]
        owner.await_steps(8)
        owner.kill()
        other.await_generates(1)
    before, after = owner.generates[0], other.generates[0]
    assert after.answer is not None
    assert after.attachments == before.attachments != []
    assert owner.attached == other.attached == [before.attachments[0].digest]


def test_a_request_without_tokens_is_sent_again(two: Replicas) -> None:
    for engine in two.engines:
        engine.is_paused = True
    with Asked(two) as asked:
        assert eventually(lambda: sum(two.counts()) == 1)
        owner = two.engines[two.counts().index(1)]
        (other,) = [engine for engine in two.engines if engine is not owner]
        other.is_paused = False
        owner.kill()
    assert asked.text == TEXT


def test_requests_wait_for_a_replica_if_none_is_ready(two: Replicas) -> None:
    for engine in two.engines:
        engine.script = stuck_after(3)
    with Asked(two) as asked:
        assert eventually(lambda: sum(two.counts()) == 1)
        owner = two.engines[two.counts().index(1)]
        owner.await_steps(6)
        for engine in two.engines:
            engine.kill()
        assert eventually(lambda: not any(state["ready"] for state in two.states()))
        with ScriptedEngine(owner.address, continued) as again:
            again.await_generates(1)
            asked.__exit__()
    assert asked.text == TEXT


def test_a_request_is_given_up_if_no_replica_becomes_ready(tmp_path: Path) -> None:
    with started(Replicas(tmp_path, failover_s=0.5)) as two:
        for engine in two.engines:
            engine.script = stuck_after(3)
        with Asked(two) as asked:
            assert eventually(lambda: sum(two.counts()) == 1)
            two.engines[two.counts().index(1)].await_steps(6)
            for engine in two.engines:
                engine.kill()
        assert asked.response.status_code == 503
        assert "no other engine was ready" in asked.response.text


def test_a_request_that_ends_its_engines_is_given_up(tmp_path: Path) -> None:
    count = MAX_LOSSES + 1
    with started(Replicas(tmp_path, count)) as replicas:
        for engine in replicas.engines:
            engine.script = stuck_after(1)
        alive = list(replicas.engines)
        with Asked(replicas) as asked:
            while len(alive) > 1:
                assert eventually(lambda: any(engine.generates for engine in alive))
                (owner,) = [engine for engine in alive if engine.generates]
                owner.await_steps(3)
                owner.kill()
                alive.remove(owner)
        assert asked.response.status_code == 503
        assert f"{MAX_LOSSES} engines were lost" in asked.response.text
        assert sum(replicas.counts()) == MAX_LOSSES


def test_a_request_whose_engine_is_lost_during_its_abort_is_not_continued(two: Replicas) -> None:
    for engine in two.engines:
        engine.script = stuck_after(3)
    with Asked(two) as asked:
        assert eventually(lambda: sum(two.counts()) == 1)
        owner = two.engines[two.counts().index(1)]
        owner.await_steps(6)
        owner.is_silent = True  # the abort is not answered
        ids = {"request_ids": [owner.generates[0].labels[0]]}
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(two.gateway.post, "/inference/v1/abort_requests", ids)
            assert eventually(lambda: AbortByLabel in owner.ignored)
            owner.kill()
        assert answer.result().json()["aborted"] == ids["request_ids"]
    assert asked.response.json()["choices"][0]["finish_reason"] == "abort"
    assert sum(two.counts()) == 1


def test_a_client_that_disconnects_is_the_reason_of_the_abort_at_its_replica(
    two: Replicas,
) -> None:
    for engine in two.engines:
        engine.script = stuck_after(3)
    with connect(two.gateway.port) as client:
        send_post(client, COMPLETIONS, {"prompt": "a prompt", "stream": True})
        assert eventually(lambda: sum(two.counts()) == 1)
    assert eventually(lambda: [n for engine in two.engines for n in engine.aborts])
    assert [why for engine in two.engines for why in engine.abort_reasons.values()] == [
        "disconnected"
    ]


# ---- changes of the list


def test_replicas_can_be_added_and_removed(two: Replicas, tmp_path: Path) -> None:
    first, second = two.engines
    with ScriptedEngine(f"ipc://{tmp_path}/new", continued) as new:
        new.stats = EngineStats()
        two.write_list([second, new])
        assert eventually(
            lambda: [s["address"] for s in two.states()] == [second.address, new.address]
        )
        assert eventually(lambda: first.goodbyes == 1)
        two.await_ready(2)
        for number in range(16):
            assert two.complete(f"{number:x}" * 100).status_code == 200
        assert not first.generates
        assert new.generates


def test_a_replica_that_left_the_list_finishes_its_requests(two: Replicas) -> None:
    for engine in two.engines:
        engine.is_paused = True
    with Asked(two) as asked:
        assert eventually(lambda: sum(two.counts()) == 1)
        owner = two.engines[two.counts().index(1)]
        two.write_list([engine for engine in two.engines if engine is not owner])
        assert eventually(lambda: "gets no new requests" in two.gateway.log)
        owner.is_paused = False
    assert asked.text == TEXT
    assert eventually(lambda: owner.goodbyes == 1)


def test_a_request_is_not_continued_with_another_model(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, failover_s=0.5)
    replicas.engines[1].card = scripted_card(digest="another")
    with started(replicas):
        for engine in replicas.engines:
            engine.script = stuck_after(3)
        with Asked(replicas) as asked:
            # Usually the first one. On a busy machine it may be silent when the request arrives.
            assert eventually(lambda: sum(replicas.counts()) == 1)
            counts = replicas.counts()
            owner = replicas.engines[counts.index(1)]
            owner.await_steps(6)
            owner.kill()
        assert asked.response.status_code == 503
        assert replicas.counts() == counts


# ---- LoRA adapters


def adapter(name: str, digest: str = "d1") -> AdapterInfo:
    return AdapterInfo(name=name, digest=digest, rank=8, path=name)


def post_adapter(replicas: Replicas, action: str, name: str) -> requests.Response:
    body = {"lora_name": name} | ({"lora_path": name} if action == "load" else {})
    return replicas.gateway.post(f"/v1/{action}_lora_adapter", body)


def test_an_adapter_is_loaded_in_all_replicas_and_unloaded_in_all(two: Replicas) -> None:
    assert post_adapter(two, "load", "fr").status_code == 200
    assert [engine.adapters for engine in two.engines] == [[adapter("fr")]] * 2
    assert two.complete(model="fr").json()["choices"][0]["text"] == TEXT
    assert [each.adapter for engine in two.engines for each in engine.generates] == ["fr"]
    assert post_adapter(two, "unload", "fr").status_code == 200
    assert [engine.adapters for engine in two.engines] == [[], []]
    assert two.complete(model="fr").status_code == 404
    assert post_adapter(two, "unload", "fr").status_code == 404


def test_a_load_that_one_replica_refuses_is_undone_in_the_others(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, 3)
    replicas.engines[2].adapters = [adapter("fr", "other")]
    with started(replicas):
        assert post_adapter(replicas, "load", "fr").status_code == 400
        assert [len(engine.adapters) for engine in replicas.engines] == [0, 0, 1]


def test_an_adapter_is_loaded_again_in_a_replica_that_has_lost_it(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, 2)
    replicas.engines[0].adapters = [adapter("fr")]
    with started(replicas):
        assert post_adapter(replicas, "load", "fr").status_code == 200
        assert [engine.adapters for engine in replicas.engines] == [[adapter("fr")]] * 2
        assert post_adapter(replicas, "load", "fr").status_code == 400


def test_requests_go_to_replicas_that_have_the_adapter(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, 3)
    replicas.engines[1].adapters = [adapter("fr")]
    with started(replicas):
        for number in range(6):
            assert replicas.complete(f"prompt {number}", model="fr").status_code == 200
        assert replicas.counts() == [0, 6, 0]


def digests(replicas: Replicas) -> list[list[str]]:
    """Return the digest of the adapter in each request that the engines have received."""
    return [[each.adapter_digest for each in engine.generates] for engine in replicas.engines]


def test_a_request_is_sent_again_for_the_adapter_that_has_replaced_its_own(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, 2)
    for engine in replicas.engines:
        engine.adapters = [adapter("fr")]
    with started(replicas):
        for engine in replicas.engines:  # the gateway does not know it yet
            engine.adapters = [adapter("fr", "d2")]
        assert replicas.complete(model="fr").status_code == 200
        received = digests(replicas)
        assert sorted(chain.from_iterable(received)) == ["d1", "d1", "d2"]
        assert all("d1" in each for each in received), "both replicas were tried"


def test_a_stream_does_not_continue_with_another_adapter_of_the_same_name(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, failover_s=0.5)
    replicas.engines[0].adapters = [adapter("fr")]
    replicas.engines[1].adapters = [adapter("fr", "other")]
    with started(replicas), ThreadPoolExecutor(1) as pool:
        for engine in replicas.engines:
            engine.script = stuck_after(5)
        answer = pool.submit(replicas.complete, model="fr")
        # Usually the first one. On a busy machine it may be silent when the request arrives.
        assert eventually(lambda: any(engine.num_steps > 6 for engine in replicas.engines))
        counts = replicas.counts()
        assert sorted(counts) == [0, 1]
        replicas.engines[counts.index(1)].kill()
        assert answer.result().status_code == 503
        assert replicas.counts() == counts
