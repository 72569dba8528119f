"""A choice of which only the tokens are returned: nothing is parsed and no token is held back.

Its deltas are those of a `ChoiceParser` without text. Stop strings need a `ChoiceParser`.
"""

from __future__ import annotations

from collections.abc import Collection

from gateway.formats.choice_parser import end_of
from gateway.formats.events import OutputDelta
from gateway.formats.finish import finish_reason
from protocol.messages import Output


class TokenPassthroughFactory:
    """Makes one `TokenPassthrough` per choice. `eos_token_ids` are the model's own end tokens."""

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def new(self) -> TokenPassthrough:
        return TokenPassthrough(self._eos_token_ids)


class TokenPassthrough:
    """Passes tokens on. After the end every push returns an empty delta, so late messages do no
    harm.
    """

    __slots__ = ("_eos_token_ids", "_finished")
    may_stop = False

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._finished = False

    def push(self, output: Output) -> OutputDelta:
        if self._finished:
            return OutputDelta(num_behind=len(output.tokens))
        if output.finish is None:
            return OutputDelta([], output.tokens, output.logprobs)
        self._finished = True
        end = end_of(output, finish_reason(output.finish), self._eos_token_ids)
        return OutputDelta([end], output.tokens, output.logprobs)
