"""The snapshot of an engine: its golden bytes, the restored engine, and its completeness.

After an intended change, raise `engine_core.journal.records.FORMAT`, write the golden bytes anew
with `python -m tests.unit.test_snapshot`, and review the difference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from engine_core.engine import Engine
from engine_core.journal.capture import take_snapshot
from engine_core.journal.restore import restore_snapshot
from engine_core.journal.snapshot import EngineSnapshot
from protocol.engine.attachments import Attachment
from tests.support.engines import Bench, a_card
from tests.support.storm import (
    AdapterStorm,
    EncodeStorm,
    ImageStorm,
    RequestStorm,
    SmallCacheStorm,
    StateStorm,
    WindowStorm,
)

GOLDEN = Path(__file__).parents[1] / "data" / "journal" / "snapshot.bin"


def sample(kind: inspect.Type) -> Any:
    """Return a value of this type, in which every field is set and no container is empty."""
    match kind:
        case inspect.StructType(cls=cls) if cls is Attachment:  # its fields depend on each other
            return Attachment(digest="0f" * 32, kind="image", runs=[(2, 2)], grid=(1, 1, 2))
        case inspect.StructType(fields=fields) | inspect.DataclassType(fields=fields):
            return kind.cls(**{field.name: sample(field.type) for field in fields})
        case inspect.IntType(ge=ge, gt=gt):
            return max(ge or 0, gt or 0) + 1
        case inspect.FloatType(ge=ge, gt=gt):
            return max(ge or 0, gt or 0) + 0.5
        case inspect.StrType():
            return "a"
        case inspect.BytesType():
            return b"bytes of 4*n"
        case inspect.BoolType():
            return True
        case inspect.EnumType(cls=cls):
            return list(cls)[-1]
        case inspect.LiteralType(values=values):
            return values[-1]
        case inspect.UnionType(types=types):
            return sample(next(each for each in types if not isinstance(each, inspect.NoneType)))
        case inspect.DictType(key_type=key, value_type=value):
            return {sample(key): sample(value)}
        case inspect.TupleType(item_types=items):
            return tuple(map(sample, items))
        case inspect.VarTupleType(item_type=item):
            return (sample(item),)
        case inspect.ListType(item_type=item):
            return [sample(item)]
        case inspect.SetType(item_type=item):
            return {sample(item)}
        case inspect.FrozenSetType(item_type=item):
            return frozenset({sample(item)})
    raise AssertionError(f"no sample of {kind}")


def golden() -> bytes:
    return msgspec.msgpack.encode(sample(inspect.type_info(EngineSnapshot)))


def test_the_bytes_of_a_snapshot_are_golden() -> None:
    assert golden() == GOLDEN.read_bytes()


def test_a_decoded_snapshot_encodes_to_the_same_bytes() -> None:
    decoded = msgspec.msgpack.decode(GOLDEN.read_bytes(), type=EngineSnapshot)
    assert msgspec.msgpack.encode(decoded) == GOLDEN.read_bytes()


# ---- the restored engine
def storms() -> Iterator[RequestStorm]:
    """Yield each storm after each of its operations. Some storms have grammars, each kind of
    drafts, steps in flight, tiers, windows or recurrent states."""
    plain = [RequestStorm(seed) for seed in (2, 3, 104, 205, 305)]
    windows = [WindowStorm(103), WindowStorm(103, 2)]
    others = [
        SmallCacheStorm(207, ["host", "disk"]),
        SmallCacheStorm(207, ["disk"], state_bytes=8, num_checkpoints=7, state_interval=16),
        AdapterStorm(5),
        ImageStorm(5),
        EncodeStorm(4),
        EncodeStorm(5),
        StateStorm(9),
        StateStorm(205),
    ]
    for storm in [*plain, *others, *windows]:
        for number in range(120):
            storm.bench.engine.tick(number / 8)
            storm.operate()
            yield storm


def restored(bench: Bench, data: bytes) -> Engine:
    engine = bench.engine
    fresh = Engine(bench.config, a_card(), engine.limits, tiers=list(bench.tiers.kept))
    cached = engine.admission.cached_grammars
    compiled = {digest: each.template for digest, each in cached.items()}
    restore_snapshot(fresh, msgspec.msgpack.decode(data, type=EngineSnapshot), compiled.__getitem__)
    return fresh


def plain(value: Any) -> Any:
    """Return `value` with dicts instead of objects, so that `==` compares all of it by value."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: plain(held) for key, held in value.items()}
    return [plain(held) for held in value] if isinstance(value, list) else value


