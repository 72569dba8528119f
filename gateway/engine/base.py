"""The interface of every engine client, the types of its callbacks, and `NullEngineClient`.

Other implementations: `client.py` (one engine), `gateway/fleet/replicas.py` (several engines of one
model) and `gateway/fleet/disaggregated.py` (prefill and decode engines).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Unpack

from protocol.engine.adapters import AdapterInfo
from protocol.engine.attachments import AttachedTensor
from protocol.engine.encoding import EncodeInputs
from protocol.engine.messages import (
    Aborted,
    Accepted,
    Account,
    AdapterChanged,
    EngineStatus,
    Limits,
    Output,
    Profiled,
    Refused,
    RequestTimelines,
)
from protocol.engine.model_card import ModelCard, read_card
from protocol.engine.sampling import SamplingParams
from protocol.engine.session import EncodeOptions, GenerateOptions
from protocol.engine.stats import EngineStats
from protocol.engine.timeline import AbortReason
from protocol.wire.arrays import Int32
from protocol.wire.errors import NoEngine, ServingError

if TYPE_CHECKING:
    from gateway.engine.client import ConnectedEngine


class RoutedOptions(GenerateOptions, total=False):
    """The options of a request to an engine client."""

    #: Requests of one session should be sent to one engine; "": no session. Engines do not need it.
    session: str
    #: Digest -> content of the request's attachments, which is sent before the request if the
    #: engine does not have it.
    contents: Mapping[str, Sequence[AttachedTensor]]


Report = (
    Accepted
    | Refused
    | Output
    | Aborted
    | AdapterChanged
    | Profiled
    | EngineStatus
    | RequestTimelines
)
"""A message of the engine about one request."""
Subscriber = Callable[[Report], None]
"""Receives the reports about one request, in order."""


class RoutedEncodeOptions(EncodeOptions, total=False):
    """The options of a request that encodes, to an engine client."""

    #: As in `RoutedOptions`.
    session: str


class RequestSender(Protocol):
    """The methods of an engine client that `ChoiceGroup` uses."""

    def generate(
        self,
        prompt: Sequence[int] | Int32,
        params: SamplingParams,
        subscriber: Subscriber,
        **options: Unpack[RoutedOptions],
    ) -> int:
        """Send a request and return its number.

        `subscriber` is called with every report about the request, including the last one. Raises
        a ServingError, such as EngineNotReady, EngineLost or NoEngine, if the request cannot be
        sent.
        """

    def encode(
        self,
        inputs: EncodeInputs,
        subscriber: Subscriber,
        **options: Unpack[RoutedEncodeOptions],
    ) -> int:
        """Send a request that encodes, and return its number. `subscriber` and the errors are those
        of `generate`."""

    def abort(
        self,
        request: int,
        reason: AbortReason,
        *,
        on_freed: Callable[[], None] | None = None,
    ) -> None:
        """Abort `request` if it is open. Its subscriber gets no more reports.

        reason    the reason that the engine's timeline of the request shows
        on_freed  called after the engine has released the request's resources.
        """


class EngineClient(RequestSender, Protocol):
    """A connection to one engine, or to several engines that serve as one.

    All methods must be called from greenlets of one thread. Subscribers are called in gevent's hub
    and must not block.
    """

    @property
    def connections(self) -> Sequence[ConnectedEngine]:
        """The connections to all engines; empty if there is no engine."""

    @property
    def is_ready(self) -> bool:
        """Whether requests can be sent now."""

    @property
    def model(self) -> ModelCard | None:
        """The engine's model; None before the engine has reported it."""

    @property
    def limits(self) -> Limits | None:
        """The engine's limits; None before the engine has reported them."""

    @property
    def adapters(self) -> Sequence[AdapterInfo]:
        """The LoRA adapters that requests can use now."""

    @property
    def epoch(self) -> str | None:
        """Identifies the current run of the engine process; None while there is no session with an
        engine."""

    @property
    def silence_s(self) -> float | None:
        """Seconds since the last message of the engine; None before the first message."""

    @property
    def stats(self) -> EngineStats | None:
        """The statistics in the last heartbeat; None before the first one in this epoch."""

    def start(self) -> None:
        """Connect. Call this after the fork. Later calls have no effect."""

    def close(self) -> None:
        """Disconnect. The engine then aborts the open requests of this client."""

    def on_exited(self) -> None:
        """Handle the exit of all engine processes, which the supervisor has reported: end the
        sessions with them. Requests can be sent after a new engine has sent Welcome."""

    def cached_refusal(self, account: Account | None) -> ServingError | None:
        """Return the engine's last refusal of a request of `account`, if it is still valid; None
        otherwise. The engine includes it in its count of refusals."""

    def cache_refusal(self, account: Account | None, refusal: ServingError) -> None:
        """Store a refusal for `cached_refusal`. Pass only refusals of requests with one choice."""

    def trouble(self) -> ServingError | None:
        """Return why no request can be sent now, as an exception; None if requests can be sent."""

    def abort_by_label(self, labels: Sequence[str]) -> Aborted:
        """Abort the requests of all clients that have one of `labels`, and return the result.

        Raises EngineNotReady, EngineLost or NoEngine if the engine cannot be reached.
        """

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load a LoRA adapter in all engines, and wait until requests can use it. Raises
        InvalidRequest or UnknownModel if an engine refuses, and as `abort_by_label` does."""

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Unload a LoRA adapter in all engines, and wait until its requests have ended and its
        memory is free. Raises UnknownModel if no engine has it, and as `abort_by_label` does."""


