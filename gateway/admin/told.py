"""What the routes for operators tell, as structs: for the documentation and for tests."""

from __future__ import annotations

from typing import Literal

import msgspec


class Live(msgspec.Struct, frozen=True):
    live: Literal[True]


class Version(msgspec.Struct, frozen=True):
    version: str


class GatewayFacts(msgspec.Struct, frozen=True):
    pid: int
    draining: bool


class EngineFacts(msgspec.Struct, frozen=True):
    """silence_s  since its last heartbeat"""

    epoch: str | None
    silence_s: float | None


class Readiness(msgspec.Struct, frozen=True):
    """why  what is missing; null when ready"""

    ready: bool
    why: str | None
    gateway: GatewayFacts
    engine: EngineFacts


class Formats(msgspec.Struct, frozen=True):
    """How answers are read, and why so; null: no such thing is looked for."""

    tools: str | None
    reasoning: str | None
    why: str


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """root  the model's own name; `id` may be another that the operator gave it"""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    formats: Formats


class Models(msgspec.Struct, frozen=True):
    object: Literal["list"]
    data: list[Model]
