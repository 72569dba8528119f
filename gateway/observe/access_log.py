"""One line per request, however it ended: numbers and names, nothing of what people wrote.

As text it is short, for people; as JSON (--log-format json) it has all that is known.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from gateway.generation.record import AnswerRecord, RequestRecord
from protocol.log_lines import FIELDS

log = logging.getLogger("gateway.access")
_DIGITS = 6


def tell(record: RequestRecord) -> None:
    log.info("%s", _AccessLine(record), extra={FIELDS: fields_of(record)})


class _AccessLine:
    """Made where it is read: a log as JSON has no need of it."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record

    def __str__(self) -> str:
        return line_of(self._record)


def line_of(record: RequestRecord) -> str:
    parts = [record.method, record.path, str(record.status), f"id={record.request_id}"]
    if record.key:
        parts.append(f"key={record.key}")
    if (answer := record.answer) is not None:
        parts.append(f"prompt_tokens={answer.prompt_tokens}")
        parts.append(f"generated_tokens={answer.generated_tokens}")
        parts.append(f"finish={answer.finish}")
    parts.append(f"ms={record.took_s * 1000:.1f}")
    return " ".join(parts)


def fields_of(record: RequestRecord) -> dict[str, Any]:
    """Flat, and times in seconds; docs/metrics.md says what they are."""
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
    return fields | (_fields_of_answer(record.answer) if record.answer is not None else {})


def _fields_of_answer(answer: AnswerRecord) -> dict[str, Any]:
    fields = msgspec.structs.asdict(answer)
    fields |= msgspec.structs.asdict(fields.pop("times"))
    fields["finishes"] = [choice.finish for choice in fields.pop("choices")]
    del fields["is_accepted"]
    return {
        name: round(value, _DIGITS) if isinstance(value, float) else value
        for name, value in fields.items()
        if value is not None
    }
