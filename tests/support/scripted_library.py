"""A supervisor of models that clients manage, for tests of the dialog that does it."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.config.gateway import ModelConfig
from protocol.tools.control import (
    DeleteModel,
    DownloadableModel,
    FromSupervisor,
    ModelLibrary,
    PullModel,
    PullProgress,
)
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_supervisor import ManageRequest, ScriptedSupervisor

GB = 10**9
SMALL, LARGE, OWN = "small-1b", "large-70b", "own"


class ScriptedLibrary:
    """A supervisor with a model of the operator, and two that can be downloaded. `pull` is the
    download of the small one, if it runs; `is_served` whether it is served."""

    def __init__(self, supervisor: ScriptedSupervisor, engine: ScriptedEngine) -> None:
        self.pull: PullProgress | None = None
        self.is_served = False
        self._supervisor, self._engine = supervisor, engine
        supervisor.on_manage = self.answer
        self.publish()

    def publish(self) -> None:
        """Send all gateways the models that they serve."""
        own = ModelConfig(served_name=[OWN], engine=self._engine.address)
        small = ModelConfig(served_name=[SMALL], engine=self._engine.address, load="first-use")
        self._supervisor.hosted = [own, small] if self.is_served else [own]
        if self.is_served:
            self._supervisor.set(SMALL, "ready")
        else:
            self._supervisor.set(OWN, "ready")

    def answer(self, message: ManageRequest) -> Iterable[FromSupervisor]:
        if isinstance(message, PullModel):
            self.pull = PullProgress(model=SMALL, status="pulling manifest")
            return [self.pull]
        if isinstance(message, DeleteModel):
            self.pull, self.is_served = None, False
            self._supervisor.hosted = self._supervisor.hosted and self._supervisor.hosted[:1]
            self._supervisor.set(OWN, "ready")
            return [self._supervisor.states]
        models = [
            DownloadableModel(
                name=SMALL,
                description="A small model.",
                licence="apache-2.0",
                download_bytes=2 * GB,
                weights_bytes=2 * GB,
                needed_bytes=3 * GB,
                max_tokens_per_s=8.25,
                is_recommended=True,
                is_served=self.is_served,
                is_deletable=self.is_served,
                pull=self.pull,
            ),
            DownloadableModel(name=LARGE, download_bytes=140 * GB, weights_bytes=140 * GB),
            DownloadableModel(name=OWN, is_served=True),
        ]
        return [ModelLibrary(models=models, disk_free_bytes=50 * GB, memory_bytes=8 * GB)]

    def has_received(self, completed: int) -> None:
        self.pull = PullProgress(
            model=SMALL, status="pulling 8e", digest="sha256:8e", total=2 * GB, completed=completed
        )

    def has_downloaded(self) -> None:
        self.pull, self.is_served = None, True
        self.publish()
