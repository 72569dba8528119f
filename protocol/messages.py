"""Messages between a client and an engine.

A client (a gateway, a program that uses `protocol.client`, a tool) sends commands; the engine
answers with reports. Each `Generate` is answered by `Accepted` or `Refused`: at once, or after its
grammar has been compiled. After `Accepted` come `Outputs`, until one of them carries `finish`. So
each request ends exactly once. (A request aborted while its grammar is being compiled gets only
that end.) If the engine ends (`EngineStopped`, silence beyond the lease, or a new epoch), all open
requests end with it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.arrays import Int32
from protocol.errors import ErrorInfo
from protocol.grammar import Grammar
from protocol.model_card import ModelCard
from protocol.sampling import SamplingParams
from protocol.stats import EngineStats

PROTOCOL_VERSION = 2

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_TIMEOUT_S = 86400.0
Seconds = Annotated[float, Meta(ge=0, le=MAX_TIMEOUT_S)]


class Message(
    msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower, omit_defaults=True, kw_only=True
):
    """Base of all messages. The tag is the class name in lower case, unless declared otherwise."""


# ---- client -> engine


class Hello(Message, frozen=True, kw_only=True):
    """Client -> engine. The client's first message, and again after an engine restart."""

    protocol: int  # always sent: a default would be read as the receiver's own
    name: str = ""
    pid: int = 0


