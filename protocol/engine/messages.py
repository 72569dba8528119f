"""Messages between a client and an engine.

A client (a gateway, a program that uses `protocol.sdk.client`, a tool) sends commands, and the
engine answers with reports. The engine answers each `Generate` with `Accepted` or `Refused`: at
once, or after it has compiled the request's grammar. After `Accepted` it sends `Outputs`, until an
`Output` of the request has `finish` set. So each request ends exactly once. (If a request is
aborted while its grammar is being compiled, the engine sends only that last `Output`.) If the
engine ends (`EngineStopped`, silence beyond the lease, or a new epoch), all open requests end with
it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.engine.account_limits import Account as Account
from protocol.engine.adapters import AdapterInfo
from protocol.engine.attachments import (
    MAX_ATTACHMENTS,
    MAX_TENSORS,
    AttachedTensor,
    Attachment,
    Digest,
)
from protocol.engine.encoding import EncodeInputs
from protocol.engine.grammar import Grammar
from protocol.engine.limits import Limits as Limits
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.model_card import ModelCard
from protocol.engine.sampling import SamplingParams
from protocol.engine.stats import BlockCounts, EngineLoad, EngineStats, StepSummary
from protocol.engine.timeline import AbortReason, EngineTimeline
from protocol.engine.usage import RequestStatus as RequestStatus
from protocol.engine.usage import Times as Times
from protocol.engine.usage import Usage as Usage
from protocol.wire.arrays import Float32, Int32
from protocol.wire.errors import ErrorInfo

PROTOCOL_VERSION = 7

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_TIMEOUT_S = 86400.0
Seconds = Annotated[float, Meta(ge=0, le=MAX_TIMEOUT_S)]


class Message(
    msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower, omit_defaults=True, kw_only=True
):
    """Base of all messages. The default tag of a message is its class name in lower case."""


# ---- client -> engine


class Hello(Message, frozen=True, kw_only=True):
    """Client -> engine. Open a session: the first message, sent again after an engine restart."""

    # No default: a default is not sent, so the receiver would assume its own version.
    protocol: int
    name: str = ""
    pid: int = 0
    #: Number of `Welcome` messages that this client has read. The engine sends one Welcome per
    #: number: a repeated number shows that the client had not read the Welcome yet. None: the
    #: client does not count, and each Hello gets a Welcome.
    num_welcomes: int | None = None


class Generate(Message, frozen=True, kw_only=True):
    """Client -> engine. Generate tokens after `prompt`, until a stop, a limit or an abort."""

    #: The client's number for this request, never used before by this client.
    request: int
    #: [number of prompt tokens] token ids, at least one.
    prompt: Int32
    params: SamplingParams = SamplingParams()
    #: Requests share prefix-cache entries only within one namespace.
    namespace: str = ""
    #: A lower value moves the request forward in the queue (EngineConfig.priority_s).
    priority: int = 0
    #: The grammar that the answer must match. The answer ends with "stop" when it is complete.
    grammar: Grammar | None = None
    #: Names by which any client may abort this request, such as ids shown to users. They need not
    #: be unique.
    labels: list[str] = []
    #: 0: generate an answer. n > 0: only compute the K/V of the prompt without its last token, and
    #: end with "length" and a handle (`Output.kv_handle`) from which n requests can continue.
    kv_readers: int = 0
    #: Continue from the K/V that this handle names. The handle must be for the same prompt.
    kv_handle: str = ""
    #: The account that the request is charged to; None: no account.
    account: Account | None = None
    #: Whether this is the first request of one HTTP request, which may need several. Only the first
    #: one counts in `Account.requests_per_minute`.
    is_first: bool = True
    #: The request ends with an error if it has not ended after this many seconds. 0: no limit.
    timeout_s: Seconds = 0.0
    #: The request ends with an error if it has not started after this many seconds. 0: no limit.
    queue_timeout_s: Seconds = 0.0
    #: [number of tokens] the answer so far, to be continued, of a request that another engine had
    #: accepted before it was lost. It may be empty. Such a request is not refused because of load
    #: or of its account's limits. Outputs contain only the tokens that follow, but usage counts
    #: all. With the same seed, the answer is the one that the other engine would have given
    #: (`ModelCard.numerics`). None: a new request.
    answer: Int32 | None = None
    #: `Output.mirostat_mu` of the last tokens of `answer`.
    mirostat_mu: float | None = None
    #: Name of the LoRA adapter to use; "": none.
    adapter: str = ""
    #: `AdapterInfo.digest` of the adapter to use. If another adapter has the name when the request
    #: arrives, the engine refuses the request with StaleAdapter. "": any adapter with the name.
    adapter_digest: str = ""
    #: The images in the prompt, in the order of their positions.
    attachments: Annotated[list[Attachment], Meta(max_length=MAX_ATTACHMENTS)] = []

    def __post_init__(self) -> None:
        if len(self.prompt.shape) != 1 or not self.prompt.shape[0]:
            raise ValueError("prompt must be a list of at least one token id")
        if self.answer is not None and len(self.answer.shape) != 1:
            raise ValueError("answer must be a list of token ids")
        end = 0
        for attachment in self.attachments:
            if attachment.first < end or attachment.end > self.prompt.shape[0]:
                raise ValueError("attachments must be in the prompt, in order, and apart")
            end = attachment.end


class AttachData(Message, frozen=True, kw_only=True):
    """Client -> engine. The content of an attachment, sent before the first `Generate` that names
    its digest. The engine keeps it while a request needs it, and for a while afterwards. A
    `Generate` with content that the engine does not have is refused with AttachmentMissing: the
    client sends the content again and repeats the request.
    """

    digest: Digest
    tensors: Annotated[list[AttachedTensor], Meta(min_length=1, max_length=MAX_TENSORS)]


class Encode(Message, frozen=True, kw_only=True):
    """Client -> engine. Encode inputs, of which each is a text or a pair of texts.

    The engine answers as it answers `Generate`. The last `Output` of a request that succeeds has
    finish "stop" and `vectors`. It is sent once the client has few unread bytes, according to its
    Pings. Fields that `Generate` has too mean the same.
    """

    request: int
    inputs: EncodeInputs
    priority: int = 0
    labels: list[str] = []
    account: Account | None = None
    timeout_s: Seconds = 0.0
    queue_timeout_s: Seconds = 0.0
    #: Whether another engine had accepted the request before it was lost. Such a request is not
    #: refused because of load or of its account's limits.
    is_moved: bool = False


class Abort(Message, frozen=True, kw_only=True):
    """Client -> engine. End these requests. Each one that is still open ends with "abort"."""

    requests: list[int]
    #: The reason that the timelines of these requests show.
    reason: AbortReason = ""


class AbortByLabel(Message, frozen=True, kw_only=True, tag="abortnamed"):
    """Client -> engine. Abort every request that has one of these names, whichever client sent it.

    A name is a label or a name from an EngineStatus. Each of the requests ends with finish="abort".
    The engine answers with Aborted.
    """

    request: int
    names: list[str] = []
    #: Abort all open requests of all clients; `names` is ignored.
    everything: bool = False


class KeepKV(Message, frozen=True, kw_only=True):
    """Client -> engine. Renew the leases of these handles. Unknown and ended leases are ignored."""

    handles: list[str]


class ReleaseKV(Message, frozen=True, kw_only=True):
    """Client -> engine. End the leases of these handles. Unknown and ended leases are ignored."""

    handles: list[str]


class Profile(Message, frozen=True, kw_only=True):
    """Client -> engine. Record the worker's next steps and write them as a Chrome trace. The engine
    answers with Profiled or Refused. An Abort ends the recording early, without an answer.
    """

    request: int
    steps: int
    #: Absolute path on the engine's machine. A missing directory is created, for its owner only.
    directory: str


class LoadAdapter(Message, frozen=True, kw_only=True):
    """Client -> engine. Load a LoRA adapter. The engine answers with AdapterChanged or Refused."""

    request: int
    name: str
    #: Path of the adapter's directory on the worker's machine, relative to WorkerConfig.lora_dir,
    #: in which it must be.
    path: str


class UnloadAdapter(Message, frozen=True, kw_only=True):
    """Client -> engine. Unload a LoRA adapter: refuse new requests for it at once, let open ones
    finish, then free its memory. The engine then answers with AdapterChanged, or with Refused."""

    request: int
    name: str


class GetStatus(Message, frozen=True, kw_only=True, tag="look"):
    """Client -> engine. Request the engine's status. The engine answers with EngineStatus."""

    request: int
    #: The most rows in the answer, up to 10,000. The oldest open requests come first.
    max_rows: int = msgspec.field(name="most", default=100)
    #: Report the steps after the one with this number, as far as they are recorded. None: none.
    after_step: int | None = None


