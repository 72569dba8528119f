"""A worker whose steps take known times: those of a model of the simulator's table on a GPU of it.

An engine starts it instead of the real worker (tests/support/paced_server.py). The name of the
model in its WorkerConfig is MODEL@GPU. It sleeps, so other work on the machine hardly delays it.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import deque

import msgspec
import zmq

from protocol.config.worker import TOKEN_BUDGET, WorkerConfig
from protocol.process.lifeline import attach_to_parent
from protocol.wire import codec, sockets
from protocol.wire.arrays import Int32
from protocol.worker.steps import StepPlan, StepResult, Stop, ToWorker, WorkerReady
from simulator.hardware import plan_memory, read_table
from simulator.replica import work_of
from simulator.steps import Roofline
from tests.support.tokenizers import card_of, smollm2_tokenizer_json

TOKEN = 500
"""Every token of every answer."""


def main() -> None:
    attach_to_parent(signal.SIGKILL)
    config = msgspec.json.decode(sys.argv[2], type=WorkerConfig)
    model_name, _, gpu_name = config.model.partition("@")
    table = read_table()
    gpu, model = table.gpu(gpu_name), table.model(model_name)
    steps = Roofline(gpu, model, 1)
    memory = plan_memory(
        gpu,
        model,
        tensor_parallel=1,
        gpu_memory=config.gpu_memory,
        block_tokens=config.block_tokens,
        max_slots=config.max_slots,
    )
    ready = WorkerReady(
        model=card_of(smollm2_tokenizer_json(), vocab_size=49152, context_tokens=1 << 17),
        max_len=config.max_len or 8192,
        max_slots=memory.max_slots,
        token_budget=TOKEN_BUDGET.choose(config.token_budget, is_gpu=True),
        block_tokens=config.block_tokens,
        num_blocks=config.kv_blocks or memory.num_blocks,
        state_bytes=model.state_bytes,
        num_checkpoints=memory.num_checkpoints,
    )
    socket = sockets.connect_dealer(zmq.Context(), config.address)
    socket.send_multipart(codec.encode(ready))
    serve(socket, steps)


def serve(socket: zmq.Socket[bytes], steps: Roofline) -> None:
    """Answer plans until Stop. A step starts when it has arrived and the one before has ended."""
    decoder: codec.Decoder[ToWorker] = codec.Decoder(ToWorker)
    plans: deque[tuple[StepPlan, float]] = deque()  # with the time of arrival
    ends_at = 0.0
    while True:
        if plans:
            plan, arrived_at = plans[0]
            due = max(arrived_at, ends_at) + steps.seconds(work_of(plan))
            timeout_ms = max(0, int((due - time.monotonic()) * 1e3))
        if not plans or timeout_ms:
            if not socket.poll(timeout_ms if plans else None):
                continue
            message = decoder.decode(socket.recv_multipart())
            if isinstance(message, Stop):
                return
            if isinstance(message, StepPlan):
                plans.append((message, time.monotonic()))
            continue
        while time.monotonic() < due:  # less than a millisecond
            pass
        plans.popleft()
        ends_at = due
        num = sum(plan.row_samples.tolist())
        result = StepResult(step=plan.step, tokens=Int32.of([TOKEN] * num), failed=Int32.of([]))
        socket.send_multipart(codec.encode(result))


if __name__ == "__main__":
    main()
