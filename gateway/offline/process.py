"""Answers the requests of a script, each with the answer of the HTTP API.

The requests arrive on a socket (`protocol.sdk.offline_messages`). The config is JSON in the
environment variable TIDEGATE_GATEWAY. The process ends when the other side closes the socket, or
when its parent ends.
"""

from __future__ import annotations

import contextlib
import socket

import gevent
from flask import Flask
from gevent.queue import Queue
from gunicorn.errors import AppImportError

from gateway.app import CANNOT_START, EXTENSION, answer_internally, create_app
from gateway.auth.caller import Caller
from gateway.http.internal_call import InternalOrigin
from gateway.observe import logging
from gateway.service import Service
from protocol.config.gateway import GatewayConfig
from protocol.engine.messages import Message
from protocol.process.exit_codes import ExitCode
from protocol.process.lifeline import ParentPipe
from protocol.sdk.offline_messages import (
    FrameReader,
    OfflineAbort,
    OfflineAnswer,
    OfflineReady,
    OfflineRequest,
    ToText,
    to_frame,
)
from protocol.shared.api_keys import ALL_SCOPES

READY_POLL_S = 0.02
SCRIPT = InternalOrigin(Caller("", ALL_SCOPES, ""), is_background=False)
"""The origin of all requests: the user who runs the script may do everything."""


def serve(fd: int, parent: ParentPipe) -> int:
    """Run the text process, and return its exit code.

    fd      descriptor of the socket to the script
    parent  gets the cause if the model cannot be served
    """
    config = GatewayConfig.from_environment()
    logging.set_up(config.log_format, shows_content=config.log_content)
    try:
        app = create_app(config)
    except AppImportError as error:
        parent.send_cause(str(error).removeprefix(CANNOT_START))
        return ExitCode.USAGE
    with socket.socket(fileno=fd) as sock:
        return TextProcess(app, sock, parent).run()


class TextProcess:
    """The application, and the requests of the script that are open."""

    def __init__(self, app: Flask, sock: socket.socket, parent: ParentPipe) -> None:
        self._app = app
        self._service: Service = app.extensions[EXTENSION]
        self._socket = sock
        self._parent = parent
        self._outgoing: Queue[Message] = Queue()
        self._open: dict[int, gevent.Greenlet[..., None]] = {}
        self._exit_code: int | None = None

    def run(self) -> int:
        """Answer requests until the script closes the socket. Return the exit code."""
        self._service.give_up = self._give_up
        self._service.start()
        while self._service.trouble() is not None and self._exit_code is None:
            gevent.sleep(READY_POLL_S)
        if self._exit_code is None:
            self._answer_all()
        self._service.close()
        return self._exit_code or ExitCode.OK

    def _answer_all(self) -> None:
        model = self._service.hosts[0].served
        assert model is not None, "the service is ready"
        limits = model.limits
        self._outgoing.put(
            OfflineReady(model=model.names[0], max_len=limits.max_len, max_slots=limits.max_slots)
        )
        gevent.spawn(self._send_all)
        reader = FrameReader(self._socket, ToText)
        while (message := reader.read()) is not None:
            if isinstance(message, OfflineAbort):
                for number in message.requests:
                    if (greenlet := self._open.get(number)) is not None:
                        greenlet.kill(block=False)
            else:
                greenlet = self._open[message.request] = gevent.spawn(self._answer, message)
                # Also called if the greenlet is killed before it has started.
                greenlet.link(lambda _, number=message.request: self._open.pop(number, None))

    def _answer(self, message: OfflineRequest) -> None:
        found = answer_internally(self._app, message.path, message.body, SCRIPT)
        answer = OfflineAnswer(request=message.request, status=found.status, body=found.body)
        self._outgoing.put(answer)

    def _send_all(self) -> None:
        """Send the queued messages to the script. Aborts do not kill this greenlet, so each frame
        is sent completely."""
        with contextlib.suppress(OSError):  # the script is gone, which `_answer_all` sees
            for message in self._outgoing:
                self._socket.sendall(to_frame(message))

    def _give_up(self, why: str, code: ExitCode | None) -> None:
        """End the process, because the engine's model cannot be served."""
        self._parent.send_cause(why)
        self._exit_code = code or ExitCode.USAGE
        self._socket.shutdown(socket.SHUT_RDWR)
