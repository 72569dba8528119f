"""The changes to the LoRA adapters at run time, kept for an engine that is restarted.

The engine writes them to a file beside its worker's socket: the names and paths of the adapters
that were loaded, and the names of those of --lora that were unloaded. If it is started again by the
same process and with the same options, it repeats the changes before it welcomes clients. So it has
the adapters that it had before, under the same names.

They survive a crash. An engine of a `tidegate serve` or `tidegate engine` also has them after a
rolling restart, or when its model is loaded again on demand; the file is removed with the server's
run directory. An engine without such a supervisor removes the file when it ends cleanly
(`on_clean_end`). So whatever the operator starts anew has only the adapters of --lora.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path

import msgspec

from engine_core.adapters import AdapterRegistry, AdapterReply
from engine_core.engine import Engine
from protocol.config.engine import EngineConfig
from protocol.engine.messages import LoadAdapter, Refused, UnloadAdapter
from protocol.process.process_state import read_stat
from protocol.wire.sockets import ADAPTERS_SUFFIX

log = logging.getLogger(__name__)

RESTORER = b""
"""The client identity of the changes that this module requests. No real client has it."""
IPC = "ipc://"


class SavedAdapter(msgspec.Struct, frozen=True):
    """The arguments of a LoadAdapter."""

    name: str
    path: str


class SavedAdapters(msgspec.Struct, frozen=True):
    """The changes since the start of the worker, which loads the adapters of --lora.

    loaded     adapters that were loaded while the engine ran
    unloaded   names of those that the worker loaded, and that were unloaded later
    """

    loaded: list[SavedAdapter] = []
    unloaded: list[str] = []


class EngineOrigin(msgspec.Struct, frozen=True):
    """How an engine was started. The saved adapters are restored only in an engine that was
    started in the same way.

    starter                 pid of the process that started the engine, and the clock ticks between
                            the boot and the start of that process
    model, lora, lora_dir   as in WorkerConfig
    """

    starter: tuple[int, int]
    model: str
    lora: list[str]
    lora_dir: str


class _Content(msgspec.Struct, frozen=True):
    """The content of the file, as JSON."""

    origin: EngineOrigin
    saved: SavedAdapters


class AdapterFile:
    """The file in which one engine saves the changes to its LoRA adapters."""

    def __init__(self, path: Path, origin: EngineOrigin) -> None:
        self._path = path
        self._origin = origin

    def read(self) -> SavedAdapters:
        """Return the changes in the file. Return no changes if there is no file, if it cannot be
        read, or if it is from an engine that was started differently (`EngineOrigin`)."""
        try:
            content = msgspec.json.decode(self._path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return SavedAdapters()
        except (OSError, ValueError, msgspec.MsgspecError) as error:  # ValueError: not UTF-8
            log.warning(
                "adapters cannot be loaded again after the restart: %s: %s", self._path, error
            )
            return SavedAdapters()
        return content.saved if content.origin == self._origin else SavedAdapters()

    def write(self, saved: SavedAdapters) -> None:
        """Replace the content. If that fails, log it: the engine continues."""
        new = self._path.with_suffix(f".new{ADAPTERS_SUFFIX}")
        try:
            new.write_bytes(msgspec.json.encode(_Content(self._origin, saved)))
            new.replace(self._path)
        except OSError as error:
            log.warning(
                "adapters will be missing after a restart, as they cannot be saved: %s", error
            )

    def remove(self) -> None:
        """Remove the file. If that fails, log it."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("the file of the adapters cannot be removed: %s", error)


