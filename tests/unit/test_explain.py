"""The words about where a request's time went, and that no name of another account leaves."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from gateway.generation.group import ABORT_REASONS
from gateway.generation.record import ENDS, End
from protocol.engine.timeline import (
    AbortReason,
    ClientTimes,
    EngineTimeline,
    PromptShare,
    StageSpan,
    StepGroup,
    redacted,
)
from protocol.shared.explain import duration, ended, explain, headline


def a_span(stage: Any, start_s: float, end_s: float) -> StageSpan:
    return StageSpan(stage=stage, start_s=start_s, end_s=end_s)


def a_group(start_s: float, end_s: float, steps: int = 1, **fields: Any) -> StepGroup:
    seconds = end_s - start_s
    times = {"busy_s": seconds, "longest_s": seconds / steps, **fields}
    return StepGroup(start_s=start_s, end_s=end_s, first_step=1, steps=steps, **times)


def a_share(tokens: int, of: int, account: str = "alice", name: str = "chatcmpl-1") -> PromptShare:
    return PromptShare(name=name, account=account, tokens=tokens, prompt_tokens=of)


def a_timeline(*stages: StageSpan, **fields: Any) -> EngineTimeline:
    facts = {"name": "chatcmpl-2", "account": "bob", "prompt_tokens": 100, "slots": 64}
    took_s = stages[-1].end_s if stages else 0.0
    return EngineTimeline(stages=list(stages), **{**facts, "took_s": took_s, **fields})


QUEUED = a_span("queued", 0.0, 1.2)
DECODE = a_span("decode", 0.0, 4.1)

CASES: list[tuple[str, str, EngineTimeline]] = [
    (
        "for an image",
        "waited 1.2 s for the encoding of 1 image (64 tokens)",
        a_timeline(a_span("encoding", 0.0, 1.2), images=1, image_tokens=64),
    ),
    (
        "behind the prompt of another account",
        "waited 1.2 s behind a 7,900-token prompt of account alice",
        a_timeline(
            QUEUED,
            groups=[
                a_group(0.0, 0.6, other_prefill=4000, prompts=[a_share(4000, 7900)]),
                a_group(0.6, 1.2, other_prefill=3900, prompts=[a_share(3900, 7900)]),
            ],
        ),
    ),
    (
        "behind several prompts",
        "waited 1.2 s behind an 800-token prompt of account alice and 50 tokens of other prompts",
        a_timeline(
            QUEUED,
            groups=[
                a_group(
                    0.0,
                    1.2,
                    other_prefill=850,
                    prompts=[a_share(800, 800), a_share(50, 60, "carol")],
                )
            ],
        ),
    ),
    (
        "for a slot, although prompts were computed, too",
        "waited 1.2 s for a slot: all 64 were in use",
        a_timeline(
            QUEUED,
            groups=[
                a_group(0.0, 0.2, other_prefill=9, prompts=[a_share(9, 9)]),
                a_group(0.2, 1.2, 30, other_decodes=30 * 64, lack="slot"),
            ],
        ),
    ),
    (
        "for blocks",
        "waited 1.2 s until enough blocks of the KV cache were free",
        a_timeline(QUEUED, groups=[a_group(0.0, 1.2, 30, lack="blocks")]),
    ),
    (
        "for the step in progress",
        "waited 30 ms until the step in progress had ended",
        a_timeline(a_span("queued", 0.0, 0.03), groups=[a_group(-0.01, 0.03, 1, other_decodes=63)]),
    ),
    (
        "with steps that are forgotten",
        "waited 1.2 s in the queue",
        a_timeline(QUEUED),
    ),
    (
        "the prefill, partly cached",
        "computing 512 tokens of its prompt took 0.8 s, in 2 steps; 7,388 were cached; "
        "63 other requests decoded in the same steps",
        a_timeline(
            a_span("prefill", 0.0, 0.8),
            prompt_tokens=7900,
            cached_tokens=7388,
            groups=[a_group(0.0, 0.8, 2, own_prefill=512, other_decodes=126)],
        ),
    ),
    (
        "the prefill beside another prompt",
        "computing 100 tokens of its prompt took 0.8 s, in 1 step; meanwhile the engine also "
        "computed a 500-token prompt of request chatcmpl-9",
        a_timeline(
            a_span("prefill", 0.0, 0.8),
            groups=[
                a_group(
                    0.0,
                    0.8,
                    own_prefill=100,
                    other_prefill=400,
                    prompts=[a_share(400, 500, "", "chatcmpl-9")],
                )
            ],
        ),
    ),
    (
        "the decode with others",
        "each token took 41 ms because 63 other requests decoded with it",
        a_timeline(
            DECODE,
            generated_tokens=101,
            groups=[a_group(0.0, 4.1, 100, own_decodes=100, other_decodes=6300)],
        ),
    ),
    (
        "the decode alone",
        "each token took 41 ms; no other request decoded with it",
        a_timeline(DECODE, generated_tokens=101, groups=[a_group(0.0, 4.1, 100, own_decodes=100)]),
    ),
    (
        "drafts",
        "each step took 41 ms because 1 other request decoded with it; "
        "30 of 40 drafts were accepted",
        a_timeline(
            DECODE,
            generated_tokens=131,
            draft_tokens=40,
            accepted_tokens=30,
            groups=[a_group(0.0, 4.1, 100, own_decodes=100, other_decodes=100)],
        ),
    ),
    (
        "a decode whose steps are forgotten",
        "each token took 41 ms",
        a_timeline(DECODE, generated_tokens=101),
    ),
    (
        "one preemption",
        "preempted once, to make room for others: 0.4 s until it ran again",
        a_timeline(a_span("preempted", 1.0, 1.4), preemptions=1),
    ),
    (
        "several preemptions",
        "preempted 3 times, to make room for others: 1.5 s in total until it ran again",
        a_timeline(a_span("preempted", 1.0, 1.5), a_span("preempted", 2.0, 3.0), preemptions=3),
    ),
    (
        "the grammar",
        "compiling its grammar took 0.3 s",
        a_timeline(a_span("grammar", 0.0, 0.3)),
    ),
    (
        "a fetch",
        "fetching the K/V of 1,024 prompt tokens took 0.2 s",
        a_timeline(a_span("fetching", 0.0, 0.2), fetched_tokens=1024),
    ),
    (
        "lost steps",
        "its first steps are not recorded any more, so the causes are incomplete",
        a_timeline(has_lost_steps=True),
    ),
]


@pytest.mark.parametrize(
    ("text", "timeline"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_a_cause_has_its_sentence(text: str, timeline: EngineTimeline) -> None:
    assert [reason.text for reason in explain(timeline)] == [text]


def test_prompts_of_others_that_slow_the_answer_are_told_apart() -> None:
    timeline = a_timeline(
        a_span("decode", 0.0, 5.0),
        generated_tokens=101,
        groups=[
            a_group(0.0, 4.0, 100, own_decodes=100, other_decodes=200),
            a_group(4.0, 5.0, 1, own_decodes=1, other_prefill=900, prompts=[a_share(900, 2000)]),
        ],
    )
    decode, prompts = explain(timeline)
    assert decode.text == "each token took 40 ms because 2 other requests decoded with it"
    assert prompts.text == (
        "its steps also computed a 2,000-token prompt of account alice; "
        "the longest gap between two tokens was 1.0 s"
    )
    assert decode.seconds + prompts.seconds == pytest.approx(5.0)
    assert prompts.seconds == pytest.approx(0.96)


CLIENTS: list[tuple[str, ClientTimes]] = [
    ("waited 12.0 s until the model was loaded", ClientTimes(load_s=12.0, sent_s=12.001)),
    ("the chat template took 3 ms", ClientTimes(template_s=0.003, sent_s=0.004)),
    ("loading and preprocessing its images took 80 ms", ClientTimes(image_s=0.08, sent_s=0.081)),
    ("the tokenizer took 20 ms", ClientTimes(tokenize_s=0.02, sent_s=0.021)),
    ("reading and checking it took 0.5 s", ClientTimes(sent_s=0.5)),
    ("the client read slowly for 2.1 s", ClientTimes(unread_s=2.1, answered_s=1.0, ended_s=3.0)),
    ("sending the end of the answer took 2.0 s", ClientTimes(answered_s=1.0, ended_s=3.0)),
    (
        "0.1 s passed between the gateway and the engine, up to the first token",
        ClientTimes(sent_s=0.001, first_token_s=0.351),
    ),
]


@pytest.mark.parametrize(("text", "client"), CLIENTS)
def test_the_gateways_part_has_its_sentence(text: str, client: ClientTimes) -> None:
    assert [r.text for r in explain(a_timeline(first_token_s=0.25), client)] == [text]


def test_times_too_short_to_matter_are_left_out() -> None:
    client = ClientTimes(template_s=0.0001, sent_s=0.001, first_token_s=0.002)
    timeline = a_timeline(a_span("queued", 0.0, 0.0001), first_token_s=0.0009)
    assert explain(timeline, client) == []
    assert headline([], 0.001) == "took 1 ms"


def test_reasons_are_in_order_and_the_headline_names_the_largest() -> None:
    stages = [
        a_span("grammar", 0.0, 0.1),
        a_span("queued", 0.1, 1.3),
        a_span("prefill", 1.3, 1.5),
        a_span("decode", 1.5, 2.0),
    ]
    reasons = explain(a_timeline(*stages, generated_tokens=6), ClientTimes(template_s=0.01))
    causes = ["template", "grammar", "queue", "prefill", "decode"]
    assert [reason.cause for reason in reasons] == causes
    assert headline(reasons, 2.01) == "took 2.0 s; the largest part: waited 1.2 s in the queue"
    assert sum(reason.seconds for reason in reasons) == pytest.approx(2.01)


def test_a_redacted_timeline_names_no_other_account() -> None:
    shares = [a_share(5, 9), a_share(4, 9, "bob", "chatcmpl-own"), a_share(3, 9, "", "chatcmpl-x")]
    timeline = a_timeline(
        QUEUED, client="gateway-7", groups=[a_group(0, 1.2, other_prefill=12, prompts=shares)]
    )
    hidden = redacted(timeline)
    text = repr(hidden)
    for secret in ("alice", "chatcmpl-1", "chatcmpl-x", "gateway-7"):
        assert secret in repr(timeline)
        assert secret not in text
    assert "chatcmpl-own" in text
    (reason,) = explain(hidden)
    assert reason.text.startswith("waited 1.2 s behind a 9-token prompt of another account")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0.4 ms"),
        (0.0412, "41 ms"),
        (0.0996, "0.1 s"),
        (0.25, "0.25 s"),
        (0.999, "1.0 s"),
        (1.24, "1.2 s"),
        (125.0, "2 min 5 s"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_how_a_request_ended_is_said_in_words() -> None:
    assert ended(a_timeline()) == "open"
    assert ended(a_timeline(finish="length")) == "ended with 'length'"


def test_each_reason_of_an_abort_has_words_of_its_own() -> None:
    said = [ended(a_timeline(finish="abort", abort_reason=why)) for why in get_args(AbortReason)]
    assert len(set(said)) == len(get_args(AbortReason))
    assert {text.partition(": ")[0] for text in said} <= {*get_args(End)}


def test_an_abort_has_the_word_of_the_gateways_log() -> None:
    for finish, reason in ABORT_REASONS.items():
        text = ended(a_timeline(finish="abort", abort_reason=reason))
        assert text.startswith(f"{ENDS[str(finish)]}: ")
