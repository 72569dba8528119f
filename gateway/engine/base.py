"""The interface of every engine client, and the types of its callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Unpack

from protocol.arrays import Int32
from protocol.errors import ServingError
from protocol.messages import (
    Aborted,
    Accepted,
    EngineStatus,
    Limits,
    Output,
    Profiled,
    Refused,
)
from protocol.model_card import ModelCard
from protocol.sampling import SamplingParams
from protocol.session import GenerateOptions
from protocol.stats import EngineStats

if TYPE_CHECKING:
    from gateway.engine.client import ClientLine

Report = Accepted | Refused | Output | Aborted | Profiled | EngineStatus
Subscriber = Callable[[Report], None]


class RequestSender(Protocol):
    """The part of `EngineClient` that the choices of one request use."""

    def generate(
        self,
        prompt: Sequence[int] | Int32,
        params: SamplingParams,
        subscriber: Subscriber,
        **options: Unpack[GenerateOptions],
    ) -> int:
        """Send a request and return its number. `subscriber` gets every report until its end.

        Raises EngineNotReady, EngineLost or NoEngine if the request cannot be sent.
        """

    def abort(self, request: int, on_freed: Callable[[], None] | None = None) -> None:
        """Abort `request` if it is open. Its subscriber gets no more reports.

        `on_freed` is called after the engine has released the request's resources.
        """


class EngineClient(RequestSender, Protocol):
    """A connection to an engine, or to several engines that serve as one.

    All methods are for the greenlets of one thread. Subscribers are called in gevent's hub and must
    not block.
    """

    @property
    def lines(self) -> Sequence[ClientLine]:
        """The connections to all engines; empty if there is none."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def model(self) -> ModelCard | None:
        """The engine's model; None before it is known."""

    @property
    def limits(self) -> Limits | None: ...

    @property
    def epoch(self) -> str | None: ...

    @property
    def silence_s(self) -> float | None:
        """Seconds since the last message of the engine; None before the first one."""

    @property
    def stats(self) -> EngineStats | None:
        """Statistics of the last heartbeat; None before the first one."""

    def start(self) -> None:
        """Connect. Call this after the fork; later calls have no effect."""

    def close(self) -> None:
        """Disconnect; the engine aborts the open requests."""

    def trouble(self) -> ServingError | None:
        """Return why no request can be sent now; None if requests can be sent."""

    def abort_named(self, names: Sequence[str]) -> Aborted:
        """Abort all requests with one of these labels, of any client, and wait for the result.

        Raises EngineNotReady, EngineLost or NoEngine if the engine cannot be reached.
        """
