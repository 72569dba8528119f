"""The stages of a run, in order: what everything else needs first, what may be lacking last."""

from __future__ import annotations

from tests.gpu.processes import GpuStage

STAGES = (GpuStage(name="machine", function="tests.gpu.machine:measure_machine", limit_s=40),)
"""Their limits add up to more than the limit of a run, because most stages take less."""
