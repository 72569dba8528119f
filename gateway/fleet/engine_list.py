"""The addresses of the engines that serve a model, from the options or from a file.

The file has one ZeroMQ address per line; text after # is a comment. A launcher, such as the one for
Ray, replaces the file when engines start elsewhere. It should write a new file and rename it, so
that no half-written list is read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from protocol.wire import sockets
from protocol.wire.cluster_key import ClusterKey

log = logging.getLogger(__name__)


class EngineList:
    """The addresses, and whether they have changed.

    addresses   those in the options, which never change
    path        file with more addresses; "": none
    key         the cluster key, which addresses of other hosts require

    The constructor raises ValueError if an address in the options is invalid.
    """

    def __init__(
        self, addresses: Sequence[str], path: str = "", key: ClusterKey | None = None
    ) -> None:
        for address in addresses:
            sockets.check_address(address, key)
        self._fixed, self._path, self._key = list(addresses), path, key
        self._seen: tuple[int, int, int] | None = None
        self._from_file: list[str] = []
        self._problem = ""

    def poll(self) -> list[str]:
        """Return the present addresses, each once. The file is read only if it has changed. If it
        cannot be read, or has a bad line, the last good list stays."""
        if self._path:
            self._read_file()
        return list(dict.fromkeys(self._fixed + self._from_file))

    def _read_file(self) -> None:
        try:
            found = os.stat(self._path)
            seen = found.st_ino, found.st_mtime_ns, found.st_size
            if seen == self._seen:
                return
            with open(self._path, encoding="utf-8") as file:
                lines = [line.partition("#")[0].strip() for line in file]
            addresses = [line for line in lines if line]
            for address in addresses:
                sockets.check_address(address, self._key)
        except (OSError, ValueError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("%s: the list of engines stays as it was: %s", self._path, error)
            return
        self._seen, self._problem, self._from_file = seen, "", addresses
