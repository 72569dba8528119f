"""Who is connected, and since when each was last heard.

Pure bookkeeping; time is an argument (seconds of a steady clock). A client that says nothing for
`lease_s` is gone.
"""

from __future__ import annotations


class Clients:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._heard: dict[bytes, float] = {}
        self._names: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def __contains__(self, client: bytes) -> bool:
        return client in self._heard

    def all(self) -> list[bytes]:
        return list(self._heard)

    def greet(self, client: bytes, now: float, name: str = "") -> None:
        """It said Hello: known from now on."""
        self._heard[client] = now
        self._names[client] = name

    def name_of(self, client: bytes) -> str:
        """As it said; "" of one that is not known."""
        return self._names.get(client, "")

    def hear(self, client: bytes, now: float) -> None:
        """It said something; a client that never said Hello stays unknown."""
        if client in self._heard:
            self._heard[client] = now

    def drop(self, client: bytes) -> None:
        self._heard.pop(client, None)
        self._names.pop(client, None)

    def expire(self, now: float) -> list[bytes]:
        """Forget, and name, those whose lease has run out."""
        gone = [client for client, heard in self._heard.items() if now - heard > self._lease_s]
        for client in gone:
            self.drop(client)
        return gone
