"""Reads traces: files of arrivals, as JSON lines or CSV.

The columns of public traces are known by their own names:

- Azure LLM inference traces (CSV): TIMESTAMP, ContextTokens, GeneratedTokens
- Mooncake traces (JSON lines): timestamp in milliseconds, input_length, output_length, hash_ids
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens that each of Mooncake's hash_ids stands for."""
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace."""

    arrival_s: float
    input_tokens: Annotated[int, Meta(ge=1, le=1 << 24)]
    output_tokens: Annotated[int, Meta(ge=1, le=1 << 24)]
    #: Requests with the same prefix share their first `prefix_tokens` tokens.
    prefix: str = ""
    prefix_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    #: The prompt of a session's request starts with the session's last prompt and answer.
    session: str = ""
    #: Ids of the prompt's blocks of `hash_tokens` tokens. An id stands for all blocks before, too.
    hash_ids: list[Annotated[int, Meta(ge=0, le=1 << 40)]] = []
    hash_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = MOONCAKE_BLOCK_TOKENS


class MooncakeLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a Mooncake trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path) -> list[TraceLine]:
    """Return the lines of a trace by time. Raises OSError, and ValueError with the number of the
    first bad line."""
    with path.open(encoding="utf-8", newline="") as file:
        first = file.readline()
        file.seek(0)
        is_json = first.lstrip().startswith("{")
        lines = [*(_json_lines(file) if is_json else _csv_lines(file))]
    if not lines:
        raise ValueError(f"{path} has no requests")
    return sorted(lines, key=lambda line: line.arrival_s)


def _json_lines(file: Iterable[str]) -> Iterator[TraceLine]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, text in enumerate(file, start=1):
        if text.strip():
            try:
                yield _to_line(decoder.decode(text))
            except (msgspec.MsgspecError, ValueError) as error:
                raise ValueError(f"line {number}: {error}") from None


def _csv_lines(file: Iterable[str]) -> Iterator[TraceLine]:
    for number, row in enumerate(csv.DictReader(file), start=2):
        try:
            yield _to_line({name: value for name, value in row.items() if value not in ("", None)})
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError(f"line {number}: {error}") from None


def _to_line(fields: Mapping[str, Any]) -> TraceLine:
    """Return a line with our own columns, Azure's or Mooncake's."""
    if "ContextTokens" in fields:
        time, num_input, num_output = (fields.get(name) for name in AZURE)
        fields = {
            "arrival_s": datetime.fromisoformat(str(time)).timestamp(),
            "input_tokens": num_input,
            "output_tokens": max(int(num_output or 0), 1),  # some answers are empty
        }
    elif "input_length" in fields:
        line = msgspec.convert(fields, MooncakeLine, strict=False)
        fields = {
            "arrival_s": line.timestamp / 1e3,
            "input_tokens": line.input_length,
            "output_tokens": max(line.output_length, 1),
            "hash_ids": line.hash_ids,
        }
    return msgspec.convert(fields, TraceLine, strict=False)
