"""Brute-force check of the invariants of slots, blocks and the prefix cache.

`Engine.check()` calls it, for tests and for `tidegate replay --check`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from engine_core.blocks.hash import extend_hashes, root_hash
from engine_core.blocks.prefix_cache import window_keys
from engine_core.encode.scheduler import MAX_STARTED, EncodeScheduler
from engine_core.images.rows import ImageRows
from engine_core.kv.leases import KVLeases
from engine_core.requests.request import Request, RequestPhase
from engine_core.schedule.scheduler import Scheduler
from protocol.engine.messages import Limits
from protocol.worker.steps import MAX_HEAD_LAG, NULL_BLOCK

UNBOUND = {RequestPhase.FETCHING, RequestPhase.READY}
FETCHING = {RequestPhase.FETCHING, RequestPhase.FINISHED}
"""Phases of a request in `Scheduler.unbound` whose fetch is not over."""


def check_invariants(
    scheduler: Scheduler,
    leases: KVLeases,
    open_requests: Iterable[Request],
    ended_in_flight: Collection[Request],
) -> None:
    """Raise AssertionError, with a description, if an invariant does not hold."""
    running, unbound = scheduler.running, scheduler.unbound
    assert running == sorted(running, key=lambda request: request.rank), (
        "running is not in rank order"
    )
    for request in open_requests:
        is_running = request.phase is RequestPhase.RUNNING
        assert (request in running) == is_running, f"{request.number}: `running` and phase disagree"
        is_unbound = request.phase in UNBOUND
        assert (request in unbound) == is_unbound, f"{request.number}: `unbound` and phase disagree"
        is_queued = request.phase in (RequestPhase.WAITING, RequestPhase.PREEMPTED)
        assert (request in scheduler.waiting) == is_queued, (
            f"{request.number}: `waiting` and phase disagree"
        )
    assert set(running) >= set(ended_in_flight), "a request that ended in flight lost its slot"
    assert {request.phase for request in unbound} <= UNBOUND | {RequestPhase.FINISHED}, (
        "wrong phase in `unbound`"
    )
    holders = running + unbound
    _check_slots(scheduler, holders)
    _check_blocks(scheduler, holders, leases)
    _check_content(scheduler, holders)
    _check_checkpoints(scheduler, holders, leases)


def _check_slots(scheduler: Scheduler, requests: list[Request]) -> None:
    slots = [request.slot for request in requests] + scheduler.slots.free
    assert sorted(slots, key=str) == sorted(range(scheduler.limits.max_slots), key=str), (
        "a slot is lost or has two owners"
    )


def check_images(images: ImageRows, requests: Collection[Request]) -> None:
    """Raise AssertionError, with a description, if an invariant of the images does not hold.

    requests   the open requests, and the ended ones that still own a slot
    """
    content = images.content
    users: dict[str, set[Request]] = {}
    for request in requests:
        for image in request.images:
            users.setdefault(image.digest, set()).add(request)
    assert content.users == users, "the users of images are wrong"
    assert content.num_bytes == sum(each.num_bytes for each in content.held.values())
    assert content.num_bytes <= content.max_bytes, "too much content of images is held"
    assert sum(images.kept.values()) <= images.max_rows, "too many rows of images are kept"
    assert set(images.encoding) <= images.kept.keys(), "an image without room is encoded"


def _check_blocks(scheduler: Scheduler, requests: list[Request], leases: KVLeases) -> None:
    pool = scheduler.pool
    holders = [0] * len(pool.holders)
    for block, count in leases.holders.items():
        holders[block] += count
    for request in requests:
        for block in request.held_blocks:
            holders[block] += 1
    assert not holders[NULL_BLOCK], "the null block is held"
    blocks = range(1, len(holders))
    if pool.holders[1:] != holders[1:]:
        wrong = [block for block in blocks if pool.holders[block] != holders[block]]
        raise AssertionError(f"blocks {wrong}: wrong number of holders")
    if [*map(pool.is_free, blocks)] != [not count for count in holders[1:]]:
        wrong = [block for block in blocks if pool.is_free(block) == bool(holders[block])]
        raise AssertionError(f"blocks {wrong}: not either free or held")
    num_cached = sum(map(pool.is_free, pool.cache.items()))
    assert pool.num_cached == num_cached, "wrong number of free blocks with cached content"
    for request in requests:
        _check_window(request, scheduler.limits)
        covered = scheduler.tables.num_covered(request)
        assert covered >= request.num_computed, f"{request.number}: computed beyond its blocks"
        assert 0 <= request.num_computed <= len(request.tokens), (
            f"{request.number}: computed beyond its tokens"
        )
        ahead = request.num_scheduled - request.num_computed
        is_drafted = request.uses_draft_model or request.uses_head
        ends_at = request.num_scheduled if is_drafted else 0
        assert request.num_draft_computed <= max(ends_at, len(request.tokens)), (
            f"{request.number}: the draft model computed beyond its tokens"
        )
        lag = request.num_scheduled - request.num_draft_computed
        assert not request.uses_head or lag <= MAX_HEAD_LAG, (
            f"{request.number}: the head needs hidden states that are not kept"
        )
        assert ahead >= 0, f"{request.number}: scheduled less than computed"
        assert covered >= request.num_scheduled, f"{request.number}: scheduled beyond its blocks"
        for end in (request.num_computed, request.num_scheduled):
            assert request.last_end(end) == end, f"{request.number}: a whole run is cut"
        is_out = bool(ahead or request.num_pending)
        assert is_out == bool(request.num_in_flight), (
            f"{request.number}: wrong number of plans in flight"
        )


def _check_window(request: Request, limits: Limits) -> None:
    """Check that the request holds the blocks that later queries read, and no earlier ones."""
    size, end, groups = limits.block_tokens, request.num_computed, limits.kv_groups
    window = limits.kv_window if groups is None else groups.window
    window = end + 1 if window is None else window
    needed = {position // size for position in range(max(end + 1 - window, 0), end)}
    first = min(needed, default=end // size)
    assert len(request.window_tables) == (0 if groups is None else groups.window_blocks)
    for table in request.window_tables or [request.blocks]:
        freed = {i for i, block in enumerate(table) if block == NULL_BLOCK}
        assert not needed & freed, f"{request.number}: a block in its window was freed"
        assert freed == set(range(first)), (
            f"{request.number}: holds a block that its window has passed"
        )
        assert len(freed) == request.num_passed >= request.num_passed_sent
        assert len(table) <= len(request.blocks), f"{request.number}: lacks a block in a column"
    assert groups is None or NULL_BLOCK not in request.blocks


def _check_content(scheduler: Scheduler, requests: list[Request]) -> None:
    """Check the held blocks that the prefix cache can find.

    The hash of such a block must be the hash of its request's tokens, and all its positions must be
    computed.
    """
    size = scheduler.limits.block_tokens
    findable = scheduler.pool.cache.items()
    digest = scheduler.prefixes.hashes.model_digest
    roots = {
        key: root_hash(digest, *key)
        for key in {(request.namespace, request.adapter_digest) for request in requests}
    }
    for request in requests:
        tables = [request.blocks, *request.window_tables]
        found = [
            (index, number, block)
            for number, table in enumerate(tables)
            for index, block in enumerate(table)
            if block in findable
        ]
        if not found:
            continue
        fresh: list[bytes] = []
        root = roots[request.namespace, request.adapter_digest]
        num_full = min(max(found)[0] + 1, len(request.tokens) // size)
        extend_hashes(fresh, root, request.tokens, size, num_full, request.images)
        for index, number, block in found:
            key = fresh[index]
            if number:
                key = window_keys(key, len(request.window_tables))[number - 1]
            assert findable[block] == key, f"block {block}: wrong content"
            end = (index + 1) * size
            assert end <= request.num_computed, f"block {block}: not computed"
            is_draft_computed = request.uses_draft_model and bool(
                scheduler.pool.cache.num_draft_computed([block])
            )
            assert not is_draft_computed or end <= request.num_draft_computed, (
                f"block {block}: not computed by the draft model"
            )


def _check_checkpoints(scheduler: Scheduler, requests: list[Request], leases: KVLeases) -> None:
    """Check that each checkpoint is free, held by `requests` and leases, or cached with its
    block."""
    held = Counter(leases.checkpoints)
    for request in requests:
        held.update(request.held_checkpoints)
    checkpoints = scheduler.pool.cache.checkpoints
    if checkpoints is None:
        assert not held, "a checkpoint is held, but there are none"
        return
    assert checkpoints.holders == held, "wrong number of holders of a checkpoint"
    cached = checkpoints.items()
    assert len(set(cached.values())) == len(cached), "a checkpoint is cached twice"
    unheld = set(cached.values()) - held.keys()
    assert sorted([*checkpoints.free, *held, *unheld]) == [*range(1, checkpoints.total + 1)], (
        "a checkpoint is not in exactly one of three places: free, held or cached"
    )
    assert (checkpoints.num_held, checkpoints.num_cached) == (len(held), len(unheld))
    lost = cached.keys() - set(scheduler.pool.cache.items().values())
    assert not lost, "a checkpoint is cached without the block that it follows"
    size = scheduler.limits.block_tokens
    for request in requests:
        is_fetching = request.phase in FETCHING and request in scheduler.unbound
        reserved = request.prompt_tokens if request.kv_readers else None
        for position in request.checkpoints:
            assert position > 0, f"{request.number}: a checkpoint of no positions"
            assert position % size == 0, f"{request.number}: a checkpoint within a block"
            is_saved = position <= request.num_computed or position == reserved
            assert is_saved or is_fetching or position <= request.num_scheduled, (
                f"{request.number}: a checkpoint never saved"
            )
            assert is_saved or is_fetching or request.num_in_flight, (
                f"{request.number}: holds a checkpoint that no step saves"
            )


def check_encoding(encoding: EncodeScheduler, requests: Collection[Request]) -> None:
    """Raise AssertionError, with a description, if an invariant of the open `requests` that encode
    does not hold."""
    planned = {request for step in encoding.inflight for request, _ in step.parts}
    for request in requests:
        progress, number = request.encode, request.number
        assert progress is not None
        assert request.slot is None, f"{number}: encodes, and owns a slot"
        assert not request.blocks, f"{number}: encodes, and owns blocks"
        is_waiting = request.phase is RequestPhase.WAITING
        assert (request in encoding.queue_of(request.client)) == is_waiting, (
            f"{number}: the queue of requests that encode and phase disagree"
        )
        is_started = request.phase is RequestPhase.RUNNING and not progress.is_planned
        assert (request in encoding.started) == is_started, (
            f"{number}: `started` and the inputs in plans disagree"
        )
        assert (request in encoding.unsent) == progress.is_done, (
            f"{number}: its results and `unsent` disagree"
        )
        is_known = is_waiting or is_started or request in planned or request in encoding.unsent
        assert is_known, f"{number}: was forgotten"
        in_flight = sum(
            count for step in encoding.inflight for owner, count in step.parts if owner is request
        )
        assert progress.num_done + in_flight == progress.num_planned <= len(progress.lengths), (
            f"{number}: lost an input"
        )
    assert encoding.num_open == len(requests), "requests that encode are miscounted"
    waiting = sum(request.phase is RequestPhase.WAITING for request in requests)
    assert encoding.waiting_load.requests == waiting, "an ended request still waits"
    sizes = [sum(map(len, each.encode.results)) for each in encoding.unsent if each.encode]
    assert encoding.unsent.num_bytes == sum(sizes), "unsent bytes are miscounted"
    assert set(encoding.unsent) <= set(requests), "an ended request has unsent results"
    usages = {request.account_usage for request in encoding.started}
    most = MAX_STARTED + max(len(usages) - 1, 0)
    assert len(encoding.started) <= most, "too many requests are started"
    assert set(encoding.started) <= set(requests), "an ended request is still started"
