"""`kv_transfer_params`: lets a router compute a prompt on one server and continue on another.

The names are vLLM's, so its routers work unchanged:

    -> {"do_remote_decode": true}                     compute the prompt and keep its K/V
    <- {"do_remote_prefill": true, "handle": "..."}   in the response, which has no tokens
    -> {"do_remote_prefill": true, "handle": "..."}   continue from that K/V

The handle is sealed (protocol/kv.py) and complete. Clients must not choose hosts, ports or block
ids, so any other field that is not null is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from gateway.generation.group import ChoiceGroup
from gateway.generation.request import PromptRequest
from protocol.errors import InvalidRequest
from protocol.kv import KV_FIELD
from protocol.messages import Limits

MAX_HANDLE_CHARS = 4096


class _Params(msgspec.Struct, frozen=True):
    """The supported fields."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    handle: str | None = None


class KVTransferParams(msgspec.Struct, frozen=True):
    """The checked parameters.

    keeps   compute the prompt and keep its K/V
    handle  continue from this K/V; "": compute the prompt
    """

    keeps: bool = False
    handle: str = ""


def parse_kv_params(given: Mapping[str, Any] | None, limits: Limits) -> KVTransferParams | None:
    """Return the request's `kv_transfer_params`; None if they are absent or do nothing here.

    An engine may be unable to keep the K/V. The response then has null, and the router lets the
    other server compute the prompt. Raises InvalidRequest, naming the field.
    """
    named = {name: value for name, value in (given or {}).items() if value is not None}
    for name in named:
        if name not in _Params.__struct_fields__:
            raise _invalid(name, "not accepted from clients; the handle identifies the K/V")
    for name, value in named.items():
        if not isinstance(value, str if name == "handle" else bool):
            raise _invalid(name, "expected text" if name == "handle" else "expected true or false")
    params = _Params(**named)
    if params.handle and not params.do_remote_prefill:
        raise _invalid("handle", "requires do_remote_prefill")
    if params.do_remote_prefill and params.do_remote_decode:
        raise _invalid("do_remote_prefill", "cannot be combined with do_remote_decode")
    if params.do_remote_prefill and not params.handle:
        raise _invalid("handle", "required; it is in the response of the prefill server")
    if len(params.handle or "") > MAX_HANDLE_CHARS:
        raise _invalid("handle", f"at most {MAX_HANDLE_CHARS:,} characters are allowed")
    keeps = bool(params.do_remote_decode and limits.kv_lease_s)
    handle = params.handle or ""
    return KVTransferParams(keeps, handle) if keeps or handle else None


def apply_kv_params(
    requests: Sequence[PromptRequest], params: KVTransferParams | None, *, streams: bool
) -> list[PromptRequest]:
    """Return `requests` with the K/V parameters set.

    If the K/V is kept, one choice computes the prompt, and the number of choices becomes the number
    of readers. Raises InvalidRequest for more than one prompt, or a stream without tokens.
    """
    if params is None:
        return list(requests)
    if len(requests) != 1:
        raise InvalidRequest(f"{KV_FIELD}: allowed with one prompt only", param=KV_FIELD)
    (request,) = requests
    if params.handle:
        return [replace(request, kv_handle=params.handle)]
    if streams:
        raise _invalid("do_remote_decode", "cannot be combined with stream")
    return [replace(request, choices=request.choices[:1], kv_readers=len(request.choices))]


def response_kv_params(group: ChoiceGroup) -> dict[str, Any] | None:
    """Return the parameters that continue this answer elsewhere; None if no K/V is kept."""
    handle = group.choices[0].kv_handle
    return {"do_remote_prefill": True, "handle": handle} if handle else None


def _invalid(field: str, why: str) -> InvalidRequest:
    param = f"{KV_FIELD}.{field}"
    return InvalidRequest(f"{param}: {why}", param=param)
