"""A small HTTP client for GET and streamed POST requests. Uses only the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tools.failure import Failure

KEY_VARIABLE = "TIDEGATE_API_KEY"
ENGINE_ROLES = {"replica": "replicas", "prefill": "prefill", "decode": "decode"}
"""Role of one of several engines of a model -> its field in /readyz."""


@dataclass(frozen=True, slots=True)
class ServerReadiness:
    """The readiness that a server reports."""

    is_ready: bool
    #: Name of the model, if the server was ready.
    model: str | None = None
    #: Epochs of its engines. A restarted engine has a new epoch.
    epochs: frozenset[str] = frozenset()
    #: Address -> epoch of each engine that is ready; None if the server has one engine only, whose
    #: address it does not report.
    engines: Mapping[str, str] | None = None


class WebServer:
    """A client of one HTTP server.

    url   "http://host:port", with an optional path prefix
    key   API key that is sent with every request; "": none

    Raises Failure if the URL is malformed.
    """

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Failure(f"--url {url!r}: must start with http:// or https://", exit_code=2)
        self.url = parts.geturl().rstrip("/")
        self._secure = parts.scheme == "https"
        self._address = (parts.hostname, port_of(parts, url))
        self._path = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._model: str | None = None  # the first model, once it was ready

    def connect(self, timeout_s: float | None) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        host, port = self._address
        return kind(host, port, timeout=timeout_s)

    def get(self, path: str, timeout_s: float = 5.0) -> tuple[int, bytes] | None:
        """Send a GET request. Return the status and the body; None if the server does not
        answer."""
        connection = self.connect(timeout_s)
        try:
            connection.request("GET", self._path + path, headers=self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def post(
        self, connection: http.client.HTTPConnection, path: str, body: Any
    ) -> http.client.HTTPResponse:
        """Send `body` as JSON in a POST request, and accept a stream. Return the response. The
        caller reads its body."""
        data = json.dumps(body).encode()
        return self.post_json(connection, path, data, accept="text/event-stream")

    def post_json(
        self,
        connection: http.client.HTTPConnection,
        path: str,
        data: bytes,
        *,
        accept: str = "application/json",
    ) -> http.client.HTTPResponse:
        """Send a POST request whose body is the JSON text `data`. Return the response. The caller
        reads its body. Raises OSError or HTTPException if the connection fails."""
        headers = {"Content-Type": "application/json", "Accept": accept, **self._headers}
        connection.request("POST", self._path + path, data, headers)
        return connection.getresponse()

    def readiness(self) -> ServerReadiness | None:
        """Return the server's readiness; None if it does not answer."""
        answer = self.get("/readyz", timeout_s=1.0)
        if answer is None:
            return None
        status, body = answer
        is_ready = status == http.client.OK
        if is_ready:
            self._model = self._model or self.first_model()
        one = _json_object(body).get("engine", {}).get("epoch")
        states = engine_states(body)
        if states is None:
            epochs = frozenset([one] * bool(is_ready and one))
            return ServerReadiness(is_ready=is_ready, model=self._model, epochs=epochs)
        engines = {state["address"]: state["epoch"] for _, state in states if state["ready"]}
        return ServerReadiness(
            is_ready=is_ready,
            model=self._model,
            epochs=frozenset(engines.values()),
            engines=engines,
        )

    def first_model(self) -> str | None:
        """Return the name of the server's first model; None if no model server answers. Raises
        Failure if the API key is missing or wrong."""
        return next(iter(self.model_names()), None)

    def model_names(self) -> list[str]:
        """Return the names of the server's models; none if no model server answers. Raises as
        `models` does."""
        return [str(entry["id"]) for entry in self.models()]

    def models(self) -> list[dict[str, Any]]:
        """Return the entries of the server's models, each with an `id`; none if no model server
        answers. Raises Failure if the API key is missing or wrong."""
        answer = self.get("/v1/models")
        if answer is not None and answer[0] == http.client.UNAUTHORIZED:
            raise Failure(f"{self.url} requires a valid API key; set --api-key or ${KEY_VARIABLE}")
        if answer is None or answer[0] != http.client.OK:
            return []
        listed = _json_object(answer[1]).get("data")
        entries = listed if isinstance(listed, list) else []
        return [each for each in entries if isinstance(each, dict) and "id" in each]


def no_server(server: WebServer) -> Failure:
    """Return the failure of a command whose server has named no model, with the cause."""
    answer = server.get("/v1/models")
    if answer is None:
        return Failure(f"no server answers at {server.url}; start one with: tidegate serve")
    if answer[0] == http.client.SERVICE_UNAVAILABLE:
        return Failure(f"the server at {server.url} is not ready; try again soon")
    return Failure(
        f"the program at {server.url} serves no models: it answers GET /v1/models with status "
        f"{answer[0]}; select a server with --port or --url"
    )


def engine_states(body: bytes) -> list[tuple[str, dict[str, Any]]] | None:
    """Return (role, state) of each engine in the body of a /readyz response; None if the server has
    only one engine.

    The role is "replica", "prefill" or "decode". If the server has several models, the role is the
    name of the engine's model, and the member `state` of the state is that of the model.
    """
    facts = _json_object(body)
    by_role = {role: facts[field] for role, field in ENGINE_ROLES.items() if field in facts}
    for model in facts.get("models", []):
        by_role[model["id"]] = [{**each, "state": model["state"]} for each in model["engines"]]
    if not by_role and "models" not in facts:
        return None
    return [(role, state) for role, states in by_role.items() for state in states]


def _json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`; an empty dict if `body` is anything else."""
    with contextlib.suppress(ValueError):
        facts = json.loads(body)
        return facts if isinstance(facts, dict) else {}
    return {}


def local_url(host: str, port: int) -> str:
    """Return the URL at which programs on this machine reach a server that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def hang_up(connection: http.client.HTTPConnection) -> None:
    """Close a connection in the middle of a response. The server notices this at once."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def port_of(parts: SplitResult, url: str) -> int | None:
    """Return the port of a URL; None if it has none. Raises Failure if the port is malformed."""
    try:
        return parts.port
    except ValueError:
        message = f"--url {url!r}: the port must be a number from 0 to 65535"
        raise Failure(message, exit_code=2) from None
