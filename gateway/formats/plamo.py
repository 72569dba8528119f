"""PLaMo 3's calls: JSON arguments behind a name, everything between markers of its own.

    <|plamo:begin_tool_requests:plamo|>
    <|plamo:begin_tool_request:plamo|>
    <|plamo:begin_tool_name:plamo|>f<|plamo:end_tool_name:plamo|>
    <|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{"a": 1}
    <|plamo:end_tool_arguments:plamo|>
    <|plamo:end_tool_request:plamo|>
    <|plamo:end_tool_requests:plamo|>

(Without the line breaks.) In the vocabulary these markers are several tokens each, of which some
are special (`:plamo|>`).

Source: vLLM's published parser.
"""

from __future__ import annotations

from gateway.formats.named_json import NamedJson


def begin(what: str) -> str:
    return f"<|plamo:begin_{what}:plamo|>"


def end(what: str) -> str:
    return f"<|plamo:end_{what}:plamo|>"


FORMATS = {
    "plamo3": NamedJson(
        section_open=(begin("tool_requests"),),
        section_close=(end("tool_requests"),),
        call_open=(begin("tool_request"),),
        kind_end=(begin("tool_name"),),
        name_end=(end("tool_name"),),
        fence=(
            begin("tool_arguments") + "<|plamo:constrain|>json<|plamo:msg|>",
            end("tool_arguments"),
        ),
        call_close=(end("tool_request"),),
    ),
}
