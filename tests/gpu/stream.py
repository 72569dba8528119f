"""Checks the worker on the device: a recorded stream with every kind of request gives the tokens of
the CPU, in float32, and no launch of a step waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import product

import torch

from protocol.worker.steps import StepResult
from tests.gpu.session import GpuSession
from tests.gpu.table import GpuRow, failed, passed
from tests.support.device_stream import FLOAT, DeviceWorker, assert_same, record_stream
from tests.support.fused_twins import FusedAttention, FusedTwins
from tests.support.pretended_device import DEVICE, PretendedDevice
from tests.support.recording import BLOCK_TOKENS, replay
from worker.loading.decoder import load_model
from worker.step.decode_graph import CudaGraphs

MODEL = "stream"
REHEARSED_STEPS = 12

Launching = Callable[[], AbstractContextManager[object]]


def check_stream(session: GpuSession) -> Iterator[GpuRow]:
    folder = session.models / MODEL
    folder.mkdir(parents=True, exist_ok=True)
    recorded = record_stream(folder)
    steps = recorded.steps[: session.choose(None, REHEARSED_STEPS)]
    expected = list(replay(recorded, steps))
    for is_captured, depth in product((False, True), (1, 2)):
        name = f"{'captured' if is_captured else 'launched'} steps, {depth} in flight"
        with ExitStack() as stack:
            place = _pretended if session.is_rehearsal else _on_gpu
            worker, launching = place(session, stack, is_captured=is_captured)
            found = worker.replay(steps, depth=depth, launching=launching)
            yield _compare(name, found, expected)


def _compare(name: str, found: Iterable[StepResult], expected: Sequence[StepResult]) -> GpuRow:
    """Return whether all results of a replay are those of the CPU."""
    count, number = len(expected), 0
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
