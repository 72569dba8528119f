"""Response bodies of the routes that encode."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class EncodeUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct, frozen=True, kw_only=True):
    """One vector: numbers, or the base64 text of little-endian float32 numbers."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EncodeUsage
    ignored_params: list[str] | UnsetType = UNSET


class PooledItem(msgspec.Struct, frozen=True, kw_only=True):
    """One vector: numbers, or the base64 text of little-endian float32 numbers."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | str


class PooledList(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PooledItem]
    usage: EncodeUsage
    ignored_params: list[str] | UnsetType = UNSET


class RerankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    text: str


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """A document: its index in the request, and its score."""

    index: int
    relevance_score: float
    document: RerankedDocument | UnsetType = UNSET


class Reranked(msgspec.Struct, frozen=True, kw_only=True):
    """The documents, best first. `meta` is that of Cohere's API."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EncodeUsage
    meta: dict[str, Any]
    ignored_params: list[str] | UnsetType = UNSET


class Score(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    """The scores, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EncodeUsage
    ignored_params: list[str] | UnsetType = UNSET
