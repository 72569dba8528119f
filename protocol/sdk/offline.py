"""Language models for scripts: starts an engine, without HTTP, and sends it requests.

    from protocol.sdk.offline import LLM

    with LLM("smollm2-135m", max_slots=16) as llm:
        for result in llm.generate(["The sea is", "The sky is"], max_tokens=16, seed=1):
            print(result.text)
        (result,) = llm.chat([{"role": "user", "content": "Hi!"}], temperature=0)
        print(result.message, result.usage)

The answers are those of the HTTP API, and so are the parameters: the fields of POST
/v1/completions and /v1/chat/completions (docs/use/batches.md).

An LLM has three child processes: one that starts and watches the other two, the engine (with its
worker), and the text process, which is a gateway without HTTP. They end with the LLM (`close`), and
with the script, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, Self, overload

import msgspec

from protocol.process.exit_codes import ExitCode
from protocol.process.lifeline import Lifeline
from protocol.sdk.offline_link import FrameLink
from protocol.sdk.offline_messages import (
    FromText,
    OfflineAbort,
    OfflineAnswer,
    OfflineConfig,
    OfflineReady,
    OfflineRequest,
)
from protocol.wire.errors import (
    EngineError,
    EngineLost,
    EngineNotReady,
    ErrorInfo,
    InvalidRequest,
    ServingError,
    error_from,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STARTER = "tools.offline"
"""The module that starts the processes. It is started by name, because this package imports no
other."""
STOP_S = 20.0
"""Seconds that the processes have to end before they are killed."""
PROGRESS_EVERY_S = 0.2
OPEN_PER_SLOT = 2
"""Requests that are open at the same time, for each slot of the engine. Those that wait for a slot
follow without a pause."""
CLOSED = "this LLM is closed"
_REFUSED = 400

Prompt = str | Sequence[int]
ChatMessage = Mapping[str, Any]


class OfflineResult(msgspec.Struct, frozen=True):
    """The answer to one prompt or conversation."""

    #: The body of the response, as the HTTP API describes it.
    body: dict[str, Any]

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The choices; several if `n` is set."""
        return list(self.body["choices"])

    @property
    def message(self) -> dict[str, Any]:
        """The message of the first choice of a chat: content, and perhaps reasoning and tool
        calls."""
        return dict(self.choices[0]["message"])

    @property
    def texts(self) -> list[str]:
        """The text of each choice; of a chat, its content without reasoning."""
        return [
            each["text"] if "text" in each else each["message"].get("content") or ""
            for each in self.choices
        ]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.texts[0]

    @property
    def finish_reason(self) -> str:
        return str(self.choices[0]["finish_reason"])

    @property
    def usage(self) -> dict[str, Any]:
        """The numbers of tokens."""
        return dict(self.body["usage"])


