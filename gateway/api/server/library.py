"""The models that clients may download, and the permission to manage models."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from flask import Response
from msgspec import UNSET, UnsetType

from gateway.api.openai.responses import ErrorAnswer
from gateway.auth.gate import Forbidden
from gateway.context import RequestContext
from gateway.engine.control import SupervisorLink
from gateway.generation.group import ClientGone
from gateway.http.client_socket import HangUp
from gateway.http.route import READING, Routes, json_response
from gateway.service import Service
from protocol.tools.control import (
    DownloadableModel,
    FromSupervisor,
    GetLibrary,
    ModelLibrary,
    ToSupervisor,
)
from protocol.wire.errors import Draining, EngineNotReady

NOT_ALLOWED = (
    "models are managed by the operator of this server: `tidegate pull` downloads a model, and "
    "`tidegate serve` serves it; with --manage-models clients may do so, too"
)
POLL_S = 1.0
"""Interval at which a request that waits for the supervisor checks whether this process stops."""

routes = Routes("Operators", ErrorAnswer, scope="admin")


class Download(msgspec.Struct, frozen=True, kw_only=True):
    """A download that runs or waits.

    status     its stage, in words
    total      size of the file that is being received, in bytes; 0: none is
    completed  bytes of it that are here
    """

    status: str
    total: int
    completed: int


class Downloadable(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the catalogue, or another one that clients have downloaded or copied.

    description     "" if nothing is known
    download_bytes  size of the download, which is an estimate for models on the Hub; 0: unknown
    weights_bytes   memory of its weights; 0: unknown
    needed_bytes    memory to serve it with a small KV cache, estimated; 0: unknown
    max_tokens_per_s  tokens of one request that cannot be exceeded in a second, because the
                    weights are read for each; 0: unknown
    is_recommended  whether it is among the best of its size
    is_gated        whether its files are only for users who accepted its terms
    fits            whether `needed_bytes` are at most the memory for models; absent if that is
                    unknown
    is_served       whether it can be used
    is_deletable    whether clients may delete it
    download        absent unless it is being downloaded
    error           why its last download failed; "" if it did not
    """

    name: str
    description: str
    licence: str
    download_bytes: int
    weights_bytes: int
    needed_bytes: int
    max_tokens_per_s: float
    is_recommended: bool
    is_gated: bool
    fits: bool | UnsetType = UNSET
    is_served: bool
    is_deletable: bool
    download: Download | UnsetType = UNSET
    error: str


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """The models that clients can download, and the room for them.

    disk_free_bytes  free space on the disk of the downloads
    memory_bytes     memory that all models together may use; 0: not limited
    """

    models: list[Downloadable]
    disk_free_bytes: int
    memory_bytes: int


def may_manage(service: Service, context: RequestContext) -> bool:
    """Return whether the caller may download, copy and delete models."""
    return service.config.manage_models and "admin" in context.caller.scopes


def manager(service: Service, context: RequestContext) -> SupervisorLink:
    """Return the connection to the supervisor, which manages the models. Raises Forbidden if the
    caller may not manage them."""
    if not service.config.manage_models:
        raise Forbidden(NOT_ALLOWED)
    if not may_manage(service, context):
        raise Forbidden("only a key with the scope 'admin' may download, copy and delete models")
    if service.link is None:
        raise EngineNotReady("this gateway has no supervisor that could manage its models")
    return service.link


def replies_of(
    service: Service, context: RequestContext, message: ToSupervisor
) -> Iterator[FromSupervisor | None]:
    """Send a request to the supervisor, and yield its replies. Yield None if a keep-alive is due.

    Raises the supervisor's refusal. Raises Draining if this process stops, and ClientGone if the
    client has disconnected. What the supervisor does for the request goes on in both cases.
    """
    is_gone = False

    def on_hang_up() -> None:
        nonlocal is_gone
        is_gone = True

    link = manager(service, context)
    hang_up = HangUp(context.environ, on_hang_up)
    silent_since = time.monotonic()
    try:
        for reply in link.manage(message, POLL_S):
            if is_gone:
                raise ClientGone
            if reply is not None:
                silent_since = time.monotonic()
                yield reply
                continue
            if service.is_draining():
                raise Draining("this server is shutting down", retry_after_s=1)
            if time.monotonic() - silent_since >= service.config.keep_alive_s:
                silent_since = time.monotonic()
                yield None
    finally:
        hang_up.close()


@routes.get(
    "/v1/library",
    about="List the models that clients can download, with their downloads.\n"
    "The operator must allow that (--manage-models).",
    gives=Library,
    statuses=READING,
)
def library(service: Service, context: RequestContext) -> Response:
    manager(service, context)
    for reply in replies_of(service, context, GetLibrary()):
        if isinstance(reply, ModelLibrary):
            entries = [_described(each, reply.memory_bytes) for each in reply.models]
            return json_response(
                Library(
                    models=entries,
                    disk_free_bytes=reply.disk_free_bytes,
                    memory_bytes=reply.memory_bytes,
                )
            )
    raise EngineNotReady("the supervisor has not answered")


def _described(entry: DownloadableModel, memory_bytes: int) -> Downloadable:
    pull = entry.pull
    needed_bytes = entry.needed_bytes or entry.weights_bytes
    is_known = bool(needed_bytes and memory_bytes)
    return Downloadable(
        name=entry.name,
        description=entry.description,
        licence=entry.licence,
        download_bytes=entry.download_bytes,
        weights_bytes=entry.weights_bytes,
        needed_bytes=needed_bytes,
        max_tokens_per_s=entry.max_tokens_per_s,
        is_recommended=entry.is_recommended,
        is_gated=entry.is_gated,
        fits=needed_bytes <= memory_bytes if is_known else UNSET,
        is_served=entry.is_served,
        is_deletable=entry.is_deletable,
        download=UNSET
        if pull is None
        else Download(status=pull.status, total=pull.total, completed=pull.completed),
        error=entry.error,
    )
