"""The parts of an engine, and how they are put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine_core.adapters import AdapterRegistry
from engine_core.admission.admission import Admission
from engine_core.blocks.cache_events import CacheEvents
from engine_core.blocks.checkpoints import CheckpointPool
from engine_core.blocks.hash import ContentHashes
from engine_core.blocks.pool import BlockPool
from engine_core.blocks.prefix_cache import PrefixCache
from engine_core.encode.scheduler import EncodeScheduler
from engine_core.history.history import EngineHistory
from engine_core.images.content import AttachmentContent
from engine_core.images.rows import ImageRows
from engine_core.kv.peers import PeerCluster, Peers
from engine_core.kv.tiers import TierIndex
from engine_core.kv.transfers import KVTransfers
from engine_core.policy.accounts import Accounts
from engine_core.policy.deadlines import Deadlines
from engine_core.policy.throughput import Throughput
from engine_core.requests.open_requests import OpenRequests
from engine_core.requests.stage_timer import EngineClock
from engine_core.schedule.inflight import InflightSteps
from engine_core.schedule.scheduler import Scheduler
from engine_core.speculation.draft_policy import Speculation
from protocol.config.engine import EngineConfig
from protocol.engine.adapters import AdapterInfo
from protocol.engine.messages import Limits
from protocol.engine.model_card import ModelCard


@dataclass(slots=True)
class Totals:
    """What an engine has counted since its start."""

    #: Number of the last plan.
    step: int = 0
    #: Counters for EngineStats, by name.
    counts: Counter[str] = field(default_factory=Counter)
    #: Finish reason -> number of requests.
    finished: Counter[str] = field(default_factory=Counter)
    #: "queued" or "running" -> number of missed deadlines.
    timeouts: Counter[str] = field(default_factory=Counter)
    #: Known tokens of the requests admitted since the last commit.
    num_admitted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineParts:
    """Everything that an engine consists of. Each part has one job, and uses only those that its
    constructor names."""

    config: EngineConfig
    model: ModelCard
    limits: Limits
    clock: EngineClock
    totals: Totals
    throughput: Throughput
    accounts: Accounts
    deadlines: Deadlines
    open_requests: OpenRequests
    admission: Admission
    scheduler: Scheduler
    encoding: EncodeScheduler
    inflight: InflightSteps
    speculation: Speculation
    kv_transfers: KVTransfers
    adapters: AdapterRegistry
    images: ImageRows
    #: The last steps and requests, for reports. No decision depends on it.
    history: EngineHistory
    #: None: nobody subscribes to changes of the prefix cache.
    cache_events: CacheEvents | None


def build_parts(
    config: EngineConfig,
    model: ModelCard,
    limits: Limits,
    *,
    draft_cost: float,
    step_costs: Sequence[tuple[int, float]],
    draw_seed: Callable[[], int],
    cluster: PeerCluster | None,
    tiers: Sequence[str],
    adapters: Sequence[AdapterInfo],
) -> EngineParts:
    """Return the parts of a new engine. The arguments, and the errors raised, are those of
    `Engine`."""
    _check_transfers(config, limits, moves_kv=bool(cluster or tiers))
    speculation = Speculation(config, draft_cost, step_costs)
    hashes = ContentHashes(model.digest, limits.block_tokens)
    cache_events = _cache_events(config, limits)
    pool = BlockPool(limits.num_blocks, PrefixCache(cache_events, _checkpoints(limits)))
    peers = Peers(config, cluster, hashes, limits)
    throughput = Throughput()
    tier_index = TierIndex(tiers, hashes, limits, throughput, config.kv_load_tokens)
    kv_transfers = KVTransfers(config, pool, peers, tier_index)
    images = ImageRows(limits.image_rows, AttachmentContent(config.image_data_mib << 20))
    shared = hashes, pool, kv_transfers, speculation, images
    scheduler = Scheduler(limits, *shared, step_costs, config.state_interval)
    encoding = EncodeScheduler(scheduler.fair_share, limits.token_budget)
    open_requests, accounts = OpenRequests(), Accounts()
    clock, deadlines = EngineClock(), Deadlines()
    registry = AdapterRegistry(
        limits.max_adapters,
        adapters,
        reserved=(model.name,),
        can_load=bool(config.worker.lora_dir),
    )
    admission = Admission(
        config,
        model,
        limits,
        kv_transfers=kv_transfers,
        open_requests=open_requests,
        waiting=scheduler.waiting,
        encoding=encoding,
        speculation=speculation,
        throughput=throughput,
        accounts=accounts,
        fair_share=scheduler.fair_share,
        draw_seed=draw_seed,
        clock=clock,
        deadlines=deadlines,
        adapters=registry,
        images=images,
    )
    return EngineParts(
        config=config,
        model=model,
        limits=limits,
        clock=clock,
        totals=Totals(),
        throughput=throughput,
        accounts=accounts,
        deadlines=deadlines,
        open_requests=open_requests,
        admission=admission,
        scheduler=scheduler,
        encoding=encoding,
        inflight=InflightSteps(config.steps_in_flight),
        speculation=speculation,
        kv_transfers=kv_transfers,
        adapters=registry,
        images=images,
        history=EngineHistory(clock, limits.max_slots),
        cache_events=cache_events,
    )


def _cache_events(config: EngineConfig, limits: Limits) -> CacheEvents | None:
    """Return the changes of the prefix cache for subscribers; None: there are none."""
    if not config.kv_events:
        return None
    return CacheEvents(config.kv_events_namespace, limits.block_tokens)


def _checkpoints(limits: Limits) -> CheckpointPool | None:
    """Return the checkpoints; None if the model has no state, or prefixes are not shared."""
    if limits.state_bytes and limits.prefix_cache:
        return CheckpointPool(limits.num_checkpoints)
    return None


def _check_transfers(config: EngineConfig, limits: Limits, *, moves_kv: bool) -> None:
    """Raise ValueError if the limits allow freeing the blocks that a window has passed, but the
    engine must keep all blocks, or if K/V would be moved without the states that belong to it,
    because there are no checkpoints.

    moves_kv   whether K/V is transferred to other engines, or stored in tiers
    """
    if moves_kv and limits.state_bytes and not limits.prefix_cache:
        raise ValueError("K/V transfer and tiers need checkpoints of the model's recurrent states")
    window = limits.kv_window if limits.kv_groups is None else limits.kv_groups.window
    if window is not None and (moves_kv or config.speculation in ("model", "mtp")):
        raise ValueError(
            f"kv_window is {window}, but K/V transfer, tiers, draft models and heads need the "
            "blocks that a window has passed"
        )
