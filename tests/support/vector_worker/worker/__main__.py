"""A worker that encodes without a model: the numbers of a result are the input's first token.

An engine starts it instead of the real worker if its folder is the first of PYTHONPATH. The
results of the largest request are as large as the protocol allows.
"""

from __future__ import annotations

import signal
import sys
from array import array

import msgspec
import zmq

from protocol.config.worker import WorkerConfig
from protocol.engine.encoding import MAX_INPUTS, MAX_RESULT_NUMBERS, EncodingCard
from protocol.process.lifeline import attach_to_parent
from protocol.wire import codec, sockets
from protocol.wire.arrays import Float32, Int32
from protocol.worker.steps import EncodePlan, EncodeResult, Stop, ToWorker, WorkerReady
from tests.support.engines import a_card

SIZE = MAX_RESULT_NUMBERS // MAX_INPUTS
"""Numbers of a result."""


def main() -> None:
    attach_to_parent(signal.SIGKILL)
    config = msgspec.json.decode(sys.argv[2], type=WorkerConfig)
    encoding = EncodingCard(task="embed", max_tokens=8, size=SIZE)
    ready = WorkerReady(
        model=a_card(generates=False, encoding=encoding),
        max_len=8,
        max_slots=1,
        token_budget=1024,
        block_tokens=config.block_tokens,
        num_blocks=2,
    )
    socket = sockets.connect_dealer(zmq.Context(), config.address)
    socket.send_multipart(codec.encode(ready))
    decoder: codec.Decoder[ToWorker] = codec.Decoder(ToWorker)
    while not isinstance(message := decoder.decode(socket.recv_multipart()), Stop):
        if isinstance(message, EncodePlan):
            socket.send_multipart(codec.encode(encode(message)))


def encode(plan: EncodePlan) -> EncodeResult:
    tokens, first, rows = plan.inputs.tokens.tolist(), 0, []
    for length in plan.inputs.lengths.tolist():
        rows.append(array("f", [tokens[first]]) * SIZE)
        first += length
    vectors = Float32(b"".join(rows), (len(rows), SIZE))
    return EncodeResult(step=plan.step, vectors=vectors, failed=Int32.of([]))


if __name__ == "__main__":
    main()
