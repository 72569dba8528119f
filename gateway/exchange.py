"""One HTTP request and its response, as numbers: a log line, the counters, the request's id.

Nothing of what people write is kept here: no prompt, no answer, no header but the request id.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from gateway.answering import Answer
from gateway.metrics import Metrics

log = logging.getLogger("gateway.access")

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id_from(header: str | None) -> str:
    """The client's own id, where it is one we can repeat in headers and logs; else a new one."""
    return header if header and _REQUEST_ID.fullmatch(header) else uuid.uuid4().hex


class Exchange:
    """From the first look at a request to its end. Of several calls of `close` the first counts.

    route   the rule that matched ("/v1/models/<name>"), so that label values are few
    logs    its end is worth a line
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        method: str,
        path: str,
        route: str,
        request_id: str,
        logs: bool = True,
    ) -> None:
        self.request_id = request_id
        self.answer: Answer | None = None
        self.is_streaming = False
        self.caller = ""  # the name of its key
        self._metrics = metrics
        self._method, self._path, self._route = method, path, route
        self._started_at = time.monotonic()
        self._logs = logs
        self._is_closed = False

    def begin(self, answer: Answer) -> None:
        """An inference request: `answer` holds its numbers."""
        self.answer = answer
        self._metrics.open_answers.inc()

    def close(self, status: int) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        took_s = time.monotonic() - self._started_at
        self._metrics.requests.labels(self._route, str(status)).inc()
        if self.answer is not None:
            self._count(self.answer, took_s)
        if self._logs:
            self._log(status, took_s)

    def _count(self, answer: Answer, took_s: float) -> None:
        metrics = self._metrics
        metrics.open_answers.dec()
        metrics.prompt_tokens.inc(answer.num_prompt_tokens)
        metrics.generated_tokens.inc(answer.num_generated_tokens)
        metrics.finishes.labels(answer.finish or "refused").inc()
        metrics.request_s.labels(self._route).observe(took_s)
        accepted, rejected = answer.num_predictions
        if accepted or rejected:
            metrics.draft_acceptance.observe(accepted / (accepted + rejected))
        if answer.first_token_at is not None:
            metrics.first_token_s.observe(answer.first_token_at - self._started_at)

    def _log(self, status: int, took_s: float) -> None:
        tokens = f" key={self.caller}" if self.caller else ""
        if self.answer is not None:
            tokens += (
                f" prompt_tokens={self.answer.num_prompt_tokens}"
                f" generated_tokens={self.answer.num_generated_tokens}"
                f" finish={self.answer.finish or 'refused'}"
            )
        log.info(
            "%s %s %d id=%s%s ms=%.1f",
            self._method,
            self._path,
            status,
            self.request_id,
            tokens,
            took_s * 1000,
        )
