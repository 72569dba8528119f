"""The script's end of the socket to its text process (`offline_messages.py`).

Python raises KeyboardInterrupt, and the exceptions of other signal handlers, in the main thread,
between any two steps of its code. In the middle of a frame this would lose the rest of the frame,
and all later ones would be misread. So separate threads send and receive.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from typing import Any

from protocol.engine.messages import Message
from protocol.sdk.offline_messages import FrameReader, to_frame

WAKE_S = 0.2
"""Longest wait before a thread runs Python code again. A signal that arrives just before a wait
does not end it, so the signal's handler runs only after the wait."""


class FrameLink:
    """Sends and receives whole frames. An exception of a signal handler may interrupt any call; it
    loses at most the message that `receive` was about to return.

    The queues are not bounded. The caller bounds the number of open requests.

    sock  is closed by `close`. A forked process only closes its copy: the connection is not its own
    kind  union of the classes of the messages that are received
    """

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self._socket = sock
        self._process_id = os.getpid()
        self._reader = FrameReader(sock, kind)
        self._to_send: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        #: Whether no further message arrives. Set before None is put into `_received`.
        self._is_over = False
        self._threads = [
            threading.Thread(target=target, name=f"tidegate-llm-{name}", daemon=True)
            for name, target in (("send", self._send_all), ("receive", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """Send a message. It is lost if the other side is gone, which `receive` reports."""
        self._to_send.put(to_frame(message))

    def receive(self) -> Any:
        """Wait for the next message and return it; None if the other side has closed the socket."""
        while not self._is_over or not self._received.empty():
            with contextlib.suppress(queue.Empty):
                return self._received.get(timeout=WAKE_S)
        return None

    def close(self) -> None:
        """Close the socket. May be called twice."""
        if os.getpid() != self._process_id:
            self._socket.close()
            return
        self._to_send.put(None)
        with contextlib.suppress(OSError):  # closed, or the other side is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):
            while (frame := self._to_send.get()) is not None:
                self._socket.sendall(frame)

    def _receive_all(self) -> None:
        try:
            with contextlib.suppress(OSError):
                while (message := self._reader.read()) is not None:
                    self._received.put(message)
        finally:  # also if a message is malformed
            self._is_over = True
            self._received.put(None)
