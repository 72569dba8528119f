"""Frames between a gateway and its sandbox processes."""

from __future__ import annotations

import pytest

from gateway.prompt.thinking import ThinkingProfile
from gateway.prompt.traits import TemplateTraits
from gateway.sandbox.messages import (
    HEAD_BYTES,
    Call,
    CallFailed,
    LoadTemplate,
    OutOfMemory,
    RenderTemplate,
    Reply,
    TemplateLoaded,
    TemplateRendered,
    TokenizerWorks,
    TryTokenizer,
    decode_call,
    decode_reply,
    marked_last,
    sizes_of,
    to_frame,
)

CALLS: list[tuple[Call, bytes]] = [
    (LoadTemplate("{{ x }}", {"bos_token": "<s>"}), b'["load","{{ x }}",{"bos_token":"<s>"}]'),
    (
        RenderTemplate("é", {}, {"x": [10**30, None, 1.5]}),
        '["render","é",{},{"x":[1000000000000000000000000000000,null,1.5]}]'.encode(),
    ),
    (TryTokenizer('{"model":{}}'), b'["try_tokenizer","{\\"model\\":{}}"]'),
]
REPLIES: list[tuple[Reply, bytes]] = [
    (
        TemplateLoaded(TemplateTraits(tools=True), ThinkingProfile(mode=("on", "off"))),
        b'["loaded",{"renders_users":true,"parts":[],'
        b'"strings":["system","user","assistant","tool"],"image_parts":[],"image_text":"",'
        b'"empty_content":"text",'
        b'"arguments":"object","developer":false,"tools":true,"tools_need_system":false,'
        b'"empty_lists":false,"tool_descriptions":false,"calls":"many","call_example":"",'
        b'"calls_without_tools":true,"keeps_results":false,"result_objects":false,'
        b'"call_ids":"any","text_with_calls":"beside","reasoning":"members",'
        b'"leading_system":"kept","leading_systems":"kept","later_system":"kept",'
        b'"user_turns":"kept","assistant_turns":"kept","user_after_result":"kept",'
        b'"omits_texts":false},'
        b'{"switches":[],"mode":["on","off"],"mode_words":[],"reads_effort":false,"efforts":[]}]',
    ),
    (TemplateRendered("a\n"), b'["rendered","a\\n"]'),
    (TokenizerWorks(), b'["works"]'),
    (CallFailed("why"), b'["failed","why"]'),
    (OutOfMemory(), b'["memory"]'),
]


@pytest.mark.parametrize(("message", "body"), [*CALLS, *REPLIES])
def test_golden_frames(message: Call | Reply, body: bytes) -> None:
    frame = to_frame(message)
    assert frame[HEAD_BYTES:] == body
    assert sizes_of(frame[:HEAD_BYTES]) == (len(body), 0, False)
    decode = decode_call if isinstance(message, Call) else decode_reply
    assert decode(body) == message


def test_the_last_frame_differs_in_one_bit() -> None:
    frame = to_frame(CallFailed("why"))
    last = marked_last(frame)
    assert (last[0], last[1:]) == (frame[0] | 0x80, frame[1:])
    assert sizes_of(last) == (*sizes_of(frame)[:2], True)


def test_a_frame_ends_with_its_raw_bytes() -> None:
    frame = to_frame(CallFailed("why"), [b"ab", memoryview(b"c")])
    assert frame[HEAD_BYTES:] == b'["failed","why"]abc'
    assert sizes_of(frame) == (16, 3, False)
