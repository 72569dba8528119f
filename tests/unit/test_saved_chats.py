"""The file of a conversation: what `/save` has written is what `/load` reads."""

from __future__ import annotations

import pytest

from tools.chat.saved import as_json, read_saved, restore
from tools.chat.session import ChatSession
from tools.http.web import WebServer

TURN = [{"role": "user", "content": "Hi\n"}, {"role": "assistant", "content": "Grüße 👍"}]


def session() -> ChatSession:
    return ChatSession(WebServer("http://127.0.0.1:1"), "m")


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("messages", [[], TURN, TURN * 3])
def test_a_saved_conversation_is_read_as_it_was(
    system: str | None, messages: list[dict[str, str]]
) -> None:
    before, after = session(), session()
    before.system, before.messages = system, messages
    after.system, after.messages, after.model = "another", TURN, "other"
    restore(read_saved(as_json(before)), after)
    assert (after.system, after.messages, after.model) == (system, messages, "other")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("# Chat with m", "it is not JSON, as /save writes it"),
        ("[]", "it is no saved chat: it needs a model"),
        ('{"model": "m"}', "it is no saved chat: "),
        ('{"model": "m", "messages": [{"role": "tool", "content": ""}]}', "it is no saved chat: "),
        ('{"model": "m", "messages": [{"role": "user", "content": ""}]}', "needs its answer"),
        ('{"model": "m", "messages": [{"role": "assistant", "content": ""}]}', "needs its answer"),
    ],
)
def test_a_text_that_is_no_saved_conversation_is_refused(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        read_saved(text)
