"""The valid API keys, which are reloaded when their file changes.

`Keyring` is an immutable set of keys. `KeyWatch` holds the current one. `KeyWatch.poll` reads the
file again if it changed. If the new file is invalid, the previous keys stay valid, and the error is
logged once.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Mapping

from gateway.auth.caller import Caller
from protocol.config.gateway import GatewayConfig
from protocol.shared import api_keys
from protocol.shared.api_keys import ALL_SCOPES, KeyEntry

log = logging.getLogger(__name__)

OPTION_NAME, SUPERVISOR_NAME = "api-key", "supervisor"
"""Name of the key that --api-key gives (the second one is called "api-key-2", and so on), and name
of the key with which `tidegate serve` checks whether its gateway is ready."""


class Keyring:
    """The valid keys and their callers."""

    def __init__(self, keys: Mapping[str, KeyEntry]) -> None:
        self._keys = [
            (bytes.fromhex(entry.digest), Caller.from_key(name, entry))
            for name, entry in keys.items()
        ]

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str) -> Caller | None:
        """Return the caller that the API key `secret` identifies; None if the key is not valid.

        `secret` is compared with every valid key, each time in constant time. So the duration of
        the search reveals nothing about the keys. It takes 0.1 ms for 1,000 keys.
        """
        digest = bytes.fromhex(api_keys.digest_of(secret))
        found = None
        for known, caller in self._keys:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def named(self, name: str) -> Caller | None:
        """Return the caller whose key has this name; None if there is no such key."""
        return next((caller for _, caller in self._keys if caller.name == name), None)


def option_keys(config: GatewayConfig) -> dict[str, KeyEntry]:
    """Return the keys that the operator's options contain. Keys of --api-key have all scopes."""
    digests = [*config.api_key_digests, *map(api_keys.digest_of, config.api_key)]
    keys = {
        f"{OPTION_NAME}-{number}" if number > 1 else OPTION_NAME: KeyEntry(
            digest=digest, scopes=sorted(ALL_SCOPES)
        )
        for number, digest in enumerate(dict.fromkeys(digests), start=1)
    }
    if config.supervisor_digest:
        keys[SUPERVISOR_NAME] = KeyEntry(digest=config.supervisor_digest)
    return keys


class KeyWatch:
    """Holds the current keys and reloads their file.

    The constructor raises ValueError, with a message of one line, if the file is invalid.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._path = config.api_keys
        self._options = option_keys(config)
        self._loaded = self._signature()
        #: The valid keys; None if the server has no keys and requires none.
        self.keyring: Keyring | None = self._read() if config.has_keys else None

    def poll(self) -> None:
        """Read the file again if it has changed or if another file or link has replaced it."""
        signature = self._signature()
        if not self._path or signature == self._loaded:
            return
        self._loaded = signature
        try:
            self.keyring = self._read()
        except ValueError as error:
            log.error("cannot reload the API keys, the previous keys stay valid: %s", error)
        else:
            log.info("reloaded %s: %d API keys are valid", self._path, len(self.keyring))

    def caller_named(self, name: str, owner: str) -> Caller | None:
        """Return the caller on whose behalf work continues after its request has ended; None if its
        key is not valid any more.

        name    name of the caller's key; "" if the server had no keys
        owner   `Caller.owner`
        """
        if self.keyring is not None:
            return self.keyring.named(name)
        return Caller("", ALL_SCOPES - {"admin"}, owner)

    def _read(self) -> Keyring:
        """Return the keys of options and file. Raises ValueError if the file is invalid."""
        keys = api_keys.read(self._path) if self._path else {}
        if reserved := keys.keys() & self._options.keys():
            raise ValueError(f"{self._path}: the key name {min(reserved)!r} is reserved")
        return Keyring({**self._options, **keys})

    def _signature(self) -> tuple[int, ...] | None:
        """Return a value that differs if the file has changed; None if the file does not exist."""
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_mode
