"""The engine that is built for a ready worker: its limits and its class."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine_core.journal.file import Writer
from engine_core.journal.recorder import RecordedEngine
from engine_core.startup import build_engine
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.wire.cluster_key import ClusterKey
from protocol.worker.steps import WorkerReady
from tests.support.engines import a_card

KEY = ClusterKey(b"k" * 32)
CONFIG = EngineConfig(worker=WorkerConfig(model=""), kv_lease_s=7.0)
READY = WorkerReady(
    model=a_card(), max_len=512, max_slots=8, token_budget=96, block_tokens=16, num_blocks=33
)


def test_the_longest_request_fits_all_blocks_except_the_null_block() -> None:
    limits = build_engine(READY, CONFIG, epoch="e").limits
    assert (limits.max_len, limits.num_blocks, limits.max_slots) == (512, 33, 8)
    assert build_engine(replace(READY, num_blocks=4), CONFIG, epoch="e").limits.max_len == 48


@pytest.mark.parametrize("configured", [0, 96])
def test_the_engine_has_the_token_budget_that_its_worker_chose(configured: int) -> None:
    config = replace(CONFIG, token_budget=configured)
    assert config.worker.token_budget == configured
    assert build_engine(READY, config, epoch="e").limits.token_budget == 96


@pytest.mark.parametrize(("speculation", "drafts"), [("none", 0), ("ngram", 5)])
def test_the_worker_reserves_memory_for_drafts_only_with_speculation(
    speculation: str, drafts: int
) -> None:
    config = replace(CONFIG, speculation=speculation, max_drafts=5)
    assert config.worker.max_drafts == drafts


@pytest.mark.parametrize(
    ("role", "exports", "key", "lease_s"),
    [
        ("both", True, KEY, 7.0),
        ("both", False, KEY, 0.0),
        ("prefill", True, KEY, 7.0),
        ("decode", False, KEY, 0.0),
        ("both", True, None, 0.0),
    ],
)
def test_only_an_engine_that_hands_over_kv_has_a_lease_time(
    role: str, exports: bool, key: ClusterKey | None, lease_s: float
) -> None:
    config = replace(CONFIG, role=role, worker=replace(CONFIG.worker, kv_export=exports))
    assert build_engine(READY, config, epoch="e", key=key).limits.kv_lease_s == lease_s


def test_an_engine_with_a_journal_is_a_recorded_engine(tmp_path: Path) -> None:
    with closing(Writer(tmp_path, 1 << 20)) as journal:
        assert isinstance(build_engine(READY, CONFIG, epoch="e", journal=journal), RecordedEngine)
    assert not isinstance(build_engine(READY, CONFIG, epoch="e"), RecordedEngine)


@pytest.mark.parametrize(("cost", "warnings"), [(None, 0), (0.5, 0), (1.0, 1)])
def test_a_draft_model_as_slow_as_the_model_logs_a_warning(
    cost: float | None, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    build_engine(replace(READY, draft_cost=cost), CONFIG, epoch="e")
    logged = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(logged) == warnings
