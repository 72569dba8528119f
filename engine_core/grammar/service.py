"""Grammar service: threads that compile grammars beside the loop.

The loop never waits for a compilation: `submit` queues a job, and `fd` becomes readable when
`drain` has a result. A job that waits or runs too long is refused (compile_queue.py). llguidance
cannot be interrupted, so a thread completes a job that was refused while it ran, and its result is
cached for later requests.

The threads have large stacks (large_stack.py). They measure what each grammar keeps (meter.py), and
return freed memory to the system, because both take milliseconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from typing import TYPE_CHECKING

from engine_core.grammar.compile_queue import CompileQueue
from engine_core.grammar.heap import CHeap
from engine_core.grammar.jobs import CompiledGrammar, CompileJob
from engine_core.grammar.large_stack import large_stacks
from engine_core.grammar.matcher import MatcherTemplate
from engine_core.grammar.meter import CompileMeter
from protocol.engine.grammar import num_chars
from protocol.engine.model_card import ModelCard
from protocol.wire.errors import EngineError, InvalidRequest, RequestError, ServingError
from protocol.worker.steps import TokenizerRead

if TYPE_CHECKING:
    from engine_core.grammar.compiler import Compiler

log = logging.getLogger(__name__)

NUM_THREADS = 3
MAX_PER_ACCOUNT = NUM_THREADS - 1
"""Most threads that compile grammars of one account, so one is left for the others."""
NICENESS = 10
"""Niceness of the compiler threads (Linux), so that decoding has precedence on busy cores."""
SLOW_S = 1.0
"""A compilation that takes longer than this is logged."""
TRIM_BYTES = 8 << 20
"""Freed memory is returned to the system when this much was freed since the last time. Compilations
free more than they keep."""
BYTES_PER_CHAR = 512
"""Size of a compiled grammar per character, if it cannot be measured. Literals need the most."""


class GrammarService:
    """The compiler threads and their queue.

    timeout_s  how long a job may wait for a thread, and how long it may then take
    clock      returns the time in seconds
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        #: An eventfd that is readable when there are results.
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._clock = clock
        self._compiler: Future[Compiler] = Future()
        self._heap = CHeap()
        self._meter = CompileMeter(self._heap.used_bytes)
        #: Protects the attributes below, and prevents writes to `fd` after it is closed. Threads
        #: without a job wait for it.
        self._changed = threading.Condition()
        self._queue = CompileQueue(timeout_s, MAX_PER_ACCOUNT)
        self._results: deque[CompiledGrammar] = deque()
        self._is_closed = False
        self._must_trim = False
        #: Slack of the heap after the last trim.
        self._slack_bytes = self._heap.slack_bytes()
        #: `num_dropped_bytes` at the last call of `trim` that had an effect.
        self._trimmed_at = 0

    def start(self, model: ModelCard | TokenizerRead) -> None:
        """Start the threads. The first builds the model's compiler, which all jobs wait for.

        Call it once, before there are requests, because building the compiler holds the GIL.
        """
        self._heap.limit_fragments()
        with large_stacks():
            for n in range(NUM_THREADS):
                arguments = (model if n == 0 else None,)
                name = f"grammar-{n}"
                threading.Thread(target=self._work, args=arguments, name=name, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether requests wait for jobs.

        If so, the caller must call `drain` regularly, even if `fd` is not readable, so that overdue
        jobs are refused.
        """
        with self._changed:
            return self._queue.is_awaited or bool(self._results)

    def submit(self, job: CompileJob) -> None:
        with self._changed:
            self._queue.add(job, self._clock())
            self._changed.notify()

    def drain(self) -> list[CompiledGrammar]:
        """Return the results since the last call, and refusals of overdue jobs."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        with self._changed:
            results = [*self._results, *self._queue.drop_overdue(self._clock())]
            self._results.clear()
        return results

    def trim(self, num_dropped_bytes: int) -> None:
        """Have a thread return freed memory to the system, if much was freed since the last time.
        `num_dropped_bytes` is the total size of the grammars that the engine has dropped."""
        if num_dropped_bytes - self._trimmed_at >= TRIM_BYTES:
            self._trimmed_at = num_dropped_bytes
            with self._changed:
                self._must_trim = True
                self._changed.notify()

    def close(self) -> None:
        """Close `fd`. Running compilations are abandoned: the threads end with the process."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            os.close(self.fd)

    # ---- in the threads

    def _work(self, model: ModelCard | TokenizerRead | None) -> None:
        if model is not None:  # holds the GIL, so a low priority would delay the loop even longer
            self._prepare(model)
        self._compiler.exception()  # wait for the compiler: a job's time starts when it can run
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (job := self._next_job()) is not None:
            self._meter.start(job.digest)
            result = self._compile(job)
            self._finish(job, result, self._meter.finish(job.digest))
            del result  # the thread must not keep what the engine drops
            if self._heap.slack_bytes() - self._slack_bytes >= TRIM_BYTES:
                self._trim()

    def _next_job(self) -> CompileJob | None:
        """Wait for a job and return it; None if the service is closed. Meanwhile, trim the heap if
        `trim` requests it."""
        while True:
            with self._changed:
                while not self._is_closed and not self._must_trim:
                    if (job := self._queue.start(self._clock())) is not None:
                        return job
                    self._changed.wait()
                if self._is_closed:
                    return None
                self._must_trim = False
            self._trim()

    def _finish(
        self, job: CompileJob, result: MatcherTemplate | ServingError, num_bytes: int
    ) -> None:
        """Store a result for `drain`."""
        if not self._heap.can_measure:
            num_bytes = BYTES_PER_CHAR * num_chars(job.grammar)
        with self._changed:
            self._queue.finish(job.digest)
            self._results.append(CompiledGrammar(job.digest, result, num_bytes))
            self._changed.notify()  # this account may have another job
            if not self._is_closed:
                os.eventfd_write(self.fd, 1)

    def _trim(self) -> None:
        """Return freed memory to the system."""
        self._heap.trim()
        self._slack_bytes = self._heap.slack_bytes()

    def _prepare(self, model: ModelCard | TokenizerRead) -> None:
        started = perf_counter()
        try:
            from engine_core.grammar.compiler import Compiler

            self._compiler.set_result(Compiler(model))
        except BaseException as error:  # a panic in llguidance is not an Exception
            log.error("grammars are not available: %s", error)
            self._compiler.set_exception(error)
        else:
            log.debug("ready to compile grammars after %.2f s", perf_counter() - started)

    def _compile(self, job: CompileJob) -> MatcherTemplate | ServingError:
        started = perf_counter()
        if self._compiler.exception() is not None:
            message = "the grammar: answers of this model cannot be constrained"
            return InvalidRequest(message, param="grammar")
        try:
            return self._compiler.result().compile(job.grammar)
        except RequestError as error:
            return error.with_traceback(None)  # its frames hold what was compiled until then
        except BaseException as error:
            log.error("a grammar could not be compiled: %s: %s", type(error).__name__, error)
            return EngineError("this server could not compile the grammar")
        finally:
            if (took := perf_counter() - started) > SLOW_S:
                log.warning("a grammar took %.1f s to compile", took)
