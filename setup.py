"""Tidegate's extras, one per need, and its compiled kernels; all else stands in setup.cfg.

Extras are here because `all` and `test` are sums. Written as `tidegate[worker]`, a sum is looked
into late, and pip may fetch half a gigabyte of some other torch before it learns which one we take.

Kernels need a C++ compiler and nothing else. They are optional, one library for each instruction
set: where there is no compiler, or it does not know a set, installing goes on, and the worker says
what it has to do without.
"""

import platform
import runpy
from pathlib import Path

from setuptools import Extension, setup

GATEWAY = [
    "flask>=3.1,<4",
    # Streams rest on private details of these two: gateway/http/client_socket.py. Both ends of both
    # ranges are tested: the newest versions by all tests, the oldest by tests/oldest.py.
    "gevent>=26.5.0,<26.10",
    "gunicorn>=26.0.0,<27.1",
    "jinja2>=3.1.6,<4",
    "prometheus-client>=0.21,<1",
    "tokenizers>=0.21,<1",
]
ENGINE = [
    "llguidance>=1.9,<2",  # 1.9 bounds the blanks that JSON may have between its items
]
WORKER = [
    "gguf>=0.17,<1",
    "numpy>=2,<3",
    "safetensors>=0.5,<1",
    "torch>=2.11,<2.14",
]
OTEL = [  # traces of requests (docs/metrics.md)
    "opentelemetry-exporter-otlp-proto-http>=1.27,<2",
    "opentelemetry-sdk>=1.27,<2",
]
TEST = [  # and instructor, which the Makefile installs without its dependencies
    "accelerate>=1.7,<2",
    "anthropic>=2.11,<3",
    "dockerfile-parse>=2,<3",
    "hypothesis>=6.130,<7",
    "langchain>=1.4,<2",
    "langchain-openai>=1,<2",
    "msgpack>=1.1,<2",
    "mypy>=1.16,<3",
    "openai>=3.54,<4",
    "openai-agents>=0.24,<1",
    "opentelemetry-sdk>=1.27,<2",
    "psutil>=7,<8",
    "pytest>=8.4,<10",
    "pytest-timeout>=2.4,<3",
    "pytest-xdist>=3.6,<4",
    "pyyaml>=6,<7",
    "requests>=2.32,<3",
    "ruff>=0.14,<1",
    "schemathesis>=4.10,<5",
    "transformers>=4.56,<6",
    "types-pyyaml>=6,<7",
    "types-tqdm>=4.66,<5",
]

CSRC = Path("worker/kernels/csrc")
SETS = runpy.run_path("worker/kernels/sets.py")["INSTRUCTION_SETS"]
IS_X86 = platform.machine() in ("x86_64", "AMD64")
OPTIONS = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-fvisibility=hidden"]
OPTIONS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # of the compiler's own headers

setup(
    ext_modules=[
        Extension(
            f"worker.kernels._{each.name}",
            [str(CSRC / "kernels.cpp")],
            depends=sorted(map(str, CSRC.glob("*.h"))),
            extra_compile_args=[*OPTIONS, *each.options],
            language="c++",
            optional=True,
        )
        for each in SETS
        if IS_X86 or not each.options
    ],
    extras_require={
        "gateway": GATEWAY,
        "engine": ENGINE,
        "worker": WORKER,
        # The package `nixl` has builds for several CUDA versions as its requirements; this is one.
        "nixl": ["nixl-cu12>=1.5,<2"],
        "otel": OTEL,
        "all": GATEWAY + ENGINE + WORKER,
        "test": GATEWAY + ENGINE + WORKER + TEST,
    },
)
