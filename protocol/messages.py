"""Client <-> engine: every sentence of the conversation.

A client (a gateway, a program using `protocol.client`, a tool) says commands; the engine answers
with reports. Each `Generate` is answered by `Accepted` or `Refused`: at once, or, if it brings a
grammar, when that has been compiled. After `Accepted` come `Outputs` until one of them carries
`finish`: exactly one end each. (A request aborted while its grammar is compiled gets that end
alone.) The engine's own end (`EngineStopped`, or silence beyond the lease, or a new epoch) ends all
open requests.
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
    """Base of everything that travels; its tag on the wire is
    the class name in lower case, unless the class declares another."""


# ---- client -> engine


class Hello(Message, frozen=True, kw_only=True):
    """Client -> engine, first of all and again after a restart: who I am."""

    protocol: int  # always sent: a default would be read as the receiver's own
    name: str = ""
    pid: int = 0


class Account(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Who pays for a request, and what this one may use; 0: no limit. All that one engine computes
    counts, whichever client asks.

    tokens_per_minute  of prompts and answers
    concurrency        requests that have been accepted and have not ended
    max_len            tokens of prompt and answer together
    """

    name: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0
    max_len: int = 0


class Generate(Message, frozen=True, kw_only=True):
    """Client -> engine. Produce tokens after `prompt` until a stop, a limit or an abort.

    request    the client's number for it, not used before by this client
    prompt     [tokens], at least one
    namespace  prefix-cache entries are shared only inside one namespace
    priority   lower goes first; equal ones in order of arrival
    grammar    what the answer must look like; it ends with "stop" as soon as it is complete
    labels     names by which any client may abort it: what its own client was told. They need not
               be unique
    kv_readers 0, or: produce nothing; compute the prompt without its last token, end with "length"
               and a handle (`Output.kv_handle`) for so many who will go on from it (kv.py)
    kv_handle  go on from what this handle stands for; the prompt is the one that it was made of
    account    whose it is; None: nobody counts
    is_first   of the requests that make up one answer: it counts as a request of its account
    timeout_s  it ends with an error where it has not ended after so long
    queue_timeout_s   the same, where it has not been begun; 0, of both: there is no such limit
    """

    request: int
    prompt: Int32
    params: SamplingParams = SamplingParams()
    namespace: str = ""
    priority: int = 0
    grammar: Grammar | None = None
    labels: list[str] = []
    kv_readers: int = 0
    kv_handle: str = ""
    account: Account | None = None
    is_first: bool = True
    timeout_s: Seconds = 0.0
    queue_timeout_s: Seconds = 0.0

    def __post_init__(self) -> None:
        if len(self.prompt.shape) != 1 or not self.prompt.shape[0]:
            raise ValueError("prompt must be a list of at least one token id")


class Abort(Message, frozen=True, kw_only=True):
    """Client -> engine. Stop these; each that is still open ends with finish="abort"."""

    requests: list[int]


class AbortByLabel(Message, frozen=True, kw_only=True, tag="abortnamed"):
    """Client -> engine. Stop every request that has one of these as a label, or is called so in a
    View, whoever asked for it; each ends with finish="abort". Answered by Aborted.

    request     the client's number for this, as for a Generate
    everything  stop all that is open, of every client; `names` do not matter
    """

    request: int
    names: list[str] = []
    everything: bool = False


class KeepKV(Message, frozen=True, kw_only=True):
    """Client -> engine. What these handles stand for is still wanted: count its time anew. Unknown,
    foreign and ended ones are no error."""

    handles: list[str]


class ReleaseKV(Message, frozen=True, kw_only=True):
    """Client -> engine. Nobody will come for these (any more). Unknown, foreign and ended ones are
    no error."""

    handles: list[str]


class Profile(Message, frozen=True, kw_only=True):
    """Client -> engine. Record what the worker does in its next steps, and write it as a Chrome
    trace. Answered by Profiled or Refused; an Abort ends it early, and then there is no answer.

    request    the client's number for this, as for a Generate
    directory  of the engine's machine, absolute; made if it is not there, and only for its owner
    """

    request: int
    steps: int
    directory: str


class GetStatus(Message, frozen=True, kw_only=True, tag="look"):
    """Client -> engine. What is it that you do? Answered by View. An engine that nobody looks at
    spends nothing on it.

    request   the client's number for this, as for a Generate
    most      rows, at most: of the requests that have been open for longest. 10,000 at most
    """

    request: int
    most: int = 100


class Drain(Message, frozen=True, kw_only=True):
    """Client -> engine. Finish what is accepted, refuse what is new, then exit with code 0."""


class Ping(Message, frozen=True, kw_only=True):
    """Client -> engine, about twice a second: I live. Answered by Pong.

    num_early   since its last one, how many requests it has refused itself, as refusals of the
                engine stood (`ErrorInfo.stands_s`)
    read_bytes  `sent_bytes` of the last Pong that it has read
    """

    num_early: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    read_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0


class Goodbye(Message, frozen=True, kw_only=True):
    """Client -> engine, last of all: I leave; abort whatever I have open."""


