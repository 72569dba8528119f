"""Reads calls that have one tag for each argument (`xml_parameters`).

The states are:

    opened      after the opening marker: if no call follows, the marker is content
    between     after a call, still in its group
    call_tag    in a call's tag, up to its `>`
    call        in a call, outside its arguments
    key_tag     in an argument's tag, up to its `>`
    value       in an argument's value
    doubt       after a tag that may have ended a value
    cdata       in a value that is wrapped in CDATA, where only its end has a meaning
    cdata_end   after that end: if text follows, the end was part of the value
    broken      in text that is not a call, which is content up to the closing marker

Values are typed by the tool's schema (`argument_types`). Text between arguments is dropped.

A value may contain closing tags. What follows a closing tag, possibly after blanks, decides whether
the tag ends the value. Any text shows that the tag is part of the value. Otherwise:

    </parameter>  ends the value if another argument, the call's end or the group's end follows
    </function>   ends a value without a closing tag if the group's end or another call follows
    </tool_call>  does so if another call or the answer's end follows

A value may also contain a whole call, such as the text of a template. So after `<function=` in a
value, the next `</parameter>`, `</function>` and `</tool_call>` that can belong to the inner call
are part of the value. Only if the answer ends directly after them, they end the outer call instead.

There is a warning if a value could also end elsewhere: if it lacks its closing tags, if one of them
is doubled (the second is dropped), and if the tags that end it may belong to an inner call.

If the syntax has no `open` marker, or if `bare` is set, a call's own tag may start a group. It does
so only if it names a tool of the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.formats.argument_types import Trim, TypedCallParser, TypedCallState
from gateway.formats.call_parser import NO_CALL, CallParser
from gateway.formats.parser import Moves
from gateway.formats.xml_tag import MAX_TAG_CHARS, attributes_in, plain_name

if TYPE_CHECKING:
    from gateway.formats.xml_parameters import XmlParameters

UNCLOSED = "a value ends without its closing tags"
DOUBLED = "the tag that ends a value is written twice"
INNER = "the tags that end a value may belong to a call inside the value"
CDATA = ("<![CDATA[", "]]>")


class XmlParametersState(TypedCallState):
    """State of an `XmlParametersParser`.

    tag      text of the current tag so far
    quote    the quote that is open in the tag, or ""
    string   value of the attribute `string_key` of the current argument
    bare     whether the group has started with a call's own tag
    inner    what is open inside the value: "call" after a call's tag, "value" after the tag of an
             argument of that call, "argument" after the tag of an argument without a call, or ""
    closers  the closing tags that have been read in the state "doubt"; a doubled one is listed once
    doubled  whether one of them is doubled
    defect   what is doubtful about the end of a value in the open call, for a warning
    """

    at: str = "opened"
    tag: str = ""
    quote: str = ""
    string: str = ""
    bare: bool = False
    inner: str = ""
    closers: list[str] = []
    doubled: bool = False
    defect: str = ""


class XmlParametersParser(TypedCallParser):
    State = XmlParametersState
    syntax: XmlParameters
    BETWEEN = frozenset({"between"})

    @property
    def trim(self) -> Trim:
        return self.syntax.trim

    def moves(self) -> Moves:
        x = self.syntax
        groups = x.close + x.open
        calls = (x.call_open, *groups, *x.skip)
        inside = (x.parameter_open, x.call_close)
        return {
            "opened": ((calls, self._structure),),
            "between": ((calls, self._structure),),
            "call": ((inside + calls, self._structure),),
            **self._moves_in_values(inside, calls),
            "broken": (((*groups, x.call_open), self._structure),),
        }

    def _moves_in_values(self, inside: tuple[str, ...], calls: tuple[str, ...]) -> Moves:
        x = self.syntax
        if not x.doubts:
            tokens = tuple(filter(self.context.lexicon.is_token, x.close + x.open))
            return {"value": (((x.parameter_close,), self._ends), (tokens, self._ends))}
        final = tuple(filter(self.context.lexicon.is_token, x.final))
        closing = tuple(tag for tag in (x.parameter_close, *x.closers()) if tag not in x.final)
        tags = (x.call_open, x.parameter_open)
        cdata = ((CDATA[0],), self._open_cdata) if x.cdata else ((), self.skip)
        return {
            "value": (cdata, (closing, self._doubt), (final, self._ends), (tags, self._inner_tag)),
            "doubt": ((closing + inside + calls, self._after_doubt),),
            "cdata": ((CDATA[1:], self._close_cdata),),
            "cdata_end": (
                (CDATA[:1], self._reopen_cdata),
                (CDATA[1:], self._again),
                ((x.parameter_close, x.call_close), self._ends),
            ),
        }

    def on_open(self, marker: str) -> None:
        self.s.raw = [marker]
        if marker == self.syntax.call_open:
            self.s.bare = True
            self._begin_tag("call_tag")

    def outside_calls(self, text: str) -> str:
        if not self.s.bare or self.s.raw:
            return super().outside_calls(text)
        rest = text.lstrip(" \t\r\n")
        self.s.done = bool(rest)
        return rest

    # ---- tags

    def _begin_tag(self, at: str) -> None:
        self.s.at, self.s.tag, self.s.quote = at, "", ""

    def _in_tag(self, text: str) -> str:
        s = self.s
        for position, char in enumerate(text):
            if s.quote:
                if char == s.quote:
                    s.quote = ""
            elif char in "\"'" and self.syntax.quoted:
                s.quote = char
            elif char == ">":
                s.tag += text[:position]
                self._tag_ended()
                return text[position + 1 :]
            if char in "<\r\n" or len(s.tag) + position >= MAX_TAG_CHARS:
                s.tag += text[:position]
                self._no_tag()
                return text[position:]
        s.tag += text
        return ""

    def verbatim(self, text: str) -> None:
        self.s.arguments.text(text, self.builder)

    TEXT = {
        **dict.fromkeys(("opened", "between"), outside_calls),
        **dict.fromkeys(("call_tag", "key_tag"), _in_tag),
        "value": TypedCallParser.value_text,
        "doubt": TypedCallParser.in_doubt,
        "cdata": verbatim,
        "cdata_end": TypedCallParser.in_doubt,
        "broken": CallParser.as_content,
    }

    def _tag_ended(self) -> None:
        s = self.s
        name = self._name_in_tag()
        if name is None:
            s.tag += ">"
            self._no_tag()
        elif s.at == "call_tag":
            self._begin_call(name)
        else:
            self._begin_value(name)

    def _name_in_tag(self) -> str | None:
        """Return the name in the complete tag, or None if the tag is malformed. Store the attribute
        `string_key`."""
        s, tag = self.s, self.s.tag.strip()
        if not self.syntax.quoted:
            return plain_name(tag)
        attributes = attributes_in("name=" + tag)
        if attributes is None:
            return None
        s.string = attributes.get(self.syntax.string_key, "")
        return attributes.get("name")

    def _no_tag(self) -> None:
        """Handle text that looked like a tag but is not one. After the start of a call's tag it is
        content; after the start of an argument's tag it is dropped."""
        s = self.s
        if s.at == "key_tag":
            self._enter("call")
        elif s.raw:
            s.raw.append(s.tag)
            self.reject("a tool call that has no name")
            s.done = True
        else:
            self.builder.reject_call(self.syntax.call_open + s.tag, "a tool call that has no name")
            s.at, s.done = "broken", s.bare

    def _begin_call(self, name: str) -> None:
        s = self.s
        if s.bare and s.raw and not self.builder.declares(name):
            s.tag += ">"
            self._no_tag()
            return
        head, _, tail = name.partition(".")
        if self.syntax.doubled_names and head == tail and not self.builder.declares(name):
            name = head
        self.start_call(name)

    def _begin_value(self, key: str) -> None:
        s = self.s
        kinds = self.kinds_of(key)
        if s.string:
            kinds = ("string",) if s.string == "true" else ()
        s.arguments.start(key, kinds, self.builder, bare_json=self._bare_json)
        self._enter("value")

    @property
    def _bare_json(self) -> bool:
        return self.s.string == "false" or (self.syntax.bare_json and not self.s.string)

    def _enter(self, at: str) -> None:
        s = self.s
        s.at, s.doubtful, s.closers, s.doubled, s.inner = at, [], [], False, ""

    def end_call(self, then: str) -> None:
        super().end_call(then)
        if self.s.defect:
            self.builder.parse_failed(self.s.defect)
            self.s.defect = ""

    # ---- a value that is wrapped in CDATA

    def _open_cdata(self, marker: str) -> None:
        if self.s.arguments.lead:
            self.s.at = "cdata"
        else:
            self.value_text(marker)

    def _close_cdata(self, marker: str) -> None:
        self.s.at, self.s.doubtful = "cdata_end", [marker]

    def _reopen_cdata(self, marker: str) -> None:
        self.s.at, self.s.doubtful = "cdata", []

    def _again(self, marker: str) -> None:
        self.was_text()
        self._close_cdata(marker)

    # ---- the end of a value

    def _ends(self, marker: str) -> None:
        """End the value at a marker that certainly ends it."""
        self._value_ended()
        if marker != self.syntax.parameter_close:
            self._structure(marker)

    def _value_ended(self, defect: str = "") -> None:
        s = self.s
        s.defect = s.defect or defect
        s.arguments.end(self.builder, bare_json=self._bare_json)
        self._enter("call")

    def _inner_tag(self, marker: str) -> None:
        """Handle a tag that opens a call or an argument, inside a value."""
        s = self.s
        if s.inner != "value":
            is_call = marker == self.syntax.call_open
            s.inner = "call" if is_call else "value" if s.inner == "call" else "argument"
        self.value_text(marker)

    def _doubt(self, marker: str) -> None:
        """Handle a closing tag in a value. What follows decides whether it ends the value."""
        self.s.at, self.s.doubtful, self.s.closers = "doubt", [marker], [marker]

    def _may_be_inner(self) -> bool:
        """Return whether the tags in doubt may belong to a call inside the value."""
        s, x = self.s, self.syntax
        owner = {x.parameter_close: ("value",), x.call_close: ("call", "value")}
        return s.inner in owner.get(s.closers[0], ())

    def _after_doubt(self, marker: str) -> None:
        s, x = self.s, self.syntax
        is_doubled = marker == s.closers[-1]
        if self._may_be_inner():
            after = {x.parameter_close: (x.call_close,), x.call_close: x.close}
            follows = marker in after.get(s.closers[-1], ())
        elif s.inner == "argument" and is_doubled:
            follows = False
        else:
            follows = is_doubled or (s.closers[-1] in x.close and marker in x.open)
            s.doubled |= is_doubled
        if follows:
            s.doubtful.append(marker)
            s.closers += [marker] * (not is_doubled)
        elif not self._may_be_inner() and self._ends_value(marker):
            self._end_in_doubt()
            self._structure(marker)
        else:
            self.was_text()
            self._in_value(marker)

    def _in_value(self, marker: str) -> None:
        if marker in self._handlers["value"]:
            self.on_marker(marker)
        else:
            self.value_text(marker)

    def _ends_value(self, marker: str) -> bool:
        """Return whether `marker` shows that the closing tag in doubt ends the value."""
        x, first = self.syntax, self.s.closers[0]
        if first == x.parameter_close:
            return marker not in (x.parameter_close, x.call_open, *x.skip)
        if first == x.call_close:
            return marker not in (x.parameter_open, x.parameter_close, x.call_close)
        return marker == x.call_open or marker in x.final

    def _end_in_doubt(self) -> None:
        """End the value before the closing tags in doubt, and handle these tags."""
        s, x = self.s, self.syntax
        closers, is_inner = s.closers, self._may_be_inner()
        defect = UNCLOSED if closers[0] in x.close else DOUBLED if s.doubled else ""
        self._value_ended(INNER if is_inner else defect)
        if closers != [x.parameter_close]:
            self.end_call("between")
        if closers[-1] in x.open:
            self._structure(closers[-1])

    def was_text(self) -> None:
        s = self.s
        if s.at == "cdata_end":
            doubtful, s.doubtful, s.at = "".join(s.doubtful), [], "cdata"
            self.verbatim(doubtful)
            return
        close = self.syntax.parameter_close
        if self._may_be_inner():
            s.inner = "call" if s.closers == [close] else ""
        elif s.inner == "argument" and s.closers[0] == close:
            s.inner = ""
        s.closers, s.doubled = [], False
        super().was_text()

    def on_stray(self, marker: str) -> None:
        if self.s.at == "cdata_end":
            self.was_text()
        if self.s.at == "cdata":
            self.verbatim(marker)
        else:
            super().on_stray(marker)

    # ---- markers

    def _structure(self, marker: str) -> None:
        """Handle a marker outside of values."""
        s, x = self.s, self.syntax
        if marker in x.skip:
            if s.raw:
                s.raw.append(marker)
            return
        if marker == x.parameter_open:
            self._begin_tag("key_tag")
            return
        if s.at == "call":
            self.end_call("between")
            if marker == x.call_close:
                return
        if marker == x.call_open:
            if s.raw:
                s.raw.append(marker)
            self._begin_tag("call_tag")
        else:
            self._group_marker(marker)

    def _group_marker(self, marker: str) -> None:
        """Handle an opening or closing marker between calls."""
        s = self.s
        if s.raw:
            if marker in self.syntax.close:
                s.raw.append(marker)
            self.reject(NO_CALL)
        if marker in self.syntax.close:
            s.done = True
        else:
            s.at, s.bare, s.raw = "opened", False, [marker]

    def on_end(self, complete: bool) -> None:
        s = self.s
        if complete and s.at == "doubt" and s.closers != [self.syntax.parameter_close]:
            self._end_in_doubt()
        if complete and s.at == "call_tag" and not self.builder.is_open:
            self._no_tag()
        super().on_end(complete)
