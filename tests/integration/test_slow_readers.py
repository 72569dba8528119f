"""A client that does not read holds up nobody, and is not waited for beyond the time to send."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.messages import Generate
from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, events_of, exchange, read_head, send_post
from tests.support.scripted_engine import Says, ScriptedEngine, says, text_of

COMPLETIONS = "/v1/completions"
LONG = [1] * 800_000
"""A control character, six bytes of JSON each: more than the kernel keeps for one connection."""
WORDS = "Others are told every word of it. " * 20


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(f"ipc://{tmp_path / 'engine.sock'}") as engine:
        engine.script = answer
        yield engine


def answer(generate: Generate) -> Says:
    """To "long" a long text, and then nothing for as long as anybody listens."""
    if text_of(generate.prompt.tolist()) == "long":
        return Says([LONG, *[[]] * 100_000], "length", None)
    return says(WORDS)


def test_who_takes_nothing_for_the_time_to_send_is_cut_off_and_others_do_not_wait(
    engine: ScriptedEngine,
) -> None:
    """What waits for the one who does not read is a single piece of news, so it is time that ends
    it, not the bound of what may wait."""
    with (
        GatewayProcess(engine=engine.address, send_timeout_s=1.0) as gateway,
        connect(gateway.await_ready().port, rcvbuf=4096) as client,
    ):
        send_post(client, COMPLETIONS, {"prompt": "long", "stream": True, "max_tokens": 1 << 24})
        engine.await_generates(1, timeout_s=20)
        body = {"prompt": "short", "stream": True, "max_tokens": 4000}
        status, _, data = exchange(gateway.port, COMPLETIONS, body)
        assert status == 200
        assert "".join(e["choices"][0]["text"] for e in events_of(data)) == WORDS
        engine.await_abort(engine.generates[0].request, timeout_s=30)
        with client.makefile("rb") as file:
            assert read_head(file)[0] == 200
            rest = b""
            with contextlib.suppress(ConnectionResetError):
                rest = file.read()
        assert not rest.endswith(b"0\r\n\r\n")
