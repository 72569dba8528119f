"""The keys that are good now, and how a new version of their file takes the place of the old.

`Keyring` is a value. `KeyWatch` has the present one: `look` reads the file again when it is another
than it was. A file that is wrong changes nothing, and is told once.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Mapping

from gateway.auth.caller import Caller
from protocol import api_keys
from protocol.api_keys import ALL_SCOPES, KeyEntry
from protocol.config.gateway import GatewayConfig

log = logging.getLogger(__name__)

OPTION_NAME, SUPERVISOR_NAME = "api-key", "supervisor"
"""The name of the key that --api-key gives, those that follow have a number behind it; and of the
one by which `tidegate serve` asks what its gateway serves."""


class Keyring:
    def __init__(self, keys: Mapping[str, KeyEntry]) -> None:
        self._keys = [
            (bytes.fromhex(entry.digest), Caller.of(name, entry)) for name, entry in keys.items()
        ]

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str) -> Caller | None:
        """Every key is compared, each in constant time: how long it takes tells nothing about any
        of them, nor which it was. 0.1 ms for 1,000 keys."""
        digest = bytes.fromhex(api_keys.digest_of(secret))
        found = None
        for known, caller in self._keys:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def option_keys(config: GatewayConfig) -> dict[str, KeyEntry]:
    """Those that are in no file. What --api-key gives opens everything."""
    digests = [*config.api_key_digests, *map(api_keys.digest_of, config.api_key)]
    keys = {
        f"{OPTION_NAME}-{place}" if place > 1 else OPTION_NAME: KeyEntry(
            digest=digest, scopes=sorted(ALL_SCOPES)
        )
        for place, digest in enumerate(dict.fromkeys(digests), start=1)
    }
    if config.supervisor_digest:
        keys[SUPERVISOR_NAME] = KeyEntry(digest=config.supervisor_digest)
    return keys


class KeyWatch:
    """keyring   those that are good now; None: the server has no keys, and asks for none

    Raises ValueError, in one line, where the file is wrong from the beginning.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._path = config.api_keys
        self._options = option_keys(config)
        self._seen = self._signature()
        self.keyring: Keyring | None = self._read() if config.has_keys else None

    def look(self) -> None:
        """Read the file again if it has changed. Whether it is the same file is asked, too: files
        are replaced by other files, and mounted secrets by other links."""
        signature = self._signature()
        if not self._path or signature == self._seen:
            return
        self._seen = signature
        try:
            self.keyring = self._read()
        except ValueError as error:
            log.error("the keys remain as they were: %s", error)
        else:
            log.info("%d keys read from %s", len(self.keyring), self._path)

    def _read(self) -> Keyring:
        keys = api_keys.read(self._path) if self._path else {}
        if twice := keys.keys() & self._options.keys():
            raise ValueError(f"{self._path}: {min(twice)} is the name of a key of our own")
        return Keyring({**self._options, **keys})

    def _signature(self) -> tuple[int, ...] | None:
        """None: there is no such file now."""
        try:
            told = os.stat(self._path)
        except OSError:
            return None
        return told.st_dev, told.st_ino, told.st_size, told.st_mtime_ns, told.st_mode