class GetTimeline(Message, frozen=True, kw_only=True):
    """Client -> engine. Request the timelines of the requests with one of these names (see
    AbortByLabel). The engine answers with RequestTimelines, or with Refused if too many wait."""

    request: int
    names: list[str]
    #: Whether the names are beginnings of names (`protocol.shared.request_ids.begins`).
    are_beginnings: bool = False


class Drain(Message, frozen=True, kw_only=True):
    """Client -> engine. Finish accepted requests, refuse new ones, then exit with code 0."""


class Ping(Message, frozen=True, kw_only=True):
    """Client -> engine, about twice a second. Renews the client's lease. Pong is the answer.

    num_early   number of requests that the client itself has refused since its last Ping, because
                an earlier refusal by the engine was still valid (`ErrorInfo.stands_s`)
    read_bytes  `sent_bytes` of the last Pong that the client has read
    """

    num_early: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    read_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0


class Goodbye(Message, frozen=True, kw_only=True):
    """Client -> engine. The client's last message. The engine aborts the client's open requests."""


# ---- engine -> client


class Welcome(Message, frozen=True, kw_only=True):
    """Engine -> client, answering Hello. The session is open, and the client may send requests.

    epoch   identifies this engine process; a restarted engine has another epoch
    """

    protocol: int
    epoch: str
    model: ModelCard
    limits: Limits
    #: The LoRA adapters that requests can use now.
    adapters: list[AdapterInfo] = []


