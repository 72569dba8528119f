"""Says in words where the time of a request went. Pure: a timeline in, sentences out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from protocol.engine.timeline import (
    HIDDEN_ACCOUNT,
    AbortReason,
    ClientTimes,
    EngineTimeline,
    PromptShare,
    StageSpan,
    StepGroup,
)

MIN_S = 0.0005
"""Shorter times are not worth a sentence."""
MIN_TRANSFER_S = 0.005
"""The same for times between processes, which are differences of two clocks' readings."""

Cause = Literal[
    "load",
    "check",
    "template",
    "images",
    "tokenize",
    "grammar",
    "queue",
    "fetch",
    "encode",
    "prefill",
    "decode",
    "prompts",
    "preempted",
    "transfer",
    "client",
    "note",
]


_ABORTS: dict[AbortReason, tuple[str, str]] = {
    "": ("aborted", "its client aborted it"),
    "disconnected": ("disconnected", "its client disconnected"),
    "complete": ("finished", "its answer was complete, because of a stop string or a tool call"),
    "cancelled": ("aborted", "it was cancelled"),
    "error": ("error", "its answer failed in the gateway, or another choice was refused"),
    "by_id": ("aborted", "it was aborted by its id"),
    "client_lost": ("disconnected", "the gateway or program that sent it ended or was lost"),
}
"""Why a request was aborted -> how it ended, in the word of the gateway's log, and why."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of a request's time."""

    #: What took the time. "load": waiting until the model was loaded; "check": reading the body;
    #: "fetch": fetching K/V; "prompts": prompts of others in the steps of the answer; "transfer":
    #: between gateway and engine; "client": a client that read slowly; "note": nothing.
    cause: Cause
    seconds: float
    text: str


class _Part(NamedTuple):
    """The time of a group of steps that falls into certain stages of the request."""

    group: StepGroup
    seconds: float


def explain(engine: EngineTimeline, client: ClientTimes | None = None) -> list[Reason]:
    """Return the reasons for the request's time, in the order in which it passed.

    `client` is the gateway's part; None if it is not known. Times of `client` and of the engine do
    not overlap, except that the client may read slowly while the engine computes.
    """
    return [*_before(client), *_in_engine(engine), *_after(engine, client)]


def headline(reasons: Sequence[Reason], took_s: float) -> str:
    """Return one sentence: how long the request took, and the largest part of it."""
    if not reasons or max(reason.seconds for reason in reasons) < MIN_S:
        return f"took {duration(took_s)}"
    largest = max(reasons, key=lambda reason: reason.seconds)
    return f"took {duration(took_s)}; the largest part: {largest.text}"


def ended(timeline: EngineTimeline) -> str:
    """Return how a request ended for the engine, in words, or that it is open."""
    if timeline.finish != "abort":
        return f"ended with {timeline.finish!r}" if timeline.finish else "open"
    word, why = _ABORTS[timeline.abort_reason]
    return f"{word}: {why}"


def duration(seconds: float) -> str:
    """Return a time as short text: "0.4 ms", "41 ms", "1.2 s", "2 min 5 s"."""
    if seconds < 0.00095:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.2g} s" if seconds < 0.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


# ---- in the gateway


def _before(client: ClientTimes | None) -> Iterator[Reason]:
    if client is None:
        return
    yield from _reason("load", client.load_s, "waited {} until the model was loaded")
    known_s = client.load_s + client.template_s + client.image_s + client.tokenize_s
    if client.sent_s is not None and client.sent_s - known_s >= MIN_TRANSFER_S:
        yield from _reason("check", client.sent_s - known_s, "reading and checking it took {}")
    yield from _reason("template", client.template_s, "the chat template took {}")
    yield from _reason("images", client.image_s, "loading and preprocessing its images took {}")
    yield from _reason("tokenize", client.tokenize_s, "the tokenizer took {}")


def _after(engine: EngineTimeline, client: ClientTimes | None) -> Iterator[Reason]:
    if client is None:
        return
    if None not in (client.first_token_s, client.sent_s, engine.first_token_s):
        assert client.first_token_s is not None
        assert client.sent_s is not None
        assert engine.first_token_s is not None
        between_s = client.first_token_s - client.sent_s - engine.first_token_s
        if between_s >= MIN_TRANSFER_S:
            text = "{} passed between the gateway and the engine, up to the first token"
            yield from _reason("transfer", between_s, text)
    if client.unread_s >= MIN_S:
        yield from _reason("client", client.unread_s, "the client read slowly for {}")
    elif client.ended_s is not None and client.answered_s is not None:
        text = "sending the end of the answer took {}"
        yield from _reason("client", client.ended_s - client.answered_s, text)


