"""How models think aloud, as data: the markers, and where an answer starts."""

from __future__ import annotations

import msgspec


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One way of thinking aloud.

    open            markers that begin a block of reasoning
    close           markers that end it
    only_at_start   a block may begin only where nothing has been said
    calls_end_it    the first marker of a tool call ends the block, too
    wrap_open       markers that some models put before the answer proper, where nothing has been
                    said; no content
    wrap_close      markers behind it
    header          markers that begin a message; the text up to the next marker says whom it is for
    ignored         markers that say nothing in content
    prefix          told as content before all else
    default_inside  an answer starts inside a block where the prompt does not say otherwise
    force_content   an answer of nothing but reasoning has it as its content as well
    """

    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    only_at_start: bool = False
    calls_end_it: bool = False
    wrap_open: tuple[str, ...] = ()
    wrap_close: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    default_inside: bool = False
    force_content: bool = False

    def markers(self) -> tuple[str, ...]:
        return (
            self.open + self.close + self.wrap_open + self.wrap_close + self.header + self.ignored
        )


NO_REASONING = ReasoningFormat()

THINK = ReasoningFormat(open=("<think>",), close=("</think>",))