class LLM:
    """A model with an engine of its own, from its creation until `close`.

    model            as for `tidegate serve`: a name of the catalogue, a directory, a .gguf file, or
                     a repository on the Hugging Face Hub
    start_timeout_s  time until the model must be ready. A download does not count
    log_file         file for the processes' log lines; default: they are shown only in the error if
                     a process fails
    options          options of `tidegate serve` for the engine, the worker and the model, as Python
                     names: max_slots, max_len, device, chat_template, ...

    Several threads may use one LLM; each call waits for the calls before it. A forked process
    cannot use the LLM. If it closes the LLM or ends, it only closes its copies of the descriptors.

    Creating an LLM raises InvalidRequest if an option is wrong, and EngineNotReady if the model
    cannot be served.
    """

    def __init__(
        self,
        model: str,
        *,
        start_timeout_s: float = 600.0,
        log_file: str | None = None,
        **options: Any,
    ) -> None:
        self._lock = threading.Lock()
        self._next_request = 1
        self._process_id = os.getpid()
        opened = contextlib.ExitStack()
        self._close = weakref.finalize(self, opened.close)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._close)
            self._log = opened.enter_context(_open_log(log_file))
            own, theirs = socket.socketpair()
            with theirs:
                self._link = FrameLink(own, FromText)
                opened.callback(self._link.close)
                config = OfflineConfig(
                    model=model,
                    options=options,
                    socket=theirs.fileno(),
                    start_timeout_s=start_timeout_s,
                )
                self._starter = _Starter(config, self._log)
            opened.callback(self._starter.stop)
            ready = self._link.receive()
            if not isinstance(ready, OfflineReady):
                raise self._lost(EngineNotReady)
            #: The first message of the text process: the model's name and its limits.
            self.facts: OfflineReady = ready
            on_failure.pop_all()

    def close(self) -> None:
        """End the processes, except in a forked process. May be called twice."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- requests

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Mapping[str, Any] | None = None,
        *,
        progress: bool | None = None,
        raises: Literal[True] = True,
        **options: Any,
    ) -> list[OfflineResult]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Mapping[str, Any] | None = None,
        *,
        progress: bool | None = None,
        raises: Literal[False],
        **options: Any,
    ) -> list[OfflineResult | ServingError]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Mapping[str, Any] | None = None,
        *,
        progress: bool | None = None,
        raises: bool = True,
        **options: Any,
    ) -> Any:
        """Complete each prompt, and return the results in the order of the prompts.

        prompts   texts or lists of token ids; or one text or list of token ids
        params    fields of POST /v1/completions for all prompts, such as max_tokens; `options` too
        progress  whether to show the progress on stderr; None: if it is a terminal
        raises    whether an error of a prompt ends the call; otherwise it is the prompt's result

        Raises the first error of a prompt, such as InvalidRequest, and EngineLost if a process
        has ended.
        """
        is_one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        listed: Sequence[Any] = [prompts] if is_one else prompts
        bodies = [{**(params or {}), **options, "prompt": prompt} for prompt in listed]
        return self._answers(COMPLETIONS, bodies, progress, raises=raises)

    @overload
    def chat(
        self,
        conversations: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        params: Mapping[str, Any] | None = None,
        *,
        progress: bool | None = None,
        raises: Literal[True] = True,
        **options: Any,
    ) -> list[OfflineResult]: ...

    @overload
    def chat(
        self,
        conversations: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        params: Mapping[str, Any] | None = None,
        *,
        progress: bool | None = None,
        raises: Literal[False],
        **options: Any,
    ) -> list[OfflineResult | ServingError]: ...

    def chat(
        self,
        conversations: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        params: Mapping[str, Any] | None = None,
        *,
        progress: bool | None = None,
        raises: bool = True,
        **options: Any,
    ) -> Any:
        """Answer each conversation, and return the results in the order of the conversations.

        conversations   lists of messages; or one list of messages
        params          fields of POST /v1/chat/completions for all conversations; `options` too

        The other arguments and the errors are those of `generate`.
        """
        is_one = bool(conversations) and isinstance(conversations[0], Mapping)
        listed: Sequence[Any] = [conversations] if is_one else conversations
        bodies = [{**(params or {}), **options, "messages": messages} for messages in listed]
        return self._answers(CHAT, bodies, progress, raises=raises)

    def _answers(
        self, path: str, bodies: Sequence[Any], progress: bool | None, *, raises: bool
    ) -> list[OfflineResult | ServingError]:
        """Send requests, at most OPEN_PER_SLOT for each slot at a time, and return the results."""
        if not self._close.alive:
            raise EngineError(CLOSED)
        if os.getpid() != self._process_id:
            raise EngineError(
                "this LLM belongs to another process; create an LLM in each forked process"
            )
        if any(body.get("stream") for body in bodies):
            raise InvalidRequest.at("stream", "an LLM returns whole answers")
        results: list[OfflineResult | ServingError | None] = [None] * len(bodies)
        with self._lock, _progress(len(bodies), progress) as show, contextlib.ExitStack() as held:
            places: dict[int, int] = {}  # open request -> index of its body
            held.callback(self._abort, places)
            waiting = iter(enumerate(bodies))
            num_open = max(1, OPEN_PER_SLOT * self.facts.max_slots)
            for place, body in waiting:
                self._send(path, body, place, places)
                if len(places) >= num_open:
                    break
            while places:
                answer = self._link.receive()
                if not isinstance(answer, OfflineAnswer):
                    raise self._lost(EngineLost)
                place = places.pop(answer.request, -1)
                if place < 0:
                    continue  # the answer to a request of a call that was interrupted
                results[place] = result = _result(answer)
                if raises and isinstance(result, ServingError):
                    result.add_note(f"in the request number {place}, counted from 0")
                    raise result
                show(len(bodies) - results.count(None))
                if (following := next(waiting, None)) is not None:
                    self._send(path, following[1], following[0], places)
        return [each for each in results if each is not None]

    def _send(self, path: str, body: Any, place: int, places: dict[int, int]) -> None:
        try:
            data = msgspec.json.encode(body)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"request {place} is not JSON: {error}") from None
        number, self._next_request = self._next_request, self._next_request + 1
        places[number] = place
        self._link.send(OfflineRequest(request=number, path=path, body=data))

    def _abort(self, places: Mapping[int, int]) -> None:
        """Abort the requests of an interrupted call that are still open."""
        if places:
            self._link.send(OfflineAbort(requests=list(places)))

    def _lost(self, kind: type[EngineError]) -> ServingError:
        """Return the error of a process that has ended, with the last line that it has logged."""
        if not self._close.alive:  # by another thread
            return EngineError(CLOSED)
        self._starter.wait(STOP_S)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        said = [line.removeprefix("tidegate: ") for line in lines if line.startswith("tidegate: ")]
        reason = (said or [line for line in lines if line.strip()] or ["its processes ended"])[-1]
        if self._starter.exit_code == ExitCode.USAGE:
            return InvalidRequest(reason)
        return kind(reason)


def _open_log(path: str | None) -> IO[bytes]:
    """Return the file for the log lines of the processes, opened to append and to read."""
    return tempfile.TemporaryFile() if path is None else Path(path).open("a+b")


class _Starter:
    """The process that starts the others. A thread of its own starts it and waits for it: the
    kernel ends a child when the thread that has started it ends."""

    def __init__(self, config: OfflineConfig, log: IO[bytes]) -> None:
        self.exit_code: int | None = None
        self._config, self._log = config, log
        try:
            self._text = msgspec.json.encode(config).decode()
        except TypeError as error:
            raise InvalidRequest(f"an option is not JSON: {error}") from None
        self._process: subprocess.Popen[bytes] | None = None
        self._process_id = os.getpid()
        self._lifeline: Lifeline | None = Lifeline()
        self._started, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="tidegate-llm", daemon=True).start()
        self._started.wait()

    def _run(self) -> None:
        assert self._lifeline is not None
        with contextlib.ExitStack() as at_end:
            at_end.callback(self._ended.set)
            at_end.callback(self._started.set)
            at_end.callback(self._close_lifeline)
            process = self._process = self._spawn(self._lifeline)
            self._started.set()
            self.exit_code = process.wait()

    def _close_lifeline(self) -> None:
        # The attribute is cleared first. A process that is forked meanwhile must not close the same
        # numbers again, because they may be those of other files by then.
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            lifeline.close()

    def _spawn(self, lifeline: Lifeline) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", STARTER, "--config", self._text],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **lifeline.environment},
                process_group=0,  # Ctrl-C interrupts the script only
                pass_fds=[self._config.socket, *lifeline.child_ends],
            )
        finally:
            lifeline.on_started()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended. Return False if it has not."""
        return self._ended.wait(timeout_s)

    def stop(self) -> None:
        """End the process, and with it the others. In a forked process, only close the copies of
        the pipes to it."""
        if os.getpid() != self._process_id:
            self._close_lifeline()  # the thread that does this was not forked
            return
        process = self._process
        if process is None or self._ended.is_set():
            return
        for number in (signal.SIGQUIT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            if self.wait(STOP_S):
                return


def _result(answer: OfflineAnswer) -> OfflineResult | ServingError:
    body = msgspec.json.decode(answer.body)
    if answer.status < _REFUSED:
        return OfflineResult(body)
    error = body["error"]
    message, param = str(error["message"]), error.get("param")
    code = error.get("code") or (InvalidRequest.code if answer.status == _REFUSED else "")
    return error_from(ErrorInfo(code=code, message=message, param=param))


@contextlib.contextmanager
def _progress(total: int, wanted: bool | None) -> Iterator[Any]:
    """Show a line of progress on stderr inside the `with` block. Yield the function to call with
    the number of results."""
    is_shown = sys.stderr.isatty() if wanted is None else wanted
    started_at = time.monotonic()
    shown_at = 0.0

    def show(num_done: int) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if not is_shown or (now - shown_at < PROGRESS_EVERY_S and num_done < total):
            return
        shown_at = now
        rate = num_done / max(1e-9, now - started_at)
        line = f"\r{num_done:,} of {total:,} requests, {rate:,.1f}/s"
        print(line, end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if is_shown:
            print(file=sys.stderr, flush=True)
