"""How the models are served that clients download while a server runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from protocol.config.engine import EngineConfig
from protocol.config.gateway import ModelConfig
from tools.processes.children import Command
from tools.processes.model_job import PullOrder
from tools.processes.run_lock import CARD_SUFFIX
from tools.processes.several_models import options_of_others

_with = msgspec.structs.replace


@dataclass(frozen=True, slots=True, kw_only=True)
class NewModels:
    """How the models are served that clients download."""

    #: The engine of the command line, which a new model has without the addresses and the files.
    engine: EngineConfig
    #: The gateways' config of a new model, without its names.
    hosted: ModelConfig
    #: The run directory, for sockets and cards.
    directory: Path
    #: Returns the command that starts the engine of a model, from the model's name.
    command: Callable[[str, EngineConfig], Command]
    #: Number of engines that have addresses already.
    num_engines: int
    #: Returns the free space on the disk of the downloads, in bytes.
    disk_free: Callable[[], int]
    #: How fast the device reads its memory; 0: not known.
    read_bytes_per_s: float = 0.0

    def order(
        self, source: str, name: str, *, key: str, number: int, memory_bytes: int
    ) -> PullOrder:
        """Return the order to download a model and to prepare its engine.

        source         name of the download
        name           the model's name in the API
        key            the model's name in the fleet, which no other model of this server has
        number         number of the engine, which no other engine of this server has had
        memory_bytes   memory that all models together may use
        """
        worker = _with(
            self.engine.worker,
            **options_of_others(self.engine.worker),
            model=source,
            address=f"ipc://{self.directory / f'worker-{number}.sock'}",
            share_device=True,
        )
        address = f"ipc://{self.directory / f'engine-{number}.sock'}"
        journal = self.engine.journal and str(Path(self.engine.journal) / key)
        return PullOrder(
            model=source,
            engine=_with(self.engine, worker=worker, address=address, journal=journal),
            hosted=_with(
                self.hosted, engine=address, load="first-use", served_name=[name], key=key
            ),
            card=str(self.directory / f"model-{number}{CARD_SUFFIX}"),
            memory_bytes=memory_bytes,
        )
