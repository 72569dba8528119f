"""Messages between a server's supervisor and its gateways or commands: which models are loaded.

The supervisor listens on a Unix stream socket in the run directory, which only its owner can enter.
Each message is one line of JSON, in both directions. So any program can use the socket: connect,
send `encode(message)`, and give what arrives to `ControlReader.push`.

A command sends one request at a time and receives its reply:

    StartModel, StopModel, GetModels    one `ModelStates` or `ControlError`
    RollEngines                         `RollProgress` for each change, then `RollEnded`; or
                                        `ControlError` if the roll cannot start
    PullModel                           `PullProgress` for each change, then `PullEnded`; or
                                        `ControlError` if the download cannot start
    CopyModel, DeleteModel              one `ModelStates` or `ControlError`
    GetLibrary                          one `ModelLibrary` or `ControlError`

A gateway process keeps one connection and follows these rules. They guarantee that no model is
unloaded under a request:

- It sends `ReportUse` about once a second, and at once after a `ModelStates` with a new version. A
  report has no reply of its own. Instead, the supervisor sends `ModelStates` whenever its version
  is newer than that of the connection's last report. So the first report, with version 0, always
  receives one.
- It gives a new request to a model only if the state that it last received is "ready". Otherwise it
  sends `StartModel`, unless it has done so since the state last changed, and keeps the request
  until the model is ready. The kept request is refused if `ControlError` names its model, or with
  the model's `error` if the state becomes "failed".
- All engines of a model have exited if its state becomes "unloaded", "waiting" or "failed", or
  changes from "stopping" to "loading". The gateway then ends its sessions with them at once,
  because it may notice later that their connections have broken.
- `StartModel` counts as one kept request of this connection until its next report. A closed
  connection has no requests.

The supervisor stops a model's engines only after each gateway has confirmed the state "stopping",
by its version, in a report without open requests of that model.

If clients manage the models, each `ModelStates` has the models that every gateway must serve, in
`hosted`. `PullEnded`, and the reply to `CopyModel` and `DeleteModel`, are sent after every gateway
has confirmed the version with the change. So whoever receives them finds the same models in each
gateway.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from protocol.config.gateway import ModelConfig
from protocol.wire.errors import EngineNotReady, ErrorInfo, ServingError, WireError, error_from

SOCKET = "control.sock"
"""Name of the supervisor's socket in the run directory."""
MAX_LINE_BYTES = 1 << 20
REPORT_EVERY_S = 1.0
"""Interval of a gateway's `ReportUse`."""

RollStep = Literal["draining", "starting", "ready"]
LoadState = Literal["unloaded", "waiting", "loading", "ready", "stopping", "failed"]
"""The state of a model:

unloaded   its engines do not run. `StartModel` loads it
waiting    it will be loaded as soon as other models have made room
loading    its engines start
ready      it serves requests
stopping   it accepts no new requests, finishes the open ones, and then frees its memory
failed     its engines ended with an error. `StartModel` tries again
"""


class ControlMessage(
    msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower, omit_defaults=True, kw_only=True
):
    """Base of all messages. The tag of a message is its class name in lower case."""


# ---- gateway or command -> supervisor


class StartModel(ControlMessage, frozen=True, kw_only=True):
    """Gateway or command -> supervisor. Load a model, and unload others without open requests if
    they occupy its room. Nothing happens if it is loaded, loading or waiting already."""

    model: str


class StopModel(ControlMessage, frozen=True, kw_only=True):
    """Command -> supervisor. Drain the engines of a model and free all their memory. The next
    request for the model loads it again."""

    model: str


class ReportUse(ControlMessage, frozen=True, kw_only=True):
    """Gateway -> supervisor. The use of the models in one gateway process."""

    #: Model -> number of requests that were given to its engines and have not ended. It is 0 for a
    #: model that was used since the last report; other models without requests are left out.
    open: dict[str, int]
    #: Model -> number of requests that wait until it is ready. Models without any are left out.
    kept: dict[str, int] = {}
    #: Version of the last `ModelStates` that the gateway received; 0: none.
    version: int = 0


class GetModels(ControlMessage, frozen=True, kw_only=True):
    """Gateway or command -> supervisor. Return the states of all models."""


class RollEngines(ControlMessage, frozen=True, kw_only=True):
    """Command -> supervisor. Restart the engines of each group of replicas one after the other."""


class PullModel(ControlMessage, frozen=True, kw_only=True):
    """Gateway -> supervisor. Download a model and serve it, or follow its download. The download
    continues if the connection ends."""

    #: A name of the catalogue, or of a model on the Hugging Face Hub.
    model: str


class CopyModel(ControlMessage, frozen=True, kw_only=True):
    """Gateway -> supervisor. Serve a model under one more name."""

    source: str
    destination: str


class DeleteModel(ControlMessage, frozen=True, kw_only=True):
    """Gateway -> supervisor. Remove a name of a model. If that is the last name, unload the model
    after its open requests have finished, and remove its files. If the model is being downloaded,
    cancel the download, and remove the partial files."""

    model: str


class GetLibrary(ControlMessage, frozen=True, kw_only=True):
    """Gateway -> supervisor. Return the models that clients can download, and those that they
    have."""


# ---- supervisor -> gateway or command


