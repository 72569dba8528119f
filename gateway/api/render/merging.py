"""Merges the chunks written for one derendered chunk into one.

A client that adds up deltas gets the same message: texts and arguments are concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.api.openai.response_builder import concatenated
from gateway.http import sse

JOINED = ("content", "reasoning", "reasoning_content")
"""Members of a delta whose text is concatenated."""

Json = dict[str, Any]


def chunk_of(frames: Iterable[bytes]) -> Json | None:
    """Merge the frames of a ChunkStream into one chunk; None if there are none."""
    events = [
        msgspec.json.decode(event.removeprefix(b"data: "), type=Json)
        for event in b"".join(frames).removesuffix(sse.DONE).split(b"\n\n")
        if event
    ]
    if not events:
        return None
    choices: dict[int, Json] = {}
    whole: Json = {}
    for event in events:
        for choice in event.pop("choices"):
            before = choices.get(choice["index"])
            choices[choice["index"]] = choice if before is None else _merged(before, choice)
        warnings = [*whole.get("warnings", ()), *event.get("warnings", ())]
        whole |= event
        if warnings:
            whole["warnings"] = warnings
    return {**whole, "choices": list(choices.values())}


def _merged(before: Json, after: Json) -> Json:
    """Merge two chunks of one choice."""
    whole = before | after
    if "delta" in after:
        whole["delta"] = _merged_delta(before["delta"], after["delta"])
    if "text" in after:
        whole["text"] = before["text"] + after["text"]
    whole["logprobs"] = concatenated([before["logprobs"], after["logprobs"]])
    if "token_ids" in before and "token_ids" in after:
        whole["token_ids"] = before["token_ids"] + after["token_ids"]
    return whole


def _merged_delta(before: Json, after: Json) -> Json:
    whole = before | after
    for name in JOINED:
        if name in before and name in after:
            whole[name] = before[name] + after[name]
    calls = [*before.get("tool_calls", ()), *after.get("tool_calls", ())]
    if calls:
        whole["tool_calls"] = _merged_calls(calls)
    return whole


def _merged_calls(calls: Iterable[Json]) -> list[Json]:
    """Merge the parts of tool calls. A call's head stays a separate part without arguments, as in
    every stream."""
    whole: list[Json] = []
    for call in calls:
        before = whole[-1] if whole else call
        goes_on = whole and "id" not in call and "id" not in before
        if goes_on and before["index"] == call["index"]:
            before["function"]["arguments"] += call["function"]["arguments"]
        else:
            whole.append(call)
    return whole
