"""What a worker does between its connection and its end: it loads the model and executes plans.

It locks its device, sends TokenizerRead, loads the model, sends WorkerReady, and then answers each
StepPlan with a StepResult until Stop (loop.py). Importing this module imports torch, which takes
seconds.
"""

from __future__ import annotations

import contextlib
import gc
import logging

import zmq
from msgspec.structs import replace

from protocol.config.worker import WorkerConfig
from protocol.worker.steps import TokenizerRead
from worker.device.device import lock_device
from worker.device.timing import StartupTiming
from worker.kv.layout import KVLayout
from worker.kv.transfer.service import KVTransferService
from worker.lora.service import AdapterService
from worker.service.connection import EngineConnection
from worker.service.loop import WorkerLoop
from worker.startup.assembly import assemble
from worker.startup.encoding import Assembled
from worker.vision.service import ImageService

log = logging.getLogger("worker")


def load_and_execute(
    config: WorkerConfig,
    context: zmq.Context[zmq.Socket[bytes]],
    engine: EngineConnection,
    timing: StartupTiming,
) -> None:
    """Load the model, then execute plans until Stop. The caller has disabled the garbage collector,
    which is enabled once the model is loaded."""

    def send_tokenizer(tokenizer: TokenizerRead) -> None:
        if config.rank == 0:
            engine.send(tokenizer)

    with contextlib.ExitStack() as stack:
        stack.enter_context(lock_device(config))
        assembled = assemble(config, timing, on_tokenizer=send_tokenizer)
        gc.collect()
        gc.freeze()  # later collections skip what was loaded
        gc.enable()
        _start_loop(config, context, engine, assembled, stack).run()


def _start_loop(
    config: WorkerConfig,
    context: zmq.Context[zmq.Socket[bytes]],
    engine: EngineConnection,
    assembled: Assembled,
    stack: contextlib.ExitStack,
) -> WorkerLoop:
    """Start the services of the worker's loop, which `stack` ends, and send WorkerReady. Return the
    loop."""
    runner, encoder, ready, states, tower = assembled
    if runner is None:
        loop = stack.enter_context(WorkerLoop(None, engine, None, encoder=encoder))
        engine.send(ready)
        return loop
    cache = runner.components.cache
    layout = KVLayout.from_cache(ready.model, cache, ready.state_bytes)
    kv_transfers = stack.enter_context(
        KVTransferService(config, context, cache, layout, states, numerics=ready.model.numerics)
    )
    adapters = None
    if runner.adapters.files is not None:
        adapters = stack.enter_context(AdapterService(runner.adapters))
    images = None
    if tower is not None:
        images = stack.enter_context(ImageService(tower, runner.image_rows))
    loop = stack.enter_context(
        WorkerLoop(
            runner,
            engine,
            kv_transfers,
            encoder=encoder,
            adapters=adapters,
            images=images,
            answers=config.rank == 0,
        )
    )
    ready = replace(ready, kv=kv_transfers.endpoint, kv_tiers=kv_transfers.tiers)
    engine.send(replace(ready, kv_report=kv_transfers.report()))
    log.debug("ready in %.1f s", sum(seconds for _, seconds in ready.phases))
    return loop