class ModelState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The state of one model."""

    name: str
    state: LoadState
    #: Version of the states at the last change of this one. It also shows a change if the state is
    #: the same again, because those in between were not received.
    version: int = 0
    #: Why the model cannot be loaded, or why its last start failed; "" if nothing is wrong.
    error: str = ""
    #: Memory that its engines need for weights, K/V cache and steps together; 0: unknown.
    planned_bytes: int = 0
    #: Models that occupy the room that this one waits for.
    waits_for: list[str] = []


class ModelStates(ControlMessage, frozen=True, kw_only=True):
    """Supervisor -> gateway or command. The states of all models, in the order of the command
    line."""

    #: Number of changes of any state so far, from 1.
    version: int
    models: list[ModelState]
    #: Memory planned for the models that are loading, ready or stopping.
    used_bytes: int = 0
    #: Memory that all models together may use; 0: not limited.
    limit_bytes: int = 0
    #: The models that each gateway serves, in the order of lists. None: those of its own config.
    hosted: list[ModelConfig] | None = None


class ControlError(ControlMessage, frozen=True, kw_only=True):
    """Supervisor -> gateway or command. The request was refused, and nothing changed."""

    message: str
    #: The model that the request named; "" if it named none.
    model: str = ""
    #: Code of the error (`protocol.wire.errors`) whose fault it is.
    code: str = EngineNotReady.code
    #: The field of the request at fault; None if none is.
    param: str | None = None

    def error(self) -> ServingError:
        """Return the exception that tells a client about the refusal."""
        return error_from(ErrorInfo(code=self.code, message=self.message, param=self.param))


class RollProgress(ControlMessage, frozen=True, kw_only=True):
    """Supervisor -> command. One engine has reached the next stage of a rolling restart."""

    engine: str
    stage: RollStep
    #: Position of the engine in the roll, from 1, and the number of engines.
    number: int
    total: int


class RollEnded(ControlMessage, frozen=True, kw_only=True):
    """Supervisor -> command. The rolling restart has ended."""

    #: Why it stopped early; "" after a complete one.
    error: str = ""


class PullProgress(ControlMessage, frozen=True, kw_only=True):
    """Supervisor -> gateway. The stage of a download, or its progress with one file."""

    model: str
    #: In words, as Ollama has them: "pulling manifest", "pulling 8eeb52dfb3bb", "success".
    status: str
    #: Digest of the file: "sha256:HEX", or "sha1:HEX" of a small file; "": the stage has no file.
    digest: str = ""
    #: Size of the file, and how much of it is here, in bytes.
    total: int = 0
    completed: int = 0


class PullEnded(ControlMessage, frozen=True, kw_only=True):
    """Supervisor -> gateway. The model is served, or the download has failed."""

    model: str
    #: Why it failed; None: the model is served.
    error: ErrorInfo | None = None


class DownloadableModel(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A model of the catalogue, or another one that clients have downloaded or copied."""

    name: str
    #: "" if nothing is known.
    description: str = ""
    licence: str = ""
    #: Size of the download. It is an estimate for models on the Hub; 0: unknown.
    download_bytes: int = 0
    #: Memory of its weights, as they are downloaded; 0: unknown.
    weights_bytes: int = 0
    #: Memory to serve it with a small KV cache, estimated; 0: unknown.
    needed_bytes: int = 0
    #: Tokens of one request that cannot be exceeded in a second on this machine; 0: unknown.
    max_tokens_per_s: float = 0.0
    #: Whether it is among the best of its size for most uses.
    is_recommended: bool = False
    #: Whether the Hub gives its files only to users who accepted the model's terms.
    is_gated: bool = False
    #: Whether the model is served.
    is_served: bool = False
    #: Whether clients may delete this name.
    is_deletable: bool = False
    #: Its download, if one is running or waiting.
    pull: PullProgress | None = None
    #: Why its last download failed; "" if it did not.
    error: str = ""


class ModelLibrary(ControlMessage, frozen=True, kw_only=True):
    """Supervisor -> gateway. The models that clients can download, and those that they have."""

    models: list[DownloadableModel]
    #: Free space on the disk of the downloads.
    disk_free_bytes: int
    #: Memory that all models together may use; 0: not limited.
    memory_bytes: int = 0


ToSupervisor = (
    StartModel
    | StopModel
    | ReportUse
    | GetModels
    | RollEngines
    | PullModel
    | CopyModel
    | DeleteModel
    | GetLibrary
)
FromSupervisor = (
    ModelStates | ControlError | RollProgress | RollEnded | PullProgress | PullEnded | ModelLibrary
)
M = TypeVar("M")


def control_address(directory: Path) -> str:
    """Return the path of the supervisor's socket in a server's run directory."""
    return str(directory / SOCKET)


def encode(message: ControlMessage) -> bytes:
    """Return the line of `message`, with its newline."""
    return msgspec.json.encode(message) + b"\n"


class ControlReader(Generic[M]):
    """Splits the bytes of a connection into messages, however they are cut.

    kind   union of the message classes that may arrive: ToSupervisor or FromSupervisor
    """

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.json.Decoder[M] = msgspec.json.Decoder(kind)
        self._unfinished = b""

    def push(self, data: bytes) -> list[M]:
        """Return the messages that `data` completes. Raises WireError if a line is no message of
        this direction, or longer than MAX_LINE_BYTES; then the connection must be closed."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if max(map(len, [*lines, self._unfinished])) > MAX_LINE_BYTES:
            raise WireError(f"a control message exceeds {MAX_LINE_BYTES:,} bytes")
        try:
            return [self._decoder.decode(line) for line in lines]
        except msgspec.DecodeError as error:
            raise WireError(f"a control message is malformed: {error}") from None
