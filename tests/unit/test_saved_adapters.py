"""LoRA adapters that were loaded at run time are loaded again by a restarted engine."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from engine_core.adapters.saved import AdapterFile, AdapterRestore, SavedAdapter
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.sockets import ADAPTERS_SUFFIX
from tests.support.engines import Bench
from tools.processes.run_lock import clear

FR, DE, IT = (SavedAdapter(name, f"{name} files") for name in ("fr", "de", "it"))
STARTER = (7, 1000)


def bench(*started: str) -> Bench:
    return Bench(adapters=started, max_adapters=3)


def names(scene: Bench) -> list[str]:
    return [info.name for info in scene.engine.adapters.infos]


def answer(scene: Bench, restore: AdapterRestore, *, fails: bool = False) -> None:
    """Let the worker carry out its next command, and pass the engine's reply on."""
    scene.run_adapter(fails=fails)
    client, reply = scene.adapters.replies[-1]
    assert restore.on_reply(client, reply)


def test_the_adapters_of_the_same_starter_are_read(tmp_path: Path) -> None:
    path = tmp_path / "worker.sock.adapters"
    assert AdapterFile(path, STARTER).read() == []
    AdapterFile(path, STARTER).write([FR, DE])
    assert AdapterFile(path, STARTER).read() == [FR, DE]
    for other in ((7, 1001), (8, 1000)):
        assert AdapterFile(path, other).read() == []
    AdapterFile(path, STARTER).write([DE])
    assert AdapterFile(path, STARTER).read() == [DE]
    assert os.listdir(tmp_path) == ["worker.sock.adapters"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"starter": [7], "adapters": []}',
        b'{"starter": [7, 1000], "adapters": [{"name": "\xff", "path": "x"}]}',
    ],
)
def test_a_damaged_file_is_reported_and_ignored(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "adapters"
    path.write_bytes(content)
    assert AdapterFile(path, STARTER).read() == []
    assert "adapters cannot be loaded again after the restart" in caplog.text


def test_a_file_that_cannot_be_written_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    AdapterFile(tmp_path / "none" / "adapters", STARTER).write([FR])
    assert "adapters will be missing after a restart" in caplog.text


def test_only_adapters_that_were_loaded_at_run_time_are_saved(tmp_path: Path) -> None:
    file = AdapterFile(tmp_path / "adapters", STARTER)
    restore, scene = AdapterRestore(file), bench("fr")
    assert scene.load_adapter("de", "de files") is None
    restore.save(scene.engine.adapters)
    assert file.read() == [], "it is not loaded yet"
    scene.run_adapter()
    assert not restore.on_reply(*scene.adapters.replies[-1]), "a client has loaded it"
    restore.save(scene.engine.adapters)
    assert file.read() == [DE]
    assert scene.unload_adapter("fr") is None
    scene.run_adapter()
    assert scene.load_adapter("fr", "fr files") is None
    scene.run_adapter()
    restore.save(scene.engine.adapters)
    assert sorted(file.read(), key=lambda each: each.name) == [DE, FR]
    assert scene.unload_adapter("de") is None
    restore.save(scene.engine.adapters)
    assert file.read() == [FR]


def test_a_restarted_engine_loads_them_and_skips_those_that_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = AdapterFile(tmp_path / "adapters", STARTER)
    file.write([FR, DE, IT])
    restore, scene = AdapterRestore(file), bench()
    assert not restore.is_busy
    restore.start(scene.engine)
    assert names(scene) == []
    answer(scene, restore)
    answer(scene, restore, fails=True)
    assert restore.is_busy
    restore.save(scene.engine.adapters)
    assert file.read() == [FR, DE, IT], "another restart must find all of them"
    answer(scene, restore)
    assert not restore.is_busy
    assert names(scene) == ["fr", "it"]
    assert "the adapter 'de' (de files) is missing after the restart: the file is" in caplog.text
    assert "the adapter 'it' was loaded again" in caplog.text
    restore.save(scene.engine.adapters)
    assert file.read() == [FR, IT]


def test_an_adapter_that_the_engine_refuses_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = AdapterFile(tmp_path / "adapters", STARTER)
    file.write([FR, SavedAdapter("a:b", "x"), DE])
    restore, scene = AdapterRestore(file), bench("fr")
    restore.start(scene.engine)
    assert "'fr' (fr files) is missing after the restart" in caplog.text
    assert "'a:b' (x) is missing after the restart" in caplog.text
    answer(scene, restore)
    assert (names(scene), restore.is_busy) == (["fr", "de"], False)


def test_a_draining_engine_loads_none(tmp_path: Path) -> None:
    file = AdapterFile(tmp_path / "adapters", STARTER)
    file.write([FR])
    restore, scene = AdapterRestore(file), bench()
    scene.engine.drain()
    restore.start(scene.engine)
    assert not restore.is_busy


def test_the_file_lies_beside_the_workers_socket_and_is_removed_with_it(tmp_path: Path) -> None:
    """An engine that loads no adapters, or whose worker has no socket here, has no file."""
    address = f"ipc://{tmp_path}/worker.sock"
    loads = EngineConfig(worker=WorkerConfig(model="m", lora_dir="/adapters"))
    for config, worker_address in (
        (loads, "tcp://0.0.0.0:1"),
        (EngineConfig(worker=WorkerConfig(model="m")), address),
    ):
        AdapterRestore.from_config(config, worker_address).save(bench().engine.adapters)
    assert os.listdir(tmp_path) == []
    scene = bench()
    scene.load_adapter("fr", "fr files")
    scene.run_adapter()
    AdapterRestore.from_config(loads, address).save(scene.engine.adapters)
    assert os.listdir(tmp_path) == [f"worker.sock{ADAPTERS_SUFFIX}"]
    restarted = bench()
    AdapterRestore.from_config(loads, address).start(restarted.engine)
    restarted.run_adapter()
    assert names(restarted) == ["fr"]
    assert clear(tmp_path) == [f"worker.sock{ADAPTERS_SUFFIX}"]
