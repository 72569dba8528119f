"""Measures the gateway's cost per event: a real gateway between a fast engine and fast clients.

    python -m tests.benchmarks.gateway_speed [--streams 64] [--rates 10000,40000] [--seconds 4]
                                          [--scenes plain,tools]

The engine (`flowing_engine`) sends one token of each stream a step, in one frame. The gateway runs
under gunicorn as in `tidegate serve`. The clients are in this process, which counts events and
parses nothing. For each scene and rate (tokens/s of all streams) a line is printed:

    events/s   events received; fewer than tokens if text was held back, or if the gateway was late
               and sent several tokens in one event
    us/event   CPU time of the gateway process, by `psutil`: in total and in the kernel, where it is
               mostly `send`
    us/token   CPU time of the gateway process per token
    busy       the share of one core that the gateway used
    gap        time between two arrivals at one client: median, 99th percentile and longest, in ms
    late       by how many ms the engine's last step was late

This is a measurement, not a test. Other work on the machine hardly changes the CPU time, but it
makes the gaps longer.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gateway.text.tokenizer import Tokenizer
from protocol.wire.sockets import make_private
from tests.benchmarks.flowing_engine import flowing_card
from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, send_post
from tests.support.processes import Program

PROSE = (
    "The harbour lies under fog, and the ferries answer each other with long, low notes. "
    "A clerk counts crates: 12 of oranges, 7 of tea, 1 of glass. "
    "“Careful!”, somebody calls — naturally in vain, and everybody laughs.\n\n"
    "```python\nfor crate in crates:\n    total += crate.weight * 9.81\n```\n\n"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        },
    },
}
MESSAGES = [{"role": "user", "content": "Tell me about the harbour."}]
CHARS = 6
"""Characters to write per token. The tokens of these texts are shorter on average."""
END = b"0\r\n\r\n"


def prose(chars: int) -> str:
    return PROSE * (chars // len(PROSE) + 1)


def thoughtful(chars: int) -> str:
    """Return reasoning and then content, of at least `chars` characters. The first `chars` / CHARS
    tokens are half reasoning, because a token has about four characters."""
    return f"<think>\n{prose(chars // 3)}\n</think>\n\n{prose(chars)}"


def calling(chars: int) -> str:
    """Return a text that is mostly the arguments of a tool call."""
    arguments = json.dumps({"path": "harbour.md", "text": prose(chars)}, ensure_ascii=False)
    call = f'{{"name": "write_file", "arguments": {arguments}}}'
    return f"<think>\nA file it is.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


@dataclass(frozen=True)
class SpeedScene:
    """One kind of answer.

    says     returns an answer of at least the given number of characters
    formats  the gateway's tool_format and reasoning_format
    """

    name: str
    path: str
    body: dict[str, Any]
    says: Callable[[int], str] = prose
    formats: tuple[str, str] = ("hermes", "qwen3")


CHAT = "/v1/chat/completions"
SCENES = [
    SpeedScene("plain", CHAT, {"messages": MESSAGES}, formats=("none", "none")),
    SpeedScene("reasoning", CHAT, {"messages": MESSAGES}, thoughtful),
    SpeedScene("tools", CHAT, {"messages": MESSAGES, "tools": [TOOL]}, calling),
    SpeedScene("logprobs", CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5}),
    SpeedScene(
        "messages", "/v1/messages", {"messages": MESSAGES, "max_tokens": 100_000}, thoughtful
    ),
    SpeedScene("responses", "/v1/responses", {"input": "Hello.", "store": False}, thoughtful),
    SpeedScene(
        "generate",
        "/inference/v1/generate",
        {"token_ids": [100, 101, 102], "sampling_params": {"max_tokens": 100_000}},
    ),
]


@dataclass
class ReceivedEvents:
    """The events that all clients received.

    events    number of events
    gaps_s    times between two arrivals at one client
    took_s    time from the first byte to the last
    """

    events: int = 0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    took_s: float = 0.0


class ClientCrowd:
    """Clients that send one request each, and count the events that they receive."""

    def __init__(self, port: int, scene: SpeedScene, streams: int) -> None:
        self._sockets = [connect(port) for _ in range(streams)]
        for sock in self._sockets:
            send_post(sock, scene.path, {**scene.body, "model": "flowing", "stream": True})

    def listen(self) -> ReceivedEvents:
        """Count events until every stream has ended."""
        received, clock = ReceivedEvents(), time.perf_counter
        poll = select.epoll()
        open_: dict[int, socket.socket] = {sock.fileno(): sock for sock in self._sockets}
        for number in open_:
            poll.register(number, select.EPOLLIN)
        last_at: dict[int, float] = {}
        ends: dict[int, bytes] = dict.fromkeys(open_, b"")
        first_at = 0.0
        while open_:
            for number, _ in poll.poll():
                data = open_[number].recv(1 << 18)
                assert data, f"a stream was cut off after {ends[number]!r}"
                now = clock()
                before = ends[number]
                # An event ends with an empty line, which may come in two parts.
                received.events += data.count(b"\n\n") + (
                    before[-1:] == b"\n" and data[:1] == b"\n"
                )
                ends[number] = (before + data)[-5:] if len(data) < 5 else data[-5:]
                first_at = first_at or now
                if number in last_at:
                    received.gaps_s.append(now - last_at[number])
                last_at[number] = now
                if ends[number] == END:
                    open_.pop(number).close()
        received.took_s = max(last_at.values()) - first_at
        poll.close()
        return received


class GatewayBench:
    """Measures a gateway in front of a `flowing_engine`."""

    def __init__(self, gateway: GatewayProcess, engine: Program, tokenizer: Tokenizer) -> None:
        self._gateway, self._engine, self._tokenizer = gateway, engine, tokenizer
        (worker,) = psutil.Process(gateway.process.pid).children()
        self._worker = worker

    def measure(self, scene: SpeedScene, streams: int, rate: float, seconds: float) -> str:
        """Measure a scene at a rate, in tokens/s of all streams. Return its row."""
        length = int(rate * seconds / streams) + 1
        text = scene.says(length * CHARS)
        ids = self._tokenizer.encode(text, add_special_tokens=False)[:length]
        order = {"ids": ids, "streams": streams, "step_s": streams / rate}
        self._engine.out.clear()
        self._engine.send_line(json.dumps(order))
        crowd = ClientCrowd(self._gateway.port, scene, streams)
        self._await_streams(streams)
        before = self._worker.cpu_times()
        self._engine.send_line("go")
        received = crowd.listen()
        after = self._worker.cpu_times()
        spent = after.user - before.user, after.system - before.system
        late_s = float(self._engine.line_with("."))
        return _line(scene, streams * len(ids), received, spent, late_s)

    def _await_streams(self, streams: int) -> None:
        """Wait until all streams are open and the gateway is idle."""
        while self._gateway.await_status("/metrics", 200).text.count(f"open_answers {streams}") < 1:
            time.sleep(0.05)
        time.sleep(0.2)


def _line(
    scene: SpeedScene,
    tokens: int,
    received: ReceivedEvents,
    spent: tuple[float, float],
    late_s: float,
) -> str:
    """Return a row of the table. `spent` is (user, system) CPU time in seconds."""
    gaps, busy_s = sorted(received.gaps_s), sum(spent)
    p50, p99, most = (gaps[int(share * (len(gaps) - 1))] * 1e3 for share in (0.5, 0.99, 1.0))
    return (
        f"{scene.name:10} {tokens / received.took_s:8,.0f} tokens/s "
        f"{received.events / received.took_s:8,.0f} events/s "
        f"{busy_s / received.events * 1e6:6.1f} ({spent[1] / received.events * 1e6:4.1f}) us/event "
        f"{busy_s / tokens * 1e6:6.1f} us/token  busy {busy_s / received.took_s:4.0%}  "
        f"gap {p50:5.1f} {p99:6.1f} {most:6.1f} ms  late {late_s * 1e3:.0f} ms"
    )


@contextmanager
def bench(formats: tuple[str, str]) -> Iterator[GatewayBench]:
    with tempfile.TemporaryDirectory() as folder:
        make_private(Path(folder) / "run" / "engine")
        address = f"ipc://{folder}/run/engine/e.sock"
        engine_of = ["-m", "tests.benchmarks.flowing_engine", address]
        config: dict[str, Any] = {
            "engine": address,
            "tool_format": formats[0],
            "reasoning_format": formats[1],
            "response_store": "none",
            "log_requests": False,
        }
        with (
            Program(engine_of, has_stdin=True) as engine,
            GatewayProcess(**config) as gateway,
        ):
            engine.line_with("ready")
            yield GatewayBench(gateway.await_ready(), engine, Tokenizer(flowing_card()))


def measure(
    scenes: Sequence[SpeedScene], streams: int, rates: Sequence[float], seconds: float
) -> None:
    """Measure each scene at each rate, and print the rows."""
    for formats in dict.fromkeys(scene.formats for scene in scenes):
        with bench(formats) as here:
            for scene in (scene for scene in scenes if scene.formats == formats):
                for rate in rates:
                    print(here.measure(scene, streams, rate, seconds), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gateway_speed")
    parser.add_argument("--streams", type=int, default=64, help="number of streams")
    parser.add_argument(
        "--rates",
        default="10000,40000",
        help="rates to measure, in tokens/s of all streams together",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement")
    parser.add_argument(
        "--scenes", default=",".join(scene.name for scene in SCENES), help="what to measure"
    )
    result = parser.parse_args()
    wanted = result.scenes.split(",")
    rates = [float(rate) for rate in result.rates.split(",")]
    measure([s for s in SCENES if s.name in wanted], result.streams, rates, result.seconds)


if __name__ == "__main__":
    main()
