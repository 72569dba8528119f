"""`kv_transfer_params`: how whoever routes between servers has a prompt computed by one of them,
and goes on from it at another. Names are vLLM's, whose routers work as they are.

    -> {"do_remote_decode": true}                        compute it, and keep it for another
    <- {"do_remote_prefill": true, "handle": "..."}      with the answer, which has no tokens
    -> {"do_remote_prefill": true, "handle": "..."}      go on from it

The handle is sealed (protocol/kv.py) and says all that there is to say: hosts, ports and block ids
are not a client's to name, so any other field that is not null is refused.
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
    """What is understood."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    handle: str | None = None


class KVTransferParams(msgspec.Struct, frozen=True):
    """keeps   compute the prompt and keep it for whoever goes on from it
    handle  go on from this one
    """

    keeps: bool = False
    handle: str = ""


def wish_of(given: Mapping[str, Any] | None) -> KVTransferParams:
    """Raises InvalidRequest naming the field."""
    named = {name: value for name, value in (given or {}).items() if value is not None}
    for name in named:
        if name not in _Params.__struct_fields__:
            raise _invalid(name, "not taken from a client; the handle says where K/V is")
    for name, value in named.items():
        if not isinstance(value, str if name == "handle" else bool):
            raise _invalid(name, "expected text" if name == "handle" else "expected true or false")
    params = _Params(**named)
    if params.handle and not params.do_remote_prefill:
        raise _invalid("handle", "needs do_remote_prefill")
    if params.do_remote_prefill and params.do_remote_decode:
        raise _invalid("do_remote_prefill", "excludes do_remote_decode")
    if params.do_remote_prefill and not params.handle:
        raise _invalid("handle", "is missing: it is told by who computed the prompt")
    if len(params.handle or "") > MAX_HANDLE_CHARS:
        raise _invalid("handle", f"has at most {MAX_HANDLE_CHARS:,} characters")
    return KVTransferParams(bool(params.do_remote_decode), params.handle or "")


def is_idle(given: Mapping[str, Any] | None, limits: Limits) -> bool:
    """Something is said that has no effect here: the engine keeps nothing for others."""
    return given is not None and (
        wish_of(given) == KVTransferParams() or _cannot(wish_of(given), limits)
    )


def handed(
    asks: Sequence[PromptRequest], wish: KVTransferParams, limits: Limits, *, streams: bool
) -> list[PromptRequest]:
    """The same with what the wish adds. All choices of a prompt that is kept are its readers."""
    if wish == KVTransferParams() or _cannot(wish, limits):
        return list(asks)
    if len(asks) != 1:
        raise InvalidRequest(f"{KV_FIELD}: goes with one prompt", param=KV_FIELD)
    (ask,) = asks
    if wish.handle:
        return [replace(ask, kv_handle=wish.handle)]
    if streams:
        raise _invalid("do_remote_decode", "is answered as a whole, not in a stream")
    return [replace(ask, choices=ask.choices[:1], kv_readers=len(ask.choices))]


def told(answer: ChoiceGroup) -> dict[str, Any] | None:
    """For whoever goes on; None where nothing is kept for anybody."""
    handle = answer.choices[0].kv_handle
    return {"do_remote_prefill": True, "handle": handle} if handle else None


def _cannot(wish: KVTransferParams, limits: Limits) -> bool:
    """Whoever routes is told null, and lets the prompt be computed."""
    return wish.keeps and not limits.kv_lease_s


def _invalid(field: str, why: str) -> InvalidRequest:
    param = f"{KV_FIELD}.{field}"
    return InvalidRequest(f"{param}: {why}", param=param)
