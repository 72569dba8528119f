"""The stages of a run, in order: short and important ones first."""

from __future__ import annotations

from tests.gpu.processes import GpuStage

STAGES = (
    GpuStage(name="machine", function="tests.gpu.machine:measure_machine", limit_s=40),
    GpuStage(name="kernels", function="tests.gpu.kernels:check_kernels", limit_s=200),
    GpuStage(name="stream", function="tests.gpu.stream:check_stream", limit_s=120),
    GpuStage(name="decode", function="tests.gpu.steps:time_decode", limit_s=120),
    GpuStage(name="prefill", function="tests.gpu.steps:time_prefill", limit_s=60),
    GpuStage(name="small model", function="tests.gpu.steps:time_small", limit_s=60),
    GpuStage(name="accuracy", function="tests.gpu.accuracy:check_accuracy", limit_s=90),
    GpuStage(name="libraries", function="tests.gpu.attention:check_libraries", limit_s=60),
    GpuStage(name="attention speed", function="tests.gpu.attention:time_attention", limit_s=60),
    GpuStage(name="serving", function="tests.gpu.serving:measure_serving", limit_s=220),
    GpuStage(name="transformers", function="tests.gpu.peer:measure_transformers", limit_s=90),
    GpuStage(name="sanitizer", function="tests.gpu.sanitizer:check_memory", limit_s=120),
)
"""Their limits add up to more than the limit of a run, because most stages take less."""
