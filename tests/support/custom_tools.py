"""Custom tools, which take one text, and grammars of such texts."""

from __future__ import annotations

from typing import Any

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: added | removed | changed
added: "*** Add File: " name LF added_line+
removed: "*** Delete File: " name LF
changed: "*** Update File: " name LF ("*** Move to: " name LF)? change?
name: /(.+)/
added_line: "+" /(.*)/ LF -> line
change: (context | line)+ ("*** End of File" LF)?
context: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
"""A patch, as agents ask for it: lines with any text."""
SHORT_PATCH = (
    PATCH.replace("hunk+", "hunk~1..2")
    .replace("added_line+", "added_line~1..3")
    .replace("(context | line)+", "(context | line)~1..3")
    .replace("/(.*)/", "/.{1,40}/?")
    .replace("/(.+)/", "/.{1,40}/")
)
"""A patch that ends soon, even if a model with a high temperature writes it."""
ARITHMETIC = r"""
?start: sum
?sum: product (ADD product)*
?product: atom (MUL atom)*
?atom: NUMBER | "-" atom | "(" sum ")"  // it contains itself
ADD: "+" | "-"
MUL: /[*\/]/
NUMBER: /[0-9]/~1..6
%ignore " "
"""
JSON = r"""
start: value
value: object | array | STRING | NUMBER | "true"i | "null"
array: "[" [value ("," value)*] "]"
object: "{" [pair ("," pair)*] "}"
pair: STRING ":" value
STRING: "\"" CHARACTER* "\""
CHARACTER: /[^"\\\x00-\x1f]/ | "\\" /["\\n]/
%import common.SIGNED_NUMBER -> NUMBER
%import common.WS
%ignore WS
"""


def custom_tool(name: str, syntax: str = "", definition: str = "") -> dict[str, Any]:
    """Return a custom tool of a chat. Without a syntax it takes any text."""
    custom: dict[str, Any] = {"name": name, "description": f"Takes a {name}."}
    if syntax:
        grammar = {"syntax": syntax, "definition": definition}
        custom["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": custom}
