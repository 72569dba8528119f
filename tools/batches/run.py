"""Sends the lines of a batch over several connections, and appends each result to the output."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from protocol.shared.batch_retries import LineOutcome, RetryPolicy, failure_of
from protocol.shared.batches import BatchLine, BatchResult
from tools.batches.sender import LineSender
from tools.failure import Failure
from tools.http.web import WebServer

STOP_POLL_S = 0.05


class BatchRun:
    """One run of a batch, with a thread for each connection.

    lines       the lines to send; they are read one by one
    append      stores a result. Many threads call it
    on_result   is called after a result was stored, by one thread at a time
    timeout_s   longest time to wait for one answer
    give_up_s   the run ends with a failure if no line was answered for this long, and lines are
                still refused or lost
    """

    def __init__(
        self,
        server: WebServer,
        lines: Iterator[BatchLine],
        append: Callable[[BatchResult], None],
        on_result: Callable[[BatchResult], None],
        *,
        timeout_s: float,
        give_up_s: float,
    ) -> None:
        self._server = server
        self._lines = lines
        self._append = append
        self._on_result = on_result
        self._timeout_s = timeout_s
        self._give_up_s = give_up_s
        self._reading = threading.Lock()
        self._reporting = threading.Lock()
        self._stopping = threading.Event()
        self._answered_at = time.monotonic()

    def run(self, concurrency: int) -> None:
        """Send all lines, and return when each has its result. Raises Failure if no server answers
        for too long, or if a file cannot be used. If the wait is interrupted (KeyboardInterrupt),
        the lines that are being computed are given up."""
        senders = [LineSender(self._server, self._timeout_s) for _ in range(concurrency)]
        with ThreadPoolExecutor(concurrency, thread_name_prefix="batch") as pool:
            futures = [pool.submit(self._send_lines, sender) for sender in senders]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            finally:
                self._stop(futures, senders)

    def _stop(self, futures: list[Future[None]], senders: list[LineSender]) -> None:
        """End all threads. Those that wait for an answer notice that their connection ends."""
        self._stopping.set()
        while not all(future.done() for future in futures):
            for sender in senders:
                sender.hang_up()
            time.sleep(STOP_POLL_S)
        for sender in senders:
            sender.close()

    def _send_lines(self, sender: LineSender) -> None:
        while (line := self._next_line()) is not None:
            result = self._result_of(line, sender)
            if result is None:
                return
            self._append(result)
            with self._reporting:
                self._answered_at = time.monotonic()
                self._on_result(result)

    def _next_line(self) -> BatchLine | None:
        with self._reading:
            return None if self._stopping.is_set() else next(self._lines, None)

    def _result_of(self, line: BatchLine, sender: LineSender) -> BatchResult | None:
        """Send a line until it has a result. Return None if the run stops."""
        policy = RetryPolicy(random.Random())
        result_id = f"batch_req_{uuid.uuid4().hex}"
        while not self._stopping.is_set():
            outcome = sender.send(line)
            pause_s = policy.pause_after(outcome)
            if self._stopping.is_set():
                break
            if pause_s is not None:
                self._check_patience(outcome)
                self._stopping.wait(pause_s)
            elif outcome.response is not None:
                return BatchResult(result_id, line.custom_id, response=outcome.response)
            else:
                return BatchResult(result_id, line.custom_id, error=failure_of(outcome))
        return None

    def _check_patience(self, outcome: LineOutcome) -> None:
        if time.monotonic() - self._answered_at < self._give_up_s:
            return
        reason = outcome.message
        if outcome.response is not None:
            reason = f"status {outcome.response.status_code}"
        raise Failure(
            f"no line was answered for {self._give_up_s:g} s (the last answer: {reason}); run the "
            "same command again to continue"
        )