def test_a_restored_engine_has_the_same_snapshot() -> None:
    """The bytes of equal snapshots can differ in the order of a dict or a set. Only if the bytes
    differ are the values compared, which takes much longer."""
    for storm in storms():
        taken = take_snapshot(storm.bench.engine)
        data = msgspec.msgpack.encode(taken)
        again = restored(storm.bench, data)
        again.check()
        retaken = take_snapshot(again)
        assert msgspec.msgpack.encode(retaken) == data or plain(retaken) == plain(taken)
        assert again.stats() == storm.bench.engine.stats()


# ---- completeness
STORED = {
    "AttachmentContent": "held num_bytes rejected",
    "HeldContent": "num_bytes num_rows",
    "ImageRows": "encode_s encoding kept num_encoded num_encoded_rows num_hits",
    "AcceptanceTally": "accepted checked idle prior",
    "AccountBuckets": "requests tokens",
    "AccountUsage": "name served",
    "Accounts": "_buckets now",
    "AdapterRegistry": "_adapters _generations",
    "Admission": "_order is_draining num_accepted num_refused",
    "BlockPool": "_free _passed _proven holders",
    "CheckpointPool": "_cached _free num_evicted",
    "Bucket": "filled_at per_minute used",
    "DraftOverhead": "_times",
    "EncodeProgress": "lengths num_done num_planned results splits",
    "EncodeScheduler": "continues debt held inflight num_open started unsent",
    "EncodeStep": "parts plan",
    "EngineAdapter": "client digest generation name num_requests path rank request row state",
    "EngineClock": "now",
    "FairShare": "_by_name _last _last_at _level _other_at",
    "Fetch": "job match request started_at state",
    "Fetches": "_jobs _last_job num_bytes num_failed num_tokens",
    "CachedGrammar": "has_failed num_bytes template",
    "GrammarCache": "_cached _pending jobs",
    "InflightStep": "needs_masks num_requested_drafts plan requests",
    "InflightSteps": "_steps",
    "Match": "num_blocks num_tokens source",
    "ModelDrafter": "_num_known _proposed",
    "OpenRequests": "_by_number",
    "PendingGrammar": "accounts num_chars requests",
    "PrefixCache": "_draft_computed _hash_of",
    "Rate": "per_s seconds",
    "Request": "account account_usage adapter images arrived_at blocks checkpoints client deadline "
    "drafting encode grammar hashes kept_checkpoint labels matcher max_total_tokens mirostat_mu "
    "namespace num_accepted "
    "num_cached num_charged num_computed num_draft_computed num_drafts num_fetched "
    "num_in_flight num_pending num_preemptions num_passed num_passed_sent num_published "
    "num_scheduled num_shared_columns number order params phase priority_credit "
    "prompt_logprobs prompt_tokens queue_time seed slot slot_generation stage_timer "
    "start_deadline stop_ids tokens uses_draft_model uses_head whole_runs window_tables",
    "RequestDrafting": "awaited_guess drafter forced_tally is_forced tally",
    "RequestEndings": "in_flight",
    "Scheduler": "_blocked_newcomer _has_paused_decodes num_prefill_tokens running unbound",
    "SlotPool": "_free _generations _releases",
    "Speculation": "_model_tally _num_started",
    "StageTimer": "_has_token _since _spent _stage",
    "StepTime": "count mean",
    "StepTimes": "drafted plain",
    "Throughput": "admitted busy_s computed encoded prompts",
    "Tier": "contents num_bytes num_dropped num_failed num_loaded num_stored states",
    "TierIndex": "_load_s _tiers",
    "Totals": "counts finished num_admitted_tokens step timeouts",
    "WaitingQueue": "_queues",
}
"""Class -> attributes that the snapshot contains."""
DERIVED = {
    "AttachmentContent": "users",
    "HeldContent": "tensors",
    "BlockPool": "num_cached",
    "CheckpointPool": "_cached_ids _holders",
    "Deadlines": "_heap _requests",
    "AdapterRegistry": "_users",
    "Fetches": "_jobs_by_request",
    "KVTransfers": "_now",
    "Matcher": "_budget_tracker _inner",
    "MatcherTemplate": "_budget _inner",
    "NgramDrafter": "_last _previous",
    "OpenRequests": "_by_account _by_label",
    "PrefixCache": "_block_of",
    "RequestDrafting": "shared_tally",
    "UnsentResults": "_by_client num_bytes",
    "WaitingQueue": "_entries _num_entries _waiting tokens",
    "_AccountQueue": "entry heap num tokens",
}
"""Class -> attributes that are derived from stored ones."""
CONFIGURED = {
    "AdapterRegistry": "_can_load _reserved _started",
    "Admission": "_config _draw_seed _limits _model",
    "CheckpointPool": "total",
    "Checkpointing": "_interval _size",
    "BlockTables": "_max_first _pool _size _window frees_blocks",
    "ContentHashes": "_block_tokens _roots model_digest",
    "EncodeScheduler": "_token_budget",
    "Engine": "limits",
    "EngineParts": "cache_events config limits model",
    "AttachmentContent": "max_bytes",
    "ImageRows": "max_rows",
    "FairShare": "_costs max_credit shared_prefill_budget",
    "Fetches": "_send _suppliers _timeout_s",
    "GroupedBlockTables": "_max_first _num_window _pool _size _width _window frees_blocks",
    "InflightSteps": "_depth",
    "KVLeases": "_lease_s _pool _send",
    "KVTransfers": "_draw_lease",
    "NgramDrafter": "_longest _shortest",
    "CachedGrammar": "num_users",
    "Peers": "_block_tokens _cluster _has_state _hashes _role _seal",
    "PrefixCache": "events",
    "Prefixes": "_block_tokens _cache _is_enabled _window _window_blocks hashes",
    "DraftPlanning": "_limits",
    "Scheduler": "_max_running limits",
    "Speculation": "_config _costs _draft_cost",
    "StepCosts": "_costs _tokens",
    "TierIndex": "_block_tokens _has_state _hashes _min_load_tokens",
}
"""Class -> attributes that are set when the engine is created, or derived from those."""
PARTS = {
    "Admission": "_accounts _adapters _clock _deadlines _encoding _fair_share _grammars "
    "_images _kv_transfers _open _speculation _throughput _waiting",
    "BlockPool": "cache",
    "Checkpointing": "_blocks _kv_transfers _prefixes pool",
    "EncodeScheduler": "_fair_share waiting",
    "Engine": "_parts accounts adapters admission clock deadlines encoding endings images "
    "inflight kv_transfers open_requests scheduler speculation throughput totals",
    "EngineParts": "accounts adapters admission clock deadlines encoding images inflight "
    "kv_transfers open_requests scheduler speculation throughput totals",
    "ImageRows": "content",
    "KVTransfers": "_peers fetches leases tiers",
    "PrefixCache": "checkpoints",
    "RequestEndings": "_parts",
    "DraftPlanning": "_speculation _tables",
    "Scheduler": "_drafts _images _kv_transfers checkpointing fair_share pool prefixes slots "
    "tables waiting",
    "Speculation": "overhead",
    "StageTimer": "_clock",
    "TierIndex": "_throughput",
    "WaitingQueue": "_fair_share",
}
"""Class -> attributes that refer to objects whose classes are listed too."""
CLUSTER_ONLY = {"KVLeases": "_holders _open num_ended", "Request": "handle kv_readers lease"}
"""Class -> attributes that are used only in a cluster, whose engines have no journal."""
SENT = {
    "AdapterRegistry": "_commands has_changed",
    "GrammarCache": "num_dropped_bytes",
    "ImageRows": "_commands",
    "KVTransfers": "commands",
    "Fetch": "error seconds",
    "RequestEndings": "_aborted freed",
}
"""Class -> replies and commands that are about to be sent. No decision depends on them."""


