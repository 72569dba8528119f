"""The LoRA adapters that were loaded at run time, kept for an engine that is restarted.

The engine writes their names and paths to a file beside its worker's socket. If it is started again
by the same process, it loads them before it welcomes clients. So adapters survive a crash, but a
server that the operator starts anew has only those of --lora.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine_core.adapters.registry import AdapterRegistry, AdapterReply
from engine_core.engine import Engine
from protocol.config.engine import EngineConfig
from protocol.messages import LoadAdapter, Refused
from protocol.process_state import read_stat
from protocol.sockets import ADAPTERS_SUFFIX

log = logging.getLogger(__name__)

RESTORER = b""
"""The client identity of the loads that this module requests. No real client has it."""
IPC = "ipc://"


class SavedAdapter(msgspec.Struct, frozen=True):
    """The arguments of a LoadAdapter."""

    name: str
    path: str


class _Content(msgspec.Struct, frozen=True):
    """The content of the file, as JSON. `starter` is the pid of the process that started the
    engine, and the clock ticks between the boot and the start of that process."""

    starter: tuple[int, int]
    adapters: list[SavedAdapter]


class AdapterFile:
    """The file of one engine. `starter` identifies the process that started the engine."""

    def __init__(self, path: Path, starter: tuple[int, int]) -> None:
        self._path = path
        self._starter = starter

    def read(self) -> list[SavedAdapter]:
        """Return the adapters of the previous engine, if the same process started that one."""
        try:
            content = msgspec.json.decode(self._path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return []
        except (OSError, ValueError, msgspec.MsgspecError) as error:  # ValueError: not UTF-8
            log.warning(
                "adapters cannot be loaded again after the restart: %s: %s", self._path, error
            )
            return []
        return content.adapters if content.starter == self._starter else []

    def write(self, adapters: Sequence[SavedAdapter]) -> None:
        """Replace the content. If that fails, log it: the engine continues."""
        new = self._path.with_suffix(f".new{ADAPTERS_SUFFIX}")
        try:
            new.write_bytes(msgspec.json.encode(_Content(self._starter, list(adapters))))
            new.replace(self._path)
        except OSError as error:
            log.warning(
                "adapters will be missing after a restart, as they cannot be saved: %s", error
            )


class AdapterRestore:
    """Loads the saved adapters after a restart, and saves those of this engine.

    file   None: nothing is saved
    """

    def __init__(self, file: AdapterFile | None) -> None:
        self._file = file
        #: Number of the LoadAdapter -> the adapter that is being loaded.
        self._loading: dict[int, SavedAdapter] = {}

    @classmethod
    def from_config(cls, config: EngineConfig, worker_address: str) -> AdapterRestore:
        """Return the AdapterRestore of an engine. Only an engine that loads adapters at run time,
        and whose worker is on this machine, has a file."""
        starter = os.getppid()
        stat = read_stat(starter)
        if not config.worker.lora_dir or not worker_address.startswith(IPC) or stat is None:
            return cls(None)
        path = Path(worker_address.removeprefix(IPC) + ADAPTERS_SUFFIX)
        return cls(AdapterFile(path, (starter, stat.started)))

    @property
    def is_busy(self) -> bool:
        """Whether saved adapters are being loaded. Clients must wait, so that no request for one of
        them is answered with 404."""
        return bool(self._loading)

    def start(self, engine: Engine) -> None:
        """Start to load the saved adapters. The engine's replies go to `on_reply`."""
        saved = [] if self._file is None or engine.is_draining else self._file.read()
        for number, adapter in enumerate(saved):
            message = LoadAdapter(request=number, name=adapter.name, path=adapter.path)
            self._loading[number] = adapter
            if (refusal := engine.load_adapter(RESTORER, message)) is not None:
                self.on_reply(RESTORER, refusal)

    def on_reply(self, client: bytes, reply: AdapterReply) -> bool:
        """Handle a reply of the engine. Return whether it is the reply to one of these loads. An
        adapter that cannot be loaded is skipped."""
        if client != RESTORER:
            return False
        adapter = self._loading.pop(reply.request)
        if isinstance(reply, Refused):
            log.warning(
                "the adapter %r (%s) is missing after the restart: %s",
                *(adapter.name, adapter.path, reply.error.message),
            )
        else:
            log.info("the adapter %r was loaded again after the restart", adapter.name)
        return True

    def save(self, adapters: AdapterRegistry) -> None:
        """Save the adapters that were loaded at run time. While some are being loaded again, keep
        the file, because this engine may be restarted before it has all of them."""
        if self._file is not None and not self.is_busy:
            loaded = adapters.loaded_at_run_time
            self._file.write([SavedAdapter(info.name, info.path) for info in loaded])
