"""Requests to one server over as many connections as are wanted, from one thread.

Bytes are stamped with the time at which the event loop learned that they were there, before any of
them is read: what the client does with one stream does not count as the server's delay in another.
A connection serves one request at a time and is used again as long as the server allows it.
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
"""Fields that a server may not know; asked for until it says so."""


class StampedSelector(selectors.DefaultSelector):
    """`at`: when the latest wait ended."""

    at = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(timeout)
        self.at = perf_counter()
        return ready


class StampedLoop(asyncio.SelectorEventLoop):
    """An event loop that knows since when what it hands out has been there."""

    def __init__(self) -> None:
        self.clock = StampedSelector()
        super().__init__(self.clock)


class BenchConnection(asyncio.Protocol):
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
            self.close()  # it speaks unasked
            return
        try:
            reader.feed(data, self._clock.at)
        except BadResponse as error:
            reader.answer.fail("no HTTP", str(error))
            self.close()
            return
        if reader.is_done:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._reader is not None:
            self._reader.close(self._clock.at)
            self._end()

    async def exchange(self, request: bytes, reader: AnswerReader) -> None:
        """Send, and wait until the answer has come to an end."""
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
    """One server, and the connections to it that are free."""

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

    async def ask(self, body: Mapping[str, Any], started: float | None = None) -> BenchAnswer:
        """The answer, whatever it is; waiting counts from `started`, or from now."""
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
            await self._on(connection, request, reader)
            if reader.response.status:
                return
            # Closed without a byte: while it was idle, most likely, as servers do.
            answer.error, answer.complaint, answer.ended = "", "", 0.0
            answer.num_resent += 1
        await self._on(await self._connect(), request, AnswerReader(answer))

    async def _on(self, connection: BenchConnection, request: bytes, reader: AnswerReader) -> None:
        try:
            await connection.exchange(request, reader)
        except asyncio.CancelledError:  # hang up, so that the server stops as well
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


async def fields_taken(client: BenchClient, body: Mapping[str, Any]) -> frozenset[str]:
    """Which of `OPTIONAL` the server takes, found by asking for a short answer. Raises Failure
    where it refuses even without them."""
    taken = frozenset(OPTIONAL)
    while True:
        left_out = set(OPTIONAL) - taken
        told = {name: value for name, value in body.items() if name not in left_out}
        answer = await client.ask({**told, "max_tokens": PROBE_TOKENS})
        named = {name for name in taken if name in answer.complaint}
        if answer.error in ("", "empty answer"):
            return taken
        if not answer.error.startswith("status 4") or not named:
            raise Failure(f"{client.url}: {answer.error}: {answer.complaint}")
        taken -= named


def _kind(error: OSError) -> str:
    """In words that do not name the address."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionError):
        return "connection lost"
    if isinstance(error, ssl.SSLError):
        return "no TLS connection"
    return "no connection"
