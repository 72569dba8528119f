"""The access log: one line for each request, however it ended.

A line contains no part of a prompt or an answer. The text format is short, for people. The JSON
format (--log-format json) has every field.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from gateway.generation.record import AnswerRecord, RequestRecord
from protocol.process.log_lines import FIELDS

log = logging.getLogger("gateway.access")
_DIGITS = 6
"""Digits after the decimal point of times in seconds."""


def log_request(record: RequestRecord, *, names_model: bool = False) -> None:
    """Log a request. `names_model`: the text format has the model, because there are several."""
    log.info("%s", _AccessLine(record, names_model), extra={FIELDS: log_fields(record)})


class _AccessLine:
    """A log message that is formatted only when it is printed. The JSON log never prints it."""

    def __init__(self, record: RequestRecord, names_model: bool) -> None:
        self._record = record
        self._names_model = names_model

    def __str__(self) -> str:
        return text_line(self._record, names_model=self._names_model)


def text_line(record: RequestRecord, *, names_model: bool) -> str:
    parts = [record.method, record.path, str(record.status), f"id={record.request_id}"]
    if record.key:
        parts.append(f"key={record.key}")
    if names_model and record.model:
        parts.append(f"model={record.model}")
    if (answer := record.answer) is not None:
        parts.append(f"prompt_tokens={answer.prompt_tokens}")
        if answer.images:
            parts.append(f"image_tokens={answer.image_tokens}")
        parts.append(f"generated_tokens={answer.generated_tokens}")
        parts.append(f"finish={answer.finish}")
    parts.append(f"ms={record.took_s * 1000:.1f}")
    return " ".join(parts)


def log_fields(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of a JSON line. docs/operate/logs.md lists them.

    The fields of the answer are on the same level as those of the request. Times are in seconds.
    """
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "route": record.route,
        "status": record.status,
        "end": record.end,
        "took_s": round(record.took_s, _DIGITS),
    }
    if record.key:
        fields["key"] = record.key
    if record.model:
        fields["model"] = record.model
    return fields | (_answer_fields(record.answer) if record.answer is not None else {})


def _answer_fields(answer: AnswerRecord) -> dict[str, Any]:
    fields = msgspec.structs.asdict(answer)
    fields |= msgspec.structs.asdict(fields.pop("times"))
    fields["finishes"] = [choice.finish for choice in fields.pop("choices")]
    del fields["is_accepted"]
    return {
        name: round(value, _DIGITS) if isinstance(value, float) else value
        for name, value in fields.items()
        if value is not None
    }
