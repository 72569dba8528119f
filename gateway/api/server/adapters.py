"""The routes that load and unload LoRA adapters, as in vLLM. GET /v1/models lists the adapters."""

from __future__ import annotations

import msgspec
from flask import Response, request

from gateway.api.openai.responses import ErrorAnswer
from gateway.context import RequestContext
from gateway.http.route import Routes, json_response
from gateway.http.text_fields import Name
from gateway.model_host import ModelHost
from gateway.service import Service
from protocol.engine.adapters import AdapterInfo, check_adapter_name, check_adapter_path
from protocol.wire.errors import InvalidRequest


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter to load.

    lora_name     the adapter's name, by which requests select it
    lora_path     its directory, in --lora-dir of the engine's machine and relative to it
    model         the model that it changes; may be left out if there is only one
    load_inplace  vLLM's option to replace an adapter of this name; only false is supported
    """

    lora_name: Name
    lora_path: Name
    model: Name | None = None
    load_inplace: bool = False


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter to unload.

    lora_name    the adapter's name
    model        the model that it changes; may be left out if there is only one
    lora_int_id  vLLM's number of the adapter; ignored
    """

    lora_name: Name
    model: Name | None = None
    lora_int_id: int | None = None


class AdapterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that was loaded or unloaded.

    digest  hex digest of its content
    rank    the largest rank of its modules
    path    its directory, as it was given
    """

    lora_name: str
    digest: str
    rank: int
    path: str

    @classmethod
    def from_info(cls, info: AdapterInfo) -> AdapterAnswer:
        return cls(lora_name=info.name, digest=info.digest, rank=info.rank, path=info.path)


routes = Routes("LoRA adapters", ErrorAnswer, scope="admin")


@routes.post(
    "/v1/load_lora_adapter",
    about="Load a LoRA adapter in all engines of a model, and wait until requests can use it.",
    takes=(LoadAdapterBody,),
    gives=AdapterAnswer,
)
def load_lora_adapter(service: Service, context: RequestContext) -> Response:
    body = service.bodies.parse(request, LoadAdapterBody)
    if body.load_inplace:
        raise InvalidRequest.at("load_inplace", "not supported; unload the adapter first")
    check_adapter_name(body.lora_name)
    check_adapter_path(body.lora_path)
    host = _host(service, body.model)
    if body.lora_name in service.names:
        raise InvalidRequest.at("lora_name", f"{body.lora_name!r} is the name of a model")
    info = host.engine.load_adapter(body.lora_name, body.lora_path)
    return json_response(AdapterAnswer.from_info(info))


@routes.post(
    "/v1/unload_lora_adapter",
    about="Unload a LoRA adapter in all engines of a model.\n"
    "New requests for it are refused at once. The route waits until its open requests have ended "
    "and its memory is free.",
    takes=(UnloadAdapterBody,),
    gives=AdapterAnswer,
)
def unload_lora_adapter(service: Service, context: RequestContext) -> Response:
    body = service.bodies.parse(request, UnloadAdapterBody)
    info = _host(service, body.model).engine.unload_adapter(body.lora_name)
    return json_response(AdapterAnswer.from_info(info))


def _host(service: Service, model: Name | None) -> ModelHost:
    """Return the host of a model whose engines run. Raises the error of a request for it."""
    host = service.host(model)
    if model is not None and host.names and model not in host.names:
        raise service.unknown_model(model)
    if (trouble := host.trouble()) is not None:
        raise trouble
    return host