class Loading(Message, frozen=True, kw_only=True):
    """Engine -> client, answering Hello while the model is loading, `elapsed_s` after the engine's
    start. Welcome follows later."""

    elapsed_s: float


class SessionLost(Message, frozen=True, kw_only=True):
    """Engine -> client. The engine has no session with this client, or has ended it. All open
    requests of the client are lost, and it must send Hello again. `why` is shown to users."""

    why: str


class Probe(Message, frozen=True, kw_only=True):
    """Engine -> client that has been silent for a while. The client answers with a Ping."""


class Accepted(Message, frozen=True, kw_only=True):
    """Engine -> client. `request` is queued. Its end will be reported in an Output."""

    request: int


class Refused(Message, frozen=True, kw_only=True):
    """Engine -> client. `request` was not queued. The number -1 means that a message was
    malformed, and that it would not have opened a generation or an encoding."""

    request: int
    error: ErrorInfo


class Aborted(Message, frozen=True, kw_only=True):
    """Engine -> client, answering AbortByLabel. Lists each name once, in the order of the command.

    aborted    names of requests that were aborted
    unknown    names that no open request has: the request has ended, or never existed
    """

    request: int
    aborted: list[str] = []
    unknown: list[str] = []


class AdapterChanged(Message, frozen=True, kw_only=True):
    """Engine -> client, answering LoadAdapter or UnloadAdapter. The adapter was loaded, or its
    memory was freed."""

    request: int
    adapter: AdapterInfo


class Adapters(Message, frozen=True, kw_only=True):
    """Engine -> every client, after a change. The LoRA adapters that requests can use now."""

    adapters: list[AdapterInfo]


