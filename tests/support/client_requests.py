"""Requests of real clients in ../shared/clients, each in a file: what agents and SDKs send."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "shared" / "clients"
KEPT_HEADERS = ("anthropic-beta", "anthropic-version", "Content-Type", "User-Agent")
"""Headers that a server may read. Ids and secrets are not recorded."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A recorded request."""

    #: The name of its file, without the suffix.
    name: str
    #: The path, without the query.
    path: str
    #: The path with the query.
    target: str
    headers: Mapping[str, str]
    body: Any

    @property
    def model(self) -> str:
        return str(self.body.get("model", ""))


def client_requests(paths: Iterable[str]) -> list[ClientRequest]:
    """Return the recorded requests with one of these paths, by name; [] if there is no folder."""
    found = []
    for file in sorted(FOLDER.glob("*.json")):
        data = json.loads(file.read_text())
        path = data["path"].partition("?")[0]
        if path in paths:
            headers = {name: data["headers"].get(name) for name in KEPT_HEADERS}
            found.append(
                ClientRequest(
                    name=file.stem,
                    path=path,
                    target=data["path"],
                    headers={name: value for name, value in headers.items() if value},
                    body=data["body"],
                )
            )
    return found
