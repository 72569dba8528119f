"""LoRA adapters that were loaded at run time are loaded again by a restarted engine."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine_core.saved_adapters import (
    AdapterFile,
    AdapterRestore,
    EngineOrigin,
    SavedAdapter,
    SavedAdapters,
)
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.wire.sockets import ADAPTERS_SUFFIX
from tests.support.engines import Bench
from tools.processes.run_lock import clear

FR, DE, IT = (SavedAdapter(name, f"{name} files") for name in ("fr", "de", "it"))
ORIGIN = EngineOrigin(starter=(7, 1000), model="m", lora=["fr=fr"], lora_dir="/adapters")
NOTHING = SavedAdapters()


def bench(*started: str) -> Bench:
    return Bench(adapters=started, max_adapters=3)


def names(scene: Bench) -> list[str]:
    return [info.name for info in scene.engine.adapters.infos]


def answer(scene: Bench, restore: AdapterRestore, *, fails: bool = False) -> None:
    """Let the worker carry out its next command, and pass the engine's reply on."""
    scene.run_adapter(fails=fails)
    client, reply = scene.adapters.replies[-1]
    assert restore.on_reply(scene.engine, client, reply)


def loaded(*adapters: SavedAdapter) -> SavedAdapters:
    return SavedAdapters(loaded=list(adapters))


def restarted(file: AdapterFile, scene: Bench, *started: str) -> Bench:
    """Save the adapters of an engine. Return an engine that was started with the adapters
    `started`, and that has restored them."""
    AdapterRestore(file).save(scene.engine.adapters)
    new, restore = bench(*started), AdapterRestore(file)
    restore.start(new.engine)
    while restore.is_busy:
        answer(new, restore)
    restore.save(new.engine.adapters)
    return new