class Account(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The account that a request is charged to, and its limits; 0: no limit. The engine counts the
    account's requests from all clients together.
    """

    name: str
    requests_per_minute: int = 0
    #: Tokens of prompts and answers.
    tokens_per_minute: int = 0
    #: Requests that have been accepted and have not ended.
    concurrency: int = 0
    #: Tokens of prompt and answer together.
    max_len: int = 0


class Generate(Message, frozen=True, kw_only=True):
    """Client -> engine. Produce tokens after `prompt` until a stop, a limit or an abort."""

    #: The client's number for this request, never used before by this client.
    request: int
    #: [tokens], at least one.
    prompt: Int32
    params: SamplingParams = SamplingParams()
    #: Requests share prefix-cache entries only within one namespace.
    namespace: str = ""
    #: Lower goes first; equal priorities go in order of arrival.
    priority: int = 0
    #: What the answer must match. The answer ends with "stop" as soon as the grammar is complete.
    grammar: Grammar | None = None
    #: Names by which any client may abort this request, such as ids shown to users. They need not
    #: be unique.
    labels: list[str] = []
    #: 0: generate an answer. n: only compute the prompt, without its last token, and end with
    #: "length" and a handle (`Output.kv_handle`) from which n requests can continue (kv.py).
    kv_readers: int = 0
    #: Continue from the K/V that this handle names; it must have been made for the same prompt.
    kv_handle: str = ""
    #: The account charged; None: not counted.
    account: Account | None = None
    #: Whether this is the first of the requests that make up one answer. Only the first one counts
    #: as a request of the account.
    is_first: bool = True
    #: The request ends with an error if it has not ended after this many seconds. 0: no limit.
    timeout_s: Seconds = 0.0
    #: The request ends with an error if it has not started after this many seconds. 0: no limit.
    queue_timeout_s: Seconds = 0.0

    def __post_init__(self) -> None:
        if len(self.prompt.shape) != 1 or not self.prompt.shape[0]:
            raise ValueError("prompt must be a list of at least one token id")


class Abort(Message, frozen=True, kw_only=True):
    """Client -> engine. End these requests; each one still open finishes with "abort"."""

    requests: list[int]


class AbortByLabel(Message, frozen=True, kw_only=True, tag="abortnamed"):
    """Client -> engine. Abort every request with one of these names, whichever client sent it. A
    name is a label or a name from an EngineStatus. Each request ends with finish="abort". Answered
    by Aborted.
    """

    request: int
    names: list[str] = []
    #: Abort all open requests of all clients; `names` is ignored.
    everything: bool = False


class KeepKV(Message, frozen=True, kw_only=True):
    """Client -> engine. Renew the leases of these handles; unknown and ended ones are ignored."""

    handles: list[str]


class ReleaseKV(Message, frozen=True, kw_only=True):
    """Client -> engine. End the leases of these handles; unknown and ended ones are ignored."""

    handles: list[str]


class Profile(Message, frozen=True, kw_only=True):
    """Client -> engine. Record the worker's next steps and write them as a Chrome trace. Answered
    by Profiled or Refused. An Abort ends the recording early, without an answer.
    """

    request: int
    steps: int
    #: Absolute path on the engine's machine; created for its owner only, if missing.
    directory: str


class GetStatus(Message, frozen=True, kw_only=True, tag="look"):
    """Client -> engine. Request the engine's status. Answered by EngineStatus. An engine that gets
    no such request spends nothing on it.
    """

    request: int
    #: The most rows, up to 10,000; the requests that have been open longest come first.
    most: int = 100


class Drain(Message, frozen=True, kw_only=True):
    """Client -> engine. Finish accepted requests, refuse new ones, then exit with code 0."""


class Ping(Message, frozen=True, kw_only=True):
    """Client -> engine, about twice a second. Renews the client's lease. Answered by Pong.

    num_early   requests refused by the client since its last Ping, because an earlier refusal by
                the engine still held (`ErrorInfo.stands_s`)
    read_bytes  `sent_bytes` of the last Pong that the client has read
    """

    num_early: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    read_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0


class Goodbye(Message, frozen=True, kw_only=True):
    """Client -> engine. The client's last message; its open requests are aborted."""


# ---- engine -> client


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of this engine, found at start.

    max_len      tokens of prompt and answer together
    kv_lease_s   seconds that K/V is kept for another engine; 0: none is kept
    """

    max_len: int
    max_slots: int
    block_tokens: int
    num_blocks: int
    token_budget: int
    prefix_cache: bool
    kv_lease_s: float = 0.0


class Welcome(Message, frozen=True, kw_only=True):
    """Engine -> client, answering Hello. An epoch is one life of the engine."""

    protocol: int
    epoch: str
    model: ModelCard
    limits: Limits


class Loading(Message, frozen=True, kw_only=True):
    """Engine -> client, answering Hello while the model is loading. Welcome follows when it is
    loaded.

    elapsed_s  seconds since the engine started
    """

    elapsed_s: float


class SessionLost(Message, frozen=True, kw_only=True):
    """Engine -> a client that is unknown, or no longer known. All its open requests are lost, and
    it must send Hello again. `why` is shown to users.
    """

    why: str


class Probe(Message, frozen=True, kw_only=True):
    """Engine -> a client that has been silent. The client answers with a Ping."""


class Accepted(Message, frozen=True, kw_only=True):
    """Engine -> client. `request` is queued; an end will follow."""

    request: int


class Refused(Message, frozen=True, kw_only=True):
    """Engine -> client. `request` was never queued. -1: a frame was malformed."""

    request: int
    error: ErrorInfo


class Aborted(Message, frozen=True, kw_only=True):
    """Engine -> client, answering AbortByLabel. Lists each of its names once, in their order.

    unknown    names that no open request has: it has ended, or never existed
    """

    request: int
    aborted: list[str] = []
    unknown: list[str] = []


class RequestView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One open request in an EngineStatus. Contains no text and no tokens."""

    #: Its name for AbortByLabel: the request's first label.
    name: str
    #: The name of the client, from its Hello.
    client: str = ""
    #: The account charged.
    account: str = ""
    #: The part of Times that is growing now, without its unit: "queued", "decode", ...
    stage: str = ""
    #: Seconds since it arrived.
    age_s: float = 0.0
    #: Seconds of computation since its first token.
    decode_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    #: Tokens of prompt and answer whose K/V has been computed.
    computed_tokens: int = 0
    generated_tokens: int = 0
    #: The most tokens that its answer can have.
    most_tokens: int = 0
    preemptions: int = 0


class EngineStatus(Message, frozen=True, kw_only=True, tag="view"):
    """Engine -> client, answering GetStatus.

    now_s      seconds of the engine's clock; rates are differences of counters over it
    num_open   number of open requests; `rows` has the oldest of them
    """

    request: int
    now_s: float
    stats: EngineStats
    num_open: int = 0
    rows: list[RequestView] = []


class Profiled(Message, frozen=True, kw_only=True):
    """Engine -> client, answering Profile. Times are in seconds since 1970."""

    request: int
    file: str
    steps: int
    began: float
    ended: float


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of one token's probabilities. They are of the model's distribution (before
    temperature and filters); for sampled tokens, `SamplingParams.logprobs_of` can choose the
    distribution that the token was drawn from.

    rank     1 for the most likely token
    top_ids, top_logprobs   the most likely tokens, best first, without impossible ones
    asked_logprobs   of the request's `logprob_token_ids`, in their order; sampled tokens only
    drawn_logprobs   if both distributions were requested: logprobs under the one that the token was
                     drawn from, of token_id, then of top_ids, then of the `logprob_token_ids`
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    asked_logprobs: list[float] = []
    drawn_logprobs: list[float] = []


class Times(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How long a request has spent in each stage in the engine so far, in seconds of the engine's
    clock. The stages do not overlap; they add up to the time since the request arrived.

    grammar_s    until its grammar was compiled
    queued_s     from then until it was first scheduled
    fetching_s   waiting for K/V to be fetched
    prefill_s    being computed, until its first token
    decode_s     being computed after that
    preempted_s  preempted, without slot and blocks; recomputing counts as prefill or decode
    """

    grammar_s: float = 0.0
    queued_s: float = 0.0
    fetching_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Token counts of a request so far. `times` is None if the time was not measured.

    cached_tokens    prompt tokens that were not computed again
    fetched_tokens   those of them that another engine computed for this request (kv.py)
    draft_tokens     tokens drafted; `accepted_tokens` of them became part of the answer
    """

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    fetched_tokens: int = 0
    times: Times | None = None


class Output(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """New output of one request: the tokens since the last Output and, once, its end."""

    request: int
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    #: [prompt tokens - 1], in the first Output, if requested.
    prompt_logprobs: list[TokenLogprobs] = []
    finish: FinishReason | None = None
    #: The token (last of `tokens`) that ended the request with finish="stop". None if its grammar
    #: was complete.
    stop_token: int | None = None
    #: Sent with the first tokens, and with finish.
    usage: Usage | None = None
    #: Sent with finish="error".
    error: ErrorInfo | None = None
    #: Sent with finish="length" for a request with `kv_readers`.
    kv_handle: str = ""


class Outputs(Message, frozen=True, kw_only=True):
    """Engine -> client. One step's output for all requests of this client, in one frame."""

    step: int
    outputs: list[Output]


class ResourcesFreed(Message, frozen=True, kw_only=True, tag="freed"):
    """Engine -> client, after an Abort. The slot and blocks of these requests are free again. Their
    end was sent before; a step or a fetch may still have been in progress then.
    """

    requests: list[int]


class Pong(Message, frozen=True, kw_only=True):
    """Engine -> client, answering Ping; also sent without a Ping when the engine can no longer
    compute, or can again. If the epoch is not the Welcome's, all earlier requests are lost.

    sent_bytes  bytes sent to this client before this message. The client returns it in its next
                Ping, so the engine can compute how much is unread. 0 without a Ping
    """

    epoch: str
    stats: EngineStats
    sent_bytes: int = 0


class EngineStopped(Message, frozen=True, kw_only=True, tag="gone"):
    """Engine -> every client. The engine is stopping; open requests are lost."""

    error: ErrorInfo


ToEngine = (
    Hello
    | Generate
    | Abort
    | AbortByLabel
    | KeepKV
    | ReleaseKV
    | Profile
    | GetStatus
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
    | Profiled
    | EngineStatus
    | Outputs
    | ResourcesFreed
    | Pong
    | EngineStopped
)
