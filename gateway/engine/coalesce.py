"""Merges the outputs of several steps if this process lags behind its engine.

The engine sends one output for each step and request. If more than MAX_PIECES outputs wait to be
processed, all outputs of a request are merged into one. The time to process them then depends
mainly on the number of requests, not on the number of tokens. So the process catches up. Output for
a client that does not read is merged in the same way (`generation.sinks`).

Parsers return the same text however the tokens are cut into outputs. So merging changes the number
of events but not the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from protocol.engine.messages import Output, Outputs

MAX_PIECES = 256
"""Most outputs processed without merging. Processing this many takes a few milliseconds."""


def coalesce(steps: list[Outputs]) -> list[Outputs]:
    """Return `steps`, merged into one if they hold more than MAX_PIECES outputs."""
    num_pieces = sum([len(step.outputs) for step in steps])
    return steps if num_pieces <= MAX_PIECES else [merge_steps(steps)]


def merge_steps(steps: Sequence[Outputs]) -> Outputs:
    """Merge the outputs of consecutive steps into one message with one output for each request.
    Requests are ordered by their first output."""
    pieces: dict[int, list[Output]] = {}
    for step in steps:
        for output in step.outputs:
            pieces.setdefault(output.request, []).append(output)
    return Outputs(step=steps[-1].step, outputs=list(map(merge_outputs, pieces.values())))


def merge_outputs(outputs: Sequence[Output]) -> Output:
    """Return consecutive outputs of one request as one output. `outputs` is not empty."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    usages = [output.usage for output in outputs if output.usage is not None]
    return Output(
        request=last.request,
        tokens=_concatenated(outputs, "tokens"),
        logprobs=_concatenated(outputs, "logprobs"),
        prompt_logprobs=_concatenated(outputs, "prompt_logprobs"),
        finish=last.finish,
        stop_token=last.stop_token,
        usage=usages[-1] if usages else None,
        error=last.error,
        kv_handle=last.kv_handle,
        mirostat_mu=last.mirostat_mu,
        vectors=last.vectors,
    )


def _concatenated(outputs: Sequence[Output], field: str) -> list[Any]:
    return list(chain.from_iterable(map(attrgetter(field), outputs)))
