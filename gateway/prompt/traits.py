"""How a chat template needs a conversation to be written.

The traits are found by rendering tiny conversations (`probe`). A conversation is brought into the
form that they describe before it is rendered (`fit`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROBED_ROLES = ("system", "user", "assistant", "tool")
"""The roles whose content is tried as a string and as a list of parts."""

ReasoningForm = Literal["members", "thinking", "thinking_only", "part", "omitted"]
REASONING_FORMS: tuple[ReasoningForm, ...] = ("members", "thinking", "thinking_only", "part")
"""The forms in which a template may read reasoning, in the order in which they are tried."""


class TemplateTraits(msgspec.Struct, frozen=True):
    """The form of conversations that a template needs.

    The defaults describe a template that renders every conversation as OpenAI's clients send it,
    with content that is a string.
    """

    #: Whether user messages are rendered, or no content at all. False for rerankers' templates.
    renders_users: bool = True
    #: Roles whose content may be a list of several text parts.
    parts: tuple[str, ...] = ()
    #: Roles whose content may be a string. Other roles get a list, of one part unless the role is
    #: also in `parts`.
    strings: tuple[str, ...] = PROBED_ROLES
    #: Roles whose content may have parts that are images, for which the template writes a marker.
    image_parts: tuple[str, ...] = ()
    #: What the template writes for an image in a user message; "": it has no markers for images.
    image_text: str = ""
    #: The content of an assistant message that has only tool calls: "", None, a list with one empty
    #: part, or no member `content` at all.
    empty_content: Literal["text", "null", "parts", "absent"] = "text"
    #: The arguments of a tool call: an object, or JSON text.
    arguments: Literal["object", "text"] = "object"
    #: Whether the role `developer` is supported. Otherwise it is replaced by `system`.
    developer: bool = False
    #: Whether tools are rendered.
    tools: bool = False
    #: Whether tools are rendered only after a system message. An empty one is added if there is
    #: none.
    tools_need_system: bool = False
    #: Whether the variables `tools` and `documents` must be lists even if there are none. Otherwise
    #: they are then None.
    empty_lists: bool = False
    #: Whether each tool, and each of its arguments, must have a description.
    tool_descriptions: bool = False
    #: How many tool calls of one assistant message are rendered: any number, or one. If none is,
    #: calls are written as text.
    calls: Literal["many", "one", "text"] = "many"
    #: How the template writes a call, as an example for the model. It is set only if the template
    #: renders calls but no tools.
    call_example: str = ""
    #: Whether calls are rendered in requests without tools. If not, they are written as text there.
    calls_without_tools: bool = True
    #: If calls are written as text: whether results keep the role `tool`. Otherwise they become
    #: text of the user.
    keeps_results: bool = False
    #: Whether the content of a tool result must be an object. Its only member is then `result`.
    result_objects: bool = False
    #: The ids of tool calls: any; or one that has the name of the tool (`functions.name:0`); or one
    #: of nine letters and digits.
    call_ids: Literal["any", "named", "nine"] = "any"
    #: Where the text of an assistant message with tool calls goes:
    #:   beside            into the same message
    #:   before            into a message before it, with the reasoning
    #:   before_reasoning  the same, but the reasoning stays with the calls
    #:   before_user       as `before`, and an empty message of the user follows the text
    text_with_calls: Literal["beside", "before", "before_reasoning", "before_user"] = "beside"
    #: Where the reasoning of an assistant message goes:
    #:   members        into `reasoning` and `reasoning_content`
    #:   thinking       into `thinking`
    #:   thinking_only  the same; in a message with calls, the text is appended to it
    #:   part           into a part of the content
    #:   omitted        as `members`; the template omits reasoning, even in a loop of tool calls
    reasoning: ReasoningForm = "members"
    #: The system message at the start: kept, or part of the first user message, or the latter only
    #: if the conversation has tool calls or does not end with a user message.
    leading_system: Literal["kept", "user", "user_unless_last"] = "kept"
    #: Several system messages at the start: kept, or joined to one.
    leading_systems: Literal["kept", "joined"] = "kept"
    #: A system message further on: kept, or written as a user message at its place.
    later_system: Literal["kept", "user"] = "kept"
    #: Consecutive messages of the user, or of the assistant: kept, or joined to one.
    user_turns: Literal["kept", "joined"] = "kept"
    assistant_turns: Literal["kept", "joined"] = "kept"
    #: A message of the user directly after a tool result: kept, or part of the result.
    user_after_result: Literal["kept", "result"] = "kept"
    #: Whether the template omits texts of some conversations without an error, in whatever form
    #: they are written. Each request is then rendered with marks first (`omissions`).
    omits_texts: bool = False