# ---- in the engine


def _in_engine(engine: EngineTimeline) -> Iterator[Reason]:
    grammar_s, fetching_s = _total(engine, "grammar"), _total(engine, "fetching")
    yield from _reason("grammar", grammar_s, "compiling its grammar took {}")
    yield from _queue(engine)
    fetched = f"{engine.fetched_tokens or engine.cached_tokens:,}"
    text = f"fetching the K/V of {fetched} prompt tokens took {{}}"
    yield from _reason("fetch", fetching_s, text)
    pictures = f"{_count(engine.images, 'image')} ({_count(engine.image_tokens, 'token')})"
    text = f"waited {{}} for the encoding of {pictures}"
    yield from _reason("encode", _total(engine, "encoding"), text)
    yield from _prefill(engine)
    yield from _decode(engine)
    yield from _preempted(engine)
    if engine.has_lost_steps:
        text = "its first steps are not recorded any more, so the causes are incomplete"
        yield Reason(cause="note", seconds=0.0, text=text)


def _queue(engine: EngineTimeline) -> Iterator[Reason]:
    seconds = _total(engine, "queued")
    if seconds < MIN_S:
        return
    parts = _parts(engine, "queued")
    waited = f"waited {duration(seconds)}"
    lack = _main_lack(parts)
    if lack == "slot":
        text = f"{waited} for a slot: all {engine.slots:,} were in use"
    elif lack == "blocks":
        text = f"{waited} until enough blocks of the KV cache were free"
    elif others := _prompts(part.group for part in parts):
        text = f"{waited} behind {others}"
    elif parts:
        text = f"{waited} until the step in progress had ended"
    else:
        text = f"{waited} in the queue"
    yield Reason(cause="queue", seconds=seconds, text=text)


def _main_lack(parts: Sequence[_Part]) -> str:
    """Return what the first request in the queue lacked for most of the time."""
    seconds = {"": 0.0, "slot": 0.0, "blocks": 0.0}
    for part in parts:
        seconds[part.group.lack] += part.seconds
    return max(seconds, key=lambda lack: seconds[lack])


def _prefill(engine: EngineTimeline) -> Iterator[Reason]:
    seconds = _total(engine, "prefill")
    if seconds < MIN_S:
        return
    groups = [part.group for part in _parts(engine, "prefill")]
    own = [group for group in groups if group.own_prefill]
    computed = max(1, engine.prompt_tokens - engine.cached_tokens)
    text = f"computing {_count(computed, 'token')} of its prompt took {duration(seconds)}"
    if own:
        text += f", in {_count(sum(group.steps for group in own), 'step')}"
    if engine.cached_tokens:
        text += f"; {engine.cached_tokens:,} were cached"
    shared = sum(group.other_prefill for group in groups)
    if shared > computed / 4:
        text += f"; meanwhile the engine also computed {_prompts(groups)}"
    decodes = sum(group.other_decodes for group in own)
    if own and decodes >= sum(group.steps for group in own):
        rows = round(decodes / sum(group.steps for group in own))
        text += f"; {_count(rows, 'other request')} decoded in the same steps"
    yield Reason(cause="prefill", seconds=seconds, text=text)


def _decode(engine: EngineTimeline) -> Iterator[Reason]:
    seconds = _total(engine, "decode")
    if seconds < MIN_S:
        return
    groups = [part.group for part in _parts(engine, "decode") if part.group.own_decodes]
    mixed = [group for group in groups if group.other_prefill]
    plain = [group for group in groups if not group.other_prefill]
    plain_s = _mean_step_s(plain)
    prompts_s = 0.0
    if plain_s is not None:
        prompts_s = sum(max(0.0, group.busy_s - group.steps * plain_s) for group in mixed)
        prompts_s = min(prompts_s, seconds)
    text = _pace(engine, plain or groups, seconds)
    yield Reason(cause="decode", seconds=seconds - prompts_s, text=text)
    if prompts_s >= MIN_S and plain_s is not None:
        longest = max(mixed, key=lambda group: group.longest_s)
        text = f"its steps also computed {_prompts(mixed)}; the longest gap between two tokens was "
        text += duration(longest.longest_s)
        yield Reason(cause="prompts", seconds=prompts_s, text=text)


