"""The progress of a batch run: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

import msgspec
from tqdm import tqdm

from protocol.shared.batches import BatchResult

LINE_EVERY_S = 10.0


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


def tokens_of(result: BatchResult) -> int:
    """Return the number of tokens in an answer; for embeddings, that of the prompts."""
    if result.response is None or result.has_failed:
        return 0
    try:
        usage = msgspec.json.decode(result.response.body, type=_Answer).usage
    except msgspec.DecodeError:
        return 0
    if usage is None:
        return 0
    for count in (usage.completion_tokens, usage.output_tokens, usage.total_tokens):
        if count is not None:
            return count
    return 0


class RunProgress:
    """Shows how far a run is, on stderr, inside a `with` block.

    total                  number of lines in the input
    num_done, num_failed   results of earlier runs
    now                    time in seconds, of a steady clock
    """

    def __init__(self, total: int, num_done: int, num_failed: int, now: float) -> None:
        self._total = total
        self._num_done, self._num_failed = num_done, num_failed
        self._num_before = num_done
        self._num_tokens = 0
        self._started_at = self._shown_at = now
        self._bar = tqdm(total=total, initial=num_done, unit="line", disable=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()

    def on_result(self, result: BatchResult) -> None:
        self._num_done += 1
        self._num_failed += result.has_failed
        self._num_tokens += tokens_of(result)
        now = time.monotonic()
        if not self._bar.disable:
            rate = self._num_tokens / max(1e-9, now - self._started_at)
            self._bar.set_postfix(
                {"tokens/s": f"{rate:,.0f}", "failed": self._num_failed}, refresh=False
            )
            self._bar.update()
        elif now - self._shown_at >= LINE_EVERY_S:
            self._shown_at = now
            print(self.line(now), file=sys.stderr, flush=True)

    def line(self, now: float) -> str:
        """Return the progress in one line."""
        elapsed_s = max(1e-9, now - self._started_at)
        rate = (self._num_done - self._num_before) / elapsed_s
        left = self._total - self._num_done
        parts = [
            f"{self._num_done:,} of {self._total:,} lines",
            f"{rate:,.1f} lines/s",
            f"{self._num_tokens / elapsed_s:,.0f} tokens/s",
            f"{self._num_failed:,} failed",
        ]
        if rate:
            parts.append(f"{duration(left / rate)} left")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds: 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
