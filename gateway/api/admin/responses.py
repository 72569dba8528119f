"""Response bodies of the operator routes, for the OpenAPI document and for tests."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class Version(msgspec.Struct, frozen=True):
    version: str


class GatewayFacts(msgspec.Struct, frozen=True):
    """The gateway process that responds. `age_s` is the time since it started."""

    pid: int
    draining: bool
    age_s: float


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state as of its last heartbeat; null before the first heartbeat.

    silence_s        age of the last heartbeat
    steps            steps planned so far; the number grows while the server computes
    doing            the worker's activity in words
    worker_step_s    age of the worker's current step
    """

    epoch: str | None
    silence_s: float | None
    pid: int | None = None
    steps: int | None = None
    doing: str | None = None
    worker_pid: int | None = None
    worker_step_s: float | None = None


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One of several engines. The numbers are from its last heartbeat; null if it is not ready.

    why  the reason it is not ready
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
    """Whether requests can be served.

    why               the reason the server is not ready; null if it is ready
    prefill, decode   the engines of a disaggregated server; one decode engine is enough to be ready
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
    """Whether a model has been available; `why` gives the reason if not, and is null otherwise."""

    started: bool
    why: str | None
    gateway: GatewayFacts
    engine: EngineFacts


class Formats(msgspec.Struct, frozen=True):
    """The formats for parsing answers, and why they were chosen. Null: not parsed for these."""

    tools: str | None
    reasoning: str | None
    why: str


class SamplingInEffect(msgspec.Struct, frozen=True):
    """The default sampling parameters."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """root  the model's own name; `id` may be an alias set by the operator"""

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
