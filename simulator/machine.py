"""One simulated replica: its limits, and the times of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from protocol.config.engine import EngineConfig
from protocol.config.worker import MAX_SLOTS, TOKEN_BUDGET
from protocol.engine.kv_window import max_request_tokens
from protocol.engine.messages import Limits
from protocol.tools.simulation import SimulatedMachine, SimulationConfig
from simulator.hardware import plan_memory, read_table
from simulator.measured import read_measurements
from simulator.steps import FittedSteps, Roofline, StepTimeModel


@dataclass(frozen=True, slots=True)
class SimulatedReplicaType:
    """The config, limits and step times that all replicas of a simulated cluster have."""

    engine: EngineConfig
    limits: Limits
    #: Returns the step times of a replica, by its number.
    steps_of: Callable[[int], StepTimeModel]
    description: str
    #: Bytes of K/V per token; 0: unknown.
    token_bytes: int = 0

    def facts(self) -> SimulatedMachine:
        limits = self.limits
        return SimulatedMachine(
            steps=self.description,
            max_slots=limits.max_slots,
            token_budget=limits.token_budget,
            block_tokens=limits.block_tokens,
            num_blocks=limits.num_blocks,
            max_len=limits.max_len,
            token_bytes=self.token_bytes,
            state_bytes=limits.state_bytes,
            num_checkpoints=limits.num_checkpoints,
            state_interval=self.engine.state_interval,
        )


def replica_type(config: SimulationConfig) -> SimulatedReplicaType:
    """Return the type of the config's replicas. Raises ValueError and OSError if a file or a name
    in the config cannot be used."""
    return _measured(config) if config.steps else _estimated(config)


def _estimated(config: SimulationConfig) -> SimulatedReplicaType:
    worker = config.engine.worker
    is_file = config.hardware.endswith(".toml")
    table = read_table(config.hardware if is_file else "")
    gpu_name = next(reversed(table.gpus)) if is_file else config.hardware
    gpu, model = table.gpu(gpu_name), table.model(config.model)
    tp = config.tensor_parallel
    memory = plan_memory(
        gpu,
        model,
        tensor_parallel=tp,
        gpu_memory=worker.gpu_memory,
        block_tokens=worker.block_tokens,
        max_slots=worker.max_slots,
        max_len=worker.max_len,
    )
    blocks = worker.kv_blocks or memory.num_blocks
    longest = min(worker.max_len or model.max_position_embeddings, model.max_position_embeddings)
    steps = Roofline(gpu, model, tp)
    gpus = f"{tp} x {gpu_name}" if tp > 1 else gpu_name
    limits = replace(
        _limits(config, blocks, longest, is_gpu=True),
        max_slots=memory.max_slots,
        state_bytes=model.state_bytes,
        num_checkpoints=memory.num_checkpoints,
    )
    return SimulatedReplicaType(
        config.engine,
        limits,
        lambda _: steps,
        f"estimated for {config.model} on {gpus}",
        model.kv_bytes,
    )


def _measured(config: SimulationConfig) -> SimulatedReplicaType:
    found, worker = read_measurements(config.steps), config.engine.worker
    fitted = FittedSteps(found.steps)
    limits = found.limits
    if limits is None:
        if not worker.kv_blocks:
            raise ValueError("--kv-blocks is needed with the steps of `tidegate bench step`")
        limits = _limits(config, worker.kv_blocks, worker.max_len or 1 << 17, is_gpu=found.is_gpu)
    else:
        changes = {
            "max_slots": worker.max_slots,
            "token_budget": config.engine.token_budget,
            "num_blocks": worker.kv_blocks,
            "max_len": worker.max_len,
        }
        given = {name: value for name, value in changes.items() if value}
        limits = replace(limits, **given, prefix_cache=config.engine.prefix_cache)
    return SimulatedReplicaType(
        config.engine,
        limits,
        fitted.for_replica,
        f"{len(found.steps):,} measured steps of {found.name}, fitted to "
        f"{fitted.error(found.steps):.1%}",
    )


def _limits(config: SimulationConfig, blocks: int, longest: int, *, is_gpu: bool) -> Limits:
    worker = config.engine.worker
    return Limits(
        max_len=max_request_tokens(
            longest, num_blocks=blocks, block_tokens=worker.block_tokens, window=None, groups=None
        ),
        max_slots=MAX_SLOTS.choose(worker.max_slots, is_gpu=is_gpu),
        block_tokens=worker.block_tokens,
        num_blocks=blocks,
        token_budget=TOKEN_BUDGET.choose(config.engine.token_budget, is_gpu=is_gpu),
        prefix_cache=config.engine.prefix_cache,
    )
