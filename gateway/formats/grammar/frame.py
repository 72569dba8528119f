"""What stands around the thinking and around the answer proper."""

from __future__ import annotations

import msgspec


class Frame(msgspec.Struct, frozen=True):
    """opens, closes  stand around a block of thinking; `closes` leads to where the next part of the
                   answer begins. "" where there is no thinking, or only the prompt opens it
    before, after  stand around content. What ends the whole answer is no part of it
    """

    opens: str = ""
    closes: str = ""
    before: str = ""
    after: str = ""
