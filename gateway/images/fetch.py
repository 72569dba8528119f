"""Loads the images that requests name by an http(s): URL, from the hosts that the operator allows.

A name is resolved once, and the connection goes to the address that was checked, so a name that
resolves to another address the next time gains nothing. A redirect may only lead to the same host.
Size and time are bounded, and a host that sends fast delays no other request. No proxy, cookie or
credential is used.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import ssl
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import gevent
from gevent import socket

from gateway.images.host_names import HostNames, Resolve, system_addresses
from gateway.images.limits import FORMATS, MAX_IMAGE_BYTES
from gateway.images.memory import Grow
from gateway.images.source import ImageSource, too_large
from protocol.wire.errors import InvalidImage

TIMEOUT_S = 10.0
"""Time limit for one image, redirects included."""
MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_PIECE_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 10
"""Bytes of a host that are read and parsed between two turns of other greenlets."""
_TURN_S = 1e-6
"""Pause before each read. Any pause ends the turn: the loop then looks for other greenlets' events,
which it does only after many turns without a pause (`gevent.sleep(0)`)."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")
"""Networks of addresses that contain an IPv4 address, to which a router translates them."""


class _TooSlow(Exception):
    """The time for one image is over."""


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to a host on the internet, and not to this machine, its
    network or its cloud."""
    found = ipaddress.ip_address(address)
    inner: ipaddress.IPv4Address | None = None
    if isinstance(found, ipaddress.IPv6Address):
        if found in _LOCAL_NAT64:
            return False
        inner = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is None and found.teredo is not None:
            return False
    checked = inner or found
    return checked.is_global and not checked.is_multicast


class UrlFetcher:
    """Loads images from some hosts.

    hosts        names of hosts, or NAME:PORT for a port other than 80 and 443
    may_connect  returns whether a connection to an IP address is allowed
    resolve      returns the addresses of a name; it runs in a thread
    timeout_s    time limit for one image
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        may_connect: Callable[[str], bool] = is_public,
        resolve: Resolve = system_addresses,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._names = HostNames(len(self._hosts), resolve)
        self._may_connect = may_connect
        self._timeout_s = timeout_s

    def fetch(self, source: ImageSource, grow: Grow) -> bytes:
        """Return the bytes of an image with an http(s): URL. `grow` is called before each part of
        them is kept. Raises InvalidImage, naming the field, and what `grow` raises."""
        timeout = gevent.Timeout(self._timeout_s, _TooSlow)
        try:
            with timeout:
                return self._fetch(source, grow)
        except _TooSlow:
            raise InvalidImage.at(
                source.param, f"the image was not loaded within {self._timeout_s:g} s"
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise InvalidImage.at(source.param, f"the image could not be loaded: {error}") from None

    def _fetch(self, source: ImageSource, grow: Grow) -> bytes:
        url, param = source.url, source.param
        host = urlsplit(url).netloc.lower()
        for _ in range(MAX_REDIRECTS + 1):
            parts = urlsplit(url)
            if parts.netloc.lower() != host:
                raise InvalidImage.at(param, "the URL redirects to another host")
            target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
            accepted = ", ".join(f"image/{name.lower()}" for name in FORMATS)
            with ExitStack() as stack:
                connection = self._connected(parts, param, stack)
                connection.request("GET", target, headers={"Accept": accepted})
                response = stack.enter_context(connection.getresponse())
                if response.status in _REDIRECTS and (place := response.getheader("Location")):
                    url = urljoin(url, place)
                    continue
                if response.status != 200:
                    raise InvalidImage.at(
                        param, f"the image's server answered with the status {response.status}"
                    )
                return _body(response, param, grow)
        raise InvalidImage.at(param, "the URL redirects too often")

    def _connected(
        self, url: SplitResult, param: str, stack: ExitStack
    ) -> http.client.HTTPConnection:
        """Return a connection to a checked address of the URL's host. `stack` closes it."""
        name, port = (url.hostname or "").lower(), url.port or _PORTS.get(url.scheme)
        if port is None or url.username is not None:
            raise InvalidImage.at(param, "must be an http: or https: URL without a user name")
        known = f"{name}:{port}" in self._hosts
        if not known and not (name in self._hosts and port in _PORTS.values()):
            raise InvalidImage.at(
                param,
                f"this server loads no images from {url.netloc!r}; send the image as a data: URL, "
                "or ask the operator to allow the host with --image-urls",
            )
        found = self._names.addresses(name)
        if not found or not all(self._may_connect(address) for _, address in found):
            raise InvalidImage.at(
                param, f"the host {name!r} has an address that is not on the internet"
            )
        connection = http.client.HTTPConnection(name, port)
        family, address = found[0]
        plain = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        plain.connect((address, port))
        if url.scheme == "https":
            plain = stack.enter_context(_tls().wrap_socket(plain, server_hostname=name))
        connection.sock = _FairSocket(plain)
        return connection


class _FairSocket:
    """A socket, as far as http.client uses it, whose reads let all other greenlets run first.

    A read from a fast host never waits, and http.client reads any number of interim responses,
    chunks and trailers in one call. Other greenlets, and the time limit, would have no turn.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def sendall(self, data: bytes) -> None:
        self._inner.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_FairReads(self._inner), _BUFFER_BYTES)

    def close(self) -> None:
        """Do nothing: http.client calls this while the response is still read."""


class _FairReads(io.RawIOBase):
    """The bytes that a socket receives."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        gevent.sleep(_TURN_S)
        return int(self._inner.recv_into(buffer))


@cache
def _tls() -> ssl.SSLContext:
    """Return the context of all connections. Making one reads all certificates of the system."""
    return ssl.create_default_context()


def _body(response: http.client.HTTPResponse, param: str, grow: Grow) -> bytes:
    if (response.length or 0) > MAX_IMAGE_BYTES:
        raise too_large(param)
    data = bytearray()
    while piece := response.read(_PIECE_BYTES):
        if len(data) + len(piece) > MAX_IMAGE_BYTES:
            raise too_large(param)
        grow(len(piece))
        data += piece
    if not data:
        raise InvalidImage.at(param, "the image has no bytes")
    return bytes(data)
