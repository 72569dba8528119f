"""Checks the worker on the device: a recorded stream with every kind of request gives the tokens of
the CPU, in float32, and no launch of a step waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import product

import torch

from protocol.steps import StepResult
from tests.gpu.session import GpuSession
from tests.gpu.table import GpuRow, failed, passed
from tests.support.device_stream import FLOAT, DeviceWorker, assert_same, record_stream
from tests.support.fused_twins import FusedAttention, FusedTwins
from tests.support.pretended_device import DEVICE, PretendedDevice
from tests.support.recording import BLOCK_TOKENS, Recording, replay
from worker.batch.decode_graph import CudaGraphs
from worker.models.load import load_model

MODEL = "stream"
REHEARSED_STEPS = 12

Launching = Callable[[], AbstractContextManager[object]]


def check_stream(session: GpuSession) -> Iterator[GpuRow]:
    folder = session.models / MODEL
    folder.mkdir(parents=True, exist_ok=True)
    recorded = record_stream(folder)
    expected = list(replay(recorded, recorded.steps))
    for is_captured, depth in product((False, True), (1, 2)):
        name = f"{'captured' if is_captured else 'launched'} steps, {depth} in flight"
        with ExitStack() as stack:
            place = _pretended if session.is_rehearsal else _on_gpu
            worker, launching = place(session, stack, is_captured=is_captured)
            yield _compare(session, name, worker, launching, recorded, expected, depth)


def _compare(
    session: GpuSession,
    name: str,
    worker: DeviceWorker,
    launching: Launching,
    recorded: Recording,
    expected: list[StepResult],
    depth: int,
) -> GpuRow:
    """Replay the stream, and return whether all results are those of the CPU."""
    count = session.choose(len(expected), REHEARSED_STEPS)
    found = worker.replay(recorded.steps[:count], depth=depth, launching=launching)
    number = 0
    try:
        for number, result in enumerate(found):
            assert_same(result, expected[number])
    except (AssertionError, RuntimeError) as error:  # torch's error for a synchronisation
        reason = " ".join(str(error).split())[:300]
        return failed(name, f"after {number} of {count} results: {type(error).__name__} {reason}")
    return passed(name, f"{count} results equal those of the CPU; no launch waits")


def _on_gpu(
    session: GpuSession, stack: ExitStack, *, is_captured: bool
) -> tuple[DeviceWorker, Launching]:
    """Return a worker on the GPU, and the context in which torch refuses to wait for it."""
    from worker.attention.triton_paged import TritonPagedAttention
    from worker.kernels.gpu import TritonKernels

    device = session.device
    torch.cuda.set_device(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    folder = session.models / MODEL
    worker = DeviceWorker.of(
        load_model(folder, dtype=FLOAT, device=device, kernels=TritonKernels()),
        device,
        TritonPagedAttention(BLOCK_TOKENS, num_processors=processors),
        capture=CudaGraphs(device) if is_captured else None,
    )
    return worker, _refusing_to_wait


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _pretended(
    session: GpuSession, stack: ExitStack, *, is_captured: bool
) -> tuple[DeviceWorker, Launching]:
    """Return a worker on a pretended device, and the context in which it must not be waited for."""
    device = stack.enter_context(PretendedDevice())

    @contextmanager
    def launching() -> Iterator[None]:
        device.forget()
        yield
        assert not device.faults, device.faults

    sampling = session.triton("worker.sampling.triton_sampling").TritonSampling(block=64)
    folder = session.models / MODEL
    worker = DeviceWorker.of(
        load_model(folder, dtype=FLOAT, device=DEVICE, kernels=FusedTwins(device)),
        DEVICE,
        FusedAttention(device),
        sampling=sampling,
        capture=device.capture if is_captured else None,
    )
    return worker, launching
