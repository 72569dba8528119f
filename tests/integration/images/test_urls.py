"""Images at URLs are loaded from allowed hosts only, at the address that was checked, and within
bounds of size and time."""

from __future__ import annotations

import gc
import socket as blocking
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain, repeat
from typing import Any

import gevent
import pytest
from gevent import socket
from gevent.event import Event
from gevent.server import StreamServer

from gateway.images.fetch import UrlFetcher, is_public
from gateway.images.limits import MAX_IMAGE_BYTES
from gateway.images.memory import FileMemory
from gateway.images.source import ImageSource
from protocol.wire.errors import InvalidImage, Overloaded
from tests.support.http import response
from tests.support.waiting import HANG_S, eventually

PARAM = "input[0].content[0].image_url"
IMAGE = b"the bytes of an image"


@contextmanager
def served(
    answer: Callable[[bytes], bytes | Iterable[bytes] | None],
) -> Iterator[tuple[str, list[bytes]]]:
    """Run a server that answers the first line of each request, in one piece or in several. Yields
    its address and the lines. A connection without an answer stays open."""
    lines: list[bytes] = []

    def handle(connection: Any, _: Any) -> None:
        with closing(connection), connection.makefile("rb") as file:
            lines.append(file.readline().strip())
            while file.readline().strip():
                pass
            reply = answer(lines[-1])
            if reply is None:
                Event().wait()  # until the client closes and the server stops
                return
            with suppress(ConnectionError):  # the client has read enough
                for piece in [reply] if isinstance(reply, bytes) else reply:
                    connection.sendall(piece)

    server = StreamServer(("127.0.0.1", 0), handle)
    server.start()
    try:
        yield f"127.0.0.1:{server.server_port}", lines
    finally:
        server.stop(0)


@contextmanager
def sent_by_thread(head: bytes, unit: bytes) -> Iterator[str]:
    """Run a server in a thread, which sends `head` to its first client, and then `unit` again and
    again. Yields its address."""
    with closing(blocking.create_server(("127.0.0.1", 0))) as listener:

        def send() -> None:
            connection, _ = listener.accept()
            with closing(connection), suppress(OSError):
                connection.sendall(head)
                while time.monotonic() < until:  # so that a client which never ends fails its test
                    connection.sendall(unit * 4096)

        until = time.monotonic() + HANG_S
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        sender.join(2 * HANG_S)
        assert not sender.is_alive(), "the client has not closed its connection"


def loaded(host: str, path: str = "/a.png?b=c#d", **options: Any) -> bytes:
    known: dict[str, Any] = {"may_connect": lambda address: True} | options
    return fetched(UrlFetcher([host], **known), f"http://{host}{path}")


def fetched(fetcher: UrlFetcher, url: str) -> bytes:
    """Return an image. Its memory is reserved from its first byte on, and not more than it has."""
    grown: list[int] = []
    data = fetcher.fetch(ImageSource(PARAM, url=url), grown.append)
    assert sum(grown) == len(data)
    return data


def why_not(host: str, path: str = "/", **options: Any) -> str:
    with pytest.raises(InvalidImage) as refused:
        loaded(host, path, **options)
    assert refused.value.param == PARAM
    return refused.value.message


def test_an_image_of_an_allowed_host_is_loaded() -> None:
    with served(lambda line: response("200 OK", IMAGE)) as (host, lines):
        assert loaded(host) == IMAGE
    assert lines == [b"GET /a.png?b=c HTTP/1.1"]


@pytest.mark.parametrize(
    "url",
    [
        "http://elsewhere.test/a.png",
        "http://allowed.test:8080/",
        "http://allowed.test.elsewhere.test/",
        "http://user@allowed.test/",
        "http://allowed.test@elsewhere.test/",
        "https:///a.png",
        "http://[::1/",
        "http://allowed.test:99999999/",
    ],
)
def test_another_host_is_refused(url: str) -> None:
    with pytest.raises(InvalidImage) as refused:
        fetched(UrlFetcher(["allowed.test"]), url)
    assert refused.value.param == PARAM


def test_the_refusal_of_a_host_names_the_option() -> None:
    with pytest.raises(InvalidImage, match=r"data: URL.*--image-urls"):
        fetched(UrlFetcher([]), "https://example.com/a.png")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "255.255.255.255", "224.0.0.1", "::1", "::", "fe80::1", "fd00:ec2::254"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b:1::1", "ff02::1"),
        *("64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:7f00:1::"),
    ],
)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_a_public_address_is_allowed(address: str) -> None:
    assert is_public(address)


def test_a_name_with_one_private_address_is_refused() -> None:
    found = [(socket.AF_INET, address) for address in ("93.184.216.34", "169.254.169.254")]
    fetcher = UrlFetcher(["rebinding.test"], resolve=lambda name: found)
    with pytest.raises(InvalidImage, match="not on the internet"):
        fetched(fetcher, "http://rebinding.test/")


def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    answers = iter([["127.0.0.1"], ["127.0.0.2"], ["127.0.0.2"]])
    checked: list[str] = []

    def may_connect(address: str) -> bool:
        checked.append(address)
        return True

    def resolved(_: str) -> list[tuple[int, str]]:
        return [(socket.AF_INET, address) for address in next(answers)]

    with served(lambda line: response("200 OK", IMAGE)) as (host, _):
        name = f"changing.test:{host.partition(':')[2]}"
        assert loaded(name, may_connect=may_connect, resolve=resolved) == IMAGE
    assert checked == ["127.0.0.1"]


