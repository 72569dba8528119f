"""The engine's news that came in together, as it is to be told.

A little is told as it came: one piece for each step and request. Where more than MANY pieces wait,
this process is behind its engine, and all that waits for one request becomes one piece. To tell it
then takes as long as there are requests, hardly longer with more tokens: so what is late catches
up, and no stream waits long for what others have to hear. In the same way what waits for a client
that takes nothing becomes one piece (`untold`).

A reader says the same however tokens are cut into pieces, so no answer changes, but for the number
of events that it comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from protocol.messages import Output, Outputs

MANY = 256
"""Pieces; to tell so many takes a few milliseconds."""


def as_told(steps: list[Outputs]) -> list[Outputs]:
    """All of it, and what is of one request in its order."""
    num_pieces = sum([len(step.outputs) for step in steps])
    return steps if num_pieces <= MANY else [joined(steps)]


def joined(steps: Sequence[Outputs]) -> Outputs:
    """One piece for each request, in the order of their first ones."""
    pieces: dict[int, list[Output]] = {}
    for step in steps:
        for output in step.outputs:
            pieces.setdefault(output.request, []).append(output)
    return Outputs(step=steps[-1].step, outputs=list(map(one_piece, pieces.values())))


def one_piece(outputs: Sequence[Output]) -> Output:
    """Of one request, in their order; at least one."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    told = [output.usage for output in outputs if output.usage is not None]
    return Output(
        request=last.request,
        tokens=_all(outputs, "tokens"),
        logprobs=_all(outputs, "logprobs"),
        prompt_logprobs=_all(outputs, "prompt_logprobs"),
        finish=last.finish,
        stop_token=last.stop_token,
        usage=told[-1] if told else None,
        error=last.error,
        kv_handle=last.kv_handle,
    )


def _all(outputs: Sequence[Output], field: str) -> list[Any]:
    return list(chain.from_iterable(map(attrgetter(field), outputs)))
