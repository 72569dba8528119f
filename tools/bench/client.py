"""The benchmark's HTTP client: requests to one server over many connections, from one thread.

When the event loop wakes up, the client reads the clock once. That time is the arrival time of all
bytes that it then reads. So the time that the client spends on one stream is not measured as a
delay of another stream. A connection serves one request at a time, and is reused if the server
allows that.
"""

from __future__ import annotations

import asyncio
import selectors
import ssl
from collections.abc import Mapping
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tools.bench.answers import AnswerReader, BadResponse, BenchAnswer
from tools.failure import Failure
from tools.http.web import WebServer

PROBE_TOKENS = 2
OPTIONAL = ("ignore_eos", "stream_options")
"""Request fields that a server may not support. Those that it refuses are not sent any more."""


class StampedSelector(selectors.DefaultSelector):
    """A selector that records in `woke_at` the time when its last wait ended."""

    woke_at = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(timeout)
        self.woke_at = perf_counter()
        return ready


class StampedLoop(asyncio.SelectorEventLoop):
    """An event loop whose `clock` records when the loop's last wait ended."""

    def __init__(self) -> None:
        self.clock = StampedSelector()
        super().__init__(self.clock)


class BenchConnection(asyncio.Protocol):
    """A connection to the server, which serves one request at a time."""

    def __init__(self, clock: StampedSelector) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._reader: AnswerReader | None = None
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader is None:
            self.close()  # the server sent data without a request
            return
        try:
            reader.push(data, self._clock.woke_at)
        except BadResponse as error:
            reader.answer.fail("not HTTP", str(error))
            self.close()
            return
        if reader.is_done:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._reader is not None:
            self._reader.finish(self._clock.woke_at)
            self._end()

    async def exchange(self, request: bytes, reader: AnswerReader) -> None:
        """Send the request, and wait until `reader` has the whole answer or the connection ends."""
        assert self._transport is not None
        self._reader = reader
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _end(self) -> None:
        assert self._reader is not None
        if not self._reader.response.keeps_alive:
            self.close()
        self._reader = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class BenchClient:
    """Sends requests to one server, over as many connections as are needed."""

    def __init__(
        self,
        url: str,
        path: str,
        headers: Mapping[str, str],
        clock: StampedSelector,
        *,
        wait_s: float,
    ) -> None:
        parts = urlsplit(WebServer(url).url)
        assert parts.hostname is not None
        self.url = url
        self._host = parts.hostname
        secure = parts.scheme == "https"
        self._port = parts.port or (443 if secure else 80)
        self._tls = ssl.create_default_context() if secure else None
        self._path = parts.path.rstrip("/") + path
        lines = {"Host": parts.netloc, "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._clock = clock
        self._wait_s = wait_s
        self._free: list[BenchConnection] = []

    async def post(self, body: Mapping[str, Any], started: float | None = None) -> BenchAnswer:
        """Send a request and return its answer. Errors are recorded in the answer.

        started   when the request was due to be sent; default: now
        """
        now = perf_counter()
        answer = BenchAnswer(now if started is None else started, int(body["max_tokens"]))
        try:
            async with asyncio.timeout(self._wait_s):
                await self._exchange(self._request(body), answer)
        except TimeoutError:
            answer.fail("timed out", f"after {self._wait_s:g} s")
        except OSError as error:
            answer.fail(_kind(error), str(error))
        answer.ended = answer.ended or perf_counter()
        return answer

    async def _exchange(self, request: bytes, answer: BenchAnswer) -> None:
        while self._free:
            connection = self._free.pop()
            if not connection.is_open:
                continue
            reader = AnswerReader(answer)
            await self._exchange_on(connection, request, reader)
            if reader.response.status:
                return
            # No byte arrived: the server probably closed the idle connection before the request.
            answer.error, answer.message, answer.ended = "", "", 0.0
            answer.num_resent += 1
        await self._exchange_on(await self._connect(), request, AnswerReader(answer))

    async def _exchange_on(
        self, connection: BenchConnection, request: bytes, reader: AnswerReader
    ) -> None:
        try:
            await connection.exchange(request, reader)
        except asyncio.CancelledError:  # disconnect, so that the server ends the request
            connection.close()
            raise
        if connection.is_open:
            self._free.append(connection)

    async def _connect(self) -> BenchConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: BenchConnection(self._clock), self._host, self._port, ssl=self._tls
        )
        return connection

    def _request(self, body: Mapping[str, Any]) -> bytes:
        data = msgspec.json.encode(body)
        head = f"POST {self._path} HTTP/1.1\r\n{self._head}Content-Length: {len(data)}\r\n\r\n"
        return head.encode() + data

    def close(self) -> None:
        for connection in self._free:
            connection.close()
        self._free.clear()


async def accepted_fields(client: BenchClient, body: Mapping[str, Any]) -> frozenset[str]:
    """Return the fields of `OPTIONAL` that the server accepts, found with short requests. Raises
    Failure if the server refuses the request for another reason."""
    accepted = frozenset(OPTIONAL)
    while True:
        omitted = set(OPTIONAL) - accepted
        fields = {name: value for name, value in body.items() if name not in omitted}
        answer = await client.post({**fields, "max_tokens": PROBE_TOKENS})
        refused = {name for name in accepted if name in answer.message}
        if answer.error in ("", "empty answer"):
            return accepted
        if not answer.error.startswith("status 4") or not refused:
            raise Failure(f"{client.url}: {answer.error}: {answer.message}")
        accepted -= refused


def _kind(error: OSError) -> str:
    """Return the kind of `error` for `BenchAnswer.fail`."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionError):
        return "connection lost"
    if isinstance(error, ssl.SSLError):
        return "TLS error"
    return "connection failed"
