"""Grammar service: threads that compile grammars beside the loop.

The loop never waits for a compilation: `submit` queues a job, and `fd` becomes readable when
`drain` has a result. A job that takes too long is refused. llguidance cannot be interrupted, so the
thread still completes such a job, and its result is cached for later requests.

The threads have large stacks (large_stack.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import deque
from concurrent.futures import Future
from time import perf_counter
from typing import TYPE_CHECKING

from engine_core.grammar.cache import CompiledGrammar, CompileJob
from engine_core.grammar.large_stack import large_stacks
from engine_core.grammar.matcher import MatcherTemplate
from protocol.errors import EngineError, InvalidRequest, RequestError, ServingError
from protocol.model_card import ModelCard
from protocol.steps import TokenizerRead

if TYPE_CHECKING:
    from engine_core.grammar.compiler import Compiler

log = logging.getLogger(__name__)

NUM_THREADS = 2
NICENESS = 10
"""Niceness of the compiler threads (Linux), so that decoding has precedence on busy cores."""
SLOW_S = 1.0
"""A compilation that takes longer than this is logged."""


class GrammarService:
    """The compiler threads and their queues.

    A job that takes longer than `timeout_s`, including its time in the queue, is refused.
    """

    def __init__(self, timeout_s: float) -> None:
        #: An eventfd that is readable when there are results.
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timeout_s = timeout_s
        self._compiler: Future[Compiler] = Future()
        self._jobs: queue.SimpleQueue[CompileJob] = queue.SimpleQueue()
        self._results: deque[CompiledGrammar] = deque()
        self._deadlines: dict[bytes, float] = {}  # of unanswered jobs
        self._lock = threading.Lock()  # prevents writes to `fd` after it is closed
        self._is_closed = False

    def start(self, model: ModelCard | TokenizerRead) -> None:
        """Start the threads. The first builds the model's compiler, which all jobs wait for.

        Call it once, before there are requests, because building the compiler holds the GIL.
        """
        with large_stacks():
            for n in range(NUM_THREADS):
                arguments = (model if n == 0 else None,)
                name = f"grammar-{n}"
                threading.Thread(target=self._work, args=arguments, name=name, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether there are unanswered jobs.

        If so, the caller must call `drain` regularly, even if `fd` is not readable, so that overdue
        jobs are refused.
        """
        return bool(self._deadlines)

    def submit(self, job: CompileJob, now: float) -> None:
        self._deadlines[job.digest] = now + self._timeout_s
        self._jobs.put(job)

    def drain(self, now: float) -> list[CompiledGrammar]:
        """Return the results since the last call, and refusals for jobs overdue at `now`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        results = []
        while self._results:
            results.append(self._results.popleft())
            self._deadlines.pop(results[-1].digest, None)
        overdue = [digest for digest, deadline in self._deadlines.items() if now > deadline]
        for digest in overdue:
            del self._deadlines[digest]
        return results + [CompiledGrammar(digest, self._refusal()) for digest in overdue]

    def close(self) -> None:
        """Close `fd`. Running compilations are abandoned: the threads end with the process."""
        with self._lock:
            self._is_closed = True
            os.close(self.fd)

    def _refusal(self) -> ServingError:
        return InvalidRequest(
            f"the grammar: it could not be compiled within {self._timeout_s:g} s", param="grammar"
        )

    # ---- in the threads

    def _work(self, model: ModelCard | TokenizerRead | None) -> None:
        if model is not None:  # holds the GIL, so a low priority would delay the loop even longer
            self._prepare(model)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            job = self._jobs.get()
            self._results.append(CompiledGrammar(job.digest, self._compile(job)))
            with self._lock:
                if self._is_closed:
                    return
                os.eventfd_write(self.fd, 1)

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
            return error
        except BaseException as error:
            log.error("a grammar could not be compiled: %s: %s", type(error).__name__, error)
            return EngineError("this server could not compile the grammar")
        finally:
            if (took := perf_counter() - started) > SLOW_S:
                log.warning("a grammar took %.1f s to compile", took)