OBSERVED = {
    "Engine": "history",
    "EngineParts": "history",
    "EngineHistory": "_clock _requests _slots first_tokens gaps steps",
    "RequestHistories": "_bound _ended _ended_by_name _open _owners",
    "RequestHistory": "abort_reason account arrived_at binds client ended_at finish first_token_at "
    "image_tokens images name names order prompt_tokens spans usage",
    "SlotBind": "first slot until",
    "StageTimer": "spans",
    "StepLog": "_is_closed _num_rows _runs",
    "StepRun": "busy_s count drafts encoded ended_at first lack longest_s num_decodes num_tokens "
    "slots started_at tokens",
}
"""Class -> attributes that only reports on the engine's past use. A restored engine has no past."""


def attributes(value: object) -> dict[str, object]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        found |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    return found


def objects(root: object) -> Iterator[object]:
    """Yield all objects of classes in engine_core that are reachable from `root`."""
    seen: dict[int, object] = {}
    queue = [root]
    while queue:
        value = queue.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, dict):
            queue += [*value, *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            queue += value
        if type(value).__module__.startswith("engine_core.") and not isinstance(value, Enum):
            yield value
            queue += attributes(value).values()


def test_every_attribute_of_an_engine_is_stored_or_listed_with_a_reason() -> None:
    tables = (STORED, DERIVED, CONFIGURED, PARTS, CLUSTER_ONLY, SENT, OBSERVED)
    listed: dict[str, list[str]] = {}
    for table in tables:
        for name, words in table.items():
            listed.setdefault(name, []).extend(words.split())
    found: dict[str, set[str]] = {}
    for storm in storms():
        for value in objects(storm.bench.engine):
            found.setdefault(type(value).__name__, set()).update(attributes(value))
    assert {name: sorted(words) for name, words in found.items()} == {
        name: sorted(words) for name, words in listed.items()
    }


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_bytes(golden())