# ---- engine -> client


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What this engine can take, as discovered at start.

    max_len      tokens of prompt and answer together
    kv_lease_s   K/V that is kept for another engine is given up after so long; 0: none is kept
    """

    max_len: int
    max_slots: int
    block_tokens: int
    num_blocks: int
    token_budget: int
    prefix_cache: bool
    kv_lease_s: float = 0.0


class Welcome(Message, frozen=True, kw_only=True):
    """Engine -> client, answering Hello: the model, the limits, and which life of the engine this
    is.
    """

    protocol: int
    epoch: str
    model: ModelCard
    limits: Limits


class Loading(Message, frozen=True, kw_only=True):
    """Engine -> client, answering Hello while the model is loading: Welcome follows when it is
    loaded.

    elapsed_s  since the engine started
    """

    elapsed_s: float


class SessionLost(Message, frozen=True, kw_only=True):
    """Engine -> client that it does not know, or not any more: all that it had open is lost, and it
    has to greet again. `why` is shown to users."""

    why: str


class Probe(Message, frozen=True, kw_only=True):
    """Engine -> client that has been silent: sent to find out whether its connection still exists.
    A client that reads it sends a Ping."""


class Accepted(Message, frozen=True, kw_only=True):
    """Engine -> client. `request` is queued; an end will follow."""

    request: int


class Refused(Message, frozen=True, kw_only=True):
    """Engine -> client. `request` was never queued.

    Also answers a malformed frame, as request -1.
    """

    request: int
    error: ErrorInfo


class Aborted(Message, frozen=True, kw_only=True):
    """Engine -> client, answering AbortNamed: each of its names, once, in their order.

    unknown    no open request has them: it ended already, or never was
    """

    request: int
    aborted: list[str] = []
    unknown: list[str] = []


class RequestView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One open request, as others may see it: neither its words nor its tokens.

    name             what to call it in AbortNamed: its first label, which its own client was told
    client           its client's name, as of Hello
    account          who pays for it
    stage            the part of Times that grows now, without its unit: "queued", "decode", ...
    age_s            since it came;  decode_s: being computed since its first token
    computed_tokens  of prompt and answer: those whose K/V is there
    most_tokens      the length of its answer, at most
    """

    name: str
    client: str = ""
    account: str = ""
    stage: str = ""
    age_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    most_tokens: int = 0
    preemptions: int = 0


class EngineStatus(Message, frozen=True, kw_only=True, tag="view"):
    """Engine -> client, answering Look.

    now_s      seconds of the engine's clock: rates are differences of counters by it
    num_open   requests, of which `rows` are the oldest
    """

    request: int
    now_s: float
    stats: EngineStats
    num_open: int = 0
    rows: list[RequestView] = []


class Profiled(Message, frozen=True, kw_only=True):
    """Engine -> client, answering Profile.

    began, ended   of the steps that were recorded, in seconds since 1970
    """

    request: int
    file: str
    steps: int
    began: float
    ended: float


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms under the model's distribution (before temperature and filters), or, of
    sampled tokens, under the one they were drawn from (`SamplingParams.logprobs_of`).

    rank     1 for the most likely token
    top_ids, top_logprobs   the most likely tokens, best first; none that is impossible
    asked_logprobs   of the request's `logprob_token_ids`, in their order; sampled tokens only
    drawn_logprobs   under the distribution it was drawn from, where both were asked for: of
                     token_id, then of top_ids, then of the asked ones
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    asked_logprobs: list[float] = []
    drawn_logprobs: list[float] = []


class Times(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Where a request's time went in the engine so far, in seconds of the engine's clock. Its parts
    do not overlap, and add up to all the time since it arrived.

    grammar_s    until its grammar was compiled
    queued_s     from then until it was first scheduled
    fetching_s   waiting for K/V that was fetched, instead of being computed
    prefill_s    being computed until its first token was there
    decode_s     being computed from then on
    preempted_s  having given its slot and blocks back; what is computed again counts above
    """

    grammar_s: float = 0.0
    queued_s: float = 0.0
    fetching_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a request cost so far. `cached_tokens` of the prompt were not computed again;
    `fetched_tokens` of these another engine has computed for this request (kv.py); `draft_tokens`
    were guessed, and `accepted_tokens` of these are in the answer. `times` is None where nobody has
    measured."""

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    fetched_tokens: int = 0
    times: Times | None = None


class Output(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """News of one request: tokens appended since the last news and, once, its end.

    stop_token       the token (last of `tokens`) that ended it, with finish="stop"; None where its
                     grammar was complete
    prompt_logprobs  [prompt tokens - 1], with the first news, if asked for
    usage            with the first tokens, and with finish
    error            with finish="error"
    kv_handle        with finish="length", of a request with `kv_readers`
    """

    request: int
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    finish: FinishReason | None = None
    stop_token: int | None = None
    usage: Usage | None = None
    error: ErrorInfo | None = None
    kv_handle: str = ""


class Outputs(Message, frozen=True, kw_only=True):
    """Engine -> client: one step's news for all requests of this client, in one frame."""

    step: int
    outputs: list[Output]


class ResourcesFreed(Message, frozen=True, kw_only=True, tag="freed"):
    """Engine -> client, after an Abort: what these owned, slot and blocks, can be given to others
    now. Their end came before; a step or a fetch may still have been on its way then."""

    requests: list[int]


class Pong(Message, frozen=True, kw_only=True):
    """Engine -> client, answering Ping, and unasked when it can compute no more, or again. Another
    epoch than Welcome's: all earlier requests are lost.

    sent_bytes  to this client before this message; the client returns it with its next Ping, so the
                engine knows how much is unread. 0, unasked
    """

    epoch: str
    stats: EngineStats
    sent_bytes: int = 0


class EngineStopped(Message, frozen=True, kw_only=True, tag="gone"):
    """Engine -> every client: I stop now; open requests are lost."""

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