MIN_TIMEOUT_S = 0.001
"""Timeout that is sent to another engine when no time remains. It is not 0, because 0 means no
limit."""


def remaining_s(timeout_s: float, elapsed_s: float) -> float:
    """Return the rest of a timeout; 0 if there is no timeout."""
    return max(timeout_s - elapsed_s, MIN_TIMEOUT_S) if timeout_s else 0.0


def limits_without_engine(max_len: int) -> Limits:
    """Return the limits of a server without an engine; `max_len` is the model's context length."""
    return Limits(
        max_len=max_len,
        max_slots=0,
        block_tokens=0,
        num_blocks=0,
        token_budget=0,
        prefix_cache=False,
    )


class NullEngineClient:
    """The `EngineClient` of a server without an engine (--render-only).

    Every request that needs an engine raises NoEngine.

    path  file with the model card; the constructor raises ValueError if it cannot be read
    """

    def __init__(self, path: str) -> None:
        content = read_card(path)
        self.model: ModelCard = content.card
        self.limits = limits_without_engine(content.max_len)
        self.epoch: str | None = None
        self.silence_s: float | None = None
        self.stats: EngineStats | None = None
        self.is_ready = False
        self.connections: list[ConnectedEngine] = []
        self.adapters: list[AdapterInfo] = []

    def start(self) -> None:
        """Do nothing, because there is no engine."""

    def close(self) -> None:
        """Do nothing, because there is no engine."""

    def on_exited(self) -> None:
        """Do nothing, because there is no engine."""

    def cached_refusal(self, account: Account | None) -> None:
        """Return None: there is no engine that could have refused a request."""

    def cache_refusal(self, account: Account | None, refusal: ServingError) -> None:
        """Do nothing, because there is no engine."""

    def trouble(self) -> ServingError | None:
        """Return None: this server can serve the requests that need no engine."""
        return None

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        raise NoEngine(
            "this server has no engine (--render-only); it only renders, derenders and tokenizes"
        )

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        self.generate()

    def abort_by_label(self, labels: Sequence[str]) -> NoReturn:
        self.generate()

    def load_adapter(self, name: str, path: str) -> NoReturn:
        self.generate()

    def unload_adapter(self, name: str) -> NoReturn:
        self.generate()

    def abort(
        self,
        request: int,
        reason: AbortReason,
        *,
        on_freed: Callable[[], None] | None = None,
    ) -> None:
        """Do nothing, because no request is ever open."""
