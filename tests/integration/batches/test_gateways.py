"""Batches with several gateway processes: leases, kills, drains, expiry and revoked keys."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from gateway.store.batch_database import BatchDatabase
from gateway.store.batch_queries import NewBatch
from protocol.engine.messages import Generate
from protocol.shared import api_keys
from tests.integration.batches.conftest import client_of
from tests.integration.batches.test_batches import (
    COMPLETIONS,
    awaited,
    created,
    echo,
    rows_of,
    uploaded,
)
from tests.support.batches import complaints, completion_lines
from tests.support.gateway_process import GatewayProcess
from tests.support.processes import descendants_of
from tests.support.scripted_engine import Reply, ScriptedEngine
from tests.support.waiting import eventually

pytestmark = pytest.mark.long


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "files.db"


def started(engine: ScriptedEngine, path: Path, **config: Any) -> GatewayProcess:
    return GatewayProcess(engine=engine.address, file_store=str(path), **config)


def num_done(client: OpenAI, batch: str) -> int:
    return int(client.batches.retrieve(batch).request_counts.completed)


def worker_pids(gateway: GatewayProcess) -> list[int]:
    family = descendants_of(gateway.process.pid)
    return [pid for pid, line in family if "gunicorn" in line]


@pytest.fixture
def counted(engine: ScriptedEngine) -> dict[tuple[int, ...], int]:
    """How often the engine has computed each prompt."""
    counts: dict[tuple[int, ...], int] = {}

    def script(generate: Generate) -> Reply:
        prompt = tuple(generate.prompt.tolist())
        counts[prompt] = counts.get(prompt, 0) + 1
        return echo(generate)

    engine.script = script
    return counts


def test_two_gateways_share_batches_and_each_line_is_computed_once(
    engine: ScriptedEngine, path: Path, counted: dict[tuple[int, ...], int]
) -> None:
    lines = completion_lines(40)
    for number, line in enumerate(lines):
        line["body"]["prompt"] = f"prompt {number}"
    with (
        started(engine, path) as first,
        started(engine, path) as second,
        client_of(first.await_ready()) as client,
        client_of(second.await_ready()) as elsewhere,
    ):
        batches = [created(each, lines).id for each in (client, elsewhere) for _ in range(3)]
        for batch in batches:
            done = awaited(elsewhere, batch)
            assert complaints(lines, rows_of(client, done.output_file_id)) == []
    assert len(counted) == 40
    assert set(counted.values()) == {6}


def test_a_batch_of_a_killed_gateway_is_continued_and_each_line_has_one_result(
    engine: ScriptedEngine, path: Path, counted: dict[tuple[int, ...], int]
) -> None:
    engine.step_s = 0.01
    lines = completion_lines(400)
    with started(engine, path) as gateway, client_of(gateway.await_ready()) as client:
        batch = created(client, lines).id
        for moment in (20, 90):
            assert eventually(lambda: num_done(client, batch) >= moment)  # noqa: B023
            for pid in worker_pids(gateway):
                os.kill(pid, signal.SIGKILL)
            gateway.await_ready()  # gunicorn has started another worker
        assert eventually(lambda: num_done(client, batch) >= 150)
        for pid in [*worker_pids(gateway), gateway.process.pid]:
            os.kill(pid, signal.SIGKILL)
        gateway.end()
    engine.step_s = 0.001
    with started(engine, path) as gateway, client_of(gateway.await_ready()) as client:
        done = awaited(client, batch)
        assert done.status == "completed"
        assert complaints(lines, rows_of(client, done.output_file_id)) == []
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (400, 400, 0)


def test_a_gateway_that_drains_leaves_its_batch_to_another_at_once(
    engine: ScriptedEngine, path: Path, counted: dict[tuple[int, ...], int]
) -> None:
    engine.step_s = 0.01
    lines = completion_lines(300)
    with started(engine, path) as first, client_of(first.await_ready()) as client:
        batch = created(client, lines).id
        assert eventually(lambda: num_done(client, batch) >= 20)
        first.signal(signal.SIGTERM)
        assert first.end() == 0, first.log
        assert "Traceback" not in first.log
    engine.step_s = 0.001
    with closing(opened(path)) as database:
        assert database.claim(time.time()) is not None, "the lease was given back"
        database.release(batch)
    with started(engine, path) as second, client_of(second.await_ready()) as client:
        done = awaited(client, batch)
        assert complaints(lines, rows_of(client, done.output_file_id)) == []


def opened(path: Path) -> BatchDatabase:
    return BatchDatabase(str(path), max_bytes=1 << 30, max_age_s=1e6)


def test_lines_left_at_the_end_of_the_window_expire(engine: ScriptedEngine, path: Path) -> None:
    engine.script = echo
    with started(engine, path) as gateway, client_of(gateway.await_ready()) as client:
        file = uploaded(client, completion_lines(5))
    with closing(opened(path)) as database:
        now = time.time()
        new = NewBatch(
            id="batch_late",
            owner=hashlib.sha256(b"k1").hexdigest()[:32],
            caller="",
            endpoint=COMPLETIONS,
            input_file=file,
            output_file="file-out",
            error_file="file-err",
            window="1m",
            metadata=b"null",
            output_s=3600,
            expires_at=now - 1,
        )
        assert database.create_batch(new, 10, now) is not None
    with started(engine, path) as gateway, client_of(gateway.await_ready()) as client:
        done = awaited(client, "batch_late")
        assert (done.status, done.output_file_id) == ("expired", None)
        assert done.expired_at is not None
        rows = rows_of(client, done.error_file_id)
    assert [row["error"]["code"] for row in rows] == ["batch_expired"] * 5
    assert all(row["response"] is None for row in rows)


def test_lines_run_under_the_account_of_their_key_until_it_is_revoked(
    engine: ScriptedEngine, path: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    alice, bob = (
        f'[keys.{name}]\ndigest = "{api_keys.digest_of(f"{name}-key")}"\nconcurrency = 7\n'
        for name in ("alice", "bob")
    )
    keys.write_text(alice + bob)
    keys.chmod(0o600)

    def script(generate: Generate) -> Reply:
        engine.is_paused = len(engine.generates) > 3
        return echo(generate)

    engine.script = script
    with started(engine, path, api_keys=str(keys), batch_concurrency=1) as gateway:
        gateway.await_status("/livez", 200)
        with client_of(gateway, "alice-key") as client:
            eventually(lambda: client.models.list().data)
            batch = created(client, completion_lines(9)).id
            engine.await_generates(4)
            assert {(g.account.name, g.account.concurrency) for g in engine.generates} == {
                ("alice", 7)
            }
            assert all("key:alice" in generate.namespace for generate in engine.generates)
            keys.write_text(bob)
            gateway.line_with("reloaded", on_stderr=True)
            engine.is_paused = False
        with closing(opened(path)) as database:

            def ended() -> Any:
                found = database.get_batch(batch, "key:alice")
                return found if found.status == "completed" else None

            done = eventually(ended)
            errors = b"".join(data for _, data in database.pieces(done.error_file, -1, 1 << 20))
    assert (done.num_completed, done.num_failed) == (4, 5)
    assert errors.count(b'"code":"invalid_api_key"') == 5
