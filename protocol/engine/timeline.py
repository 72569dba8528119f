"""The timeline of one request: its stages, and what the steps computed meanwhile.

The engine builds an `EngineTimeline` from what it has recorded about its last steps and requests
(engine_core/history). The gateway that sent the request adds its own times as `ClientTimes`. Both
are data; `explain.py` puts them into words. All times are in seconds since the request arrived at
the process that reports them.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

Stage = Literal["grammar", "queued", "fetching", "encoding", "prefill", "decode", "preempted"]
"""A stage of a request in the engine: the fields of `Times`, without their unit."""
Lack = Literal["", "slot", "blocks"]
"""The resource that the first request in the queue lacks; "": none, or the queue is empty."""
AbortReason = Literal["", "disconnected", "complete", "cancelled", "error", "by_id", "client_lost"]
"""Why a request was aborted. The client gives the reason, except for the last two.

- "": its client gave none
- "disconnected": the HTTP client disconnected
- "complete": a stop string or the only allowed tool call had completed the answer
- "cancelled": the response, or the batch of the request, was cancelled
- "error": the answer failed in the gateway, or another choice of it was refused
- "by_id": an AbortByLabel named the request
- "client_lost": its gateway or program ended, or was lost
"""


class StageSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A time that a request spent in one stage without a break."""

    stage: Stage
    start_s: float
    end_s: float


class PromptShare(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The part of another request's prompt that some steps computed."""

    #: Name of the other request.
    name: str
    #: The account that it is charged to; "": none.
    account: str = ""
    #: Prompt tokens that these steps computed.
    tokens: int
    #: Length of the whole prompt.
    prompt_tokens: int


class StepGroup(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Consecutive steps of the engine, and what they computed for the request and for others."""

    start_s: float
    end_s: float
    #: Number of the first step.
    first_step: int
    #: How many steps the group contains.
    steps: int
    #: Seconds that the worker needed for all of them, and for the slowest.
    busy_s: float
    longest_s: float
    #: Tokens of the request's prompt that were computed, also after a preemption.
    own_prefill: int = 0
    #: In how many of the steps the request computed the next token of its answer.
    own_decodes: int = 0
    #: Drafts of the request that were verified.
    own_drafts: int = 0
    #: Rows of other requests that computed one token of an answer, in all steps together.
    other_decodes: int = 0
    #: Tokens of other prompts that were computed.
    other_prefill: int = 0
    #: Drafts of other requests that were verified.
    other_drafts: int = 0
    #: The resource that the first request in the queue lacked.
    lack: Lack = ""
    #: The other requests whose prompts were computed, largest share first; at most MAX_SHARES.
    prompts: list[PromptShare] = []


HIDDEN_ACCOUNT = "another account"
"""Stands for the name of an account that the reader of a timeline may not see."""
MAX_SHARES = 4
"""Most prompts of others that one group of steps names."""
MAX_GROUPS = 200
"""Most groups of steps in one timeline. Longer timelines have larger groups."""


class EngineTimeline(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The timeline of one request in one engine."""

    #: The request's name: its first label.
    name: str
    #: Name of the client that sent it, from its Hello.
    client: str = ""
    #: The account that it is charged to; "": none.
    account: str = ""
    #: The finish reason; "" while the request is open.
    finish: str = ""
    #: Why it was aborted, if `finish` is "abort".
    abort_reason: AbortReason = ""
    #: Seconds from the arrival to the end, or until now.
    took_s: float
    #: Seconds since the end; 0 while the request is open.
    ended_ago_s: float = 0.0
    prompt_tokens: int
    cached_tokens: int = 0
    fetched_tokens: int = 0
    #: Images of the prompt, and their tokens.
    images: int = 0
    image_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    #: Drafts that became part of the answer.
    accepted_tokens: int = 0
    #: Seconds from the arrival to the first token; None if there was none.
    first_token_s: float | None = None
    #: Number of slots of the engine.
    slots: int = 0
    #: The stages, in order. A request that changes its stage very often has only the first ones.
    stages: list[StageSpan] = []
    #: The steps from its arrival to its end, whether it took part in them or not, in order.
    groups: list[StepGroup] = []
    #: Whether the engine has already forgotten the first steps.
    has_lost_steps: bool = False


class ClientTimes(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The part of a timeline that the gateway measures. Seconds since the HTTP request arrived."""

    #: Until the response was sent or the client disconnected; before that, until now.
    took_s: float = 0.0
    #: Seconds from the arrival until now, whether the request has ended or not.
    arrived_ago_s: float = 0.0
    #: Time spent waiting until the model was loaded.
    load_s: float = 0.0
    #: Time spent in the chat template.
    template_s: float = 0.0
    #: Time spent loading and preprocessing images.
    image_s: float = 0.0
    #: Time spent in the tokenizer.
    tokenize_s: float = 0.0
    #: When the request was sent to the engine; None: not yet.
    sent_s: float | None = None
    #: When the first token arrived from the engine; None: not yet.
    first_token_s: float | None = None
    #: When all choices had ended; None: not yet.
    answered_s: float | None = None
    #: When the response was sent completely, or the client disconnected; None: not yet.
    ended_s: float | None = None
    #: Time in which output waited because the client did not read.
    unread_s: float = 0.0


def redacted(timeline: EngineTimeline) -> EngineTimeline:
    """Return a timeline that its own account may see: without the names of other accounts and of
    their requests, and without the client's name."""

    def hide(share: PromptShare) -> PromptShare:
        if share.account == timeline.account and share.account:
            return share
        return replace(share, name="", account=HIDDEN_ACCOUNT)

    groups = [replace(group, prompts=[*map(hide, group.prompts)]) for group in timeline.groups]
    return replace(timeline, client="", groups=groups)
