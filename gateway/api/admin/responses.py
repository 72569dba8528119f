"""What the routes for operators tell, as structs: for the documentation and for tests."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class Version(msgspec.Struct, frozen=True):
    version: str


class GatewayFacts(msgspec.Struct, frozen=True):
    """The process that answers. age_s  since it began"""

    pid: int
    draining: bool
    age_s: float


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """As of its last heartbeat, which is `silence_s` old; null where there is none.

    steps            that it has planned: the count of a server that computes grows
    doing            what the worker computes, in words; its step's age is `worker_step_s`
    """

    epoch: str | None
    silence_s: float | None
    pid: int | None = None
    steps: int | None = None
    doing: str | None = None
    worker_pid: int | None = None
    worker_step_s: float | None = None


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One of several engines. The numbers are its own, as of its last heartbeat; null where it is
    not ready.

    why  it is not
    """

    address: str
    ready: bool
    why: str | None
    epoch: str | None
    silence_s: float | None
    running: int | None
    waiting: int | None
    waiting_tokens: int | None
    free_blocks: int | None
    total_blocks: int | None


class ReadinessAnswer(msgspec.Struct, frozen=True):
    """why  what is missing; null when ready
    prefill, decode   of a server with engines of two kinds; it is ready with a decode engine alone
    """

    ready: bool
    why: str | None
    gateway: GatewayFacts
    engine: EngineFacts
    prefill: list[EngineState] | UnsetType = UNSET
    decode: list[EngineState] | UnsetType = UNSET


class Live(msgspec.Struct, frozen=True):
    live: Literal[True]
    gateway: GatewayFacts


class Startup(msgspec.Struct, frozen=True):
    """why  there is no model to serve yet; null when there was one"""

    started: bool
    why: str | None
    gateway: GatewayFacts
    engine: EngineFacts


class Formats(msgspec.Struct, frozen=True):
    """How answers are read, and why so; null: no such thing is looked for."""

    tools: str | None
    reasoning: str | None
    why: str


class SamplingInEffect(msgspec.Struct, frozen=True):
    """The sampling parameters of a request that sets none of them."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """root  the model's own name; `id` may be another that the operator gave it"""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    default_sampling: SamplingInEffect
    formats: Formats


class Models(msgspec.Struct, frozen=True):
    object: Literal["list"]
    data: list[ModelEntry]
