"""Measures how long the largest request that encodes holds up the engine's loop when it comes.

    python -m tests.benchmarks.encode_admission

Prints the least CPU time of a few runs, in milliseconds, of what the loop does with such a request:
reading its message from the socket, decoding it, `add_encode`, and the plan of its first step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import pytest
import zmq

from protocol.engine.encoding import MAX_INPUTS, MAX_REQUEST_TOKENS, EncodeInputs
from protocol.engine.messages import Accepted, Encode, ToEngine
from protocol.wire import codec
from protocol.wire.arrays import Int32
from tests.support.engines import Bench, a_card

T = TypeVar("T")

TRIES = 10
VOCAB_SIZE = 151_936


def main() -> None:
    source = random.Random(1)
    length = MAX_REQUEST_TOKENS // MAX_INPUTS
    inputs = EncodeInputs(
        tokens=Int32.of([source.randrange(VOCAB_SIZE) for _ in range(MAX_REQUEST_TOKENS)]),
        lengths=Int32.of([length] * MAX_INPUTS),
    )
    card = a_card(vocab_size=VOCAB_SIZE)
    assert card.encoding is not None
    card = msgspec.structs.replace(
        card, encoding=msgspec.structs.replace(card.encoding, max_tokens=length)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.engines.a_card", lambda: card)
        runs = [_run(Encode(request=1, inputs=inputs)) for _ in range(TRIES)]
    for name in runs[0]:
        print(f"{name:10}  {min(run[name] for run in runs) * 1e3:6.1f} ms")
    print(f"{'together':10}  {min(sum(run.values()) for run in runs) * 1e3:6.1f} ms")


def _run(message: Encode) -> dict[str, float]:
    """Let a new engine receive `message`. Return the seconds of each part of that."""
    bench = Bench(
        token_budget=4096,
        max_len=4096,
        num_blocks=4096,
        max_waiting_tokens=1 << 30,
        checks=False,
    )
    spent: dict[str, float] = {}

    def timed(name: str, run: Callable[[], T]) -> T:
        started = time.thread_time()
        result = run()
        spent[name] = time.thread_time() - started
        return result

    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as here,
        context.socket(zmq.PAIR) as there,
    ):
        here.bind("inproc://here")
        there.connect("inproc://here")
        there.send_multipart(codec.encode(message))
        here.poll()
        frames = timed("receive", here.recv_multipart)
    received = timed("decode", lambda: codec.Decoder[ToEngine](ToEngine).decode(frames))
    assert isinstance(received, Encode)
    reply = timed("add", lambda: bench.engine.add_encode(b"client", received))
    assert isinstance(reply, Accepted)
    timed("plan", bench.engine.plan)
    return spent


if __name__ == "__main__":
    main()
