"""Resolves the names of hosts in threads of their own.

A name server that does not answer holds a thread for many seconds, and the thread cannot be
stopped. In the thread pool that all work of a gateway process shares, such threads would delay
every other request. Here a name has at most one thread, for which all requests with that name wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TypeAlias

from gevent import socket
from gevent.monkey import get_original
from gevent.threadpool import ThreadPool

from gateway.thread_pool import ThreadJob

Address: TypeAlias = tuple[int, str]
"""The family of an IP address, and the address as text."""
Resolve: TypeAlias = Callable[[str], Sequence[Address]]


def system_addresses(name: str) -> list[Address]:
    """Return the addresses of a name, as the system finds them, and block this thread meanwhile.
    Raises OSError if there are none, and UnicodeError if it cannot be a name."""
    found = get_original("socket", "getaddrinfo")(name, None, type=socket.SOCK_STREAM)
    return [(int(family), str(address[0])) for family, _, _, _, address in found]


class HostNames:
    """Some names of hosts, which are resolved anew each time.

    max_names  largest number of names
    resolve    runs in a thread; returns the addresses of a name, or raises OSError or UnicodeError
    """

    def __init__(self, max_names: int, resolve: Resolve) -> None:
        self._max_names = max_names
        self._resolve = resolve
        #: The last job of each name. Its result is no exception: the frames of all requests that
        #: raised it would stay with it.
        self._jobs: dict[str, ThreadJob[Sequence[Address] | str]] = {}

    def addresses(self, name: str) -> Sequence[Address]:
        """Return the addresses of a name. Raises OSError if there are none."""
        job = self._jobs.get(name)
        if job is None or job.has_ended:
            assert job is not None or len(self._jobs) < self._max_names, "an unknown name"
            job = self._jobs[name] = ThreadJob(self._pool, partial(self._found, name))
        found = job.result()
        if isinstance(found, str):
            raise OSError(found)
        return found

    def _found(self, name: str) -> Sequence[Address] | str:
        """Return the addresses of a name, or why there are none."""
        try:
            return self._resolve(name)
        except (OSError, UnicodeError) as error:
            return str(error)

    @cached_property
    def _pool(self) -> ThreadPool:
        return ThreadPool(self._max_names)