def test_the_adapters_of_an_engine_of_the_same_origin_are_read(tmp_path: Path) -> None:
    path = tmp_path / "worker.sock.adapters"
    assert AdapterFile(path, ORIGIN).read() == NOTHING
    saved = SavedAdapters(loaded=[FR, DE], unloaded=["it"])
    AdapterFile(path, ORIGIN).write(saved)
    assert AdapterFile(path, ORIGIN).read() == saved
    for other in (
        {"starter": (7, 1001)},
        {"starter": (8, 1000)},
        {"model": "another"},
        {"lora": ["fr=it"]},
        {"lora_dir": "/others"},
    ):
        assert AdapterFile(path, replace(ORIGIN, **other)).read() == NOTHING
    AdapterFile(path, ORIGIN).write(loaded(DE))
    assert AdapterFile(path, ORIGIN).read() == loaded(DE)
    assert os.listdir(tmp_path) == ["worker.sock.adapters"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"origin": {"starter": [7]}, "saved": {}}',
        b'{"saved": {"unloaded": ["\xff"]}}',
    ],
)
def test_a_damaged_file_is_reported_and_ignored(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "adapters"
    path.write_bytes(content)
    assert AdapterFile(path, ORIGIN).read() == NOTHING
    assert "adapters cannot be loaded again after the restart" in caplog.text


def test_a_file_that_cannot_be_written_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    AdapterFile(tmp_path / "none" / "adapters", ORIGIN).write(loaded(FR))
    assert "adapters will be missing after a restart" in caplog.text


def test_only_adapters_that_were_loaded_at_run_time_are_saved(tmp_path: Path) -> None:
    file = AdapterFile(tmp_path / "adapters", ORIGIN)
    restore, scene = AdapterRestore(file), bench("fr")
    assert scene.load_adapter("de", "de files") is None
    restore.save(scene.engine.adapters)
    assert file.read() == NOTHING, "it is not loaded yet"
    scene.run_adapter()
    assert not restore.on_reply(scene.engine, *scene.adapters.replies[-1]), "a client has loaded it"
    restore.save(scene.engine.adapters)
    assert file.read() == loaded(DE)
    assert scene.unload_adapter("fr") is None
    scene.run_adapter()
    assert scene.load_adapter("fr", "fr files") is None
    scene.run_adapter()
    restore.save(scene.engine.adapters)
    assert sorted(file.read().loaded, key=lambda each: each.name) == [DE, FR]
    assert scene.unload_adapter("de") is None
    restore.save(scene.engine.adapters)
    assert file.read() == SavedAdapters(loaded=[FR], unloaded=["fr"])


def test_a_restarted_engine_loads_them_and_skips_those_that_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = AdapterFile(tmp_path / "adapters", ORIGIN)
    file.write(loaded(FR, DE, IT))
    restore, scene = AdapterRestore(file), bench()
    assert not restore.is_busy
    restore.start(scene.engine)
    assert names(scene) == []
    answer(scene, restore)
    answer(scene, restore, fails=True)
    assert restore.is_busy
    restore.save(scene.engine.adapters)
    assert file.read() == loaded(FR, DE, IT), "another restart must find all of them"
    answer(scene, restore)
    assert not restore.is_busy
    assert names(scene) == ["fr", "it"]
    assert "the adapter 'de' (de files) is missing after the restart: the file is" in caplog.text
    assert "the adapter 'it' was loaded again" in caplog.text
    restore.save(scene.engine.adapters)
    assert file.read() == loaded(FR, IT)


def test_an_adapter_that_the_engine_refuses_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = AdapterFile(tmp_path / "adapters", ORIGIN)
    file.write(loaded(FR, SavedAdapter("a:b", "x"), DE))
    restore, scene = AdapterRestore(file), bench("fr")
    restore.start(scene.engine)
    assert "'fr' (fr files) is missing after the restart" in caplog.text
    assert "'a:b' (x) is missing after the restart" in caplog.text
    answer(scene, restore)
    assert (names(scene), restore.is_busy) == (["fr", "de"], False)


def test_another_adapter_under_the_name_of_one_of_the_start_is_there_after_a_restart(
    tmp_path: Path,
) -> None:
    """If the adapter of --lora returned, clients would get its weights under this name."""
    file = AdapterFile(tmp_path / "adapters", ORIGIN)
    scene = bench("fr")
    for change in (scene.unload_adapter("fr"), scene.load_adapter("fr", "other files")):
        assert change is None
        scene.run_adapter()
    for _ in range(2):
        scene = restarted(file, scene, "fr")
        assert [(info.name, info.path) for info in scene.engine.adapters.infos] == [
            ("fr", "other files")
        ]


def test_an_adapter_of_the_start_that_was_unloaded_is_not_there_after_a_restart(
    tmp_path: Path,
) -> None:
    file = AdapterFile(tmp_path / "adapters", ORIGIN)
    scene = bench("fr", "it")
    assert scene.unload_adapter("fr") is None
    for _ in range(2):
        scene = restarted(file, scene, "fr", "it")
        assert names(scene) == ["it"]


def test_adapters_that_need_the_rows_of_those_of_the_start_are_there_after_a_restart(
    tmp_path: Path,
) -> None:
    file = AdapterFile(tmp_path / "adapters", ORIGIN)
    scene = bench("a", "b", "c")
    for old, new in (("a", "fr"), ("c", "de")):
        assert scene.unload_adapter(old) is None
        scene.run_adapter()
        assert scene.load_adapter(new) is None
        scene.run_adapter()
    for _ in range(2):
        scene = restarted(file, scene, "a", "b", "c")
        assert sorted(names(scene)) == ["b", "de", "fr"]


def test_an_adapter_of_the_start_that_cannot_be_unloaded_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = AdapterFile(tmp_path / "adapters", ORIGIN)
    file.write(SavedAdapters(loaded=[DE], unloaded=["it"]))
    restore, scene = AdapterRestore(file), bench("fr")
    restore.start(scene.engine)
    assert "the adapter 'it' could not be unloaded again after the restart: there" in caplog.text
    answer(scene, restore)
    assert (names(scene), restore.is_busy) == (["fr", "de"], False)


def test_a_draining_engine_loads_none_and_keeps_the_file(tmp_path: Path) -> None:
    """A server may start it again: `tidegate restart` during its start."""
    file = AdapterFile(tmp_path / "adapters", ORIGIN)
    file.write(loaded(FR))
    restore, scene = AdapterRestore(file), bench()
    scene.engine.drain()
    restore.start(scene.engine)
    assert not restore.is_busy
    restore.save(scene.engine.adapters)
    assert file.read() == loaded(FR)


def test_an_engine_that_is_drained_before_it_has_restored_all_keeps_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = AdapterFile(tmp_path / "adapters", ORIGIN)
    saved = SavedAdapters(loaded=[DE], unloaded=["fr"])
    file.write(saved)
    restore, scene = AdapterRestore(file), bench("fr")
    restore.start(scene.engine)
    scene.engine.drain()
    answer(scene, restore)
    assert (names(scene), restore.is_busy) == ([], False)
    restore.save(scene.engine.adapters)
    assert file.read() == saved
    assert not caplog.records


@pytest.mark.parametrize("is_supervised", [False, True])
def test_only_a_supervised_engine_leaves_its_file_when_it_ends_cleanly(
    is_supervised: bool, tmp_path: Path
) -> None:
    file = AdapterFile(tmp_path / "adapters", ORIGIN)
    restore, scene = AdapterRestore(file), bench("fr")
    assert scene.unload_adapter("fr") is None
    restore.save(scene.engine.adapters)
    restore.on_clean_end(is_supervised=is_supervised)
    assert file.read() == SavedAdapters(unloaded=["fr"] if is_supervised else [])
    restore.on_clean_end(is_supervised=is_supervised)
    AdapterRestore(None).on_clean_end(is_supervised=is_supervised)


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
    new = bench()
    AdapterRestore.from_config(loads, address).start(new.engine)
    new.run_adapter()
    assert names(new) == ["fr"]
    assert clear(tmp_path) == [f"worker.sock{ADAPTERS_SUFFIX}"]
