"""Builds the `Engine` once the worker has loaded the model."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from engine_core.engine import Engine
from engine_core.journal.file import Writer
from engine_core.journal.recorder import RecordedEngine
from engine_core.kv.peers import PeerCluster
from engine_core.workers.process import WorkerLost
from protocol.config.engine import EngineConfig
from protocol.engine.kv_window import max_request_tokens
from protocol.engine.messages import Limits
from protocol.process.exit_codes import ExitCode
from protocol.wire.cluster_key import ClusterKey
from protocol.worker.steps import WorkerReady

log = logging.getLogger(__name__)


def build_engine(
    ready: WorkerReady,
    config: EngineConfig,
    *,
    epoch: str,
    key: ClusterKey | None = None,
    journal: Writer | None = None,
) -> Engine:
    """Return an engine for the worker that has sent `ready`.

    - epoch: identifies this life of the engine process
    - key: the cluster's key; None if the engine is not part of a cluster
    - journal: records all input of the engine; None for no journal, and always in a cluster

    Raises WorkerLost if an option cannot be combined with the model.
    """
    if ready.state_bytes:
        _check_state(config, ready.num_checkpoints)
    if not config.transfers_kv:
        key = None  # the key is only for the connections to workers and clients
    if ready.has_own_cache and config.speculation != "none":
        log.warning("the model keeps a cache of its own, so there are no drafts")
        config = replace(config, speculation="none")
    limits = _limits(ready, config, hands_over=key is not None and config.role != "decode")
    draft_cost, tiers = ready.draft_cost or 0.0, ready.kv_tiers
    if draft_cost >= 1:
        log.warning("the draft model or head is as slow as the model; it is not used")
    log.info(
        "engine ready: %s, %s, %d blocks of %d tokens, %d slots, %d tokens per step, "
        "max_len %d (%s)",
        ready.model.name,
        ready.model.dtype,
        limits.num_blocks,
        limits.block_tokens,
        limits.max_slots,
        limits.token_budget,
        limits.max_len,
        ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ready.phases),
    )
    if journal is not None:
        return RecordedEngine(
            journal,
            config,
            ready.model,
            limits,
            draft_cost=draft_cost,
            step_costs=ready.step_costs,
            tiers=tiers,
            adapters=ready.adapters,
        )
    return Engine(
        config,
        ready.model,
        limits,
        draft_cost=draft_cost,
        step_costs=ready.step_costs,
        cluster=PeerCluster(key.derive("kv"), epoch, ready.kv) if key else None,
        tiers=tiers,
        adapters=ready.adapters,
    )


def _check_state(config: EngineConfig, num_checkpoints: int) -> None:
    """Raise WorkerLost if an option moves K/V out of the cache, and the recurrent states that
    belong to it cannot be moved, because there are no checkpoints."""
    if config.prefix_cache and num_checkpoints:
        return
    lack = "no memory is left" if config.prefix_cache else "--no-prefix-cache is set"
    moving = {
        "--kv-host-gib": config.worker.kv_host_gib,
        "--kv-disk": config.worker.kv_disk,
        "--split, --role and --kv-address": config.transfers_kv,
    }
    for options, is_set in moving.items():
        if is_set:
            raise WorkerLost(
                "the model has recurrent layers, whose states are moved as checkpoints, and there "
                f"are none because {lack}: serve it without {options}",
                ExitCode.USAGE,
            )


def _limits(ready: WorkerReady, config: EngineConfig, *, hands_over: bool) -> Limits:
    max_len = ready.max_len
    can_resume = not ready.state_bytes or ready.num_checkpoints > 0
    if config.prefix_cache and not can_resume:
        log.warning("there is no memory for checkpoints of states, so no prefix is shared")
    if ready.model.generates:
        max_len = max_request_tokens(
            max_len,
            num_blocks=ready.num_blocks,
            block_tokens=ready.block_tokens,
            window=ready.kv_window,
            groups=ready.kv_groups,
        )
    return Limits(
        max_len=max_len,
        max_slots=ready.max_slots,
        block_tokens=ready.block_tokens,
        num_blocks=ready.num_blocks,
        token_budget=ready.token_budget,
        prefix_cache=config.prefix_cache and not ready.has_own_cache and can_resume,
        kv_lease_s=config.kv_lease_s if hands_over else 0.0,
        kv_window=ready.kv_window,
        kv_groups=ready.kv_groups,
        max_adapters=ready.max_adapters,
        state_bytes=ready.state_bytes,
        num_checkpoints=ready.num_checkpoints,
        image_rows=ready.image_rows,
    )
