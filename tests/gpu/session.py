"""The device, the folder and the sizes that all stages of a run share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

CONFIGS = Path(__file__).parent / "configs"
T = TypeVar("T")


@dataclass(frozen=True)
class GpuSession:
    """A run on the first GPU, or its rehearsal on the CPU with small sizes."""

    #: Receives the table and the files of the stages.
    folder: Path
    is_rehearsal: bool = False

    @cached_property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu" if self.is_rehearsal else "cuda:0")

    @property
    def models(self) -> Path:
        """Return the folder of models that stages write. It is removed at the end of the run."""
        return self.folder / "models"

    @property
    def threads(self) -> int:
        """Return the number of torch's threads; 0 means one per core. A rehearsal needs one, and
        more of them would wait for each other on a busy machine."""
        return self.choose(0, 1)

    def choose(self, real: T, rehearsed: T) -> T:
        """Return one of two values: that of a run on a GPU, or that of a rehearsal."""
        return rehearsed if self.is_rehearsal else real

    def config(self, name: str) -> Path:
        """Return the config.json of a model's shape; in a rehearsal that of a tiny model."""
        return CONFIGS / f"{self.choose(name, 'tiny')}.json"

    def triton(self, module: str) -> Any:
        """Return a module whose kernels run on the device; in a rehearsal Triton's interpreter runs
        them."""
        if not self.is_rehearsal:
            return import_module(module)
        from tests.support.triton_code import interpreted

        return interpreted(module)

    def set_threads(self) -> None:
        """Apply `threads` to this process."""
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.is_rehearsal:
            import torch

            torch.cuda.synchronize()
