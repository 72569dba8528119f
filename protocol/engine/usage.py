"""The usage of one request so far: the time in each stage, tokens, and its row in a status."""

from __future__ import annotations

import msgspec


class Times(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Seconds that a request has spent in each stage so far. The stages do not overlap, and add up
    to the time since the request arrived.

    grammar_s    from the arrival until its grammar was compiled
    queued_s     from then until it was first scheduled
    fetching_s   waiting for K/V to be fetched
    encoding_s   waiting for the rows of its next image, which are being encoded
    prefill_s    being computed, until its first token
    decode_s     being computed after its first token
    preempted_s  waiting after a preemption, without a slot and blocks. Computing its tokens again
                 counts as prefill or decode
    """

    grammar_s: float = 0.0
    queued_s: float = 0.0
    fetching_s: float = 0.0
    encoding_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Token counts of a request so far.

    cached_tokens    prompt tokens whose K/V did not have to be computed
    fetched_tokens   the part of `cached_tokens` whose K/V another engine computed for this request
                     (kv.py)
    draft_tokens     tokens drafted; `accepted_tokens` of them became part of the answer
    times            None: the times were not measured
    """

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    fetched_tokens: int = 0
    times: Times | None = None


class RequestStatus(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One open request in an EngineStatus, without its text and tokens."""

    #: The request's name for AbortByLabel, which is its first label.
    name: str
    #: The name of the client, from its Hello.
    client: str = ""
    #: Name of the account that the request is charged to; "": none.
    account: str = ""
    #: The field of Times that is growing now, without its unit: "queued", "decode", ...
    stage: str = ""
    #: Seconds since the request arrived.
    age_s: float = 0.0
    #: Seconds of computation since the first token of the answer.
    decode_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    #: Tokens of prompt and answer whose K/V has been computed.
    computed_tokens: int = 0
    generated_tokens: int = 0
    #: The most tokens that the answer can have.
    most_tokens: int = 0
    preemptions: int = 0
    #: What has to happen before the request goes on: "grammar" (it is being compiled), "slot" or
    #: "blocks" (one must become free), "turn" (others go first), "fetch" (its K/V arrives), "step"
    #: (it takes part in the steps).
    waits_for: str = ""