def test_a_name_server_without_answers_holds_one_thread() -> None:
    """All requests with the name wait for it. Other hosts are loaded, and the thread pool of all
    other work is free."""
    is_over = threading.Event()
    asked: list[str] = []

    def resolved(name: str) -> list[tuple[int, str]]:
        asked.append(name)
        if name == "silent.test":
            is_over.wait(HANG_S)
        return [(socket.AF_INET, "127.0.0.1")]

    with served(lambda line: response("200 OK", IMAGE)) as (host, _):
        port = host.partition(":")[2]
        good, silent = f"good.test:{port}", f"silent.test:{port}"
        fetcher = UrlFetcher(
            [good, silent], may_connect=lambda _: True, resolve=resolved, timeout_s=HANG_S
        )

        waiting = [gevent.spawn(fetched, fetcher, f"http://{silent}/") for _ in range(30)]
        try:
            eventually(lambda: asked, pause=gevent.sleep)
            assert fetched(fetcher, f"http://{good}/") == IMAGE
            assert gevent.get_hub().threadpool.apply(threading.get_ident)
        finally:
            is_over.set()
        assert [each.get() for each in waiting] == [IMAGE] * 30
    assert sorted(asked) == ["good.test", "silent.test"]


def test_a_name_that_is_not_found_keeps_nothing_of_its_requests() -> None:
    bodies: list[weakref.ref[Any]] = []

    def resolved(name: str) -> list[tuple[int, str]]:
        raise OSError("not found")

    def request() -> None:
        body = {PARAM}
        bodies.append(weakref.ref(body))
        with pytest.raises(InvalidImage, match="not found"):
            fetched(fetcher, "http://no.test/")
        assert body

    fetcher = UrlFetcher(["no.test"], resolve=resolved)
    gevent.joinall([gevent.spawn(request) for _ in range(3)], raise_error=True)
    gc.collect()
    assert [each() for each in bodies] == [None] * 3


def test_a_redirect_within_the_host_is_followed() -> None:
    def answer(line: bytes) -> bytes:
        if b"/start" in line:
            return response("302 Found", Location="/end")
        return response("200 OK", IMAGE)

    with served(answer) as (host, lines):
        assert loaded(host, "/start") == IMAGE
    assert len(lines) == 2


def test_a_redirect_to_another_host_is_refused() -> None:
    elsewhere = "http://169.254.169.254/latest/meta-data"
    with served(lambda line: response("302 Found", Location=elsewhere)) as (host, lines):
        assert "redirects to another host" in why_not(host)
    assert len(lines) == 1


def test_a_redirect_to_this_machine_is_refused() -> None:
    with (
        served(lambda line: response("200 OK", IMAGE)) as (inner, lines),
        served(lambda line: response("302 Found", Location=f"http://{inner}/")) as (host, _),
    ):
        assert "redirects to another host" in why_not(host)
    assert lines == []


def test_a_body_without_end_is_read_up_to_the_limit() -> None:
    head = response("200 OK", Server="endless")
    with served(lambda line: chain([head], repeat(bytes(1 << 16)))) as (host, _):
        assert "more than" in why_not(host)


@pytest.mark.parametrize(
    ("head", "unit"),
    [
        (b"", response("100 Continue")),
        (response("200 OK", **{"Transfer-Encoding": "chunked"}), b"1\r\nx\r\n"),
        (response("200 OK", **{"Transfer-Encoding": "chunked"}) + b"0\r\n", b"X: y\r\n"),
    ],
    ids=["interim responses", "chunks", "trailers"],
)
def test_a_fast_host_holds_up_no_other_greenlet(head: bytes, unit: bytes) -> None:
    """The host is a thread, so its bytes are always there. The time limit is another greenlet."""
    with sent_by_thread(head, unit) as host:
        assert "within 0.2 s" in why_not(host, timeout_s=0.2)


def test_an_announced_size_is_refused_before_the_body() -> None:
    size = {"Content-Length": str(MAX_IMAGE_BYTES + 1)}
    with served(lambda line: response("200 OK", **size)) as (host, _):
        assert "more than" in why_not(host)


def test_a_body_is_read_no_further_than_there_is_memory() -> None:
    memory = FileMemory(1 << 20)
    head = response("200 OK", Server="endless")
    with served(lambda line: chain([head], repeat(bytes(1 << 16)))) as (host, _):
        fetcher = UrlFetcher([host], may_connect=lambda _: True)
        source = ImageSource(PARAM, url=f"http://{host}/")
        with memory.file() as grow, pytest.raises(Overloaded, match="fill the 1 MiB") as refused:
            fetcher.fetch(source, grow)
    assert refused.value.retry_after_s
    assert memory.num_bytes == 0


def test_the_bytes_decide_and_not_the_content_type() -> None:
    reply = response("200 OK", IMAGE, **{"Content-Type": "text/html"})
    with served(lambda line: reply) as (host, _):
        assert loaded(host) == IMAGE


def test_endless_redirects_are_refused() -> None:
    with served(lambda line: response("302 Found", Location="/")) as (host, lines):
        assert "redirects too often" in why_not(host)
    assert len(lines) == 4


def test_a_server_that_does_not_answer_is_given_up() -> None:
    with served(lambda line: None) as (host, _):
        assert "within 0.2 s" in why_not(host, timeout_s=0.2)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (response("404 Not Found"), "status 404"),
        (response("200 OK"), "no bytes"),
        (response("200 OK", bytes(MAX_IMAGE_BYTES + 1)), "more than"),
        (b"no HTTP\r\n\r\n", "could not be loaded"),
        (b"", "could not be loaded"),
    ],
    ids=["status", "empty", "large", "no HTTP", "nothing"],
)
def test_an_answer_without_an_image_is_refused(reply: bytes, why: str) -> None:
    with served(lambda line: reply) as (host, _):
        assert why in why_not(host)
