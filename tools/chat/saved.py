"""The file of a conversation: what `/save` writes and `/load` reads."""

from __future__ import annotations

import json
from typing import Literal

import msgspec

from tools.chat.session import ChatSession


class SavedMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str


class SavedChat(msgspec.Struct, frozen=True):
    """A conversation as JSON."""

    model: str
    messages: list[SavedMessage]


def as_json(conversation: ChatSession) -> str:
    """Return the model and the messages of a conversation as JSON."""
    saved = {"model": conversation.model, "messages": conversation.transcript}
    return json.dumps(saved, indent=2, ensure_ascii=False) + "\n"


def as_markdown(conversation: ChatSession) -> str:
    """Return a conversation as markdown, with a heading for each message."""
    parts = [f"# Chat with {conversation.model}"]
    for message in conversation.transcript:
        parts += [f"## {message['role'].capitalize()}", message["content"].strip()]
    return "\n\n".join(parts) + "\n"


def read_saved(text: str) -> SavedChat:
    """Return the conversation in a text that `as_json` has written. Raises ValueError if it is
    another text, or if the messages are not those of a chat: perhaps a system prompt, then messages
    of the user, each with its answer."""
    try:
        saved = msgspec.json.decode(text, type=SavedChat)
    except msgspec.ValidationError:
        raise ValueError("it is no saved chat: it needs a model and messages with texts") from None
    except msgspec.DecodeError:
        raise ValueError("it is not JSON, as /save writes it") from None
    roles = [message.role for message in saved.messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError("it is no saved chat: each message of the user needs its answer")
    return saved


def restore(saved: SavedChat, conversation: ChatSession) -> None:
    """Replace the messages and the system prompt of a conversation. Its model stays."""
    messages = [{"role": each.role, "content": each.content} for each in saved.messages]
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    conversation.system, conversation.messages = system, messages