def _pace(engine: EngineTimeline, groups: Sequence[StepGroup], seconds: float) -> str:
    """Return the sentence about the tokens after the first one."""
    steps = sum(group.steps for group in groups)
    step_s = _mean_step_s(groups)
    if step_s is None or not steps:
        tokens = max(1, engine.generated_tokens - 1)
        return f"each token took {duration(seconds / tokens)}"
    others = round(sum(group.other_decodes for group in groups) / steps)
    unit = "step" if engine.draft_tokens else "token"
    text = f"each {unit} took {duration(step_s)}"
    if others:
        text += f" because {_count(others, 'other request')} decoded with it"
    else:
        text += "; no other request decoded with it"
    if engine.draft_tokens:
        text += (
            f"; {engine.accepted_tokens:,} of {_count(engine.draft_tokens, 'draft')} were accepted"
        )
    return text


def _preempted(engine: EngineTimeline) -> Iterator[Reason]:
    seconds = _total(engine, "preempted")
    if not engine.preemptions:
        return
    times = "once" if engine.preemptions == 1 else f"{engine.preemptions:,} times"
    total = "" if engine.preemptions == 1 else " in total"
    text = f"preempted {times}, to make room for others: {duration(seconds)}{total} "
    yield Reason(cause="preempted", seconds=seconds, text=text + "until it ran again")


# ---- parts


def _reason(cause: Cause, seconds: float, text: str) -> Iterator[Reason]:
    """Yield a reason, unless its time is too short to be worth a sentence. `{}` in the text stands
    for the time."""
    if seconds >= MIN_S:
        yield Reason(cause=cause, seconds=seconds, text=text.format(duration(seconds)))


def _total(engine: EngineTimeline, stage: str) -> float:
    return sum(span.end_s - span.start_s for span in engine.stages if span.stage == stage)


def _parts(engine: EngineTimeline, stage: str) -> list[_Part]:
    """Return the groups of steps that overlap the spans of a stage."""
    spans = [span for span in engine.stages if span.stage == stage]
    parts = []
    for group in engine.groups:
        seconds = sum(_overlap_s(group, span) for span in spans)
        if seconds > 0:
            parts.append(_Part(group, seconds))
    return parts


def _overlap_s(group: StepGroup, span: StageSpan) -> float:
    return max(0.0, min(group.end_s, span.end_s) - max(group.start_s, span.start_s))


def _mean_step_s(groups: Sequence[StepGroup]) -> float | None:
    steps = sum(group.steps for group in groups)
    return sum(group.busy_s for group in groups) / steps if steps else None


def _prompts(groups: Iterable[StepGroup]) -> str:
    """Return in words the prompts of others that these steps computed: the largest, and how many
    tokens of others. Return "" if there are none."""
    total, by_owner = 0, dict[tuple[str, str, int], int]()
    for group in groups:
        total += group.other_prefill
        for share in group.prompts:
            key = share.account, share.name, share.prompt_tokens
            by_owner[key] = by_owner.get(key, 0) + share.tokens
    if not by_owner:
        return f"{total:,} tokens of other prompts" if total else ""
    (account, name, length), tokens = max(by_owner.items(), key=lambda item: item[1])
    largest = PromptShare(name=name, account=account, tokens=tokens, prompt_tokens=length)
    text = f"{_article(length)} {length:,}-token prompt {_owner(largest)}"
    rest = total - tokens
    return f"{text} and {_count(rest, 'token')} of other prompts" if rest > 0 else text


def _owner(share: PromptShare) -> str:
    if share.account == HIDDEN_ACCOUNT:
        return "of another account"
    if share.account:
        return f"of account {share.account}"
    return f"of request {share.name}" if share.name else "of another request"


def _article(number: int) -> str:
    """Return "an" before eight, eleven, eighteen, eighty, eight hundred, eleven thousand, ..."""
    lead = f"{number:,}".split(",")[0]
    return "an" if lead in ("11", "18") or lead.startswith("8") else "a"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
