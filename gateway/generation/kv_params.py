"""The request field `kv_transfer_params`, for disaggregation by an external router.

A router lets one server compute a prompt and another one generate the answer. The names are vLLM's,
so its routers work unchanged. The router sends request 1 to the first server, which responds
without tokens. Then it sends the field of that response to the second server:

    request 1   {"do_remote_decode": true}                    compute the prompt, keep its K/V
    response 1  {"do_remote_prefill": true, "handle": "..."}
    request 2   {"do_remote_prefill": true, "handle": "..."}  continue from that K/V

The handle is sealed (protocol/worker/kv.py) and contains everything that is needed to fetch the
K/V. Clients must not choose hosts, ports or block ids. So any other field that is not null is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from gateway.generation.group import ChoiceGroup
from gateway.generation.request import PromptRequest
from protocol.engine.messages import Limits
from protocol.wire.errors import InvalidRequest
from protocol.worker.kv import KV_FIELD

MAX_HANDLE_CHARS = 4096


class _Fields(msgspec.Struct, frozen=True):
    """The supported fields of `kv_transfer_params`."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    handle: str | None = None


class KVTransferParams(msgspec.Struct, frozen=True):
    """The checked `kv_transfer_params` of a request. Exactly one field differs from its default."""

    #: Whether to compute the prompt only and keep its K/V.
    keeps: bool = False
    #: Continue from the K/V with this handle.
    handle: str = ""


def parse_kv_params(given: Mapping[str, Any] | None, limits: Limits) -> KVTransferParams | None:
    """Return the checked `kv_transfer_params` of a request; None if they are absent or have no
    effect.

    `do_remote_decode` has no effect if the engine cannot keep K/V (`limits.kv_lease_s` is 0). The
    `kv_transfer_params` of the response are then null, so the router lets the second server compute
    the prompt itself.

    Raises InvalidRequest, naming the invalid field.
    """
    present = {name: value for name, value in (given or {}).items() if value is not None}
    for name in present:
        if name not in _Fields.__struct_fields__:
            raise _invalid(name, "not accepted from clients; the handle identifies the K/V")
    for name, value in present.items():
        if not isinstance(value, str if name == "handle" else bool):
            raise _invalid(name, "expected text" if name == "handle" else "expected true or false")
    params = _Fields(**present)
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
    """Return `requests` with the K/V parameters set; unchanged if `params` is None.

    If K/V is to be kept, the result has one choice, which computes the prompt. For each original
    choice, one later request may continue from the handle.

    Raises InvalidRequest if there are several prompts, or if K/V is to be kept for a stream.
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
    """Return the response's `kv_transfer_params`; None if the engine keeps no K/V of the prompt."""
    handle = group.choices[0].kv_handle
    return {"do_remote_prefill": True, "handle": handle} if handle else None


def _invalid(field: str, why: str) -> InvalidRequest:
    param = f"{KV_FIELD}.{field}"
    return InvalidRequest(f"{param}: {why}", param=param)