class AdapterRestore:
    """Loads and unloads adapters as the engine before a restart did, and saves later changes for
    the next restart.

    file   None: nothing is saved
    """

    def __init__(self, file: AdapterFile | None) -> None:
        self._file = file
        #: What is still to be requested: the adapters to unload, then those to load. Loads wait for
        #: all unloads, because they may need the rows.
        self._stages: deque[list[UnloadAdapter | LoadAdapter]] = deque()
        #: Number of a request to which the engine has not replied yet -> the request.
        self._open: dict[int, UnloadAdapter | LoadAdapter] = {}
        #: Whether the engine has the saved adapters, so that the file may be replaced.
        self._may_save = True

    @classmethod
    def from_config(cls, config: EngineConfig, worker_address: str) -> AdapterRestore:
        """Return the AdapterRestore of an engine. Only an engine that loads adapters at run time,
        and whose worker is on this machine, has a file."""
        starter, worker = os.getppid(), config.worker
        stat = read_stat(starter)
        if not worker.lora_dir or not worker_address.startswith(IPC) or stat is None:
            return cls(None)
        path = Path(worker_address.removeprefix(IPC) + ADAPTERS_SUFFIX)
        origin = EngineOrigin(
            (starter, stat.started), worker.model, list(worker.lora), worker.lora_dir
        )
        return cls(AdapterFile(path, origin))

    @property
    def is_busy(self) -> bool:
        """Whether the engine is still loading and unloading adapters as the engine before the
        restart did. Until that is done, clients must wait. Otherwise a request for an adapter could
        be answered with 404, or computed with another adapter of the same name."""
        return bool(self._open)

    def start(self, engine: Engine) -> None:
        """Start to repeat the saved changes. The engine's replies go to `on_reply`."""
        if self._file is None:
            return
        saved = self._file.read()
        first = len(saved.unloaded)
        self._stages += (
            [UnloadAdapter(request=i, name=name) for i, name in enumerate(saved.unloaded)],
            [
                LoadAdapter(request=i, name=adapter.name, path=adapter.path)
                for i, adapter in enumerate(saved.loaded, first)
            ],
        )
        self._request_next(engine)

    def _request_next(self, engine: Engine) -> None:
        """Request the next group of saved changes, unless replies to an earlier group are still
        missing."""
        while self._stages and not self._open:
            if engine.is_draining:  # it refuses loads; keep the file for the next engine
                self._stages.clear()
                self._may_save = False
                return
            messages = self._stages.popleft()
            self._open = {message.request: message for message in messages}
            for message in messages:
                refusal = (
                    engine.load_adapter(RESTORER, message)
                    if isinstance(message, LoadAdapter)
                    else engine.unload_adapter(RESTORER, message)
                )
                if refusal is not None:
                    self._close(refusal)

    def on_reply(self, engine: Engine, client: bytes, reply: AdapterReply) -> bool:
        """Handle a reply to a saved change, and request the next group after the last reply of a
        group. An adapter that cannot be loaded is skipped. Return False, and do nothing, if
        `client` is a real client, which must get the reply itself."""
        if client != RESTORER:
            return False
        self._close(reply)
        self._request_next(engine)
        return True

    def _close(self, reply: AdapterReply) -> None:
        """Log the outcome of a repeated LoadAdapter or UnloadAdapter. It is then no longer open."""
        match self._open.pop(reply.request), reply:
            case LoadAdapter(name=name, path=path), Refused(error=error):
                log.warning(
                    "the adapter %r (%s) is missing after the restart: %s",
                    *(name, path, error.message),
                )
            case LoadAdapter(name=name), _:
                log.info("the adapter %r was loaded again after the restart", name)
            case UnloadAdapter(name=name), Refused(error=error):
                log.warning(
                    "the adapter %r could not be unloaded again after the restart: %s",
                    *(name, error.message),
                )
            case UnloadAdapter(name=name), _:
                log.info("the adapter %r of --lora was unloaded again after the restart", name)

    def save(self, adapters: AdapterRegistry) -> None:
        """Save the changes to the adapters. While some are being repeated, keep the file, because
        this engine may be restarted before it has repeated all of them."""
        if self._file is not None and self._may_save and not self.is_busy:
            loaded = [SavedAdapter(info.name, info.path) for info in adapters.loaded_at_run_time]
            self._file.write(SavedAdapters(loaded, adapters.unloaded_at_run_time))

    def on_clean_end(self, *, is_supervised: bool) -> None:
        """Forget the changes at the end of an engine that did not crash, unless it has a supervisor
        that may start it again."""
        if self._file is not None and not is_supervised:
            self._file.remove()
