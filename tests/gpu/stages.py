"""The stages of a run, in order: what everything else needs first, what may be lacking last."""

from __future__ import annotations

from tests.gpu.processes import GpuStage

STAGES = (
    GpuStage(name="machine", function="tests.gpu.machine:measure_machine", limit_s=40),
    GpuStage(name="layer kernels", function="tests.gpu.kernels:check_layers", limit_s=90),
    GpuStage(name="attention kernels", function="tests.gpu.kernels:check_attention", limit_s=150),
    GpuStage(name="sampling kernels", function="tests.gpu.kernels:check_sampling", limit_s=120),
    GpuStage(name="stream", function="tests.gpu.stream:check_stream", limit_s=120),
    GpuStage(name="decode", function="tests.gpu.steps:time_decode", limit_s=120),
    GpuStage(name="prefill", function="tests.gpu.steps:time_prefill", limit_s=60),
    GpuStage(name="small model", function="tests.gpu.steps:time_small", limit_s=60),
    GpuStage(name="accuracy", function="tests.gpu.accuracy:check_accuracy", limit_s=90),
    GpuStage(name="libraries", function="tests.gpu.attention:check_libraries", limit_s=60),
    GpuStage(name="attention speed", function="tests.gpu.attention:time_attention", limit_s=60),
    GpuStage(name="sanitizer", function="tests.gpu.sanitizer:check_memory", limit_s=120),
)
"""Their limits add up to more than the limit of a run, because most stages take less."""
