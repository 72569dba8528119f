"""Hosts of images that misbehave, and the name server that has their names.

    python -m tests.torture.image_hosts

All hosts are one HTTP server, at port 80 of every address of a network of its own (own_network.py).
A request to any address but the public one is an error of the attacked server: it gets a status
that no host has, and a line with REACHED is printed. READY is printed when all listen.
"""

from __future__ import annotations

import itertools
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from socketserver import BaseRequestHandler, StreamRequestHandler, ThreadingTCPServer, UDPServer

from gateway.images.limits import MAX_IMAGE_BYTES
from tests.support.dns import A, answer_to, question_of
from tests.support.hostile_images import black_png
from tests.support.http import response
from tests.torture.own_network import NAME_SERVER, PRIVATE, PUBLIC

MODULE = "tests.torture.image_hosts"
READY, REACHED = "the hosts are ready", "reached at"
DRIP_S = 0.5
"""Interval of the bytes of a slow host."""
IMAGE = black_png(8, 8)
PIECE_BYTES = 1 << 16


OK, CHUNKED = response("200 OK"), response("200 OK", **{"Transfer-Encoding": "chunked"})
ANNOUNCED = {"Content-Length": str(100 * MAX_IMAGE_BYTES)}


@dataclass(frozen=True, slots=True)
class ImageHost:
    """A host, which gives each request the same response.

    pieces     returns the pieces of the response
    stays      whether the connection stays open after the last piece, until the client closes it
    addresses  those of the name: of the first question, of the second, and so on, and then from the
               start again; None: its questions get no answer
    """

    pieces: Callable[[], Iterable[bytes]]
    stays: bool = False
    addresses: Sequence[Sequence[str]] | None = ((PUBLIC,),)


def once(*pieces: bytes) -> Callable[[], Iterable[bytes]]:
    return lambda: pieces


def redirect(place: str) -> ImageHost:
    return ImageHost(once(response("302 Found", Location=place)))


def endless(head: bytes, unit: bytes) -> ImageHost:
    """Return a host that sends `head` and then `unit` again and again, as fast as it can."""
    piece = unit * (PIECE_BYTES // len(unit))
    return ImageHost(lambda: itertools.chain([head], itertools.repeat(piece)))


def dripped(head: bytes, unit: bytes) -> ImageHost:
    """Return a host that sends `head` and then, again and again, a `unit` and nothing for a
    while."""

    def pieces() -> Iterator[bytes]:
        yield head
        while True:
            time.sleep(DRIP_S)
            yield unit

    return ImageHost(pieces)


GOOD = ImageHost(once(response("200 OK", IMAGE)))
HOSTS: dict[str, ImageHost] = {
    "good.test": GOOD,
    "to-another.test": redirect("http://good.test/"),
    "to-this-machine.test": redirect("http://127.0.0.1/"),
    "to-metadata.test": redirect(f"http://{PRIVATE[0]}/latest/meta-data"),
    "in-circles.test": redirect("/"),
    "changing.test": ImageHost(GOOD.pieces, addresses=[[PUBLIC], ["127.0.0.1"]]),
    "half-public.test": ImageHost(GOOD.pieces, addresses=[[PUBLIC, PRIVATE[1]]]),
    "unknown.test": ImageHost(GOOD.pieces, addresses=[[]]),
    "nameless.test": ImageHost(GOOD.pieces, addresses=None),
    "silent.test": ImageHost(once(), stays=True),
    "slow-head.test": dripped(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "slow-body.test": dripped(OK, b"x"),
    "endless.test": endless(OK, bytes(PIECE_BYTES)),
    "announced.test": ImageHost(once(response("200 OK", **ANNOUNCED)), stays=True),
    "many-heads.test": endless(b"", response("100 Continue")),
    "small-chunks.test": endless(CHUNKED, b"1\r\nx\r\n"),
    "many-trailers.test": endless(CHUNKED + b"0\r\n", b"X: y\r\n"),
}
_num_questions = dict.fromkeys(HOSTS, 0)


class _Web(ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 128


class _Connection(StreamRequestHandler):
    def handle(self) -> None:
        address = str(self.connection.getsockname()[0])
        if address != PUBLIC:
            print(f"{REACHED} {address}", flush=True)
            self.wfile.write(response("418 A private host was reached"))
            return
        name = ""
        while line := self.rfile.readline().strip():
            if line.lower().startswith(b"host:"):
                name = line[5:].strip().decode()
        host = HOSTS[name]
        with suppress(OSError):  # the client has read enough
            for piece in host.pieces():
                self.wfile.write(piece)
            if host.stays:
                self.rfile.read()


class _Query(BaseRequestHandler):
    def handle(self) -> None:
        data, server = self.request
        with suppress(IndexError, struct.error):
            question = question_of(data)
            host = HOSTS.get(question.name)
            if host is not None and host.addresses is None:
                return
            addresses = None
            if host is not None and host.addresses is not None:
                addresses = host.addresses[_num_questions[question.name] % len(host.addresses)]
                _num_questions[question.name] += question.kind == A
            assert isinstance(server, socket.socket)
            server.sendto(answer_to(data, addresses), self.client_address)


def main() -> None:
    with _Web(("", 80), _Connection) as web, UDPServer((NAME_SERVER, 53), _Query) as names:
        for server in web, names:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        print(READY, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
