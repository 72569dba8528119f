"""How a chat template needs a conversation to be written.

The traits are found by rendering tiny conversations (`probe`). A conversation is brought into the
form that they describe before it is rendered (`fit`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROBED_ROLES = ("system", "user", "assistant", "tool")
"""The roles whose content is tried as a string and as a list of parts."""


class TemplateTraits(msgspec.Struct, frozen=True):
    """The form of conversations that a template needs.

    The defaults describe a template that renders every conversation as OpenAI's clients send it,
    with content that is a string.
    """

    #: The template renders what the user writes, or no content at all. Templates of rerankers
    #: render the content of other roles.
    users: bool = True
    #: Roles whose content may be a list of several text parts.
    parts: tuple[str, ...] = ()
    #: Roles whose content may be a string. Other content must be a list of parts: of one part, if
    #: the role is not in `parts` either.
    strings: tuple[str, ...] = PROBED_ROLES
    #: The content of an assistant message that has only tool calls: "", None, a list with one empty
    #: part, or no member `content` at all.
    no_text: Literal["text", "null", "parts", "absent"] = "text"
    #: The arguments of a tool call: an object, or JSON text.
    arguments: Literal["object", "text"] = "object"
    #: The role `developer` is supported; otherwise it is replaced by `system`.
    developer: bool = False
    #: The template renders tools.
    tools: bool = False
    #: It does so only if there is a system message.
    tools_need_system: bool = False
    #: The variables `tools` and `documents` must be lists even if there are none; otherwise they
    #: are then None.
    empty_lists: bool = False
    #: Each tool, and each of its arguments, must have a description.
    tool_descriptions: bool = False
    #: The tool calls of one assistant message: any number, or one, or the template renders none, so
    #: calls and their results are written as text.
    calls: Literal["many", "one", "words"] = "many"
    #: How the template writes a call, as an example for the model. It is set only if the template
    #: renders calls but no tools.
    call_example: str = ""
    #: Calls are rendered even if the request has no tools; otherwise they are then written as
    #: text.
    calls_without_tools: bool = True
    #: Tool results are rendered as such even if the calls are written as text; otherwise they are
    #: the user's text, too.
    results_of_words: bool = False
    #: The content of a tool result must be an object. It has the text as its only member, `result`.
    result_objects: bool = False
    #: Each tool result must have the name of its tool.
    result_names: bool = False
    #: The ids of tool calls: any or none; or each call needs one; or one that has the name of the
    #: tool (`functions.name:0`); or one of nine letters and digits.
    call_ids: Literal["any", "required", "named", "nine"] = "any"
    #: The text of an assistant message that has tool calls, too: in that message; in a message
    #: before it, which has the reasoning; in one that has not; or in one that is followed by an
    #: empty message of the user.
    text_with_calls: Literal["beside", "before", "before_reasoning", "before_user"] = "beside"
    #: The reasoning of an assistant message: in the members `reasoning` and `reasoning_content`, in
    #: `thinking`, in `thinking` instead of the text of a message with calls, or in a part; or the
    #: template omits it, even in a loop of tool calls.
    reasoning: Literal["members", "thinking", "thinking_only", "part", "omitted"] = "members"
    #: The system message at the start: kept, or part of the first user message, or the latter only
    #: if the conversation has tool calls or does not end with the user's message.
    system: Literal["kept", "user", "user_unless_last"] = "kept"
    #: Several system messages at the start: kept, or joined to one.
    systems: Literal["kept", "joined"] = "kept"
    #: A system message further on: kept, or written as a user message at its place.
    late_system: Literal["kept", "user"] = "kept"
    #: Consecutive messages of the user, or of the assistant: kept, or joined to one.
    user_turns: Literal["kept", "joined"] = "kept"
    assistant_turns: Literal["kept", "joined"] = "kept"
    #: A message of the user directly after a tool result: kept, or part of the result.
    user_after_result: Literal["kept", "result"] = "kept"