class EngineStatus(Message, frozen=True, kw_only=True, tag="view"):
    """Engine -> client, answering GetStatus."""

    request: int
    #: The engine's clock, in seconds, to compute rates from the counters of two answers.
    now_s: float
    stats: EngineStats
    #: Number of open requests; `rows` has the oldest of them.
    num_open: int = 0
    rows: list[RequestStatus] = []
    blocks: BlockCounts = BlockCounts()
    #: The recorded steps after `GetStatus.after_step`, oldest first, equal ones in one entry. If
    #: there are very many, only the last.
    steps: list[StepSummary] = []
    #: How many first tokens, and gaps between two outputs of an answer, took how long, since the
    #: start: counts by the bounds in latency.py.
    first_tokens: list[int] = []
    gaps: list[int] = []


class RequestTimelines(Message, frozen=True, kw_only=True):
    """Engine -> client, answering GetTimeline.

    timelines    of the open and the recently ended requests with these names, at most 16
    kept         number of ended requests that the engine remembers at most
    kept_s       seconds after its end for which it remembers a request
    """

    request: int
    timelines: list[EngineTimeline]
    kept: int
    kept_s: float


class Profiled(Message, frozen=True, kw_only=True):
    """Engine -> client, answering Profile. Times are in seconds since 1970."""

    request: int
    file: str
    steps: int
    began: float
    ended: float


class Output(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """New output of one request: the tokens since its last Output. `finish` marks the final one."""

    request: int
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    #: [number of prompt tokens - 1], in the first Output, if requested.
    prompt_logprobs: list[TokenLogprobs] = []
    finish: FinishReason | None = None
    #: The stop token that ended the request with finish="stop"; it is the last of `tokens`. None if
    #: the request ended because its grammar was complete.
    stop_token: int | None = None
    #: Sent with the first tokens, and with finish.
    usage: Usage | None = None
    #: Sent with finish="error".
    error: ErrorInfo | None = None
    #: Sent with finish="length" for a request with `kv_readers`.
    kv_handle: str = ""
    #: `SlotInit.mirostat_mu` after `tokens`. None: Mirostat is off, or the request has ended.
    mirostat_mu: float | None = None
    #: [number of inputs, size of a result], with finish="stop", of an `Encode`.
    vectors: Float32 | None = None


class Outputs(Message, frozen=True, kw_only=True):
    """Engine -> client. The output of one step for all requests of this client, in one message."""

    #: 0 for outputs that are not those of one step, such as results of encoding.
    step: int
    outputs: list[Output]
    #: The engine's load after the step; None if no step was committed.
    load: EngineLoad | None = None


class ResourcesFreed(Message, frozen=True, kw_only=True, tag="freed"):
    """Engine -> client, after an Abort. The slots and blocks of these requests are free again.

    The engine has reported the end of the requests earlier, when a step or a fetch could still use
    their slots and blocks.
    """

    requests: list[int]


class Pong(Message, frozen=True, kw_only=True):
    """Engine -> client, answering Ping. Also sent without a Ping when the engine becomes unable to
    compute, or able again.

    epoch       if it differs from the epoch in Welcome, all earlier requests are lost
    sent_bytes  number of bytes sent to this client before this message; 0 without a Ping. The
                client returns it in its next Ping, so the engine can compute how much is unread
    """

    epoch: str
    stats: EngineStats
    sent_bytes: int = 0


class EngineStopped(Message, frozen=True, kw_only=True, tag="gone"):
    """Engine -> every client. The engine is stopping, and all open requests are lost."""

    error: ErrorInfo


ToEngine = (
    Hello
    | AttachData
    | Generate
    | Encode
    | Abort
    | AbortByLabel
    | KeepKV
    | ReleaseKV
    | Profile
    | LoadAdapter
    | UnloadAdapter
    | GetStatus
    | GetTimeline
    | Drain
    | Ping
    | Goodbye
)
ToClient = (
    Welcome
    | Loading
    | SessionLost
    | Probe
    | Accepted
    | Refused
    | Aborted
    | AdapterChanged
    | Adapters
    | Profiled
    | EngineStatus
    | RequestTimelines
    | Outputs
    | ResourcesFreed
    | Pong
    | EngineStopped
)
